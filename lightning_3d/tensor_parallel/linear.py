"""The arithmetic of column and row layers, each as one step of autograd with its collective inside.

A step of autograd in Python takes as long as a small product of matrices, so the local view of the parameters, the
product and the sum over ranks share one. And the sum of a column layer's input gradients travels while the gradient of
its weight is computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from lightning_3d.collectives import Handle, all_gather, all_reduce, reduce_scatter
from lightning_3d.mesh import Axis
from lightning_3d.tensor_parallel.collectives import reduce_from_tp, reduce_scatter_to_sequence
from lightning_3d.tensor_parallel.parameters import hand_over, local_view

_KINDS = (Tensor, FakeTensor)  # the latter in a dry run


class Regathering:
    """Gathers the input of column layers once more in the backward, once for all of them that read it.

    Under sequence parallelism they keep their piece of the sequence for it, as the layers around them do.
    """

    def __init__(self, axis: Axis, dim: int) -> None:
        self.dim = dim
        self._axis = axis
        self._readers = 0
        self._handle: Handle | None = None

    def expect(self) -> None:
        """One more layer will call :meth:`start`."""
        self._readers += 1

    def start(self, piece: Tensor) -> Handle:
        """Gather ``piece``, which is the same whichever layer kept it; the handle gives the whole sequence."""
        handle = self._handle
        if handle is None:
            handle = all_gather(piece, self._axis, self.dim, async_op=True)
        self._readers -= 1
        self._handle = handle if self._readers > 0 else None
        return handle


class Piece(NamedTuple):
    """What a whole input was gathered from."""

    tensor: Tensor
    again: Regathering


def is_fusible(x: Tensor, weight: Any, bias: Any = None) -> bool:
    """Whether the functions here compute what autograd would: real values, cut parameters, gradients wanted."""
    cut = isinstance(weight, DTensor) and (bias is None or isinstance(bias, DTensor))
    return cut and type(x) in _KINDS and not x.is_meta and torch.is_grad_enabled() and not torch.compiler.is_compiling()


def column_linear(
    x: Tensor,
    weight: DTensor,
    bias: DTensor | None,
    axis: Axis | None,
    piece: Piece | None = None,
    transposed: bool = False,
) -> Tensor:
    """``x`` ``[..., in]``, whole, times this rank's rows of ``weight``: ``[..., out / tp]``.

    Args:
        x: Equal on every rank of the axis.
        weight: ``[out, in]``, cut along dim 0.
        bias: ``[out]``, cut likewise.
        axis: Where the gradient of ``x`` is summed; ``None`` if it is summed elsewhere.
        piece: What ``x`` was gathered from, to be kept instead of it. It gets the gradient that is summed here.
        transposed: Whether the weight is ``[in, out]``, cut along dim 1.
    """
    x = autocast(x)
    if piece is None:
        return _Linear.apply(x, weight, bias, None, None, axis, None, None, transposed)
    kept = piece.tensor
    x, kept = (x, kept.detach()) if axis is None else (x.detach(), kept)
    return _Linear.apply(x, weight, bias, kept, piece.again, axis, None, None, transposed)


def row_linear(x: Tensor, weight: Any, axis: Axis, scatter_dim: int | None = None, transposed: bool = False) -> Tensor:
    """This rank's features ``x`` ``[..., in / tp]`` times its columns of ``weight``, summed: ``[..., out]``.

    Args:
        x: A piece of the features.
        weight: ``[out, in]``, cut along dim 1.
        axis: Where the product is summed.
        scatter_dim: Dim of which this rank gets its piece of the sum; ``None`` for all of it.
        transposed: Whether the weight is ``[in, out]``, cut along dim 0.
    """
    if is_fusible(x, weight):
        return _Linear.apply(autocast(x), weight, None, None, None, None, axis, scatter_dim, transposed)
    local = local_view(weight)
    y = F.linear(x, local.t() if transposed else local)
    return reduce_from_tp(y, axis) if scatter_dim is None else reduce_scatter_to_sequence(y, axis, scatter_dim)


def autocast(x: Tensor) -> Tensor:
    """``x`` in the type in which products of it are computed."""
    return x.to(computed_type(x))


def computed_type(x: Tensor) -> torch.dtype:
    """The type in which products of ``x``, a tensor with values, are computed: its own, or that of autocast."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: DTensor,
        bias: DTensor | None,
        piece: Tensor | None,
        again: Regathering | None,
        input_axis: Axis | None,
        output_axis: Axis | None,
        scatter_dim: int | None,
        transposed: bool,
    ) -> Tensor:
        local = weight._local_tensor
        wanted = ctx.needs_input_grad
        if wanted[1] and again is not None:
            again.expect()
        # The weight as it is held: a copy in another type would live as long as the micro-batch is under way.
        kept = (x if piece is None else piece) if wanted[1] else None
        ctx.save_for_backward(kept, local if wanted[0] or wanted[3] else None)
        ctx.parameters = weight, bias
        ctx.again, ctx.input_axis, ctx.output_axis, ctx.scatter_dim = again, input_axis, output_axis, scatter_dim
        ctx.transposed = transposed
        matrix = autocast(local.t() if transposed else local)
        y = F.linear(x, matrix, None if bias is None else autocast(bias._local_tensor))
        if output_axis is None:
            return y
        return all_reduce(y, output_axis) if scatter_dim is None else reduce_scatter(y, output_axis, scatter_dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return _once(ctx, gradient)
        return _backward(ctx, gradient)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, local = ctx.saved_tensors
    weight, bias = ctx.parameters
    wanted, nodes = ctx.needs_input_grad, ctx.next_functions
    arriving = ctx.again.start(x) if wanted[1] and ctx.again is not None else None
    if ctx.scatter_dim is not None:
        gradient = all_gather(gradient, ctx.output_axis, ctx.scatter_dim)
    rows = gradient.reshape(-1, gradient.shape[-1])
    input_gradient = weight_gradient = bias_gradient = on_its_way = None
    if wanted[0] or wanted[3]:
        matrix = (local.t() if ctx.transposed else local).to(rows.dtype)
        input_gradient = rows.mm(matrix).view(*gradient.shape[:-1], matrix.shape[1])
        if wanted[3]:
            on_its_way = reduce_scatter(input_gradient, ctx.input_axis, ctx.again.dim, async_op=True)
        elif ctx.input_axis is not None:
            on_its_way = all_reduce(input_gradient, ctx.input_axis, async_op=True)
    if wanted[1]:
        x = x if arriving is None else arriving.wait()
        inputs = x.reshape(-1, x.shape[-1])
        product = inputs.t().mm(rows) if ctx.transposed else rows.t().mm(inputs)
        weight_gradient = hand_over(weight, product, nodes[1][0])
    if wanted[2]:
        bias_gradient = hand_over(bias, rows.sum(0), nodes[2][0])
    if on_its_way is not None:
        input_gradient = on_its_way.wait()
    whole, piece = (None, input_gradient) if wanted[3] else (input_gradient, None)
    return whole, weight_gradient, bias_gradient, piece, None, None, None, None, None


_once = once_differentiable(_backward)
