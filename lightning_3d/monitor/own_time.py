"""What a rank spent its time on: events lie within each other, and every moment counts once, for the innermost."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

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


def _reading(step: StepEvents) -> float:
    return sum(event.seconds for event in step.events if event.phase is Phase.LOADER and event.label == READ)


def spread(values: Sequence[float]) -> Spread:
    """Values of several steps, in short; of none, zeros."""
    if not values:
        return Spread(0.0, 0.0, 0.0)
    middle = statistics.median(values)
    return Spread(statistics.fmean(values), middle, statistics.median(abs(value - middle) for value in values))


def summarize(rank: int, steps: Sequence[StepEvents], memory: Mapping[str, int] | None = None) -> RankWindow:
    """The figures of one rank over a window of steps.

    Validation in the midst of a step is no part of it.

    Args:
        rank: The rank.
        steps: What it did.
        memory: Bytes ``"memory"`` in use and ``"memory_peak"``.
    """
    charged = [seconds_by_phase(step) for step in steps]
    for phases in charged:
        phases.pop(Phase.EVALUATION.value, None)
    names = sorted({name for phases in charged for name in phases})
    pipeline = [pipeline_seconds(step) for step in steps]
    lengths = spread([sum(phases.values()) for phases in charged])
    return RankWindow(
        rank=rank,
        steps=len(steps),
        step_s=lengths.mean,
        usual_s=lengths.median,
        seconds={name: spread([phases.get(name, 0.0) for phases in charged]) for name in names},
        micro_batches=statistics.fmean(step.micro_batches for step in steps) if steps else 0.0,
        samples=statistics.fmean(step.samples for step in steps) if steps else 0.0,
        tokens=statistics.fmean(step.tokens for step in steps) if steps else 0.0,
        pipeline_s=statistics.fmean(whole for whole, _ in pipeline) if steps else 0.0,
        busy_s=statistics.fmean(busy for _, busy in pipeline) if steps else 0.0,
        reading=spread([_reading(step) for step in steps]),
        **(memory or {}),
    )
