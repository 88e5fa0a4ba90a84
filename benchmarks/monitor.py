"""``python -m benchmarks.monitor``: what a step costs more while somebody listens to its timings.

The two contenders are one run: nobody listens in every other stretch of steps, so both see the same machine, model and
memory. The listener does what ``ThreeDMonitor`` does with a step. Beside the ratio of times, which a busy machine
blurs, stands what recording costs by itself: spans per step times the cost of one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from benchmarks.workload import Shape
from lightning_3d import ThreeDStrategy
from lightning_3d.events import EventSource, Phase, StepEvents
from lightning_3d.monitor.own_time import summarize
from tests.harness import run_trainer

TARGET = 1.01
_STRETCH = 3
"""Steps of a turn; one more before it is not measured, in which the steps change over."""
_TIME_LIMIT_S = 600.0


@dataclass
class Measured:
    """What one rank measured, by round: while nobody listens, and while somebody does."""

    wall: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    """Seconds per step."""
    cpu: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    """Seconds of processor time per step, which a busy machine blurs less."""
    spans: int = 0
    """Of the last step that was heard of."""
    span_s: float = 0.0
    """Seconds that a span costs by itself."""


class Alternate(Callback):
    """Listens in every other stretch, and times all of them."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.measured = Measured()
        self._done = -2 * (_STRETCH + 1)
        self._began = self._began_cpu = 0.0

    def _listen(self, step: StepEvents) -> None:
        summarize(0, [step])
        self.measured.spans = len(step.events)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """A step is over."""
        self._done += 1
        events: EventSource = trainer.strategy.events  # type: ignore[attr-defined]
        turn, place = divmod(self._done, _STRETCH + 1)
        if place == 0:
            if turn > 0:
                self.measured.wall[(turn - 1) % 2].append((time.perf_counter() - self._began) / _STRETCH)
                self.measured.cpu[(turn - 1) % 2].append((time.process_time() - self._began_cpu) / _STRETCH)
            (events.listen if turn % 2 else events.unlisten)(self._listen)
        elif place == 1:
            self._began, self._began_cpu = time.perf_counter(), time.process_time()
        if turn >= 2 * self.rounds:
            trainer.should_stop = True


def race(rank: int, world: int, rounds: int, pp: int, tp: int) -> Measured:
    """One rank's part."""
    shape = Shape()
    alternate = Alternate(rounds)
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=ThreeDStrategy(pipeline_parallel=pp, tensor_parallel=tp, num_micro_batches=4 * pp),
        max_steps=(2 * rounds + 2) * (_STRETCH + 1) + 1,
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


def main() -> None:
    """Print the ratio and what it is made of."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each")
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks")
    given = parser.parse_args()
    with contextlib.redirect_stdout(io.StringIO()):
        told = run_trainer(given.pp * given.tp, race, given.rounds, given.pp, given.tp, timeout=_TIME_LIMIT_S)
    mine = told[0]
    (quiet, heard), spans, cost = mine.wall, mine.spans, mine.span_s
    ratios = sorted(on / off for off, on in zip(quiet, heard, strict=True))
    by_rank = [[sum(times) for times in zip(*(one.cpu[turn] for one in told), strict=True)] for turn in (0, 1)]
    cpu = sorted(on / off for off, on in zip(*by_rank, strict=True))
    step = statistics.median(quiet)
    print(
        f"events: GPT of {Shape().layers} layers, pp{given.pp} tp{given.tp}, {len(ratios)} rounds of {_STRETCH} steps"
    )
    print(f"  step {1e3 * step:.1f} ms while nobody listens, {1e3 * statistics.median(heard):.1f} ms with a listener")
    quartiles = f"{ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f}"
    print(f"  ratio {statistics.median(ratios):.3f} (quartiles {quartiles}), target {TARGET}")
    quartiles = f"{cpu[len(cpu) // 4]:.3f} to {cpu[-1 - len(cpu) // 4]:.3f}"
    print(f"  ratio of processor time {statistics.median(cpu):.3f} (quartiles {quartiles})")
    print(f"  {spans} spans per step x {1e6 * cost:.2f} us = {spans * cost / step:.3%} of a step")


if __name__ == "__main__":
    main()
