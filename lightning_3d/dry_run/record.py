"""What one rank did in a step, as plain data, and the same for more micro-batches than were run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_3d.dry_run.allocations import KINDS, Peak
from lightning_3d.dry_run.recorder import Recorder
from lightning_3d.dry_run.traffic import Message, Traffic

PIPELINE = frozenset({"F", "B", "W", "SF", "RF", "SB", "RB"})
"""Phases of the engine."""
_FIXED = -1


class UnlikeError(Exception):
    """Micro-batches that should be alike are not."""


@dataclass(frozen=True)
class Work:
    """Arithmetic and messages."""

    flops: int = 0
    traffic: Mapping[Message, int] = field(default_factory=dict)

    def plus(self, other: Work, times: int = 1) -> Work:
        """Both, the other that many times."""
        total: Traffic = Counter(dict(self.traffic))
        for message, count in other.traffic.items():
            total[message] += times * count
        return Work(self.flops + times * other.flops, dict(total))


@dataclass(frozen=True, kw_only=True)
class Record:
    """A step of one rank."""

    pipeline: Peak
    """The fullest moment of forwards and backwards."""
    outside: Peak
    """The fullest moment before and after them: reductions, clipping, the optimizers."""
    work: Work
    timeline: tuple[tuple[str, int], ...]
    """Everything that the rank did, in order, with the most bytes held in it."""
    micro_batches: int
    micro_batches_run: int
    reads: Mapping[str, int] = field(default_factory=dict)
    """Lines of code that have read a value, which was taken to be zero."""

    @property
    def peak(self) -> Peak:
        """The fullest moment."""
        return max(self.pipeline, self.outside, key=lambda peak: peak.total)


def record_of(recorder: Recorder, micro_batches: int, run: int) -> Record:
    """The step that was recorded last, for a run of ``micro_batches`` of which ``run`` were run.

    A schedule that has reached its steady state repeats itself: the micro-batches that were left out hold no more
    memory than the others, and do and send what the middle ones do.

    Raises:
        UnlikeError: if the middle micro-batches differ from each other, so that all have to be run.
    """
    watch, first = recorder.watch, recorder.first
    allocations = watch.allocations
    flops: Counter[int] = Counter()
    traffic: defaultdict[int, Traffic] = defaultdict(Counter)
    for index, moment in enumerate(allocations.moments):
        if index >= first:
            key = moment.micro_batch if moment.phase in PIPELINE else _FIXED
            flops[key] += watch.flops.get(index, 0)
            traffic[key].update(watch.traffic.get(index, {}))
    work = Work()
    for key in sorted({*flops, *traffic}):
        work = work.plus(Work(flops[key], traffic[key]))
    if run < micro_batches:
        middle = [Work(flops[key], dict(traffic[key])) for key in (1, 2)]
        if middle[0] != middle[1]:
            raise UnlikeError
        work = work.plus(middle[0], micro_batches - run)
    timeline = [(str(moment), held) for moment, held in allocations.timeline()[first:]]
    return Record(
        pipeline=allocations.peak(first, PIPELINE),
        outside=allocations.peak(first, PIPELINE, outside=True),
        work=work,
        timeline=tuple(timeline),
        micro_batches=micro_batches,
        micro_batches_run=run,
    )


def bytes_sent(recorder: Recorder, phase: str) -> int:
    """Bytes that micro-batch 1 of the step recorded last sends in the actions of a name."""
    watch = recorder.watch
    return sum(
        message.num_bytes * count
        for index, moment in enumerate(watch.allocations.moments)
        if index >= recorder.first and (moment.phase, moment.micro_batch) == (phase, 1)
        for message, count in watch.traffic.get(index, {}).items()
    )


def turns(recorder: Recorder, ahead: int, micro_batches: Sequence[int]) -> tuple[Peak, ...]:
    """The fullest moment of each of those backwards and of the forward before it, in the step recorded last."""
    allocations = recorder.watch.allocations
    places = {
        (moment.phase, moment.micro_batch): index
        for index, moment in enumerate(allocations.moments)
        if index >= recorder.first
    }
    return tuple(
        allocations.peak(places["F", number + ahead], PIPELINE, last=places["B", number]) for number in micro_batches
    )


def between(low: Record, high: Record, place: float) -> Record:
    """The record of a stage that differs from two alike ones by its place alone: ``low + place * (high - low)``.

    Stages alike hold the same parameters and do the same, and the memory of their activations grows with the
    micro-batches in flight, by the same for every stage further up.
    """
    return replace(
        low,
        pipeline=_between(low.pipeline, high.pipeline, place),
        outside=_between(low.outside, high.outside, place),
        timeline=(),
    )


def _between(low: Peak, high: Peak, place: float) -> Peak:
    def at(first: int, second: int) -> int:
        return round(first + place * (second - first))

    kinds = {kind: at(low.by_kind.get(kind, 0), high.by_kind.get(kind, 0)) for kind in KINDS}
    return Peak(at(low.total, high.total), high.when, kinds)
