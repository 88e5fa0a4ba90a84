"""Parameters that user code keeps beside their modules: in lists, tuples and dicts that it made in ``__init__``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

_DEPTH = 3
"""How many containers inside each other are looked into."""


class KeptParameters:
    """Keeps such containers up to date when others stand in the place of parameters.

    Laying a module out replaces parameters, and where they are sharded, a step computes with gathered ones that come
    and go. Between steps the containers hold what ``module.parameters()`` gives, so that optimizers may be made of
    them; in a step they hold what the modules compute with.

    Args:
        module: The LightningModule, laid out.
        names: The parameters that it was built with, and those that tensor parallelism made of them -> their names.
    """

    def __init__(self, module: nn.Module, names: Mapping[Any, tuple[str, ...]]) -> None:
        self._module = module
        self._places: list[tuple[Callable[[Any], None], str]] = []
        for owner in module.modules():
            for key, value in list(vars(owner).items()):
                if key in ("_parameters", "_buffers", "_modules") or not isinstance(value, list | tuple | dict):
                    continue
                self._look_into(value, partial(vars(owner).__setitem__, key), names)
        self._between = {name: module.get_parameter(name) for _, name in self._places}
        self._put(self._between)

    def install(self, stage: nn.Module) -> None:
        """Follow the steps of ``stage``, whose hooks gather the parameters; call it after those are there."""
        if self._places:
            stage.register_forward_pre_hook(lambda *_: self._put(self._now()))
            stage.register_forward_hook(lambda *_: self._put(self._between), always_call=True)

    def _now(self) -> dict[str, nn.Parameter]:
        return {name: self._module.get_parameter(name) for name in self._between}

    def _put(self, parameters: Mapping[str, Any]) -> None:
        for set_place, name in self._places:
            set_place(parameters[name])

    def _look_into(
        self, container: Any, replace: Callable[[Any], None], names: Mapping[Any, tuple[str, ...]], depth: int = 0
    ) -> None:
        items = list(container.items()) if isinstance(container, dict) else list(enumerate(container))
        target = _Tuple(container, replace) if isinstance(container, tuple) else container
        for key, value in items:
            if isinstance(value, nn.Parameter) and value in names:
                self._places.append((partial(target.__setitem__, key), names[value][0]))
            elif isinstance(value, list | tuple | dict) and depth < _DEPTH:
                self._look_into(value, partial(target.__setitem__, key), names, depth + 1)


class _Tuple:
    """Sets entries of a tuple, by a new one in its place."""

    def __init__(self, values: tuple[Any, ...], replace: Callable[[Any], None]) -> None:
        self._values, self._replace, self._kind = list(values), replace, type(values)

    def __setitem__(self, index: int, value: Any) -> None:
        self._values[index] = value
        self._replace(self._kind(*self._values) if hasattr(self._kind, "_fields") else self._kind(self._values))
