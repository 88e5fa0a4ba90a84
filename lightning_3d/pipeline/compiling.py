"""``torch.compile`` of blocks, one by one: what our hooks, collectives and placeholders do stays outside of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.eval_frame import OptimizeContext, innermost_backend
from torch._dynamo.exc import InvalidBackend

from lightning_3d.errors import ConfigError
from lightning_3d.placeholder import is_placeholder, leaves_of, resolve

Backend = str | Callable[..., Any]

_VARIANTS = 16
"""Compiled versions of one block: training or not, with a graph or not, constant or changing sizes, and some more."""


@dataclass(frozen=True)
class Compiler:
    """What ``torch.compile`` was asked for."""

    backend: Backend = "inductor"
    dynamic: bool | None = None
    """Whether sizes are variables; ``None``: those that have changed once."""

    @classmethod
    def of_option(cls, option: bool | str) -> Compiler | None:
        """The compiler of the strategy's option ``compile``.

        Raises:
            ConfigError: for a backend that torch does not have.
        """
        if isinstance(option, bool):
            return cls() if option else None
        try:
            lookup_backend(option)
        except InvalidBackend as error:
            raise ConfigError(
                f"compile={option!r} names a backend that torch.compile does not have. Use compile=True (inductor),"
                " 'aot_eager', 'eager', or another that torch.compiler.list_backends(None) names."
            ) from error
        return cls(option)

    @classmethod
    def of_context(cls, context: Any) -> Compiler:
        """The compiler of a ``torch.compile`` of the user's, without ``fullgraph``: blocks have graph breaks."""
        callback = getattr(context, "callback", None)
        backend = innermost_backend(callback) if callable(callback) else "inductor"
        return cls(backend, getattr(context, "_dynamic", None))

    @classmethod
    def of_function(cls, compiled: Callable[..., Any]) -> Compiler:
        """The compiler of a function that ``torch.compile`` has given; inductor if it cannot be told."""
        cells = [cell.cell_contents for cell in getattr(compiled, "__closure__", None) or ()]
        return cls.of_context(next((item for item in cells if isinstance(item, OptimizeContext)), None))

    def __call__(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """``forward``, compiled when it is first called."""
        return torch.compile(forward, backend=self.backend, dynamic=self.dynamic)


def choose_parts(
    module: nn.Module, blocks: Sequence[str], option: bool | str, wishes: Mapping[str, Compiler]
) -> dict[str, Compiler]:
    """Names of the modules to compile, each with how.

    A module that is to be compiled is compiled block by block if it holds blocks, in one piece otherwise.

    Args:
        module: The whole model.
        blocks: Names of all its blocks.
        option: The strategy's option ``compile``.
        wishes: Names of modules that the user compiled, each with how; ``""`` is the whole model.
    """
    parts: dict[str, Compiler] = {}
    general = Compiler.of_option(option)
    for name, compiler in [*([("", general)] if general else []), *wishes.items()]:
        prefix = name + "." if name else ""
        inside = [block for block in blocks if block.startswith(prefix)]
        around = name in blocks or any(name.startswith(block + ".") for block in blocks)
        if not inside and not around and not name:
            inside = [child for child, part in module.named_children() if _is_called(part)]
        for part in inside or [name]:
            # A block that is compiled whole covers what the user compiled in it.
            if part and not any(part == other or part.startswith(other + ".") for other in parts):
                parts[part] = compiler
    return parts


def compile_parts(module: nn.Module, parts: Mapping[str, Compiler]) -> int:
    """Compile the named parts of ``module`` in place; those that other stages own are left as they are.

    Names, hooks and attributes of the parts stay, only their ``forward`` is compiled: hooks of the blocks, among them
    those of FSDP2, random streams and the cut, run outside. Layers that communicate run between the compiled pieces.
    Nothing is compiled before its first call, so what is done to the parts later is seen.

    Returns:
        How many parts are compiled.
    """
    owned = {name: module.get_submodule(name) for name in parts}
    owned = {name: part for name, part in owned.items() if not any(map(is_placeholder, part.parameters()))}
    _allow_variants(len(owned))
    for part in {id(child): child for block in owned.values() for child in block.modules()}.values():
        if _is_ours(part):
            part.forward = _Untraced(part.forward)
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            for key, hook in hooks.items():
                if _made_by_us(hook):
                    hooks[key] = torch.compiler.disable(hook)
    for name, part in owned.items():
        part.forward = _Compiled(part.forward, parts[name])
    return len(owned)


def _is_ours(part: nn.Module) -> bool:
    """Whether the forward of ``part`` is that of a converted layer, which communicates."""
    return any(map(_made_by_us, type(part).__mro__)) or _made_by_us(vars(part).get("forward"))


def _made_by_us(item: Any) -> bool:
    made_by = getattr(item, "__module__", None)
    return isinstance(made_by, str) and made_by.startswith("lightning_3d.tensor_parallel.")


def _is_called(part: nn.Module) -> bool:
    """Whether the user's code calls ``part``: a list is read instead."""
    return not isinstance(part, nn.ModuleList | nn.ModuleDict) and any(True for _ in part.parameters())


def _allow_variants(parts: int) -> None:
    """Let torch compile as many versions of one piece of code as there are blocks that differ.

    Blocks share their code and mostly the compiled version too, but not where they read their own number. Torch counts
    per piece of code, and goes on without compiling at 8.
    """
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _VARIANTS + 4 * parts)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4 * config.recompile_limit)


class _Compiled:
    """A compiled forward. Placeholders never reach the compiler, and copies of the module are plain."""

    def __init__(self, forward: Callable[..., Any], compiler: Compiler) -> None:
        self._forward = forward
        self._compiled = compiler(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = resolve((args, kwargs))
        if any(map(is_placeholder, leaves_of((args, kwargs)))):
            return self._forward(*args, **kwargs)
        return self._compiled(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._forward, memo)


class _Untraced:
    """A forward that compiled code around it calls as it is."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._forward, memo)
