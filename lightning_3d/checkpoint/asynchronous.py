"""Saving in the background: a thread writes copies of the state while training goes on, one checkpoint at a time."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.checkpoint.agreement import together
from lightning_3d.checkpoint.host_copies import HostCopies
from lightning_3d.checkpoint.save import Content, write
from lightning_3d.events import Phase
from lightning_3d.mesh import Mesh

_LOOK_S = 0.1
"""How often a wait for the thread lets Python act on signals."""


@dataclass(eq=False)
class _Flight:
    """A save under way."""

    target: Path
    thread: threading.Thread | None = None
    error: BaseException | None = None
    landed: bool = False
    """Written and in its place, or failed; nothing is added to ``then`` any more."""
    then: list[Callable[[], None]] = field(default_factory=list)
    """What is to be done once it is in its place."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    question: tuple[dist.Work, Tensor] | None = None
    """To all ranks: have you all landed, and has nobody failed?"""


class BackgroundSaves:
    """Writes checkpoints from a thread, at most one at a time.

    Every rank copies its part to host memory and goes on. The threads agree over process groups of their own, so that
    they never come between the collectives of training. Whether a save has succeeded is one decision of all ranks,
    made over the control group by the threads that train, at :meth:`look` or :meth:`wait`.

    Collective to construct.

    Args:
        mesh: This rank's place.
        side: The same with control groups that nobody else uses (:func:`~lightning_3d.mesh.side_mesh`).
    """

    def __init__(self, mesh: Mesh, side: Mesh) -> None:
        self._mesh = mesh
        self._side = side
        self._copies = HostCopies()
        self._flight: _Flight | None = None

    @property
    def target(self) -> Path | None:
        """Where the save under way will appear."""
        return self._flight.target if self._flight is not None else None

    def start(self, target: Path, content: Content) -> None:
        """Save ``content``, as it is now, to ``target``; collective. Waits for the save before it.

        Raises:
            CheckpointError: That one failed.
        """
        self.wait()
        flight = _Flight(target)
        frozen, ready = together(self._mesh, f"Saving to {target}", lambda: self._freeze(content))
        flight.thread = threading.Thread(
            target=self._fly, args=(flight, frozen, ready), name="lightning-3d-save", daemon=True
        )
        self._flight = flight
        flight.thread.start()

    def then(self, action: Callable[[], None]) -> bool:
        """Do ``action`` once the save under way is complete, and never if it fails; without one, nothing is done.

        Returns:
            Whether there is a save under way that will see to it.
        """
        flight = self._flight
        if flight is None:
            return False
        with flight.lock:
            if flight.landed:
                return flight.error is not None  # after a failure nothing may happen that relies on it
            flight.then.append(action)
            return True

    def look(self) -> None:
        """At every step: find out whether the save under way has ended; collective, and waits for nobody's disk.

        The answer of all ranks comes one step after the question, so that no rank waits for another one.

        Raises:
            CheckpointError: On all ranks at the same step, if it failed on any.
        """
        flight = self._flight
        if flight is None:
            return
        if self._mesh.world.size == 1:
            if flight.landed:
                self.wait()
            return
        if flight.question is not None:
            work, answer = flight.question
            with self._mesh.events.span(Phase.SYNC, label="save"):
                work.wait()
            flight.question = None
            if answer.tolist()[0]:
                self.wait()
                return
        question = torch.tensor([int(flight.landed)])
        work = dist.all_reduce(question, dist.ReduceOp.MIN, group=self._mesh.control_world.group, async_op=True)
        flight.question = (work, question)

    def wait(self) -> None:
        """Until no save is under way; collective.

        Raises:
            CheckpointError: On all ranks, if it failed on any.
        """
        flight = self._flight
        if flight is None:
            return
        if flight.question is not None:
            flight.question[0].wait()
            flight.question = None
        self._join(flight, None)
        self._flight = None

        def report() -> None:
            if flight.error is not None:
                raise flight.error if isinstance(flight.error, Exception) else RuntimeError(repr(flight.error))

        together(self._mesh, f"Saving to {flight.target} in the background", report)

    def give_up(self, patience_s: float) -> str | None:
        """When this rank fails: let the save under way come to its end, as long as the others take part in it.

        Args:
            patience_s: How long to wait for it.

        Returns:
            What has become of it, if it did not succeed.
        """
        flight, self._flight = self._flight, None
        if flight is None:
            return None
        self._join(flight, patience_s)
        if not flight.landed:
            return f"The save to {flight.target} that was under way could not be finished."
        return None if flight.error is None else f"The save to {flight.target} that was under way: {flight.error}"

    def _join(self, flight: _Flight, patience_s: float | None) -> None:
        assert flight.thread is not None
        end = None if patience_s is None else time.monotonic() + patience_s
        while flight.thread.is_alive() and (end is None or time.monotonic() < end):
            flight.thread.join(_LOOK_S)

    def _freeze(self, content: Content) -> tuple[Content, Callable[[], object]]:
        """``content`` as bytes and copies, which training does not change."""
        files = {name: _as_bytes(what) for name, what in content.files.items()}
        entries, ready = self._copies.take(content.entries)
        return replace(content, entries=entries, files=files), ready

    def _fly(self, flight: _Flight, content: Content, ready: Callable[[], object]) -> None:
        try:
            if self._mesh.device.type == "cuda":
                # A thread begins on the first GPU, where the threads of all ranks of the node would take memory.
                torch.cuda.set_device(self._mesh.device)
            ready()
            write(flight.target, content, self._side)
            while True:
                with flight.lock:
                    if not flight.then:
                        flight.landed = True
                        return
                    action = flight.then.pop(0)
                action()
        except BaseException as error:
            with flight.lock:
                flight.error = error
                flight.landed = True


def _as_bytes(content: Any) -> bytes:
    if isinstance(content, bytes):
        return content
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()
