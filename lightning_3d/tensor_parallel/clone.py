"""Copies of a block for trials: the same structure with other tensors in it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_3d.attributes import carry_attributes
from lightning_3d.placeholder import is_placeholder

Make = Callable[[str, Tensor], Tensor]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Ground:
    """Where copies of a block run for trials."""

    device: str = "meta"
    """``"cpu"`` for blocks whose shapes depend on values (routers)."""
    narrow: bool = False
    """Whether float64 tensors become float32, for blocks whose kernels know no float64."""

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which a tensor of ``dtype`` is tried."""
        return torch.float32 if self.narrow and dtype == torch.float64 else dtype


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
        new = nn.Parameter(make_parameter(name, parameter), requires_grad=floating)
        if not is_placeholder(parameter):
            carry_attributes(parameter, new)
        memo[id(parameter)] = new
    for name, buffer in block.named_buffers():
        memo[id(buffer)] = make_tensor(name, buffer)
    for prefix, module in block.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = make_tensor(f"{prefix}.{name}", value)
        for name in _HOOKS:
            # Not copied, as what they hold need not be copyable (profilers); they are taken off the copy.
            memo |= {id(hook): hook for hook in vars(module)[name].values() if not _is_of_torch(hook)}
    cloned = copy.deepcopy(block, memo)
    for module in cloned.modules():
        vars(module).update(without_hooks(module))
    return cloned


def without_hooks(module: nn.Module) -> dict[str, Any]:
    """Attributes that leave ``module`` without the hooks of its user, which a trial must not run.

    Those of PyTorch itself stay: they compute weights.
    """
    changed: dict[str, Any] = {"_backward_hooks": OrderedDict(), "_backward_pre_hooks": OrderedDict()}
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        hooks = vars(module)[name].items()
        changed[name] = OrderedDict((key, hook) for key, hook in hooks if _is_of_torch(hook))
    return changed


def _is_of_torch(hook: Any) -> bool:
    made_by = getattr(hook, "__module__", None) or type(hook).__module__
    return str(made_by).split(".")[0] == "torch"


class GuessValues(TorchDispatchMode):
    """Answers zero, or False, where code asks for the value of a meta tensor, so that it goes on one way."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _READS and args[0].is_meta:
            return False if func is not torch.ops.aten._local_scalar_dense.default or args[0].dtype == torch.bool else 0
        return func(*args, **(kwargs or {}))


_READS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
)


def trial_clone(block: nn.Module, ground: Ground) -> nn.Module:
    """``block`` on another ground without its values, every floating-point parameter trainable, in evaluation mode."""

    def empty(_: str, tensor: Tensor) -> Tensor:
        return trial_tensor(tensor, ground)

    return clone_block(block, empty, empty).eval()


def trial_tensor(tensor: Tensor, ground: Ground) -> Tensor:
    """A tensor like ``tensor`` on ``ground``, of zeros (small numbers for floating-point types)."""
    dtype = ground.dtype(tensor.dtype)
    if ground.device == "meta":
        return torch.empty(tensor.shape, dtype=dtype, device="meta")
    return torch.full(tensor.shape, 0.01 if tensor.is_floating_point() else 0, dtype=dtype, device=ground.device)
