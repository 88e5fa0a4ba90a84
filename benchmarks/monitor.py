"""``python -m benchmarks.monitor``: what a step costs more while somebody listens to its timings.

The contenders are stretches of one run, so all see the same machine, model and memory: in one somebody listens, who
does what ``ThreeDMonitor`` does with a step; in two nobody does, and how these two differ is what the machine does by
itself. Their order changes from round to round. Beside the ratios stands what recording costs by itself: spans per step
times the cost of one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from benchmarks.workload import Shape
from lightning_3d import ThreeDStrategy
from lightning_3d.events import EventSource, Phase, StepEvents
from lightning_3d.monitor.own_time import summarize, times_of
from tests.harness import run_trainer

TARGET = 1.01
_STRETCH = 3
"""Steps of a turn; one more before them is not measured, in which the contenders change over."""
_TIME_LIMIT_S = 600.0


QUIET, HEARD, AGAIN = "quiet", "heard", "again"
"""Nobody listens; somebody does; nobody does, once more."""


@dataclass
class Measured:
    """What one rank measured, by contender and round."""

    wall: dict[str, list[float]] = field(default_factory=lambda: {QUIET: [], HEARD: [], AGAIN: []})
    """Seconds per step."""
    cpu: dict[str, list[float]] = field(default_factory=lambda: {QUIET: [], HEARD: [], AGAIN: []})
    """Seconds of processor time per step."""
    spans: int = 0
    """Of the last step that was heard of."""
    span_s: float = 0.0
    """Seconds that a span costs by itself."""


class Alternate(Callback):
    """Listens in some stretches, and times all of them."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.measured = Measured()
        self._turns = [*_turns(rounds)]
        self._number = -1  # the first turn settles shapes
        self._place = 0
        self._began = self._began_cpu = 0.0

    @property
    def num_steps(self) -> int:
        """Steps of all turns."""
        return (len(self._turns) + 1) * (_STRETCH + 1)

    def _listen(self, step: StepEvents) -> None:
        summarize(0, [times_of(step)])
        self.measured.spans = len(step.events)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """A step is over."""
        if self._place == 0:  # the step in which they change over
            self._began, self._began_cpu = time.perf_counter(), time.process_time()
        self._place += 1
        if self._place <= _STRETCH:
            return
        if self._number >= 0:
            turn = self._turns[self._number]
            self.measured.wall[turn].append((time.perf_counter() - self._began) / _STRETCH)
            self.measured.cpu[turn].append((time.process_time() - self._began_cpu) / _STRETCH)
        self._number, self._place = self._number + 1, 0
        events: EventSource = trainer.strategy.events  # type: ignore[attr-defined]
        heard = self._number < len(self._turns) and self._turns[self._number] == HEARD
        (events.listen if heard else events.unlisten)(self._listen)


def _turns(rounds: int) -> Iterator[str]:
    """The same order on every rank."""
    draw = random.Random(0)
    for _ in range(rounds):
        order = [QUIET, HEARD, AGAIN]
        draw.shuffle(order)
        yield from order


def race(rank: int, world: int, rounds: int, pp: int, tp: int) -> Measured:
    """One rank's part."""
    shape = Shape()
    alternate = Alternate(rounds)
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=ThreeDStrategy(pipeline_parallel=pp, tensor_parallel=tp, num_micro_batches=4 * pp),
        max_steps=alternate.num_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[alternate],
    )
    trainer.fit(shape.module(), shape.loader(shape.batch))
    alternate.measured.span_s = span_cost()
    return alternate.measured


def span_cost(number: int = 20_000) -> float:
    """Seconds of processor time that one span costs, with its part of the end of the step."""
    events = EventSource()
    events.listen(lambda step: None)
    start = time.process_time()
    for step in range(number // 200):
        events.begin_step(step)
        events.count(1, 1, 1)
        for index in range(200):
            with events.span(Phase.TP, 0, index, "all_reduce", 1024):
                pass
    events.flush()
    return (time.process_time() - start) / number


def said(name: str, contender: list[float], base: list[float]) -> str:
    """The median of the ratios of the rounds, with an interval that holds it 19 times in 20 (by resampling rounds)."""
    ratios = [one / other for one, other in zip(contender, base, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return f"  {name:<52} {statistics.median(ratios):.4f} ({medians[50]:.4f} to {medians[-51]:.4f})"


def main() -> None:
    """Print the ratios and what they are made of."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="turns of each contender")
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    given = parser.parse_args()
    with contextlib.redirect_stdout(io.StringIO()):
        told = run_trainer(given.pp * given.tp, race, given.rounds, given.pp, given.tp, timeout=_TIME_LIMIT_S)
    mine = told[0]
    cpu = {turn: [sum(times) for times in zip(*(one.cpu[turn] for one in told), strict=True)] for turn in mine.cpu}
    step = statistics.median(mine.wall[QUIET])
    print(
        f"events: GPT of {Shape().layers} layers, pp{given.pp} tp{given.tp}, {given.rounds} rounds of {_STRETCH} steps"
    )
    print(f"  a step takes {1e3 * step:.1f} ms while nobody listens; target {TARGET}:")
    for name, times in (("time", mine.wall), ("processor time", cpu)):
        base = [(first + second) / 2 for first, second in zip(times[QUIET], times[AGAIN], strict=True)]
        print(said(f"{name}, somebody listens to nobody does", times[HEARD], base))
        print(said(f"{name}, nobody listens to the same", times[QUIET], times[AGAIN]))
    cost = mine.spans * mine.span_s
    print(f"  {mine.spans} spans per step x {1e6 * mine.span_s:.2f} us = {cost / step:.3%} of a step")


if __name__ == "__main__":
    main()
