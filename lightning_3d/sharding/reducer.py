"""Gradients averaged over replicas for parameters that are kept whole: flat buckets, sent while backward runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.collectives import timed
from lightning_3d.mesh import Axis

BUCKET_BYTES = 25 * 2**20
"""Gradients that travel in one all-reduce."""


@dataclass(eq=False)
class _Slot:
    """The place of one parameter's gradient."""

    parameter: nn.Parameter
    bucket: _Bucket
    local: Tensor
    """The parameter's values on this rank, for their shape and type."""
    view: Tensor | None = None
    """Where its gradient is summed; a part of the bucket."""
    public: Tensor | None = None
    """What ``parameter.grad`` is after the step."""
    is_filled: bool = False
    is_hooked: bool = False
    arrived: bool = False


@dataclass(eq=False)
class _Bucket:
    chunk: int | None
    dtype: torch.dtype
    slots: list[_Slot] = field(default_factory=list)
    buffer: Tensor | None = None
    missing: set[int] = field(default_factory=set)
    """Ids of the slots whose last gradient of this step has not come yet."""
    is_ready: bool = False
    work: Any = None


class BucketReducer:
    """Collects gradients of whole parameters and averages them over the dp axis.

    Each gradient is added to its place in a bucket as soon as autograd has made it and is not kept elsewhere, so
    micro-batches cost no second copy, and low-precision gradients are summed in the type of the reduction. During the
    last backward a full bucket is sent at once. Buckets are sent in one fixed order, so replicas that skip different
    layers still pair up.

    Args:
        parameters: Parameters with the chunk each belongs to (``None``: to several or to none), in registration order.
        axis: The dp axis, of more than one replica.
        reduce_dtype: Type in which gradients are summed; ``None``: float32, or the parameter's own if that is wider.
        bucket_bytes: A bucket is closed when it has this size.
        overlap: Whether buckets are sent during the last backward. Not beside FSDP2, whose collectives use the same
            group: where replicas skip different layers, only a fixed order pairs them.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[nn.Parameter, int | None]],
        axis: Axis,
        reduce_dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        overlap: bool = True,
    ) -> None:
        self._axis = axis
        self._overlap = overlap
        self._slots: dict[int, _Slot] = {}
        self._buckets: list[_Bucket] = []
        self._next = 0
        self._open = False
        self._launching: int | None = None
        self._sends_all = False
        ends: dict[tuple[int | None, torch.dtype], _Bucket] = {}
        chunks = {chunk for _, chunk in parameters}
        merge = len(chunks - {None}) <= 1  # one chunk: its last backward is also the step's
        for parameter, chunk in _backward_order(parameters, merge):
            local = local_of(parameter.detach())
            wide = reduce_dtype or torch.promote_types(local.dtype, torch.float32)
            key = (None if merge else chunk, wide)
            bucket = ends.get(key)
            if bucket is None or _bytes(bucket) >= bucket_bytes:
                bucket = ends[key] = _Bucket(*key)
                self._buckets.append(bucket)
            slot = _Slot(parameter, bucket, local)
            bucket.slots.append(slot)
            self._slots[id(parameter)] = slot

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients are reduced here."""
        return [slot.parameter for slot in self._slots.values()]

    @property
    def arrived(self) -> dict[int, bool]:
        """By id of parameter: whether this replica has a gradient of it."""
        return {key: slot.arrived for key, slot in self._slots.items()}

    def prepare_backward(self, chunk: int, last_of_chunk: bool, last_of_step: bool, sync: bool) -> None:
        """Before the backward of one micro-batch; see :meth:`Sharding.prepare_backward`."""
        if not self._open:
            self._begin()
        sync = sync and self._overlap
        self._launching, self._sends_all = (chunk if last_of_chunk and sync else None), last_of_step and sync

    def flush(self) -> None:
        """After the last backward of an optimizer step: send the buckets that are not on their way yet."""
        if not self._open:
            self._begin()
        while self._next < len(self._buckets):
            self._send(self._buckets[self._next])

    def finish(self) -> None:
        """Wait for what was sent; afterwards ``grad`` of every parameter is its average over the replicas.

        A parameter that this replica made no gradient of took part with zeros; whether its ``grad`` stays is decided
        by the caller, who knows about the other replicas.
        """
        if not self._open:
            return
        self._open = False
        self._launching, self._sends_all = None, False
        for bucket in self._buckets:
            self._receive(bucket)
        for slot in self._slots.values():
            if slot.is_filled:
                slot.parameter.grad = self._published(slot)

    def _begin(self) -> None:
        """Take over the gradients that earlier steps left (accumulation), and forget those that were zeroed."""
        self._open, self._next = True, 0
        for bucket in self._buckets:
            bucket.missing = {id(slot) for slot in bucket.slots if slot.parameter.requires_grad}
            bucket.is_ready = not bucket.missing
            for slot in bucket.slots:
                if slot.parameter.requires_grad and not slot.is_hooked:  # refused while the parameter is frozen
                    slot.parameter.register_post_accumulate_grad_hook(self._collect)
                    slot.is_hooked = True
                gradient = slot.parameter.grad
                slot.parameter.grad = None
                slot.is_filled = False
                slot.arrived = gradient is not None
                if gradient is None:
                    continue
                if gradient is slot.public and slot.view is not None:
                    slot.is_filled = True
                    if slot.view.dtype != slot.local.dtype:
                        slot.view.copy_(local_of(gradient))
                else:
                    self._add(slot, local_of(gradient))

    def _collect(self, parameter: nn.Parameter) -> None:
        """Autograd has set ``grad``: move it to its bucket, and send the bucket if it was the last."""
        slot = self._slots[id(parameter)]
        if not self._open:  # the user's own backward outside a step
            return
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        slot.arrived = True
        self._add(slot, local_of(gradient))
        bucket = slot.bucket
        if self._sends_all or (bucket.chunk is not None and bucket.chunk == self._launching):
            bucket.missing.discard(id(slot))
            if not bucket.missing:
                bucket.is_ready = True
                self._send_ready()

    def _add(self, slot: _Slot, gradient: Tensor) -> None:
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        if slot.view is None:
            _allocate(slot.bucket)
        assert slot.view is not None
        if slot.is_filled:
            slot.view.add_(gradient)
        else:
            slot.view.copy_(gradient)
            slot.is_filled = True

    def _send_ready(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].is_ready:
            self._send(self._buckets[self._next])

    def _send(self, bucket: _Bucket) -> None:
        self._next += 1
        if not any(slot.parameter.requires_grad for slot in bucket.slots):
            return
        _allocate(bucket)
        for slot in bucket.slots:
            if not slot.is_filled and slot.view is not None:
                slot.view.zero_()
                slot.is_filled = slot.parameter.requires_grad
        assert bucket.buffer is not None
        if bucket.dtype == torch.float16:  # the sum of many replicas could overflow
            bucket.buffer.div_(self._axis.size)
        bucket.work = dist.all_reduce(bucket.buffer, group=self._axis.group, async_op=True)

    def _receive(self, bucket: _Bucket) -> None:
        if bucket.work is None:
            return
        assert bucket.buffer is not None
        with timed(self._axis, "all_reduce", bucket.buffer):
            bucket.work.wait()
        bucket.work = None
        if bucket.dtype != torch.float16:
            bucket.buffer.div_(self._axis.size)

    def _published(self, slot: _Slot) -> Tensor:
        assert slot.view is not None
        if slot.public is None:
            values = slot.view if slot.view.dtype == slot.local.dtype else torch.empty_like(slot.local)
            slot.public = like_parameter(values, slot.parameter)
        values = local_of(slot.public)
        if values is not slot.view and values.dtype != slot.view.dtype:
            values.copy_(slot.view)
        return slot.public


def local_of(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` on this rank."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def like_parameter(values: Tensor, parameter: Tensor) -> Tensor:
    """``values``, this rank's part, described as ``parameter`` is: a DTensor where it is one."""
    if not isinstance(parameter, DTensor):
        return values
    return DTensor.from_local(
        values,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _backward_order(
    parameters: Sequence[tuple[nn.Parameter, int | None]], merge: bool
) -> Iterable[tuple[nn.Parameter, int | None]]:
    """About the order in which the last gradients come: late chunks first, reverse registration within each."""
    backward = list(parameters)[::-1]
    if merge:
        return backward
    return sorted(backward, key=lambda item: -1 if item[1] is None else item[1], reverse=True)


def _bytes(bucket: _Bucket) -> int:
    return sum(slot.local.numel() for slot in bucket.slots) * bucket.dtype.itemsize


def _allocate(bucket: _Bucket) -> None:
    if bucket.buffer is not None:
        return
    total = sum(slot.local.numel() for slot in bucket.slots)
    bucket.buffer = torch.zeros(total, dtype=bucket.dtype, device=bucket.slots[0].local.device)
    offset = 0
    for slot in bucket.slots:
        slot.view = bucket.buffer[offset : offset + slot.local.numel()].view(slot.local.shape)
        offset += slot.local.numel()


def by_chunk(blocks: Mapping[int, Sequence[nn.Module]]) -> dict[int, int | None]:
    """By id of parameter: the one chunk whose blocks hold it."""
    owners: dict[int, int | None] = {}
    for chunk, modules in blocks.items():
        for module in modules:
            for parameter in module.parameters():
                owners[id(parameter)] = chunk if owners.get(id(parameter), chunk) == chunk else None
    return owners
