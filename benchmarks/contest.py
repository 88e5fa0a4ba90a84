"""Two contenders in the same processes, taking turns: what slows the machine down for a while slows both."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer


class Contender(Protocol):
    """Something that trains, a number of steps at a time."""

    losses: list[float]
    """Loss of every step, where this rank knows it."""

    def run(self, steps: int) -> None:
        """Train for ``steps`` more steps."""

    def close(self) -> None:
        """Stop."""


@dataclass
class Turns:
    """What one rank measured, a number per round."""

    wall: list[float] = field(default_factory=list)
    """Seconds per step."""
    cpu: list[float] = field(default_factory=list)
    """Seconds of processor time per step on this rank."""
    losses: list[float] = field(default_factory=list)


class Loop:
    """A contender that is a function of no arguments, which makes one step and returns the loss if it has one."""

    def __init__(self, step: Callable[[], float | None]) -> None:
        self._step = step
        self.losses: list[float] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            loss = self._step()
            if loss is not None:
                self.losses.append(loss)

    def close(self) -> None:
        """Nothing runs between the turns."""


class Fit:
    """A contender that is ``Trainer.fit``: it runs in a thread of its own, which sleeps while it is not its turn.

    All that a step costs under the Trainer is measured: the loader, the hooks, the loops.

    Args:
        fit: Called with the callback that the Trainer needs; it builds a Trainer and calls ``fit``.
    """

    def __init__(self, fit: Callable[[Callback], None]) -> None:
        self.losses: list[float] = []
        self._fit = fit
        self._go, self._done = threading.Event(), threading.Event()
        self._left = 0
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()
        self._wait()

    def run(self, steps: int) -> None:
        self._left = steps
        self._resume()

    def close(self) -> None:
        self._closing = True
        self._resume()
        self._thread.join()

    def _main(self) -> None:
        try:
            self._fit(_Gate(self))
        except BaseException as error:  # raised again where the turn was given
            self._error = error
        self._done.set()

    def _resume(self) -> None:
        self._go.set()
        self._wait()

    def _wait(self) -> None:
        self._done.wait()
        self._done.clear()
        if self._error is not None:
            raise self._error

    def pause(self) -> bool:
        """Called by the Trainer's thread when its turn is over. Returns whether to stop for good."""
        self._done.set()
        self._go.wait()
        self._go.clear()
        return self._closing

    def step_done(self, loss: float) -> bool:
        """Called by the Trainer's thread after every step. Returns whether to stop for good."""
        self.losses.append(loss)
        self._left -= 1
        return self.pause() if self._left == 0 else False


class _Gate(Callback):
    def __init__(self, fit: Fit) -> None:
        self._fit = fit

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop = self._fit.pause()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        trainer.should_stop = self._fit.step_done(float(outputs["loss"]))


def alternate(contenders: list[Contender], rounds: int, steps: int, warm_up: int = 3) -> list[Turns]:
    """Let the contenders take turns, in changing order. Collective.

    Args:
        contenders: Ready to run.
        rounds: How often each gets its turn.
        steps: Steps in a turn.
        warm_up: Steps before anything is measured.
    """
    turns = [Turns() for _ in contenders]
    for contender in contenders:
        contender.run(warm_up)
    order = list(range(len(contenders)))
    for _ in range(rounds):
        order.append(order.pop(0))
        for index in order:
            _meet()
            wall, cpu = time.perf_counter(), time.process_time()
            contenders[index].run(steps)
            cpu = time.process_time() - cpu
            _meet()
            turns[index].wall.append((time.perf_counter() - wall) / steps)
            turns[index].cpu.append(cpu / steps)
    for contender, turn in zip(contenders, turns, strict=True):
        turn.losses = contender.losses
        contender.close()
    return turns


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()
