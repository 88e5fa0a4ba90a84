"""What stands in a chunk for a module that another chunk runs: it answers with placeholders of the right shapes."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_3d.pipeline.caches import is_cache
from lightning_3d.placeholder import Placeholder, lost_writes, resolve
from lightning_3d.tensor_parallel.clone import Ground, trial_clone, trial_tensor


class StandIn:
    """The forward of a module that another chunk owns: on meta tensors once per signature, then from memory."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._forward = module.forward
        self._module = module
        self._name = name
        self._memory: dict[Any, tuple[list[Any], Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer as the module would, with placeholders."""
        inputs: list[Tensor] = []
        with torch._C.DisableTorchFunctionSubclass():  # placeholders answer for themselves
            signature = _signature((args, kwargs), inputs)
        key = None if signature is None else (signature, self._module.training, torch.is_grad_enabled())
        if key is not None and key in self._memory:
            answer, out_spec = self._memory[key]
        else:
            args, kwargs = resolve((args, kwargs))
            outputs, out_spec = pytree.tree_flatten(self._compute(args, kwargs))
            answer = [self._describe(leaf, inputs) for leaf in outputs]
            if key is not None and not any(isinstance(item, Tensor) for item in answer):
                self._memory[key] = (answer, out_spec)
        outputs = [self._recall(item, inputs) for item in answer]
        return outputs[0] if out_spec.is_leaf() else pytree.tree_unflatten(outputs, out_spec)

    def _compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module gives, with placeholders for what depends on those given.

        What routes tokens by their values, or has no kernel for meta tensors, runs on small numbers in host memory.
        Whether the shapes are right for real values is seen when the first ones arrive.
        """
        try:
            with lost_writes():
                return self._forward(*args, **kwargs)
        except Exception as error:
            device = next((leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if _is_floating(leaf)), None)
            if device is None:
                raise
            try:
                outputs = _try_on_host(self._module, args, kwargs)
            except Exception:
                raise error from None
            grad = torch.is_grad_enabled()

            def stand_in(leaf: Any) -> Any:
                if not isinstance(leaf, Tensor):
                    return leaf
                return Placeholder.of(leaf.shape, leaf.dtype, device, grad and leaf.requires_grad, self._name)

            return pytree.tree_map(stand_in, outputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._forward, memo)

    @staticmethod
    def _describe(leaf: Any, inputs: list[Tensor]) -> Any:
        for index, given in enumerate(inputs):
            if leaf is given:
                return _Input(index)
        if isinstance(leaf, Placeholder):
            return _Fact(leaf.meta, leaf.device, leaf.requires_grad)
        return leaf

    def _recall(self, item: Any, inputs: list[Tensor]) -> Any:
        if isinstance(item, _Input):
            return inputs[item.index]
        if isinstance(item, _Fact):
            return Placeholder(item.meta, item.device, item.requires_grad, origin=self._name)
        return item


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _try_on_host(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    ground = Ground("cpu")
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
        clone = trial_clone(module, ground)
        for name, parameter in module.named_parameters():
            clone.get_parameter(name).requires_grad_(parameter.requires_grad)

        def given(leaf: Any) -> Any:
            if is_cache(leaf):  # the attempt that failed may have filled it
                return None
            if not isinstance(leaf, Placeholder):
                return leaf.to("cpu") if isinstance(leaf, Tensor) else leaf
            return trial_tensor(leaf, ground).requires_grad_(leaf.requires_grad)

        args, kwargs = pytree.tree_map(given, (args, kwargs), is_leaf=is_cache)
        return clone(*args, **kwargs)


def _signature(tree: Any, tensors: list[Tensor]) -> Any:
    """What decides the shapes that a module answers with; ``None`` if that cannot be told. Collects the tensors."""
    kind = type(tree)
    if isinstance(tree, Tensor):
        if isinstance(tree, Placeholder) and tree.bound is not None:
            tree = tree.bound
        tensors.append(tree)
        return isinstance(tree, Placeholder), tree.shape, tree.dtype, tree.requires_grad
    if tree is None or isinstance(tree, bool | int | float | str | torch.dtype | torch.device):
        return kind, tree
    layout: Any = kind
    if kind is dict:
        layout, tree = tuple(tree), tree.values()
    elif kind is not tuple and kind is not list:
        if pytree.tree_is_leaf(tree):
            return None
        tree, spec = pytree.tree_flatten(tree)
        layout = str(spec)
    parts = [_signature(item, tensors) for item in tree]
    return None if any(part is None for part in parts) else (layout, *parts)


@dataclass(frozen=True)
class _Input:
    """The answer is the input tensor of this number."""

    index: int


@dataclass(frozen=True)
class _Fact:
    """The answer is a new placeholder with these facts."""

    meta: Tensor
    device: torch.device
    requires_grad: bool
