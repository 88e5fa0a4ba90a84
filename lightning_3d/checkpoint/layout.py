"""Which boxes of a full tensor a rank's local tensor holds. Pure arithmetic, nothing of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Cut(Protocol):
    """How tensor parallelism cut a parameter; ``tensor_parallel.parameters.ParameterCut`` is one."""

    @property
    def dim(self) -> int:
        """The dim that is cut."""

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the uncut parameter."""

    def intervals(self, rank: int) -> Sequence[tuple[int, int]]:
        """``(start, length)`` along ``dim`` of the pieces that ``rank`` holds, one after the other.

        Several for packed layers, where each rank holds a piece of the query, the key and the value rows.
        """


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
    """What one rank holds along one dim of the full tensor: pieces ``(start, length)``, one after the other."""

    dim: int
    intervals: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Shard:
    """One rank's ``torch.chunk`` along one dim."""

    dim: int
    rank: int
    size: int

    def share(self, length: int) -> Share:
        """The rows it has of ``length``."""
        start, stop = share_bounds(length, self.rank, self.size)
        return Share(self.dim, ((start, stop - start),))


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


def local_chunks(shape: Sequence[int], cut: Share | None = None, shard: Shard | None = None) -> tuple[Chunk, ...]:
    """The boxes of a tensor of ``shape`` that a rank holds.

    Args:
        shape: Shape of the full tensor.
        cut: What this rank holds by tensor parallelism.
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
        runs[cut.dim] = _cut_runs(cut)
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


def local_shape(shape: Sequence[int], cut: Share | None = None, shard: Shard | None = None) -> tuple[int, ...]:
    """Shape of the rank's local tensor; arguments as :func:`local_chunks`."""
    sizes = list(shape)
    if cut is not None:
        sizes[cut.dim] = sum(length for _, length in cut.intervals)
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


def _cut_runs(cut: Share) -> list[_Run]:
    runs: list[_Run] = []
    local = 0
    for start, length in cut.intervals:
        last = runs[-1] if runs else None
        if last is not None and last.start + last.length == start:
            runs[-1] = _Run(last.start, last.local, last.length + length)
        elif length:
            runs.append(_Run(start, local, length))
        local += length
    return runs


def _shard_runs(runs: Sequence[_Run], shard: Shard) -> list[_Run]:
    start, stop = share_bounds(sum(run.length for run in runs), shard.rank, shard.size)
    kept = []
    for run in runs:
        first, last = max(run.local, start), min(run.local + run.length, stop)
        if first < last:
            kept.append(_Run(run.start + first - run.local, first - start, last - first))
    return kept
