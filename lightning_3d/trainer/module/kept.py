"""Parameters that user code keeps beside their modules: in lists, tuples and dicts, or by ``id`` in sets too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

_DEPTH = 3
"""How many containers inside each other are looked into."""
_Put = Callable[[Any], None]


class KeptParameters:
    """Keeps such containers up to date when others stand in the place of parameters.

    Laying a module out replaces parameters, and where they are sharded, a step computes with gathered ones that come
    and go. Between steps the containers hold what ``module.parameters()`` gives, so that optimizers may be made of
    them; in a step they hold what the modules compute with. What holds the ``id`` of a parameter holds that of the one
    in its place.

    Args:
        module: The LightningModule, laid out.
        names: The parameters that it was built with, and those that tensor parallelism made of them -> their names.
        ids: The ``id`` of every parameter that it was built with -> its name.
    """

    def __init__(self, module: nn.Module, names: Mapping[Any, tuple[str, ...]], ids: Mapping[int, str]) -> None:
        self._module = module
        self._places: list[tuple[_Put, str]] = []
        self._ids: list[_Container] = []
        for container in _containers(module):
            self._places += [
                (partial(container.put, place), names[value][0])
                for place, value in container.items()
                if isinstance(value, nn.Parameter) and value in names
            ]
            if container.look_for(ids):
                self._ids.append(container)
        used = {name for _, name in self._places}.union(*(container.names for container in self._ids))
        self._between = {name: module.get_parameter(name) for name in used}
        self._put(self._between)

    def install(self, stage: nn.Module) -> None:
        """Follow the steps of ``stage``, whose hooks gather the parameters; call it after those are there."""
        if self._between:
            stage.register_forward_pre_hook(lambda *_: self._put(self._now()))
            stage.register_forward_hook(lambda *_: self._put(self._between), always_call=True)

    def _now(self) -> dict[str, nn.Parameter]:
        return {name: self._module.get_parameter(name) for name in self._between}

    def _put(self, parameters: Mapping[str, Any]) -> None:
        for set_place, name in self._places:
            set_place(parameters[name])
        for container in self._ids:
            container.renew(parameters)


def renew_ids(module: nn.Module, ids: Mapping[int, str]) -> None:
    """In a copy of a module: let containers that hold the ``id`` of a parameter of the original hold that of its own.

    Args:
        module: The copy.
        ids: The ``id`` of every parameter of the original -> its name.
    """
    own = dict(module.named_parameters())
    for container in list(_containers(module)):
        if container.look_for(ids):
            container.renew(own)


def _containers(module: nn.Module) -> Iterator[_Container]:
    """Every container that is an attribute of a part of ``module``, or in one."""
    for owner in module.modules():
        for key, value in list(vars(owner).items()):
            if key not in ("_parameters", "_buffers", "_modules"):
                yield from _inside(value, partial(vars(owner).__setitem__, key))


def _inside(value: Any, replace: _Put, depth: int = 0) -> Iterator[_Container]:
    if not isinstance(value, list | tuple | dict | set | frozenset) or depth > _DEPTH:
        return
    container = _Container(value, replace)
    yield container
    for place, inner in container.items():
        yield from _inside(inner, partial(container.put, place), depth + 1)


class _Container:
    """A list, tuple, dict or set of the user's.

    Args:
        value: The container.
        replace: Puts another into its place, for those that cannot change.
    """

    def __init__(self, value: Any, replace: _Put) -> None:
        self._value, self._replace = value, replace
        self._names: dict[int, str] = {}
        self._now: dict[int, int] = {}

    @property
    def names(self) -> set[str]:
        """The parameters of which it holds the ``id``."""
        return set(self._names.values())

    def items(self) -> list[tuple[Any, Any]]:
        """Places and what is there; none for sets."""
        if isinstance(self._value, dict):
            return list(self._value.items())
        return [] if isinstance(self._value, set | frozenset) else list(enumerate(self._value))

    def put(self, place: Any, value: Any) -> None:
        """Set what is at a place that was there at first."""
        if isinstance(self._value, tuple):
            self._rebuild([value if index == place else entry for index, entry in enumerate(self._value)])
        else:
            self._value[self._now.get(place, place) if isinstance(self._value, dict) else place] = value

    def look_for(self, ids: Mapping[int, str]) -> bool:
        """Whether it holds any of these ids, as entries, keys or values; from then on it knows them by name."""
        # The object that had this id may be gone, and the number be another's later.
        entries = (self._value, self._value.values()) if isinstance(self._value, dict) else (self._value,)
        self._now = {entry: entry for part in entries for entry in part if type(entry) is int and entry in ids}
        self._names = {number: ids[number] for number in self._now}
        return bool(self._names)

    def renew(self, parameters: Mapping[str, Any]) -> None:
        """Let it hold the ids of these parameters, given by name."""
        after = {first: id(parameters[name]) for first, name in self._names.items()}
        new = {self._now[first]: number for first, number in after.items()}
        if after == self._now:
            return
        self._now = after

        def renewed(entry: Any) -> Any:
            return new.get(entry, entry) if type(entry) is int else entry

        if isinstance(self._value, dict):
            items = [(renewed(key), renewed(value)) for key, value in self._value.items()]
            self._value.clear()
            self._value.update(items)
            return
        entries = [renewed(entry) for entry in self._value]
        if isinstance(self._value, tuple | frozenset):
            self._rebuild(entries)
        elif isinstance(self._value, set):
            self._value.clear()
            self._value.update(entries)
        else:
            self._value[:] = entries

    def _rebuild(self, entries: list[Any]) -> None:
        kind = type(self._value)
        self._value = kind(*entries) if hasattr(kind, "_fields") else kind(entries)
        self._replace(self._value)
