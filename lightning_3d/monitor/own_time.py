"""What a rank spent its time on: events lie within each other, and every moment counts once, for the innermost."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from lightning_3d.events import Event, Phase, StepEvents
from lightning_3d.monitor.record import RankWindow, Spread

OTHER = "other"
"""What no event tells of: hooks of callbacks and modules, logging, the engine's own bookkeeping."""

READ = "read"
"""Label of the time in which a rank waits for its own data loader."""


def seconds_by_phase(step: StepEvents) -> dict[str, float]:
    """Seconds of a step by phase; they sum to its length.

    A message of tensor parallelism within a forward counts for ``"tp"`` and not for ``"forward"``. Where events overlap
    without one holding the other, as those of two streams do, the one that began last counts.
    """
    charged: defaultdict[str, float] = defaultdict(float)
    active: list[Event] = []
    now = step.begin

    def advance(until: float) -> None:
        nonlocal now
        while active and active[-1].end <= until:
            last = active.pop()
            if last.end > now:
                charged[last.phase.value] += last.end - now
                now = last.end
        if until > now:
            charged[active[-1].phase.value if active else OTHER] += until - now
            now = until

    for event in step.events:
        advance(min(max(event.start, now), step.end))
        active.append(event)
    advance(step.end)
    charged[OTHER] += charged.pop(Phase.PIPELINE.value, 0.0)
    return dict(charged)


def pipeline_seconds(step: StepEvents) -> tuple[float, float]:
    """Seconds from this rank's first action of the pipeline to its last, and those of them in which it worked.

    Work are forwards and backwards with all that lies within them, but for the waits for other stages.
    """
    whole = busy = 0.0
    until = step.begin
    for event in step.events:
        if event.phase is Phase.PIPELINE:
            whole += event.seconds
        elif event.phase in (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT):
            busy += event.seconds
            until = event.end
        elif event.phase is Phase.PP_WAIT and event.start < until:
            busy -= min(event.end, until) - event.start
    return (whole, busy) if whole else (0.0, 0.0)


def spread(values: Sequence[float]) -> Spread:
    """Values of several steps, in short; of none, zeros."""
    if not values:
        return Spread(0.0, 0.0, 0.0)
    middle = statistics.median(values)
    return Spread(statistics.fmean(values), middle, statistics.median(abs(value - middle) for value in values))


class StepTimes(NamedTuple):
    """What a rank did in a step, in short; validation in the midst of it is no part of it."""

    seconds: Mapping[str, float]
    """By phase, each moment once."""
    evaluation_s: float
    pipeline_s: float
    busy_s: float
    reading_s: float
    """Wait for this rank's own data loader."""
    micro_batches: int
    samples: int
    tokens: int

    @property
    def length(self) -> float:
        """Seconds of the step."""
        return sum(self.seconds.values())


def times_of(step: StepEvents) -> StepTimes:
    """A step in short: what is kept of the thousands of events that one may have."""
    seconds = seconds_by_phase(step)
    evaluation = seconds.pop(Phase.EVALUATION.value, 0.0)
    pipeline, busy = pipeline_seconds(step)
    reading = sum(event.seconds for event in step.events if event.phase is Phase.LOADER and event.label == READ)
    return StepTimes(seconds, evaluation, pipeline, busy, reading, step.micro_batches, step.samples, step.tokens)


def summarize(rank: int, steps: Sequence[StepTimes], memory: Mapping[str, int] | None = None) -> RankWindow:
    """The figures of one rank over a window of steps.

    Args:
        rank: The rank.
        steps: What it did.
        memory: Bytes ``"memory"`` in use and ``"memory_peak"``.
    """
    names = sorted({name for step in steps for name in step.seconds})
    lengths = spread([step.length for step in steps])

    def mean(values: Iterable[float]) -> float:
        return sum(values) / max(1, len(steps))

    return RankWindow(
        rank=rank,
        steps=len(steps),
        step_s=lengths.mean,
        usual_s=lengths.median,
        seconds={name: spread([step.seconds.get(name, 0.0) for step in steps]) for name in names},
        micro_batches=mean(step.micro_batches for step in steps),
        samples=mean(step.samples for step in steps),
        tokens=mean(step.tokens for step in steps),
        pipeline_s=mean(step.pipeline_s for step in steps),
        busy_s=mean(step.busy_s for step in steps),
        reading=spread([step.reading_s for step in steps]),
        **(memory or {}),
    )
