"""State that user code keeps on its module: changed by steps on the last stage, wanted by hooks on all of them."""

from __future__ import annotations

import logging
import operator
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_3d.errors import StageError
from lightning_3d.placeholder import Placeholder
from lightning_3d.trainer.data.messages import encode
from lightning_3d.trainer.module.late_modules import LateModules

log = logging.getLogger(__name__)

_MAX_NODES = 1024  # Python objects, and kilobytes of arrays, looked at per attribute; more is compared by identity
_COPIED = 64  # entries of containers in which tensors are copied
_MAX_GRAPH_ELEMENTS = 1 << 16  # tensors that hang on an autograd graph are sent up to this size
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_LIBRARIES = {"torch", "lightning", "pytorch_lightning", "torchmetrics", "transformers", "tokenizers", "datasets"}
_FORBIDDEN = (Placeholder, DTensor, nn.Parameter)

Path = tuple[str, str, str]
"""Module name, ``"attribute"`` or ``"buffer"``, attribute name."""


@dataclass(frozen=True)
class _Frozen:
    """A picture of a value: equal pictures mean that nothing has changed in place."""

    value: Any
    """The value itself; kept alive, so that its identity is not used again."""
    content: Any
    """What it held: versions of tensors, entries of containers, attributes of objects. ``None``: identity decides."""
    copies: Mapping[int, Any]
    """Values of the tensors and arrays in it, by ``id``, where they may have to be put back."""


@dataclass(frozen=True)
class Snapshot:
    """The state of a module at one time. Cheap: it refers to values and copies only what can change in place."""

    entries: dict[Path, _Frozen]


@dataclass(frozen=True)
class Delta:
    """What has changed. Pickles; tensors in it travel as tensors."""

    values: dict[Path, Any]
    """New values."""
    tails: dict[Path, list[Any]]
    """What was appended to lists that otherwise are as before."""
    deleted: tuple[Path, ...]
    """Attributes that are gone."""

    def __bool__(self) -> bool:
        return bool(self.values or self.tails or self.deleted)


class StateMirror:
    """Follows the attributes, buffers and torchmetrics states of a LightningModule.

    Followed are the attributes and buffers of the LightningModule itself, and of all modules in it that have no
    parameters (metrics, losses, counters). Modules with parameters belong to one stage, and their state stays there.
    Values that do not pickle, parameters, other modules and values as large as a vocabulary are left alone.

    Args:
        module: The LightningModule.
        in_block: Whether the module of a name is in a block of any stage: it is not looked into.
        is_everywhere: Whether every stage has the module of a name. Where only some have, it is inside of one with
            parameters, and not followed unless it is a metric.
    """

    def __init__(
        self,
        module: LightningModule,
        in_block: Callable[[str], bool] = lambda _: False,
        is_everywhere: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.module = module
        self._in_block, self._is_everywhere = in_block, is_everywhere
        self._late = LateModules(module)
        self._unsent: set[Path] = set()
        self._look()

    def _look(self) -> None:
        # The same on all ranks, since the last stage's changes are carried out on the others.
        self._watched = dict(_watched(self.module, self._in_block, self._is_everywhere))
        self.named: dict[str, Any] = dict(self.module.named_modules())
        """Objects that are sent by name instead of by value."""
        self.names = {id(inner): name for name, inner in self.named.items()}
        """The names, by ``id``."""

    def snapshot(self, copy: bool = False) -> Snapshot:
        """The state now.

        Args:
            copy: Also copy the values of tensors, so that :meth:`restore` can undo what is done to them in place.
        """
        if self._late.changed():
            self._look()
        return Snapshot({path: _freeze(value, copy) for path, value in self._values()})

    def delta(self, before: Snapshot) -> Delta:
        """What has changed since a snapshot."""
        values: dict[Path, Any] = {}
        tails: dict[Path, list[Any]] = {}
        seen = set()
        for path, value in self._values():
            seen.add(path)
            old = before.entries.get(path)
            if old is not None and old.value is value and _same(old.content, _freeze(value).content):
                continue
            if path in self._unsent:
                continue
            if old is not None and (tail := _appended(old, value)) is not None:
                if self._can_send(path, tail):
                    tails[path] = tail
            elif self._can_send(path, value):
                values[path] = value
        deleted = tuple(path for path in before.entries if path not in seen)
        return Delta(values, tails, deleted)

    def apply(self, delta: Delta) -> None:
        """Take over what has changed elsewhere.

        Raises:
            StageError: if that is in a module that this stage does not have.
        """
        unknown = {path[0] for path in (*delta.values, *delta.tails, *delta.deleted)} - self._watched.keys()
        if unknown:
            raise StageError(
                f"The last stage has {', '.join(sorted(map(repr, unknown)))}, which this one has not. A module that a"
                " step makes exists where the step runs to its end. Make it in a hook, which every rank runs"
                " (on_validation_epoch_start, say)."
            )
        for path, value in delta.values.items():
            self._set(path, value)
        for path, tail in delta.tails.items():
            current = self._get(path)
            if isinstance(current, list):
                current.extend(tail)
        for path in delta.deleted:
            self._delete(path)

    def restore(self, snapshot: Snapshot) -> None:
        """Undo what has changed since: after a filler batch, or where only the last stage's changes count."""
        seen = set()
        for path, value in list(self._values()):
            seen.add(path)
            old = snapshot.entries.get(path)
            if old is None:
                self._delete(path)
            elif old.value is not value or not _same(old.content, _freeze(value).content):
                self._set(path, _thaw(old))
        for path in snapshot.entries.keys() - seen:
            self._set(path, _thaw(snapshot.entries[path]))

    def _values(self) -> Iterator[tuple[Path, Any]]:
        for name, (inner, ignored) in self._watched.items():
            for attribute, value in vars(inner).items():
                if attribute not in ignored and not attribute.startswith(("_hparams", "_lightning_3d")):
                    yield (name, "attribute", attribute), value
            for attribute, value in inner._buffers.items():
                yield (name, "buffer", attribute), value

    def _get(self, path: Path) -> Any:
        return getattr(self._watched[path[0]][0], path[2], None)

    def _set(self, path: Path, value: Any) -> None:
        inner, _ = self._watched[path[0]]
        current = self._get(path)
        if type(current) is list and type(value) is list:
            current[:] = value  # in place: the user may hold the list under another name too
        elif path[1] == "buffer":
            inner._buffers[path[2]] = value
        else:
            object.__setattr__(inner, path[2], value)

    def _delete(self, path: Path) -> None:
        inner, _ = self._watched[path[0]]
        (inner._buffers if path[1] == "buffer" else vars(inner)).pop(path[2], None)

    def _can_send(self, path: Path, value: Any) -> bool:
        try:
            _, tensors = encode(_checked(value), self.names)
        except Exception as error:
            reason = str(error)
        else:
            large = [t for t in tensors if t.numel() > _MAX_GRAPH_ELEMENTS] if _has_graph(value) else []
            if not large:
                return True
            reason = "it holds a large tensor with its autograd graph; keep tensor.detach() instead"
        self._unsent.add(path)
        log.info("`%s` is not shared with the other pipeline stages: %s", ".".join(p for p in path[::2] if p), reason)
        return False


def _watched(
    module: LightningModule, in_block: Callable[[str], bool], is_everywhere: Callable[[str], bool]
) -> Iterator[tuple[str, tuple[nn.Module, frozenset[str]]]]:
    lightning_names = frozenset(vars(LightningModule())) | {"_trainer", "_fabric", "trainer"}
    torch_names = frozenset(vars(nn.Module()))
    for name, inner in module.named_modules():
        if in_block(name):
            continue
        if isinstance(inner, LightningModule):
            yield name, (inner, lightning_names)
        elif not any(True for _ in inner.parameters()) and (isinstance(inner, Metric) or is_everywhere(name)):
            # `training` is set by Lightning on every rank. The wrapped methods of a metric are made, not state.
            ignored = torch_names | {
                "update",
                "compute",
                "_update_signature",
                "_defaults",
                "_persistent",
                "_reductions",
            }
            if isinstance(inner, Metric) or type(inner).__module__.partition(".")[0] != "torch" or inner._buffers:
                yield name, (inner, ignored)


@dataclass(frozen=True)
class _Held:
    """What a container or an object held."""

    entries: tuple[Any, ...]
    inner: tuple[Any, ...]
    """The content of each entry."""


@dataclass(frozen=True)
class _Tail:
    """Length and end of a container too large to be looked at in each step: such containers grow at the end."""

    length: int
    last: tuple[Any, ...]

    @classmethod
    def of(cls, value: Any, length: int) -> _Tail:
        if isinstance(value, list):
            return cls(length, tuple(value[max(0, length - 8) : length]))
        if isinstance(value, dict):
            return cls(length, tuple(part for item in islice(reversed(value.items()), 4) for part in item))
        return cls(length, ())


def _freeze(value: Any, copy: bool = False) -> _Frozen:
    copies: dict[int, Any] = {}
    content = _content(value, [_MAX_NODES], copies if copy else None)
    if copy and isinstance(value, Tensor) and not isinstance(value, _FORBIDDEN) and id(value) not in copies:
        copies[id(value)] = value.detach().clone()  # one by itself is copied whatever its size
    return _Frozen(value, content, copies)


def _content(value: Any, budget: list[int], copies: dict[int, Any] | None = None) -> Any:
    """What tells whether a value has changed in place; spends one unit of the budget per object or kilobyte.

    Small tensors in it are copied into ``copies``, those in long containers left out: outputs, which steps append.
    """
    budget[0] -= 1
    if isinstance(value, _ATOMS) or budget[0] < 0:
        return None
    if isinstance(value, Tensor):
        if copies is not None and not isinstance(value, _FORBIDDEN) and value.numel() <= _MAX_GRAPH_ELEMENTS:
            copies[id(value)] = value.detach().clone()
        return _version(value)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject or value.nbytes // 1024 > budget[0]:
            return None
        budget[0] -= value.nbytes // 1024
        if copies is not None:
            copies[id(value)] = value.copy()
        return hash(value.tobytes())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        if len(value) <= budget[0]:
            return _held(value, value, budget, copies)
        return _Tail.of(value, len(value))
    if isinstance(value, dict):
        if len(value) <= budget[0]:
            return _held(value.items(), value.values(), budget, copies)
        return _Tail.of(value, len(value))
    if isinstance(value, nn.Module) or callable(value) or not hasattr(value, "__dict__"):
        return None
    if type(value).__module__.partition(".")[0] in _LIBRARIES:
        return None
    attributes = vars(value)
    return _held(attributes.items(), attributes.values(), budget, copies) if len(attributes) <= budget[0] else None


def _held(
    entries: Collection[Any], inner: Iterable[Any], budget: list[int], copies: dict[int, Any] | None = None
) -> _Held:
    copies = copies if len(entries) <= _COPIED else None
    return _Held(tuple(entries), tuple(_content(entry, budget, copies) for entry in inner))


def _version(tensor: Tensor) -> Any:
    if isinstance(tensor, _FORBIDDEN):
        return None
    if tensor.is_inference():  # no version is kept; small ones (metric states) count as changed
        return object() if tensor.numel() <= _MAX_GRAPH_ELEMENTS else None
    return tensor._version


def _same(old: Any, new: Any) -> bool:
    """Whether two contents are equal."""
    if isinstance(old, _Tail) and isinstance(new, _Tail):
        return old.length == new.length and all(map(operator.is_, old.last, new.last))
    if not isinstance(old, _Held) or not isinstance(new, _Held):
        return bool(old == new)
    if len(old.entries) != len(new.entries):
        return False
    if not all(map(_same_entry, old.entries, new.entries)):
        return False
    return all(map(_same, old.inner, new.inner))


def _same_entry(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if type(old) is tuple and type(new) is tuple:  # an item of a dictionary, or a tuple made anew
        return len(old) == len(new) and all(map(_same_entry, old, new))
    return isinstance(old, _ATOMS) and type(old) is type(new) and bool(old == new)


def _appended(old: _Frozen, value: Any) -> list[Any] | None:
    """What was appended to the very list that ``old`` shows, if nothing else has changed."""
    if type(value) is not list or old.value is not value:
        return None
    content = old.content
    if isinstance(content, _Tail):
        grown = len(value) > content.length and _same(content, _Tail.of(value, content.length))
        return value[content.length :] if grown else None
    if not isinstance(content, _Held) or len(value) <= len(content.entries):
        return None
    before = value[: len(content.entries)]
    return value[len(before) :] if _same(content, _held(before, before, [_MAX_NODES])) else None


def _thaw(frozen: _Frozen) -> Any:
    """The value of a picture, with containers put back to what they held."""
    return _put_back(frozen.value, frozen.content, frozen.copies)


def _put_back(value: Any, content: Any, copies: Mapping[int, Any]) -> Any:
    """What is to stand in the place of ``value``: the same object, within which all is as it was, or a copy."""
    if isinstance(value, Tensor):
        unchanged = content is not None and _same(content, _version(value))
        return value if unchanged or id(value) not in copies else copies[id(value)].clone()
    if isinstance(value, np.ndarray):
        if id(value) in copies and content != hash(value.tobytes()):
            value[...] = copies[id(value)]
        return value
    if isinstance(content, _Tail):
        if isinstance(value, dict):
            for key in list(value)[content.length :]:
                del value[key]
        elif isinstance(value, list):
            del value[content.length :]
        return value
    if not isinstance(content, _Held) or _same(content, _content(value, [_MAX_NODES])):
        return value
    holder = value if isinstance(value, (list, tuple, set, frozenset, deque, dict)) else vars(value)
    by_name = isinstance(holder, dict)
    parts = [entry[1] for entry in content.entries] if by_name else content.entries
    parts = [_put_back(part, inner, copies) for part, inner in zip(parts, content.inner, strict=True)]
    if type(value) is tuple and not all(map(operator.is_, parts, value)):
        return tuple(parts)
    if isinstance(holder, (tuple, frozenset)):
        return value
    holder.clear()
    if isinstance(holder, dict):
        holder.update(zip((key for key, _ in content.entries), parts, strict=True))
    elif isinstance(holder, set):
        holder.update(parts)
    else:
        holder.extend(parts)
    return value


def _checked(value: Any, depth: int = 3) -> Any:
    """The value, unless it is of a kind that must not be sent."""
    if isinstance(value, _FORBIDDEN):
        raise TypeError(f"a {type(value).__name__} belongs to its stage")
    if depth and isinstance(value, (list, tuple, set, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            _checked(part, depth - 1)
    return value


def _has_graph(value: Any, depth: int = 3) -> bool:
    if isinstance(value, Tensor):
        return value.grad_fn is not None
    if depth and isinstance(value, (list, tuple, dict)):
        return any(_has_graph(part, depth - 1) for part in (value.values() if isinstance(value, dict) else value))
    return False
