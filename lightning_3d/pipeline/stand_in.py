"""What stands in a chunk for a module that another chunk runs: it answers with placeholders of the right shapes."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_3d.pipeline.cache_effects import CacheEffects, CacheWatch
from lightning_3d.pipeline.caches import is_cache
from lightning_3d.pipeline.signature import signature
from lightning_3d.placeholder import Placeholder, inside_of, lost_writes, resolve
from lightning_3d.tensor_parallel.clone import Ground, trial_clone, trial_tensor

_MOST_ANSWERS = 256
"""Signatures of which a module's answers are remembered; those of the oldest go first."""


class StandIn:
    """The forward of a module that another chunk owns: on meta tensors once per signature, then from memory."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._forward = module.forward
        self._module = module
        self._name = name
        self._memory: dict[Any, list[_Answer]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer as the module would, with placeholders."""
        given: list[Any] = []
        caches: list[Any] = []
        with torch._C.DisableTorchFunctionSubclass():  # placeholders answer for themselves
            known = signature((args, kwargs), given, caches)
            key = None if known is None else (known, self._module.training, torch.is_grad_enabled(), _autocast())
            for answer in self._memory.get(key, ()):
                found = list(given)
                if answer.effects.apply_to(caches, found):
                    answer.effects.repeat(caches, partial(self._recall, given=found))
                    return self._recalled(answer, found)
        args, kwargs = resolve((args, kwargs))
        watch = CacheWatch(caches, given)
        with watch.watching():
            outputs, spec = pytree.tree_flatten(self._compute(args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            effects = watch.effects(partial(self._describe, given=given))
            answer = _Answer([self._describe(leaf, given) for leaf in outputs], spec, effects or CacheEffects())
            leaves = (*answer.outputs, *answer.effects.leaves())
            if key is not None and effects is not None and not any(isinstance(leaf, Tensor) for leaf in leaves):
                self._memory.setdefault(key, []).append(answer)
                if len(self._memory) > _MOST_ANSWERS:
                    del self._memory[next(iter(self._memory))]
        return self._recalled(answer, given)

    def _compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module gives, with placeholders for what depends on those given.

        What routes tokens by their values, or has no kernel for meta tensors, runs on small numbers in host memory.
        Whether the shapes are right for real values is seen when the first ones arrive.
        """
        buffers = [(part._buffers, dict(part._buffers)) for part in self._module.modules()]
        try:
            with lost_writes(), inside_of(self._name):
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
        finally:
            for now, before in buffers:  # code that updates them may have put placeholders there
                now.update(before)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._forward, memo)

    @staticmethod
    def _describe(leaf: Any, given: list[Any]) -> Any:
        known = leaf.bound if isinstance(leaf, Placeholder) and leaf.bound is not None else leaf
        for index, item in enumerate(given):
            if known is item:
                return _Input(index)
        if isinstance(leaf, Placeholder):
            return _Fact(leaf.meta, leaf.device, leaf.requires_grad)
        return leaf

    def _recalled(self, answer: _Answer, given: list[Any]) -> Any:
        outputs = [self._recall(item, given) for item in answer.outputs]
        return outputs[0] if answer.spec.is_leaf() else pytree.tree_unflatten(outputs, answer.spec)

    def _recall(self, item: Any, given: list[Any]) -> Any:
        if isinstance(item, _Input):
            return given[item.index]
        if isinstance(item, _Fact):
            return Placeholder(item.meta, item.device, item.requires_grad, origin=self._name)
        return item


def _autocast() -> tuple[Any, ...]:
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


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


@dataclass(frozen=True)
class _Input:
    """The answer is the tensor or store of this number among those given."""

    index: int


@dataclass(frozen=True)
class _Fact:
    """The answer is a new placeholder with these facts."""

    meta: Tensor
    device: torch.device
    requires_grad: bool


@dataclass(frozen=True)
class _Answer:
    """What a call gave: described leaves, their structure, and what it did to stores of keys and values."""

    outputs: list[Any]
    spec: pytree.TreeSpec
    effects: CacheEffects
