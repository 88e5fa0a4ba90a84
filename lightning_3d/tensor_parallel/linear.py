"""The arithmetic of column and row layers, each as one step of autograd with its collective inside.

A step of autograd in Python takes as long as a small product of matrices, so the local view of the parameters, the
product and the sum over ranks share one. And the sum of a column layer's input gradients travels while the gradient of
its weight is computed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from lightning_3d.collectives import all_reduce
from lightning_3d.mesh import Axis
from lightning_3d.tensor_parallel.parameters import hand_over

_KINDS = (Tensor, FakeTensor)  # the latter in a dry run


def is_fusible(x: Tensor, weight: Any, bias: Any = None) -> bool:
    """Whether the functions here compute what autograd would: real values, cut parameters, gradients wanted."""
    cut = isinstance(weight, DTensor) and (bias is None or isinstance(bias, DTensor))
    return cut and type(x) in _KINDS and not x.is_meta and torch.is_grad_enabled() and not torch.compiler.is_compiling()


def column_linear(x: Tensor, weight: DTensor, bias: DTensor | None, axis: Axis | None) -> Tensor:
    """``x`` ``[..., in]``, whole, times this rank's rows of ``weight``: ``[..., out / tp]``.

    Args:
        x: Equal on every rank of the axis.
        weight: ``[out, in]``, cut along dim 0.
        bias: ``[out]``, cut likewise.
        axis: Where the gradient of ``x`` is summed; ``None`` if it is summed elsewhere.
    """
    return _Linear.apply(_autocast(x), weight, bias, axis, None)


def row_linear(x: Tensor, weight: DTensor, axis: Axis | None) -> Tensor:
    """This rank's features ``x`` ``[..., in / tp]`` times its columns of ``weight``, summed: ``[..., out]``.

    Args:
        x: A piece of the features.
        weight: ``[out, in]``, cut along dim 1.
        axis: Where the product is summed; ``None`` leaves it partial.
    """
    return _Linear.apply(_autocast(x), weight, None, None, axis)


def _autocast(x: Tensor) -> Tensor:
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: DTensor, bias: DTensor | None, input_axis: Axis | None, output_axis: Axis | None
    ) -> Tensor:
        local = _autocast(weight._local_tensor)
        ctx.save_for_backward(x, local)
        ctx.parameters = weight, bias
        ctx.axis = input_axis
        y = F.linear(x, local, None if bias is None else _autocast(bias._local_tensor))
        return y if output_axis is None else all_reduce(y, output_axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return _once(ctx, gradient)
        return _backward(ctx, gradient)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, local = ctx.saved_tensors
    weight, bias = ctx.parameters
    wanted, nodes = ctx.needs_input_grad, ctx.next_functions
    rows = gradient.reshape(-1, gradient.shape[-1])
    input_gradient = weight_gradient = bias_gradient = on_its_way = None
    if wanted[0]:
        input_gradient = rows.mm(local).view(x.shape)
        if ctx.axis is not None:
            on_its_way = all_reduce(input_gradient, ctx.axis, async_op=True)
    if wanted[1]:
        product = rows.t().mm(x.reshape(-1, x.shape[-1]))
        weight_gradient = hand_over(weight, product.to(weight.dtype), nodes[1][0])
    if wanted[2]:
        bias_gradient = hand_over(bias, rows.sum(0).to(bias.dtype), nodes[2][0])
    if on_its_way is not None:
        on_its_way.wait()
    return input_gradient, weight_gradient, bias_gradient, None, None


_once = once_differentiable(_backward)
