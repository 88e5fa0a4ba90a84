"""What a block's forward changes in the block itself: a second run of it must begin where the first one began."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_3d.errors import ConfigError

_LARGE = 2**16
"""Elements from which a buffer that a forward did not change is taken for a constant, of which no copy is kept."""
_SMALL = 1024
"""Entries up to which containers are put back."""
_ATOMS = (bool, int, float, str, type(None))
_TORCH = frozenset(vars(nn.Module()))

Place = tuple[nn.Module, str]


@contextlib.contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Around forwards that are only tried: what they set in parts of ``module`` (counters, caches) is as before."""
    before = [(part, {key: (value, _content(value)) for key, value in vars(part).items()}) for part in module.modules()]
    try:
        yield
    finally:
        for part, attributes in before:
            for key in vars(part).keys() - attributes.keys():
                del vars(part)[key]
            for key, (value, content) in attributes.items():
                vars(part)[key] = value
                if content is not None and key not in _TORCH and not _same(content, _content(value)):
                    value.clear()
                    value.extend(content) if isinstance(value, list) else value.update(content)


def _content(value: Any) -> Any:
    """What a small container of the user's holds, to put it back."""
    return value.copy() if type(value) in (list, dict, set) and len(value) <= _SMALL else None


def _same(one: Any, other: Any) -> bool:
    """Whether two containers hold the same objects; tensors do not compare to one truth."""
    if other is None or len(one) != len(other):
        return False
    if isinstance(one, dict):
        one, other = [*one.items()], [*other.items()]
        return all(a is c and b is d for (a, b), (c, d) in zip(one, other, strict=True))
    return one == other if isinstance(one, set) else all(map(operator.is_, one, other))


class BlockState:
    """Follows the buffers and counters of a block from call to call.

    Buffers are copied when they have changed since they were copied before, so constants cost nothing in a step. Some
    operations (batch normalisation) change one without a trace; that is found in the first forward, by its values.

    Args:
        block: The block.
    """

    def __init__(self, block: nn.Module) -> None:
        self._parts = list(block.modules())
        self._copies: dict[tuple[int, str], tuple[Tensor, int, Tensor]] = {}
        self._seen: set[tuple[int, str]] = set()
        self._untraced: set[tuple[int, str]] = set()
        """Buffers that change, though nothing but their values tells."""
        self._constants: dict[tuple[int, str], Tensor] = {}
        """Large buffers that a forward has left as they were."""

    def runs(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A function that runs ``forward`` for real once, and from then on again from the state it had begun with."""
        return _Runs(self, forward)

    def before(self) -> _Before:
        """The state now, to begin from again."""
        buffers: dict[Place, tuple[Tensor, int, Tensor | None]] = {}
        numbers: dict[Place, Any] = {}
        for part in self._parts:
            for key, buffer in part._buffers.items():
                if buffer is not None and not buffer.is_inference():
                    buffers[part, key] = buffer, buffer._version, self._copy(part, key, buffer)
            for key, value in vars(part).items():
                if isinstance(value, _ATOMS) and key not in _TORCH:
                    numbers[part, key] = value
        return _Before(buffers, numbers)

    def after(self, before: _Before) -> None:
        """A forward has run: what it has not changed needs no copy.

        Raises:
            ConfigError: if it has changed what seemed to be a constant.
        """
        for part, key in list(before.buffers):
            buffer, version, copy = before.buffers[part, key]
            changed = buffer._version != version or self._changes_untraced(part, key)
            if not changed and copy is not None and (id(part), key) not in self._seen:
                changed = not torch.equal(buffer, copy)
                self._untraced.update({(id(part), key)} if changed else ())
            self._seen.add((id(part), key))
            if not changed and part._buffers.get(key) is buffer:
                del before.buffers[part, key]
                if buffer.numel() >= _LARGE:
                    self._constants[id(part), key] = buffer
                    self._copies.pop((id(part), key), None)
            elif changed and copy is None:
                raise ConfigError(
                    f"A {type(part).__name__} in a block that is recomputed (activation_checkpointing) has changed its"
                    f" buffer {key!r} of shape {tuple(buffer.shape)} only after forwards that left it as it was. Then"
                    " nobody knows what it was for the second run. Change it outside of forward or in every forward, or"
                    " use activation_checkpointing=None."
                )
            else:
                self._constants.pop((id(part), key), None)
        for part, key in list(before.numbers):
            if vars(part).get(key) == before.numbers[part, key]:
                del before.numbers[part, key]

    def _changes_untraced(self, part: nn.Module, key: str) -> bool:
        return (isinstance(part, _NormBase) and part.training) or (id(part), key) in self._untraced

    def _copy(self, part: nn.Module, key: str, buffer: Tensor) -> Tensor | None:
        place = id(part), key
        if self._changes_untraced(part, key):
            return buffer.detach().clone()
        if self._constants.get(place) is buffer:
            return None
        held = self._copies.get(place)
        if held is None or held[0] is not buffer or held[1] != buffer._version:
            held = self._copies[place] = buffer, buffer._version, buffer.detach().clone()
        return held[2]


class _Before:
    """The state that a forward began with."""

    def __init__(self, buffers: dict[Place, tuple[Tensor, int, Tensor | None]], numbers: dict[Place, Any]) -> None:
        self.buffers = buffers
        self.numbers = numbers

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run ``forward`` from there, and leave everything as it is now."""
        if not self.buffers and not self.numbers:
            return forward(*args, **kwargs)
        # Other tensors for the time of the run: graphs of later micro-batches may hold the present ones.
        now = {(part, key): part._buffers.get(key) for part, key in self.buffers}
        present = {(part, key): vars(part)[key] for part, key in self.numbers if key in vars(part)}
        for (part, key), (buffer, _, copy) in self.buffers.items():
            part._buffers[key] = (buffer if copy is None else copy).detach().clone()
        for (part, key), value in self.numbers.items():
            vars(part)[key] = value
        try:
            return forward(*args, **kwargs)
        finally:
            for (part, key), tensor in now.items():
                part._buffers[key] = tensor
            for (part, key), value in present.items():
                vars(part)[key] = value


class _Runs:
    """A forward, for real at the first call, and from the same beginning at every later one."""

    def __init__(self, state: BlockState, forward: Callable[..., Any]) -> None:
        self._state, self._forward = state, forward
        self._before: _Before | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:
            return self._before.run(self._forward, args, kwargs)
        before = self._state.before()
        result = self._forward(*args, **kwargs)
        self._state.after(before)
        self._before = before
        return result
