"""When a rank did what: the one source of timings, which records only while somebody listens.

Sites wrap what they do in :meth:`EventSource.span`. Spans nest: a message of tensor parallelism lies within the forward
that sends it. On a GPU both ends of a span are CUDA events on the current stream, so what is measured is the device's
time; they are read when they have happened, at a later step, and nothing ever waits for them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch


class Phase(Enum):
    """What a rank spends time on."""

    PIPELINE = "pipeline"
    """All actions of a batch; forwards, backwards and waits lie within it."""
    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"
    """The part of a backward that computes gradients of weights, of schedules that run it apart."""
    TP = "tp"
    """A collective of tensor parallelism."""
    PP_WAIT = "pp_wait"
    """Waiting for a message of another stage."""
    DP = "dp"
    """Waiting for gradients, parameters or what is logged of other replicas, as far as computation does not hide it."""
    SYNC = "sync"
    """Waiting for other ranks in messages of no one axis: norms, decisions, barriers, the batch, outputs of a step."""
    LOADER = "loader"
    """Waiting for the data loader."""
    OPTIMIZER = "optimizer"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    """A whole validation in the midst of training."""


class Event(NamedTuple):
    """One thing that a rank did."""

    phase: Phase
    chunk: int
    """Chunk of the model; -1 where there is none."""
    micro_batch: int
    """Index of the micro-batch in its batch; -1 where there is none."""
    start: float
    """Seconds, on the clock of the step's ``begin``."""
    end: float
    label: str
    """What it is more exactly, such as the name of the collective; may be empty."""
    bytes: int
    """Size of what this rank hands in; 0 where nothing is sent."""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class StepEvents:
    """All that a rank did in one step: from the request for its batch to the request for the next."""

    mode: str = "train"
    """``"train"``, or ``"validation"``, ``"test"`` or ``"predict"`` for a batch of these loops."""
    step: int
    """Optimizer steps of the run before it (``trainer.global_step``)."""
    begin: float
    """Seconds on this rank's monotonic clock."""
    end: float
    wall: float
    """``time.time()`` at ``begin``, by which steps of several ranks can be laid side by side."""
    events: tuple[Event, ...]
    """In order of their start; an event that holds others comes before them."""
    micro_batches: int = 0
    samples: int = 0
    """Samples of this rank's replica, 0 if it only fills up."""
    tokens: int = 0
    """Tokens of this rank's replica: positions of the batch's ids; 0 where the batch has none."""

    @property
    def seconds(self) -> float:
        """How long the step took."""
        return self.end - self.begin


Listener = Callable[[StepEvents], None]

MODES = ("train", "validation", "test", "predict")
"""Loops that a step may belong to."""


class Clock(Protocol):
    """Makes marks in time, and tells later how far they are apart."""

    def mark(self) -> Any:
        """A mark at what the caller has asked for so far."""

    def is_past(self, mark: Any) -> bool:
        """Whether everything before ``mark`` is done."""

    def seconds(self, earlier: Any, later: Any) -> float:
        """From one mark to another; both are past."""

    def release(self, marks: Sequence[Any]) -> None:
        """Nobody asks for these marks any more."""

    def wait(self, mark: Any) -> None:
        """Wait until ``mark`` is past. Never called within a step."""

    def now(self) -> Moment | None:
        """A mark that is past, and the host's time at it; ``None`` where that cannot be told at once."""


class Moment(NamedTuple):
    """A mark, and when it was."""

    mark: Any
    monotonic: float
    """Seconds on the host's monotonic clock."""
    calendar: float
    """``time.time()``."""


class HostClock:
    """Marks are times of the host; right where it does the work itself."""

    mark = staticmethod(time.perf_counter)

    def is_past(self, mark: float) -> bool:
        """Always."""
        return True

    def seconds(self, earlier: float, later: float) -> float:
        """The difference."""
        return later - earlier

    def release(self, marks: Sequence[float]) -> None:
        """Nothing to do."""

    def wait(self, mark: float) -> None:
        """Nothing to do."""

    def now(self) -> Moment:
        """Now."""
        mark = time.perf_counter()
        return Moment(mark, mark, time.time())


class DeviceClock:
    """Marks are CUDA events on the stream that is current where they are made; used again and again.

    Args:
        make: Makes an event with ``record(stream)``, ``query()``, ``elapsed_time(later)`` (milliseconds) and
            ``synchronize()``, as ``torch.cuda.Event(enable_timing=True)`` does.
        stream: Makes a stream.
    """

    def __init__(self, make: Callable[[], Any] | None = None, stream: Callable[[], Any] | None = None) -> None:
        self._make = make or (lambda: torch.cuda.Event(enable_timing=True))
        self._stream = stream or torch.cuda.Stream
        self._idle: Any = None
        """A stream that is given nothing to do."""
        self._free: deque[Any] = deque()  # the threads of autograd take from it too; its ends are safe for that

    def mark(self) -> Any:
        """An event, recorded on the current stream."""
        event = self._event()
        event.record()
        return event

    def _event(self) -> Any:
        try:
            return self._free.pop()
        except IndexError:
            return self._make()

    def is_past(self, mark: Any) -> bool:
        """Whether the device has reached it; does not wait."""
        return bool(mark.query())

    def seconds(self, earlier: Any, later: Any) -> float:
        """Time of the device between them."""
        return float(earlier.elapsed_time(later)) / 1e3

    def release(self, marks: Sequence[Any]) -> None:
        """Take the events back for new marks."""
        self._free.extend(marks)

    def wait(self, mark: Any) -> None:
        """Let the host wait for the device."""
        mark.synchronize()

    def now(self) -> Moment | None:
        """An event on a stream of its own, which the device reaches at once whatever else it works on.

        Where all streams share one queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``) it does not; nobody waits for that.
        """
        if self._idle is None:
            self._idle = self._stream()
        event = self._event()
        event.record(self._idle)
        given_up = time.perf_counter() + _AT_ONCE_S
        while not event.query():
            if time.perf_counter() > given_up:
                self._free.append(event)
                return None
        return Moment(event, time.perf_counter(), time.time())


_AT_ONCE_S = 1e-4
_HOST_TIME_EVERY_S = 10.0
"""Seconds between looks at the host's clocks: those of a device run a little faster or slower."""

Row = tuple[Phase, int, int, str, int]
"""Phase, chunk, micro-batch, label and bytes of an event."""

Opener = Callable[[Row], Callable[[], None]]
"""Called where a span begins; what it returns is called where it ends, in the same thread."""


class Span:
    """One event, while it is recorded."""

    __slots__ = ("_clock", "_close", "_into", "_opener", "end", "only_last", "row", "start")

    def __init__(self, clock: Clock, into: list[Span], row: Row, opener: Opener | None = None) -> None:
        self._clock, self._into = clock, into
        self._opener = opener
        self._close: Callable[[], None] | None = None
        self.row = row
        self.only_last: float | None = None
        """If set, only so many seconds at the end are of this phase; before, this rank waited for others."""
        self.start: Any = None
        self.end: Any = None

    def __enter__(self) -> Span:
        self._into.append(self)
        self.start = self._clock.mark()
        if self._opener is not None:
            self._close = self._opener(self.row)
        return self

    def __exit__(self, *_: object) -> None:
        if self._close is not None:
            self._close()
        self.end = self._clock.mark()


_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(kw_only=True)
class _Record:
    """A step whose times are not known yet."""

    mode: str
    step: int
    is_inner: bool
    """Whether it lies within another step."""
    begin: Any
    moment: Moment | None = None
    """A moment shortly before it, if the host's clocks were looked at."""
    end: Any = None
    spans: list[Span] = field(default_factory=list)
    has_work: bool = False
    micro_batches: int = 0
    samples: int = 0
    tokens: int = 0


class EventSource:
    """Tells listeners what this rank did in every step.

    A listener is called in the thread that trains, when all times of a step are known: on a CPU when the step ends, on
    a GPU at the end of a later step. While nobody listens, a span costs the look at one attribute.

    Args:
        clock: What to measure with.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.is_recording = False
        """Whether spans are recorded now. Sites that would have to work for what they say of a span ask it first."""
        self.opener: Opener | None = None
        """For profilers, which want to hear of spans as they happen; with a listener beside it, or nothing happens."""
        self._clock: Clock = clock or HostClock()
        self._listeners: dict[Listener, frozenset[str]] = {}
        self._open: _Record | None = None
        self._aside: _Record | None = None
        """The training step in which a loop of evaluation runs."""
        self._closed: deque[_Record] = deque()
        self._last: Moment | None = None
        """The last mark whose time is known."""
        self._looked = 0.0
        """When the host's clocks were looked at, on the monotonic one."""

    def use(self, clock: Clock) -> None:
        """Measure with ``clock`` from now on; before anything is recorded."""
        self._clock = clock

    # --- who listens -----------------------------------------------------------------------------------------------

    def listen(self, listener: Listener, modes: Collection[str] = ("train",)) -> None:
        """Call ``listener`` with every step of these loops, from the next that begins."""
        self._listeners[listener] = frozenset(modes)

    def unlisten(self, listener: Listener) -> None:
        """Call it no more. Steps whose times are not known yet are dropped with the last listener."""
        self._listeners.pop(listener, None)
        if not self._listeners:
            self.abandon()

    # --- sites -----------------------------------------------------------------------------------------------------

    def span(
        self, phase: Phase, chunk: int = -1, micro_batch: int = -1, label: str = "", bytes: int = 0
    ) -> AbstractContextManager[Span | None]:
        """Record what is done within it; nothing at all while nobody listens."""
        if not self.is_recording:
            return _NOTHING
        assert self._open is not None
        return Span(self._clock, self._open.spans, (phase, chunk, micro_batch, label, bytes), self.opener)

    def begin_step(self, step: int, mode: str = "train") -> None:
        """A step begins, and the one before it ends; one that has not counted its work yet (several loaders) goes on.

        Args:
            step: Optimizer steps before it.
            mode: Which loop it belongs to.
        """
        if not self._listeners or (self._open is not None and self._open.mode == mode and not self._open.has_work):
            return
        self.end_step()
        if any(mode in modes for modes in self._listeners.values()):
            moment, is_inner = None, self._aside is not None
            if not is_inner and (self._last is None or time.perf_counter() > self._looked + _HOST_TIME_EVERY_S):
                self._looked, moment = time.perf_counter(), self._clock.now()
            mark = self._clock.mark()
            if self._last is None:
                self._last = Moment(mark, time.perf_counter(), time.time())
            self._open = _Record(mode=mode, step=step, is_inner=is_inner, begin=mark, moment=moment)
            self.is_recording = True

    def count(self, micro_batches: int, samples: int, tokens: int) -> None:
        """What the step that runs works on."""
        if self._open is not None:
            self._open.has_work = True
            self._open.micro_batches, self._open.samples, self._open.tokens = micro_batches, samples, tokens

    def end_step(self) -> None:
        """The step ends; tell the listeners about all steps that are past."""
        self.is_recording = False
        record, self._open = self._open, None
        if record is not None and record.has_work:  # else the loader had no batch left
            record.end = self._clock.mark()
            self._closed.append(record)
        self._tell()

    def begin_evaluation(self) -> None:
        """Batches of another loop follow, within a training step or not."""
        if self._open is not None:
            span = Span(self._clock, self._open.spans, (Phase.EVALUATION, -1, -1, "", 0))
            span.__enter__()
            self._aside, self._open = self._open, None
            self.is_recording = False

    def end_evaluation(self) -> None:
        """The other loop is through."""
        if not self._listeners:
            return
        self.end_step()
        if self._aside is not None:
            self._open, self._aside = self._aside, None
            next(span for span in reversed(self._open.spans) if span.end is None).__exit__()
            self.is_recording = True

    def flush(self) -> None:
        """End the step and wait until all times are known; at the end of a run, or to look at one step alone."""
        self.end_step()
        for record in self._closed:
            for mark in _marks(record):
                self._clock.wait(mark)
        self._tell()

    def abandon(self) -> None:
        """A run is over, maybe by an error: forget a step that has not ended, or the next run would go on with it."""
        self._open = self._aside = self._last = None
        self._closed.clear()
        self.is_recording = False

    # --- what is known ---------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        while self._closed and all(map(self._clock.is_past, _marks(self._closed[0]))):
            record = self._closed.popleft()
            events = self._resolve(record)
            for listener, modes in list(self._listeners.items()):
                if record.mode in modes:
                    listener(events)

    def _resolve(self, record: _Record) -> StepEvents:
        assert self._last is not None
        clock = self._clock
        # From the step before, not from the first: a device counts milliseconds in single precision.
        known, monotonic, calendar = record.moment or self._last
        passed = clock.seconds(known, record.begin)
        begin, wall = monotonic + passed, calendar + passed
        events: list[Event] = []
        for span in record.spans:
            if span.end is None:  # the step ended within it: something was raised
                continue
            phase, chunk, micro_batch, label, size = span.row
            start = begin + clock.seconds(record.begin, span.start)
            end = begin + clock.seconds(record.begin, span.end)
            if span.only_last is not None and end - span.only_last > start:
                cut = min(end, end - span.only_last)
                events.append(Event(Phase.SYNC, chunk, micro_batch, start, cut, label, 0))
                start = cut
            events.append(Event(phase, chunk, micro_batch, start, end, label, size))
        events.sort(key=lambda event: event.start)
        length = clock.seconds(record.begin, record.end)
        used = [mark for span in record.spans for mark in (span.start, span.end) if mark is not None]
        if record.moment is not None:
            used.append(record.moment.mark)
        if record.is_inner:
            used.append(record.begin)
        else:
            if self._last.mark is not record.begin:
                used.append(self._last.mark)
            self._last = Moment(record.begin, begin, wall)
        clock.release([*used, record.end])
        return StepEvents(
            mode=record.mode,
            step=record.step,
            begin=begin,
            end=begin + length,
            wall=wall,
            events=tuple(events),
            micro_batches=record.micro_batches,
            samples=record.samples,
            tokens=record.tokens,
        )


def _marks(record: _Record) -> Iterator[Any]:
    yield record.end  # the last of most, so mostly the only one that is asked in vain
    for span in record.spans:
        if span.end is not None:
            yield span.end
