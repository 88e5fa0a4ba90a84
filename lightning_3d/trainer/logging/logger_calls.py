"""Loggers and ``self.print`` in steps: what is called where the loss is, rank 0 carries out once per batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_3d.errors import ConfigError
from lightning_3d.mesh import Mesh
from lightning_3d.pipeline.foreign import refuse_foreign
from lightning_3d.placeholder import user_line
from lightning_3d.trainer.data.messages import encode
from lightning_3d.trainer.data.outputs import combine
from lightning_3d.trainer.processes.failure import say
from lightning_3d.trainer.replicas import ReplicaStrategy

_PLAIN = (type(None), bool, int, float, str, bytes, os.PathLike)
"""What a logger may be asked for in a step: names, versions, folders."""


@dataclass(frozen=True)
class Reference:
    """Where rank 0 finds what was called, or handed to a call."""

    root: tuple[str, int]
    """``("logger", index)``, ``("module", 0)`` or ``("result", number of a call)``."""
    path: tuple[tuple[str, Any], ...] = ()
    """``("attribute", name)`` and ``("item", key)`` from there on."""

    def __str__(self) -> str:
        parts = [f".{key}" if kind == "attribute" else f"[{key!r}]" for kind, key in self.path]
        root = {"logger": "self.logger", "result": "result", "module": "self"}[self.root[0]]
        return root + "".join(parts)


@dataclass(frozen=True)
class LoggerCall:
    """One call in a step. Pickles; tensors in it travel as tensors."""

    what: Reference
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    line: str
    """Of the user's code."""
    number: int = 0
    """Position among the calls of its micro-batch."""
    micro_batch: int | None = None
    """``None``: one call for all of them."""


@dataclass
class _Tape:
    """The calls of one micro-batch."""

    weight: float | Tensor
    size: int
    keeps: bool
    """Whether they will be carried out: the micro-batch counts, and this rank is the one that speaks."""
    sends: bool
    calls: list[LoggerCall] = field(default_factory=list)

    def call(self, what: Reference, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorded:
        if self.keeps:
            args, kwargs = pytree.tree_map(_Settle(what), (args, kwargs))
            call = LoggerCall(what, args, kwargs, user_line(), len(self.calls))
            if self.sends:
                _refuse_unsendable(call)
            self.calls.append(call)
        return Recorded(self, Reference(("result", len(self.calls) - 1)))


class Recorded:
    """Stands in a step for a part of a logger, such as its ``experiment``, or for what a call on it will give."""

    __slots__ = ("_reference", "_tape")

    def __init__(self, tape: _Tape, reference: Reference) -> None:
        self._tape, self._reference = tape, reference

    def _at(self, kind: str, key: Any) -> Recorded:
        reference = self._reference
        return Recorded(self._tape, Reference(reference.root, (*reference.path, (kind, key))))

    def __getattr__(self, name: str) -> Recorded:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._at("attribute", name)

    def __getitem__(self, key: Any) -> Recorded:
        return self._at("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._at("attribute", "__setitem__")(key, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Recorded:
        """Record the call."""
        return self._tape.call(self._reference, args, kwargs)

    def __bool__(self) -> bool:
        return True if self._reference.root[0] == "logger" else self._refuse()

    def __repr__(self) -> str:
        return f"<{self._reference}, known on rank 0 after the step>"

    def _refuse(self, *args: Any) -> NoReturn:
        raise ConfigError(
            f"{user_line()} reads {self._reference} within a step that is cut into micro-batches. What a step calls on"
            " a logger is carried out after it, on rank 0, so its answer is not known here. Read it in a hook such as"
            " on_train_batch_end, under self.trainer.is_global_zero."
        )

    __iter__ = __len__ = __float__ = __int__ = __index__ = __enter__ = __exit__ = _refuse
    __str__ = __format__ = __contains__ = _refuse


class LoggerCalls:
    """Gives rank 0 what a step calls on loggers, and what it prints with ``self.print``.

    A step runs once per micro-batch, and is whole on the last stage only, where loggers write nothing: Lightning has
    them write on rank 0. So within a step calls on loggers are recorded. Those of the last stage of replica 0 (of which
    rank 0 is a part) are carried out on rank 0 when the batch is over. If all micro-batches called the same, with
    arguments that are equal or numbers, that is one call, with weighted means of the numbers; else each counts.

    Within the step the rank that speaks passes for rank 0 (``global_rank``, ``is_global_zero``, ``rank_zero_only``), so
    that code that is for rank 0 alone runs where it can, and once.

    Args:
        module: The LightningModule, attached to a Trainer.
        mesh: The mesh.
    """

    def __init__(self, module: LightningModule, mesh: Mesh) -> None:
        self._module = module
        self._mesh = mesh
        self._tapes: list[_Tape] = []
        self._discards = False
        self._pass_through = True
        self._kinds: dict[type[Logger], type[Logger]] = {}
        self._tape: _Tape | None = None
        first = mesh.dp.rank == mesh.tp.rank == 0
        self._speaks = first and mesh.pp.is_last
        speaker = (mesh.pp.size - 1) * mesh.dp.size * mesh.tp.size
        self._passes_for = {0: speaker, speaker: 0}.get(mesh.rank, mesh.rank)

    def begin(self, filler: bool, num_micro_batches: int) -> None:
        """A batch begins."""
        self._tapes = []
        self._discards = filler
        self._pass_through = num_micro_batches == 1 and self._mesh.pp.size == 1 and not filler

    @contextmanager
    def recording(self, size: int, weight: float | Tensor) -> Iterator[None]:
        """Around the user's step on one micro-batch.

        Args:
            size: Its samples. With none, what it calls is not carried out.
            weight: Its weight in the loss.
        """
        if self._pass_through:
            yield
            return
        keeps = self._speaks and size > 0 and not self._discards
        tape = self._tape = _Tape(weight, size, keeps, sends=self._mesh.pp.size > 1)
        with ExitStack() as stack:
            stack.callback(setattr, self, "_tape", None)
            for logger in self._module.trainer.loggers:
                stack.enter_context(self._in_place_of(logger))
            stack.enter_context(self._printing(tape))
            if self._mesh.pp.size > 1:
                stack.enter_context(self._as_rank(self._passes_for))
            yield
            if keeps:  # else the step ended at a cut: the same micro-batch runs once more, further
                self._tapes.append(tape)

    def collect(self) -> tuple[LoggerCall, ...]:
        """The calls of the batch, one for all micro-batches where that is the same. On the rank that speaks."""
        tapes, self._tapes = self._tapes, []
        if not any(tape.calls for tape in tapes):
            return ()
        whats = [[call.what for call in tape.calls] for tape in tapes]
        if any(other != whats[0] for other in whats):
            return tuple(replace(call, micro_batch=i) for i, tape in enumerate(tapes) for call in tape.calls)
        weights, sizes = [tape.weight for tape in tapes], [tape.size for tape in tapes]
        calls: list[LoggerCall] = []
        for row in zip(*(tape.calls for tape in tapes), strict=True):
            merged = _merged(row, weights, sizes)
            calls += [replace(call, micro_batch=i) for i, call in enumerate(row)] if merged is None else [merged]
        return tuple(calls)

    def replay(self, calls: Sequence[LoggerCall] | None) -> None:
        """Carry the calls out; on rank 0."""
        if not calls or self._mesh.rank != 0:
            return
        results: dict[tuple[int | None, int], Any] = {}
        loggers = self._module.trainer.loggers

        def find(reference: Reference, micro_batch: int | None) -> Any:
            kind, index = reference.root
            if kind == "result":
                value = results[
                    next(key for key in ((micro_batch, index), (None, index), (0, index)) if key in results)
                ]
            else:
                value = self._module if kind == "module" else loggers[index]
            for step, key in reference.path:
                value = getattr(value, key) if step == "attribute" else value[key]
            return value

        for call in calls:

            def resolve(leaf: Any, call: LoggerCall = call) -> Any:
                return find(leaf, call.micro_batch) if isinstance(leaf, Reference) else leaf

            args, kwargs = pytree.tree_map(resolve, (call.args, call.kwargs))
            try:
                results[call.micro_batch, call.number] = find(call.what, call.micro_batch)(*args, **kwargs)
            except Exception:
                say(f"{call.line} called {call.what} in a step; carried out after it, that failed:\n")
                raise

    @contextmanager
    def _in_place_of(self, logger: Logger) -> Iterator[None]:
        kind = type(logger)
        if kind not in self._kinds:
            self._kinds[kind] = _recording_kind(kind, self._look)
        # Its class, not another object in its place: the user may hold it under another name, or ask for its type.
        logger.__class__ = self._kinds[kind]
        try:
            yield
        finally:
            object.__setattr__(logger, "__class__", kind)

    def _look(self, logger: Logger, name: str) -> Any:
        """An attribute of a logger within a step."""
        tape = self._tape
        assert tape is not None
        if name != "experiment":  # which would start one
            recording, passes_for = type(logger), rank_zero_only.rank  # type: ignore[attr-defined]
            object.__setattr__(logger, "__class__", recording.__base__)
            # What starts something on rank 0 alone must not do so here.
            rank_zero_only.rank = self._mesh.rank  # type: ignore[attr-defined]
            try:
                value = getattr(logger, name)
            finally:
                object.__setattr__(logger, "__class__", recording)
                rank_zero_only.rank = passes_for  # type: ignore[attr-defined]
            # None may be what only rank 0 knows better, such as the id of a run.
            if isinstance(value, _PLAIN) and not (value is None and self._mesh.pp.size > 1):
                return value
        index = next(i for i, other in enumerate(self._module.trainer.loggers) if other is logger)
        return Recorded(tape, Reference(("logger", index), (("attribute", name),)))

    @contextmanager
    def _printing(self, tape: _Tape) -> Iterator[None]:
        attributes = vars(self._module)
        before = attributes.get("print")
        attributes["print"] = Recorded(tape, Reference(("module", 0), (("attribute", "print"),)))
        try:
            yield
        finally:
            del attributes["print"]
            if before is not None:
                attributes["print"] = before

    @contextmanager
    def _as_rank(self, rank: int) -> Iterator[None]:
        strategy = self._module.trainer.strategy
        assert isinstance(strategy, ReplicaStrategy)
        before = getattr(rank_zero_only, "rank", None)
        strategy.rank_in_step = rank_zero_only.rank = rank  # type: ignore[attr-defined]
        try:
            yield
        finally:
            strategy.rank_in_step = None
            rank_zero_only.rank = before  # type: ignore[attr-defined]


def _recording_kind(kind: type[Logger], look: Callable[[Logger, str], Any]) -> type[Logger]:
    def find(logger: Logger, name: str) -> Any:
        return object.__getattribute__(logger, name) if name.startswith("_") else look(logger, name)

    return type(kind.__name__, (kind,), {"__getattribute__": find, "__module__": kind.__module__})


class _Settle:
    """Takes an argument as it is now: later lines of the step may change it."""

    def __init__(self, what: Reference) -> None:
        self._what = what

    def __call__(self, leaf: Any) -> Any:
        if isinstance(leaf, Recorded):
            return leaf._reference
        refuse_foreign(leaf, f"{self._what}(...)")
        return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _refuse_unsendable(call: LoggerCall) -> None:
    try:
        encode(call)
    except Exception as error:
        raise ConfigError(
            f"{call.line} calls {call.what} with something that cannot be sent to rank 0, where loggers write"
            f" ({type(error).__name__}: {error}). Hand over numbers, tensors, arrays or figures; or keep on the module"
            " what it is made of, and call the logger in on_train_batch_end."
        ) from error


def _merged(row: Sequence[LoggerCall], weights: Sequence[float | Tensor], sizes: Sequence[int]) -> LoggerCall | None:
    """One call for all micro-batches, if their arguments allow it."""
    flat = [pytree.tree_flatten((call.args, call.kwargs)) for call in row]
    if any(spec != flat[0][1] for _, spec in flat):
        return None
    leaves = []
    for column in zip(*(leaves for leaves, _ in flat), strict=True):
        first = column[0]
        if all(isinstance(leaf, float) for leaf in column):
            leaf = combine([float(leaf) for leaf in column], weights, sizes)
        elif all(isinstance(leaf, Tensor) and leaf.dim() == 0 and leaf.is_floating_point() for leaf in column):
            leaf = combine(column, weights, sizes)
        elif len(row) == 1 or (isinstance(first, (*_PLAIN, Reference)) and all(leaf == first for leaf in column)):
            leaf = first
        else:
            return None
        leaves.append(leaf)
    args, kwargs = pytree.tree_unflatten(leaves, flat[0][1])
    return replace(row[0], args=args, kwargs=kwargs, micro_batch=None)
