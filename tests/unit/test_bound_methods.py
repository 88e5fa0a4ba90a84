"""Bound methods arrive in ranks with the function and the object that they had."""

from __future__ import annotations

import pickle
from functools import partial, update_wrapper
from multiprocessing.reduction import ForkingPickler
from types import MethodType
from typing import Any

from lightning_3d.trainer.module.methods import bound_as_they_are


class Base:
    def step(self) -> str:
        return "of the base"

    @classmethod
    def make(cls) -> str:
        return cls.__name__


class Thing(Base):
    held: Any

    def step(self) -> str:
        return "of the class"

    def __hidden(self) -> str:
        return "hidden"

    def hold_hidden(self) -> None:
        self.held = self.__hidden

    def hold_base(self) -> None:
        self.held = super().step

    def as_written(self) -> str:
        return "under another name"

    other_name = as_written


class Keeper:
    def __init__(self, thing: Thing) -> None:
        self.of_class = thing.step
        self.thing = thing


def given(self: Thing, word: str = "given") -> str:
    return f"{word} to {self.name}"  # type: ignore[attr-defined]


def sent(value: Any) -> Any:
    with bound_as_they_are():
        data = bytes(ForkingPickler.dumps(value))
    return pickle.loads(data)


def test_a_method_put_on_an_instance_stays() -> None:
    thing = Thing()
    thing.name = "this"  # type: ignore[attr-defined]
    keeper = Keeper(thing)
    wrapped = partial(given, word="partially given")
    update_wrapper(wrapped, given)
    thing.step = MethodType(given, thing)  # type: ignore[method-assign]
    thing.held = MethodType(wrapped, thing)
    arrived = sent(keeper)
    thing = arrived.thing
    assert thing.step() == "given to this"
    assert thing.held() == "partially given to this"
    assert thing.held.__wrapped__ is given  # by which Lightning tells that a hook is overridden
    assert thing.step.__self__ is thing.held.__self__ is thing
    assert arrived.of_class() == "of the class"


def test_methods_that_are_not_what_the_class_has_under_their_name() -> None:
    thing = Thing()
    thing.hold_hidden()
    assert sent(thing).held() == "hidden"
    thing.hold_base()
    assert sent(thing).held() == "of the base"
    thing.held = thing.other_name
    assert sent(thing).held() == "under another name"
    assert sent(thing.step)() == "of the class"
    assert sent(Thing.make)() == "Thing"
    assert sent(super(Thing, Thing).make)() == "Thing"
    assert sent([].append) is not None


def test_other_users_of_multiprocessing_are_left_alone() -> None:
    before = dict(ForkingPickler._extra_reducers)  # type: ignore[attr-defined]
    sent(Thing())
    assert ForkingPickler._extra_reducers == before  # type: ignore[attr-defined]
