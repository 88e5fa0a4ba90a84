"""A rank that hangs is found and named; the job ends instead of waiting for a time-out of the network."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_3d import collectives
from lightning_3d.config import Sizes
from lightning_3d.mesh import Mesh, coordinates, where
from lightning_3d.pipeline import transport
from lightning_3d.progress import Progress
from lightning_3d.trainer.data import messages
from lightning_3d.trainer.processes.failure import FailureGuard
from lightning_3d.trainer.processes.flight_recorder import FlightRecorder

_ANSWER_S = 5.0
"""How long ranks have to say where they stand once one of them has called."""

# Frames in these places wait for other ranks: such a rank is held up, and does not hold up others.
_WAITING = (
    str(Path("torch", "distributed")),
    *(str(module.__file__) for module in (collectives, transport, messages)),
)
_INNERMOST = 4
_DEVICE_S = 1.0
"""How long the driver has to say whether a device is at work."""
_MOST = 16
"""Ranks that a message names of each kind, of thousands that may stand alike."""


@dataclass(frozen=True)
class Standing:
    """Where a rank stands; crosses the store as JSON."""

    doing: str
    idle_s: float
    """Seconds since it last began something."""
    waiting: bool
    """Whether it waits for another rank, as far as can be told."""
    stack: str


class Watchdog:
    """Watches from a thread that this rank goes on, and finds out with the others who does not.

    A rank that begins nothing for ``timeout_s`` calls all ranks through the store. Each watchdog answers with what its
    rank does, for how long, and its stack. Those that do not answer (a process that is stopped, or a call that never
    comes back from C++), else those that are busy and do not wait for anybody, hold up the rest: they are named, with
    place on the mesh, stage, action and stack, and the job ends as after any failure of a rank.

    Args:
        guard: Ends the job.
        progress: Of this rank.
        timeout_s: Seconds; longer than the longest step, validation hook, save or compilation. ``None``: no watching.
        recorder: Writes down what this rank has sent, if it is on.
    """

    def __init__(
        self,
        guard: FailureGuard,
        progress: Progress,
        timeout_s: float | None,
        recorder: FlightRecorder | None = None,
    ) -> None:
        self._guard = guard
        self._progress = progress
        self._arguments = (guard, progress, timeout_s, recorder)
        self._recorder = recorder or FlightRecorder(False)
        self._wanted = timeout_s is not None
        self._timeout_s = timeout_s or 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Watchdog, self._arguments  # what it watches is this process

    def start(self, mesh: Mesh) -> None:
        """Once the process group stands, and again at each later run; one rank alone is not watched."""
        if mesh.world.size == 1 or self._thread is not None or not self._wanted:
            return
        store = dist.distributed_c10d._get_default_store()
        store = store.clone() if hasattr(store, "clone") else store
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, args=(mesh, store), name="lightning-3d-watchdog", daemon=True
        )
        self._thread.start()
        threading.Thread(target=self._alarm, args=(self._stop,), name="lightning-3d-alarm", daemon=True).start()

    def stop(self) -> None:
        """At the end of a run."""
        self._stop.set()
        self._thread = None

    def _watch(self, mesh: Mesh, store: Any) -> None:
        stop = self._stop
        seen, since = self._progress.count, time.monotonic()
        period = min(1.0, self._timeout_s / 10)
        key = f"{self._guard.scope}/hang"
        while not stop.wait(period):
            if self._progress.count != seen:
                seen, since = self._progress.count, time.monotonic()
            idle = time.monotonic() - since
            try:
                called = store.check([key])
                if not called and idle < self._timeout_s:
                    continue
                standing = self._standing(idle, mesh.device)
                store.set(f"{key}/{mesh.rank}", json.dumps(asdict(standing)))
                self._recorder.dump(mesh.rank, f"{mesh.where}: {standing.doing}\n{standing.stack}")
                if called or store.compare_set(key, "", str(mesh.rank)) != str(mesh.rank).encode():
                    return
                found = _answers(store, key, mesh.world.size)
            except Exception:  # the store went away with rank 0: the guard says so
                return
            if not stop.is_set():
                self._guard.trip(report(found, mesh, self._timeout_s) + self._recorder.hint, announce=True)
            return

    def _alarm(self, stop: threading.Event) -> None:
        """For the case that the store is out of reach: then no question and no answer comes through, or an error."""
        seen, since = self._progress.count, time.monotonic()
        while not stop.wait(1.0):
            if self._progress.count != seen:
                seen, since = self._progress.count, time.monotonic()
            elif time.monotonic() - since > self._timeout_s + 2 * _ANSWER_S:
                self._guard.trip(
                    f"no progress for {self._timeout_s:g} s (hang_timeout_s), and the store, which lives with rank 0,"
                    " does not answer"
                )
                return

    def _standing(self, idle_s: float, device: torch.device) -> Standing:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
        waiting = any(place in entry.filename for entry in stack[-_INNERMOST:] for place in _WAITING)
        # A host runs ahead of its GPU and waits for it anywhere, say for a loss to print; what waits there is a kernel.
        waiting = waiting or is_at_work(device)
        return Standing(str(self._progress), round(idle_s, 1), waiting, "".join(traceback.format_list(stack[-12:])))


def is_at_work(device: torch.device) -> bool:
    """Whether a GPU is not done with what the host has asked of it."""
    if device.type != "cuda":
        return False
    answer = [True]

    def ask() -> None:
        with contextlib.suppress(Exception):
            answer[0] = not torch.cuda.default_stream(device).query()

    thread = threading.Thread(target=ask, name="lightning-3d-device", daemon=True)  # the driver may hold it up as well
    thread.start()
    thread.join(_DEVICE_S)
    return answer[0]


def report(found: Mapping[int, Standing], mesh: Mesh, timeout_s: float) -> str:
    """The message that names who holds up the rest.

    Args:
        found: What the ranks answered; those that are missing did not.
        mesh: The mesh.
        timeout_s: The time without progress that was allowed.
    """
    sizes = mesh.sizes
    silent = [rank for rank in range(sizes.world) if rank not in found]
    busy = [rank for rank, standing in found.items() if not standing.waiting and standing.idle_s >= timeout_s / 2]
    lines = [f"no progress for {timeout_s:g} s (hang_timeout_s)"]
    for rank in silent[:_MOST]:
        lines.append(
            f"{where(rank, sizes)}, stage {_stage(rank, sizes)}, does not answer: its process is stopped, gone or"
            " stands in a call that does not return to Python"
        )
    for rank in busy[:_MOST] if not silent else []:
        standing = found[rank]
        lines.append(
            f"{where(rank, sizes)}, stage {_stage(rank, sizes)}, hangs: {standing.doing or 'outside of steps'}, for"
            f" {standing.idle_s:g} s, at (innermost call last)\n{standing.stack.rstrip()}"
        )
    if named := silent or busy:
        lines += _others(named)
        held_up = sorted(set(found) - set(busy))
        text = ", ".join(where(rank, sizes) for rank in held_up[:_MOST]) or "nobody"
        lines.append(f"held up by it: {', '.join([text, *_others(held_up)])}")
        return "\n".join(lines)
    kernel = "" if mesh.device.type == "cpu" else ", or a kernel does not end"
    lines.append(f"all ranks wait for each other: they do not agree on what to do next{kernel}. Each stands at")
    for rank, standing in sorted(found.items())[:_MOST]:
        innermost = standing.stack.strip().splitlines()[-2:]
        lines.append(f"{where(rank, sizes)}: {standing.doing}; {' '.join(line.strip() for line in innermost)}")
    return "\n".join([*lines, *_others(list(found))])


def _others(ranks: Sequence[int]) -> list[str]:
    """What to say of those that are not named."""
    return [f"and {len(ranks) - _MOST} more"] if len(ranks) > _MOST else []


def _stage(rank: int, sizes: Sizes) -> int:
    return coordinates(rank, sizes)[0]


def _answers(store: Any, key: str, world: int) -> dict[int, Standing]:
    deadline = time.monotonic() + _ANSWER_S
    missing = set(range(world))
    found: dict[int, Standing] = {}
    while missing and time.monotonic() < deadline:
        for rank in sorted(missing):
            if store.check([f"{key}/{rank}"]):
                found[rank] = Standing(**json.loads(store.get(f"{key}/{rank}")))
        missing -= found.keys()
        time.sleep(0.1)
    return found
