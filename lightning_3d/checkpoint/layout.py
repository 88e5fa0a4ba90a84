"""Which boxes of a full tensor a rank's local tensor holds. Pure arithmetic, nothing of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Cut(Protocol):
    """How tensor parallelism cut a parameter (``tensor_parallel.ParameterCut`` has these fields)."""

    @property
    def dim(self) -> int:
        """The dim that is cut."""

    @property
    def parts(self) -> int:
        """Equal slices along ``dim``, each cut by itself: 3 for packed query, key and value rows."""

    @property
    def global_shape(self) -> Sequence[int]:
        """Shape of the uncut parameter."""


@dataclass(frozen=True)
class Chunk:
    """A box of a full tensor, and where this rank's tensor holds it."""

    offsets: tuple[int, ...]
    """First index of the box in the full tensor, per dim."""
    sizes: tuple[int, ...]
    """Extent of the box, per dim."""
    local: tuple[int, ...]
    """First index of the box in this rank's tensor, per dim."""

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into this rank's tensor."""
        return box(self.local, self.sizes)


@dataclass(frozen=True)
class Share:
    """The share of one rank: which dim, which of how many ranks, in how many separately cut parts."""

    dim: int
    rank: int
    size: int
    parts: int = 1


@dataclass(frozen=True)
class _Run:
    """``length`` rows that start at ``start`` of the full dim and at ``local`` of this rank's."""

    start: int
    local: int
    length: int


def box(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """The slices that select a box."""
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def share_bounds(length: int, rank: int, size: int) -> tuple[int, int]:
    """Rows ``[start, stop)`` of rank ``rank`` when ``length`` rows are shared as ``torch.chunk`` shares them.

    The first ranks get ``ceil(length / size)`` rows each, later ones what is left, perhaps none.
    """
    step = -(-length // size)
    start = min(rank * step, length)
    return start, min(start + step, length)


def local_chunks(shape: Sequence[int], cut: Share | None = None, shard: Share | None = None) -> tuple[Chunk, ...]:
    """The boxes of a tensor of ``shape`` that a rank holds.

    Args:
        shape: Shape of the full tensor.
        cut: This rank's share by tensor parallelism, taken from every one of its parts.
        shard: This rank's share by ZeRO: a ``torch.chunk`` of what ``cut`` left, along its own dim.

    Returns:
        Disjoint boxes which together are the local tensor. None where the rank holds nothing; a tensor without
        elements has one empty box on every rank, so that it is not forgotten.
    """
    shape = tuple(shape)
    if math.prod(shape) == 0:
        return (Chunk((0,) * len(shape), shape, (0,) * len(shape)),)
    runs = {dim: [_Run(0, 0, length)] for dim, length in enumerate(shape)}
    if cut is not None:
        runs[cut.dim] = _cut_runs(shape[cut.dim], cut)
    if shard is not None:
        runs[shard.dim] = _shard_runs(runs[shard.dim], shard)
    chunks = [Chunk((), (), ())]
    for dim in range(len(shape)):
        chunks = [
            Chunk((*chunk.offsets, run.start), (*chunk.sizes, run.length), (*chunk.local, run.local))
            for chunk in chunks
            for run in runs[dim]
        ]
    return tuple(chunks)


def local_shape(shape: Sequence[int], cut: Share | None = None, shard: Share | None = None) -> tuple[int, ...]:
    """Shape of the rank's local tensor; arguments as :func:`local_chunks`."""
    sizes = list(shape)
    if cut is not None:
        sizes[cut.dim] = sum(run.length for run in _cut_runs(sizes[cut.dim], cut))
    if shard is not None:
        start, stop = share_bounds(sizes[shard.dim], shard.rank, shard.size)
        sizes[shard.dim] = stop - start
    return tuple(sizes)


def overlap(
    offsets: Sequence[int], sizes: Sequence[int], other_offsets: Sequence[int], other_sizes: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offsets and sizes of what two boxes share; ``None`` when they share nothing."""
    starts, lengths = [], []
    for offset, size, other_offset, other_size in zip(offsets, sizes, other_offsets, other_sizes, strict=True):
        start = max(offset, other_offset)
        length = min(offset + size, other_offset + other_size) - start
        if length <= 0:
            return None
        starts.append(start)
        lengths.append(length)
    return tuple(starts), tuple(lengths)


def _cut_runs(length: int, cut: Share) -> list[_Run]:
    if length % cut.parts:
        raise ValueError(f"{length} rows are not {cut.parts} equal parts")
    part = length // cut.parts
    start, stop = share_bounds(part, cut.rank, cut.size)
    if cut.size == 1:
        return [_Run(0, 0, length)]
    runs = (_Run(index * part + start, index * (stop - start), stop - start) for index in range(cut.parts))
    return [run for run in runs if run.length]


def _shard_runs(runs: Sequence[_Run], shard: Share) -> list[_Run]:
    start, stop = share_bounds(sum(run.length for run in runs), shard.rank, shard.size)
    kept = []
    for run in runs:
        first, last = max(run.local, start), min(run.local + run.length, stop)
        if first < last:
            kept.append(_Run(run.start + first - run.local, first - start, last - first))
    return kept
