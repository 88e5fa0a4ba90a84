"""The memory of a step as a list of events, and what every piece of it was for, told when the step is over."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

KINDS = (
    "parameters",
    "gathered parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "communication",
    "temporary",
)
"""What memory is for. Parameters include buffers; temporary is what ends in the action that has made it."""


@dataclass(frozen=True)
class Moment:
    """What the rank was doing."""

    phase: str
    """An action of the engine (``"F"``, ``"B"``...), or another part of the step such as ``"optimizer"``."""
    chunk: int = 0
    micro_batch: int = -1

    def __str__(self) -> str:
        return f"{self.phase}{self.chunk}.{self.micro_batch}" if self.micro_batch >= 0 else self.phase


@dataclass
class Piece:
    """One storage from the moment it was seen first."""

    born: int
    """Index of the moment."""
    place: str
    """``"block"``, ``"head"`` (after the last block) or ``""``, while the model runs."""
    died: int = -1
    kind: str = ""


@dataclass(frozen=True)
class Peak:
    """Memory at the fullest moment of a part of the step, in bytes."""

    total: int
    when: str
    by_kind: Mapping[str, int] = field(default_factory=dict)


class Allocations:
    """Follows the storages of tensors: when they come, change their size and go.

    What a dispatch mode sees is what counts: every tensor that an operation gives. Scratch memory inside of kernels is
    not seen, and the rounding and fragments of an allocator are not either.
    """

    def __init__(self) -> None:
        self.moments: list[Moment] = [Moment("before the step")]
        self.place = ""
        self.pieces: list[Piece] = []
        self._events: list[tuple[int, int, int]] = []
        """Index of the moment, index of the piece, and by how many bytes it grew."""
        self._live: dict[int, tuple[Any, int, int]] = {}
        """By id of the storage: a weak reference to it, its piece and its size."""

    def begin(self, moment: Moment) -> None:
        """The rank does something else from here on."""
        self.moments.append(moment)

    def see(self, tensor: Tensor, kind: str = "") -> Piece | None:
        """Note a tensor, and what it is for where that is known."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if tensor.device.type == "meta" or tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        key = id(storage)
        found = self._live.get(key)
        if found is None:
            size = storage.nbytes()
            self.pieces.append(Piece(len(self.moments) - 1, self.place))
            index = len(self.pieces) - 1
            self._live[key] = (weakref.ref(storage, partial(self._gone, key)), index, size)
            self._note(index, size)
        else:
            index = found[1]
        piece = self.pieces[index]
        if kind:
            piece.kind = kind
        return piece

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within, storages that change their size are followed too: so FSDP2 frees what it has gathered."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            found = self._live.get(id(storage))
            if found is not None and found[2] != size:
                self._live[id(storage)] = (found[0], found[1], size)
                self._note(found[1], size - found[2])

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    @property
    def now(self) -> int:
        """Bytes that are held."""
        return sum(size for _, _, size in self._live.values())

    def timeline(self) -> list[tuple[Moment, int]]:
        """Every moment with the most bytes held in it."""
        peaks = [0] * len(self.moments)
        total, last = 0, 0
        for moment, _, delta in self._events:
            for skipped in range(last + 1, moment + 1):
                peaks[skipped] = total
            last, total = moment, total + delta
            peaks[moment] = max(peaks[moment], total)
        for skipped in range(last + 1, len(peaks)):
            peaks[skipped] = total
        return list(zip(self.moments, peaks, strict=True))

    def peak(
        self, first: int, phases: frozenset[str] | None = None, outside: bool = False, last: int | None = None
    ) -> Peak:
        """The fullest moment from moment ``first`` on, to ``last``; only in those phases, or outside of them."""
        best, place, total = -1, 0, 0
        for index, (moment, _, delta) in enumerate(self._events):
            total += delta
            if last is not None and moment > last:
                break
            if moment < first or (phases is not None and (self.moments[moment].phase in phases) is outside):
                continue
            if total > best:
                best, place = total, index
        if best < 0:
            return Peak(0, "")
        held: defaultdict[int, int] = defaultdict(int)
        for _, piece, delta in self._events[: place + 1]:
            held[piece] += delta
        at = self._events[place][0]
        by_kind = dict.fromkeys(KINDS, 0)
        for index, size in held.items():
            by_kind[self._kind(self.pieces[index], at)] += size
        return Peak(best, str(self.moments[at]), by_kind)

    def _kind(self, piece: Piece, at: int) -> str:
        if piece.kind and piece.kind != "communication":
            return piece.kind
        born = self.moments[piece.born]
        if born.phase == "RF" and replace(born, phase="F") in self.moments[piece.born : at + 1]:
            return "activations"  # what has arrived is kept for the backward
        if born.phase == "F":
            if piece.place == "head":
                return "logits"
            if piece.died < 0 or piece.died > piece.born:
                return "activations"
        return piece.kind or "temporary"

    def _note(self, piece: int, delta: int) -> None:
        if delta:
            self._events.append((len(self.moments) - 1, piece, delta))

    def _gone(self, key: int, _: object) -> None:
        found = self._live.pop(key, None)
        if found is not None:
            self.pieces[found[1]].died = len(self.moments) - 1
            self._note(found[1], -found[2])
