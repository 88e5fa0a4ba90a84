"""Bound methods on their way to ranks that start as functions: there an object has those that it was given."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.reduction import ForkingPickler
from types import MethodType
from typing import Any


@contextlib.contextmanager
def bound_as_they_are() -> Iterator[None]:
    """Within, processes that are started get every bound method with its own function.

    Python sends the object and the function's name, and the name is looked up on the copy. So of a method that
    somebody has put on an instance (``model.configure_optimizers = MethodType(function, model)``, as LightningCLI does
    for ``--optimizer``), or taken from a base class that the instance's class overrides, another function arrives.
    """
    reducers: dict[type, Callable[[Any], Any]] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    before = dict(reducers)
    reducers[MethodType] = _reduce
    reducers[partial] = partial.__reduce__  # multiprocessing's own leaves behind what update_wrapper has put on it
    try:
        yield
    finally:
        for kind in (MethodType, partial):
            reducers.pop(kind)
            if kind in before:
                reducers[kind] = before[kind]


def _reduce(method: MethodType) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    owner, function = method.__self__, method.__func__
    if (name := _name_in_class(owner, function)) is not None:
        return _bind_from_class, (owner, name)
    return _bind, (owner, function)


def _name_in_class(owner: object, function: object) -> str | None:
    """Under which name the class of ``owner`` (or ``owner``, a class) has ``function``; None if it has another."""
    kind = owner if isinstance(owner, type) else type(owner)
    written = getattr(function, "__name__", None)
    # A method whose name begins with two underscores stands in its class under another one.
    names = [written] if isinstance(written, str) else []
    names += [name for base in kind.__mro__ for name, value in vars(base).items() if _function(value) is function]
    for name in names:
        if _function(inspect.getattr_static(kind, name, None)) is function:
            return name
    return None


def _function(attribute: object) -> object:
    return attribute.__func__ if isinstance(attribute, classmethod) else attribute


def _bind(owner: object, function: Callable[..., Any]) -> MethodType:
    return MethodType(function, owner)


def _bind_from_class(owner: object, name: str) -> Any:
    """The method that the class has, whatever the instance has under that name."""
    if isinstance(owner, type):
        return getattr(owner, name)
    return MethodType(_function(inspect.getattr_static(type(owner), name)), owner)  # type: ignore[arg-type]
