"""Collectives that autograd runs backwards: the conjugate pairs of tensor and sequence parallelism.

Each maps a tensor of one layout over the axis to another. On a placeholder or a meta tensor only the shape is mapped
and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_3d.collectives import all_gather, all_reduce, reduce_scatter
from lightning_3d.mesh import Axis
from lightning_3d.placeholder import Placeholder, resolve


def is_shape_only(x: Tensor, axis: Axis) -> bool:
    """Whether only the shape of ``x`` is wanted: it has no values here, or the axis has nobody to send to."""
    return axis.group is None or x.is_meta or isinstance(x, Placeholder)


def copy_to_tp(x: Tensor, axis: Axis) -> Tensor:
    """A replicated tensor as the input of column layers: identity forward, all-reduce of the gradient backward."""
    x = _resolved(x)
    if axis.size == 1 or not (x.requires_grad and torch.is_grad_enabled()) or is_shape_only(x, axis):
        return x
    return _Copy.apply(x, axis)


def reduce_from_tp(x: Tensor, axis: Axis) -> Tensor:
    """The sum of partial tensors: all-reduce forward, identity backward.

    ``x`` must be a fresh result that nothing else reads: it is overwritten.
    """
    x = _resolved(x)
    if axis.size == 1 or is_shape_only(x, axis):
        return x
    return _Reduce.apply(x, axis)


def gather_from_tp(x: Tensor, axis: Axis, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
    """A tensor cut along ``dim``, made whole for code that runs alike on every rank: all-gather / own piece.

    Args:
        x: This rank's piece.
        axis: The tensor-parallel axis.
        dim: Dim that is cut.
        sizes: Length of every rank's piece along ``dim``; ``None`` when equal.
    """
    return _gather(x, axis, dim, sizes, reduce_gradient=False)


def split_to_tp(x: Tensor, axis: Axis, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's piece along ``dim`` of a replicated tensor: own piece forward, all-gather backward.

    Args:
        x: The same on every rank.
        axis: The tensor-parallel axis.
        dim: Dim to cut.
        sizes: Length of every rank's piece along ``dim``; ``None`` when equal.
    """
    x = _resolved(x)
    if axis.size == 1:
        return x
    if is_shape_only(x, axis):
        return _own_piece(x, axis, dim, sizes)
    return _Split.apply(x, axis, dim, sizes)


def scatter_to_sequence(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's piece of the sequence of a replicated tensor: own piece forward, all-gather backward."""
    return split_to_tp(x, axis, dim)


def gather_from_sequence(x: Tensor, axis: Axis, dim: int, reduce_gradient: bool) -> Tensor:
    """The whole sequence from every rank's piece: all-gather forward.

    Args:
        x: This rank's piece.
        axis: The tensor-parallel axis.
        dim: The sequence dim.
        reduce_gradient: True before column layers, whose input gradients are partial: reduce-scatter backward. False
            where the same code follows on every rank: own piece backward.
    """
    return _gather(x, axis, dim, None, reduce_gradient)


def reduce_scatter_to_sequence(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's piece of the sequence of the sum of partial tensors: reduce-scatter forward, all-gather backward."""
    x = _resolved(x)
    if axis.size == 1:
        return x
    if is_shape_only(x, axis):
        return _own_piece(x, axis, dim)
    return _ReduceScatter.apply(x, axis, dim)


def _gather(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None, reduce_gradient: bool) -> Tensor:
    x = _resolved(x)
    if axis.size == 1:
        return x
    if is_shape_only(x, axis):
        if sizes is None:
            return torch.cat([x] * axis.size, dim)
        shape = list(x.shape)
        shape[dim] = sum(sizes)
        return x.new_empty(shape).requires_grad_(x.requires_grad)
    return _Gather.apply(x, axis, dim, sizes, reduce_gradient)


def _own_piece(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    if sizes is None:
        sizes = (x.shape[dim] // axis.size,) * axis.size
    return x.narrow(dim, sum(sizes[: axis.rank]), sizes[axis.rank])


def _resolved(x: Tensor) -> Tensor:
    return resolve(x) if isinstance(x, Placeholder) else x


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Others may hold this gradient, so the sum goes into a copy.
        return all_reduce(gradient.clone(memory_format=torch.contiguous_format), ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        if not x.is_contiguous():
            return all_reduce(x.contiguous(), axis)
        ctx.mark_dirty(x)
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None, reduce_gradient: bool
    ) -> Tensor:
        ctx.axis, ctx.dim, ctx.sizes, ctx.reduce_gradient = axis, dim, sizes, reduce_gradient
        return all_gather(x, axis, dim, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        axis: Axis = ctx.axis
        if ctx.reduce_gradient:
            piece = reduce_scatter(gradient, axis, ctx.dim, sizes=ctx.sizes)
        else:
            piece = _own_piece(gradient, axis, ctx.dim, ctx.sizes)
        return piece, None, None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None) -> Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        # A copy in any case: a piece of a batch of one sample is contiguous, and would keep the whole tensor in memory.
        return _own_piece(x, axis, dim, sizes).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return all_gather(gradient, ctx.axis, ctx.dim, ctx.sizes), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return reduce_scatter(x, axis, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(gradient, ctx.axis, ctx.dim), None, None
