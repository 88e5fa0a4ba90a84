"""Cutting a replica's batch into micro-batches, and what each of them weighs in the loss."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_3d.errors import ConfigError


@dataclass(frozen=True)
class MicroBatch:
    """A piece of a batch."""

    index: int
    """Its place in the batch."""
    data: Any
    """The same structure as the batch, with fewer samples."""
    size: int
    """Samples in it; 0 for a piece that only keeps the replicas in step. Of several loaders: in its first part."""
    others: int = 0
    """Samples of the further loaders, where a batch holds a part from each of several."""

    @property
    def samples(self) -> int:
        """Samples of all loaders."""
        return self.size + self.others


PartPath = tuple[Any, ...]
"""Keys and positions that lead from a batch to the part of one loader in it."""


class Part(NamedTuple):
    """What one of several loaders has given to a batch."""

    path: PartPath
    size: int
    """Samples on this replica."""


def batch_size_of(batch: Any) -> int:
    """Samples in a batch: the length along dim 0 of its first tensor, else of its first list."""
    return _tensor_length(batch) or _list_length(batch) or 1


def tokens_of(batch: Any) -> int:
    """Tokens in a batch: positions of its first tensor of ids (whole numbers, samples x positions); 0 without one."""
    if isinstance(batch, Tensor):
        return batch.numel() if batch.dim() == 2 and batch.dtype in (torch.int64, torch.int32) else 0
    return next((count for part in _parts(batch) if (count := tokens_of(part))), 0)


def _parts(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, (list, tuple)):
        return list(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    return []


def _tensor_length(batch: Any) -> int | None:
    if isinstance(batch, Tensor):
        return batch.size(0) if batch.dim() else None
    return next((length for part in _parts(batch) if (length := _tensor_length(part)) is not None), None)


def _list_length(batch: Any) -> int | None:
    if isinstance(batch, list) and not any(_parts(part) for part in batch):
        return len(batch)
    return next((length for part in _parts(batch) if (length := _list_length(part)) is not None), None)


def piece_sizes(batch_size: int, count: int, piece: int | None = None) -> list[int]:
    """Sizes of ``count`` pieces: all ``piece`` but for a smaller last one, else as even as they can be.

    Zeros stand at the end when there are more pieces than samples.
    """
    if piece is not None:
        return [max(0, min(piece, batch_size - i * piece)) for i in range(count)]
    base, more = divmod(batch_size, count)
    return [base + (i < more) for i in range(count)]


def part_sizes(totals: Sequence[int], count: int) -> list[list[int]]:
    """Sizes of ``count`` pieces of every part of a batch: in equal proportions where the totals allow it.

    They do where their greatest common divisor is at least ``count``: 4 and 2 in two pieces are 2 + 2 and 1 + 1, and 3
    and 2 are 2 + 1 and 1 + 1, in other proportions.
    """
    common = math.gcd(*totals)
    if common < count:
        return [piece_sizes(total, count) for total in totals]
    return [[units * (total // common) for units in piece_sizes(common, count)] for total in totals]


def in_proportion(sizes: Sequence[Sequence[int]]) -> bool:
    """Whether every piece has the same share of each part: ``sizes`` as of :func:`part_sizes`."""
    first = sizes[0]
    return all(
        own * sum(first) == other * sum(part) for part in sizes[1:] for own, other in zip(part, first, strict=True)
    )


def cut(
    batch: Any,
    sizes: Sequence[int],
    split_hook: Callable[[Any, int], Sequence[Any]] | None = None,
) -> list[MicroBatch]:
    """Cut ``batch`` into pieces of the given sizes.

    Tensors whose dim 0 is the batch size and lists of that length are cut; everything else goes into every piece. A
    piece of size 0 repeats the first sample, so that its step can run, with no weight.

    Args:
        batch: Any nesting of dicts, lists, tuples, dataclasses and tensors.
        sizes: Samples of every piece.
        split_hook: The user's ``split_micro_batches(batch, num)``, for batches that cannot be cut along dim 0.

    Raises:
        ConfigError: if the hook returns another number of pieces.
    """
    if split_hook is not None:
        pieces = list(split_hook(batch, len(sizes)))
        if len(pieces) != len(sizes):
            raise ConfigError(
                f"split_micro_batches(batch, num={len(sizes)}) returned {len(pieces)} pieces. It must return exactly"
                " num of them, since every rank of a replica runs the same schedule."
            )
        return [MicroBatch(i, piece, batch_size_of(piece)) for i, piece in enumerate(pieces)]
    if len(sizes) == 1:
        return [MicroBatch(0, batch, sizes[0])]
    total = batch_size_of(batch)
    return [
        MicroBatch(i, _take(batch, total, begin, stop), size)
        for i, (size, (begin, stop)) in enumerate(zip(sizes, _ranges(sizes), strict=True))
    ]


def cut_parts(batch: Any, parts: Sequence[Part], sizes: Sequence[Sequence[int]]) -> list[MicroBatch]:
    """Cut a batch of several loaders, the part of each along its own dim 0: joined, the pieces are the batch.

    Args:
        batch: Dicts, lists and tuples, with the parts in them.
        parts: Where they are.
        sizes: Of every part, the samples of every piece.
    """
    pieces = []
    ranges = [_ranges(own) for own in sizes]
    for i in range(len(sizes[0])):
        data = batch
        for part, own in zip(parts, ranges, strict=True):
            data = _with(data, part.path, _take(_at(batch, part.path), part.size, *own[i]))
        pieces.append(MicroBatch(i, data, sizes[0][i], sum(own[i] for own in sizes[1:])))
    return pieces


def find_parts(batch: Any, paths: Sequence[PartPath]) -> list[Part] | None:
    """The parts at these places, with the samples they have by now; ``None`` if hooks have built another batch."""
    try:
        return [Part(path, batch_size_of(_at(batch, path))) for path in paths] or None
    except (KeyError, IndexError, TypeError):
        return None


def _at(batch: Any, path: PartPath) -> Any:
    for key in path:
        batch = batch[key]
    return batch


def _with(batch: Any, path: PartPath, part: Any) -> Any:
    """A copy of the containers along the path, with another part at its end."""
    if not path:
        return part
    changed = _with(batch[path[0]], path[1:], part)
    if isinstance(batch, tuple):
        items = [changed if i == path[0] else item for i, item in enumerate(batch)]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    whole = copy.copy(batch)
    whole[path[0]] = changed
    return whole


def _ranges(sizes: Sequence[int]) -> list[tuple[int, int]]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [(start, start + size) if size else (0, 1) for start, size in zip(starts, sizes, strict=True)]


def _take(batch: Any, total: int, begin: int, stop: int) -> Any:
    if isinstance(batch, list) and len(batch) == total and not any(isinstance(item, Tensor) for item in batch):
        return batch[begin:stop]
    if isinstance(batch, Tensor):
        return batch[begin:stop] if batch.dim() and batch.size(0) == total else batch
    if type(batch) is dict:
        return {key: _take(item, total, begin, stop) for key, item in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(_take(item, total, begin, stop) for item in batch)
    return apply_to_collection(batch, (Tensor, list), lambda item: _take(item, total, begin, stop))


def loss_weights(
    micro_batches: Sequence[MicroBatch], weigh: Callable[[Any], float | Tensor] | None, device: torch.device
) -> list[float] | list[Tensor]:
    """What every micro-batch weighs: its samples, or the user's ``micro_batch_weight`` of it; a filler weighs 0."""
    if weigh is None:
        return [float(piece.samples) for piece in micro_batches]
    weights = []
    for piece in micro_batches:
        given = weigh(piece.data)
        if isinstance(given, Tensor):
            weight = given.to(device, torch.float64, non_blocking=True)
        else:
            weight = torch.full((), float(given), dtype=torch.float64, device=device)  # a copy would wait for a GPU
        weights.append(weight if piece.size else torch.zeros_like(weight))
    return weights
