"""Collectives over one axis of the mesh, with the same answers on every backend.

Every function returns at once when the axis has size 1. What gloo lacks (averages, some types of payload) is made up
for here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol, overload

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.errors import ConfigError
from lightning_3d.events import Phase
from lightning_3d.mesh import Axis

Op = Literal["sum", "max", "min", "avg"]

# torch 2.13 has new names for these two, and warns about the old ones.
_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


_PHASES = {"tp": Phase.TP, "dp": Phase.DP}


def timed(axis: Axis, label: str, tensor: Tensor) -> AbstractContextManager[Any]:
    """What waits for a collective over ``axis`` that ``tensor`` is handed to runs within this, for those who time it.

    On a GPU: what makes the current stream wait.
    """
    events = axis.events
    if not events.is_recording:
        return events.span(Phase.SYNC)
    return events.span(_PHASES.get(axis.name, Phase.SYNC), label=label, bytes=tensor.nbytes)


class Handle(Protocol):
    """A collective on its way."""

    def wait(self) -> Tensor:
        """Wait (on a GPU: make the current stream wait) and give the result."""


class _Pending:
    """A collective on its way, and what is left to do when it has arrived."""

    def __init__(
        self,
        result: Tensor,
        work: dist.Work | None = None,
        finish: Callable[[], Tensor] | None = None,
        axis: Axis | None = None,
        label: str = "",
    ) -> None:
        self._result = result
        self._work = work
        self._finish = finish
        self._axis, self._label = axis, label

    def wait(self) -> Tensor:
        if self._work is not None:
            assert self._axis is not None
            with timed(self._axis, self._label, self._result):
                self._work.wait()
            self._work = None
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of ``tensor``, one-dimensional; they share its memory if it is contiguous."""
    whole = tensor.contiguous()
    # Not `view(-1)`: a tensor of one element counts as contiguous whatever its stride, and keeps that.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


@overload
def all_reduce(tensor: Tensor, axis: Axis, op: Op = "sum", async_op: Literal[False] = False) -> Tensor: ...
@overload
def all_reduce(tensor: Tensor, axis: Axis, op: Op = "sum", *, async_op: Literal[True]) -> Handle: ...
def all_reduce(tensor: Tensor, axis: Axis, op: Op = "sum", async_op: bool = False) -> Tensor | Handle:
    """Reduce ``tensor`` over the axis, in place.

    Args:
        tensor: Any shape, the same on every rank. Booleans are combined by "or" (sum, max) or "and" (min).
        axis: Whom to reduce with.
        op: ``"sum"``, ``"max"``, ``"min"`` or ``"avg"`` (floating point only).
        async_op: Return a handle at once; ``tensor`` must not be touched until its ``wait``.

    Returns:
        ``tensor`` itself, or the handle whose ``wait`` returns it.

    Raises:
        ConfigError: for an average of whole numbers.
    """
    if op not in ("sum", "max", "min", "avg"):
        raise ConfigError(f"op={op!r} is not known. Choose from 'sum', 'max', 'min', 'avg'.")
    if op == "avg" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigError(f"op='avg' on {tensor.dtype} has no exact answer. Convert to a floating point type first.")
    if axis.group is None:
        return _Pending(tensor) if async_op else tensor
    if op == "sum" and not async_op and tensor.dtype != torch.bool and tensor.is_contiguous():
        with timed(axis, "all_reduce", tensor):
            dist.all_reduce(tensor, group=axis.group)  # most calls, between layers
        return tensor
    payload = tensor.contiguous()
    if tensor.dtype == torch.bool:
        payload = tensor.to(torch.uint8)
        op = "max" if op == "sum" else op
    native = _OPS.get(op, dist.ReduceOp.AVG)
    divide = op == "avg" and not _has_average(axis)
    with nullcontext() if async_op else timed(axis, "all_reduce", payload):
        work = dist.all_reduce(payload, _OPS["sum"] if divide else native, group=axis.group, async_op=async_op)

    def finish() -> Tensor:
        if divide:
            payload.div_(axis.size)
        if payload is not tensor:
            tensor.copy_(payload)
        return tensor

    return _Pending(tensor, work, finish, axis, "all_reduce") if async_op else finish()


@overload
def all_gather(
    tensor: Tensor, axis: Axis, dim: int = 0, sizes: Sequence[int] | None = None, async_op: Literal[False] = False
) -> Tensor: ...
@overload
def all_gather(
    tensor: Tensor, axis: Axis, dim: int = 0, sizes: Sequence[int] | None = None, *, async_op: Literal[True]
) -> Handle: ...
def all_gather(
    tensor: Tensor, axis: Axis, dim: int = 0, sizes: Sequence[int] | None = None, async_op: bool = False
) -> Tensor | Handle:
    """Every rank's ``tensor``, joined along ``dim`` in rank order.

    Args:
        tensor: The same shape on every rank, except along ``dim`` when ``sizes`` is given.
        axis: Whom to gather from.
        dim: Tensor dim to join along.
        sizes: Length along ``dim`` of every rank's tensor; ``None`` when all are equal.
        async_op: Return a handle whose ``wait`` gives the result.
    """
    if axis.group is None:
        return _Pending(tensor) if async_op else tensor
    dim = dim % max(1, tensor.dim())
    if sizes is not None and len(set(sizes)) > 1:
        return _gather_ragged(tensor, axis, dim, sizes, async_op)
    payload = _plain(tensor)
    joined = payload.new_empty((axis.size, *payload.shape))
    with nullcontext() if async_op else timed(axis, "all_gather", payload):
        work = _gather_flat(joined.view(-1), payload.view(-1), group=axis.group, async_op=async_op)

    def finish() -> Tensor:
        whole = joined.movedim(0, dim).flatten(dim, dim + 1) if tensor.dim() else joined
        return whole if whole.dtype == tensor.dtype else whole.to(tensor.dtype)

    return _Pending(tensor, work, finish, axis, "all_gather") if async_op else finish()


@overload
def reduce_scatter(
    tensor: Tensor,
    axis: Axis,
    dim: int = 0,
    op: Op = "sum",
    sizes: Sequence[int] | None = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def reduce_scatter(
    tensor: Tensor,
    axis: Axis,
    dim: int = 0,
    op: Op = "sum",
    sizes: Sequence[int] | None = None,
    *,
    async_op: Literal[True],
) -> Handle: ...
def reduce_scatter(
    tensor: Tensor,
    axis: Axis,
    dim: int = 0,
    op: Op = "sum",
    sizes: Sequence[int] | None = None,
    async_op: bool = False,
) -> Tensor | Handle:
    """This rank's piece along ``dim`` of the sum (or other ``op``) of every rank's ``tensor``.

    Args:
        tensor: The same shape on every rank; left as it is.
        axis: Whom to reduce with.
        dim: Tensor dim that is cut.
        op: As in :func:`all_reduce`.
        sizes: Length along ``dim`` of every rank's piece; ``None`` cuts evenly.
        async_op: Return a handle whose ``wait`` gives the piece.

    Raises:
        ConfigError: when the dim does not divide and ``sizes`` is not given.
    """
    if axis.group is None:
        return _Pending(tensor) if async_op else tensor
    dim = dim % tensor.dim()
    if sizes is None and tensor.shape[dim] % axis.size:
        raise ConfigError(
            f"dim {dim} of a tensor of shape {tuple(tensor.shape)} cannot be cut evenly over the {axis.size} ranks of"
            f" {axis.name}. Pass the size of every rank's piece."
        )
    if (sizes is not None and len(set(sizes)) > 1) or tensor.dtype == torch.bool or op in ("max", "min"):
        lengths = [tensor.shape[dim] // axis.size] * axis.size if sizes is None else list(sizes)
        whole = tensor.clone(memory_format=torch.contiguous_format)
        start = sum(lengths[: axis.rank])
        handle = all_reduce(whole, axis, op, async_op=True)
        pending = _Pending(whole, None, lambda: handle.wait().narrow(dim, start, lengths[axis.rank]).contiguous())
        return pending if async_op else pending.wait()
    pieces = tensor.unflatten(dim, (axis.size, -1)).movedim(dim, 0).contiguous()
    piece = torch.empty_like(pieces[0])
    divide = op == "avg" and not _has_average(axis)
    native = dist.ReduceOp.AVG if op == "avg" and not divide else dist.ReduceOp.SUM
    with nullcontext() if async_op else timed(axis, "reduce_scatter", pieces):
        work = _scatter_flat(piece.view(-1), pieces.view(-1), native, group=axis.group, async_op=async_op)
    if async_op:

        def finish() -> Tensor:
            return piece.div_(axis.size) if divide else (pieces, piece)[1]  # ``pieces`` must outlive the collective

        return _Pending(piece, work, finish, axis, "reduce_scatter")
    return piece.div_(axis.size) if divide else piece


def broadcast_object(obj: Any, axis: Axis, src: int = 0) -> Any:
    """The object of index ``src`` along the axis, pickled; use a ``control_*`` axis on a GPU."""
    if axis.group is None:
        return obj
    box = [obj if axis.rank == src else None]
    dist.broadcast_object_list(box, axis.ranks[src], group=axis.group)
    return box[0]


def all_gather_object(obj: Any, axis: Axis) -> list[Any]:
    """Every rank's object, in rank order, pickled; use a ``control_*`` axis on a GPU."""
    if axis.group is None:
        return [obj]
    box: list[Any] = [None] * axis.size
    dist.all_gather_object(box, obj, group=axis.group)
    return box


def gather_object(obj: Any, axis: Axis) -> list[Any] | None:
    """Every rank's object, in rank order, on the first rank of the axis; ``None`` on the others, which only send.

    Pickled; use a ``control_*`` axis on a GPU.
    """
    if axis.group is None:
        return [obj]
    box: list[Any] | None = [None] * axis.size if axis.is_first else None
    dist.gather_object(obj, box, axis.ranks[0], group=axis.group)
    return box


def chunk_sizes(length: int, pieces: int) -> tuple[int, ...]:
    """Lengths of ``pieces`` chunks of a dim of ``length``, as ``torch.chunk`` and DTensor's ``Shard`` cut it.

    The first chunks have ``ceil(length / pieces)``, the last ones what is left, possibly nothing.
    """
    step = -(-length // pieces)
    return tuple(max(0, min(step, length - index * step)) for index in range(pieces))


def _gather_ragged(tensor: Tensor, axis: Axis, dim: int, sizes: Sequence[int], async_op: bool) -> Tensor | Handle:
    longest = max(sizes)
    shape = list(tensor.shape)
    shape[dim] = longest
    padded = tensor.new_zeros(shape)
    padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor.detach())
    handle = all_gather(padded, axis, dim, async_op=True)

    def finish() -> Tensor:
        pieces = handle.wait().split(longest, dim)
        return torch.cat([piece.narrow(dim, 0, size) for piece, size in zip(pieces, sizes, strict=True)], dim)

    pending = _Pending(tensor, None, finish)
    return pending if async_op else pending.wait()


def _plain(tensor: Tensor) -> Tensor:
    """``tensor`` in one piece, in a type every backend carries."""
    tensor = tensor.detach().contiguous()
    return tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor


def _has_average(axis: Axis) -> bool:
    assert axis.group is not None
    return dist.get_backend(axis.group) == "nccl"
