"""Copies of a block for trials: the same structure with other tensors in it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

Make = Callable[[str, Tensor], Tensor]


def clone_block(block: nn.Module, make_parameter: Make, make_tensor: Make) -> nn.Module:
    """A deep copy of ``block`` that never touches the values of its parameters.

    Args:
        block: The original; its parameters may be on the meta device or placeholders.
        make_parameter: Gives the tensor of a new parameter, from the name and the original.
        make_tensor: The same for buffers and tensors kept as plain attributes.
    """
    memo: dict[int, object] = {}
    for name, parameter in block.named_parameters():
        floating = parameter.is_floating_point() or parameter.is_complex()
        memo[id(parameter)] = nn.Parameter(make_parameter(name, parameter), requires_grad=floating)
    for name, buffer in block.named_buffers():
        memo[id(buffer)] = make_tensor(name, buffer)
    for prefix, module in block.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = make_tensor(f"{prefix}.{name}", value)
    cloned = copy.deepcopy(block, memo)
    for module in cloned.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            hooks.clear()
    return cloned


def meta_clone(block: nn.Module) -> nn.Module:
    """``block`` on the meta device, every floating-point parameter trainable, in evaluation mode."""

    def empty(_: str, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    return clone_block(block, empty, empty).eval()
