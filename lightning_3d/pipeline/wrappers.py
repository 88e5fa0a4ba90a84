"""Taking out the modules that ``torch.compile`` and checkpoint wrappers put around the user's, and what they ask for.

Their parts of names would stand between a block and its plan, its stage and its place in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from lightning_3d.pipeline.compiling import Compiler

_WHOLE = "_lightning_3d_compiler"


@dataclass
class Wishes:
    """What the user's wrappers did, by the plain names of what they stood around."""

    compiled: dict[str, Compiler] = field(default_factory=dict)
    recomputed: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """With the function that recomputes, called as ``function(forward, *args, **kwargs)``."""


def unwrap(module: nn.Module) -> Wishes:
    """Replace every wrapper inside ``module`` by what it stands around, in place.

    Compiled in place (``layer.compile()``) counts too.
    """
    wishes = Wishes()
    whole = vars(module).pop(_WHOLE, None)
    if whole is not None:
        wishes.compiled[""] = whole
    _unwrap(module, "", wishes, set())
    return wishes


def keep_compiler(module: nn.Module, context: Any) -> None:
    """Remember for :func:`unwrap` that the whole of ``module`` was compiled, with the context of ``torch.compile``."""
    object.__setattr__(module, _WHOLE, Compiler.of_context(context))


def _unwrap(parent: nn.Module, prefix: str, wishes: Wishes, seen: set[int]) -> None:
    if id(parent) in seen:
        return
    seen.add(id(parent))
    call = parent._compiled_call_impl
    if call is not None:
        wishes.compiled.setdefault(prefix.removesuffix("."), Compiler.of_function(call))
        parent._compiled_call_impl = None
    for key, child in parent._modules.items():
        name = prefix + key
        while isinstance(child, OptimizedModule | CheckpointWrapper):
            if isinstance(child, OptimizedModule):
                wishes.compiled.setdefault(name, Compiler.of_context(child.dynamo_ctx))
                child = child._orig_mod
            else:
                wishes.recomputed.setdefault(name, child.checkpoint_fn)
                child = child._checkpoint_wrapped_module
            parent._modules[key] = child
        if child is not None:
            _unwrap(child, name + ".", wishes, seen)
