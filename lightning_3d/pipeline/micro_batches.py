"""Cutting a replica's batch into micro-batches, and what each of them weighs in the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    """Samples in it; 0 for a piece that only keeps the replicas in step."""


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
    pieces, start = [], 0
    for i, size in enumerate(sizes):
        begin, stop = (start, start + size) if size else (0, 1)
        pieces.append(MicroBatch(i, _take(batch, total, begin, stop), size))
        start += size
    return pieces


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
        return [float(piece.size) for piece in micro_batches]
    weights = []
    for piece in micro_batches:
        weight = torch.as_tensor(weigh(piece.data), dtype=torch.float64, device=device)
        weights.append(weight if piece.size else torch.zeros_like(weight))
    return weights
