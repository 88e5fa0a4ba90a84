"""Runs a schedule on paper: when each action starts and ends, who idles, what is kept, and whether it ends at all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_3d.errors import ThreeDError
from lightning_3d.schedules.actions import Action, Kind, Schedule

Times = float | Sequence[float]
"""Time of one action in any unit: one number, or one for each chunk."""


class DeadlockError(ThreeDError):
    """A schedule that cannot run to its end; says where each rank stands. None that `build` returns raises it."""


class Span(NamedTuple):
    """A compute action with its start and end, in the unit of the given times."""

    action: Action
    start: float
    end: float


class Message(NamedTuple):
    """A tensor on its way between two ranks, with start and end of the transfer, in the unit of the given times."""

    kind: Kind
    """F for activations, B for their gradients."""
    chunk: int
    """The chunk that receives it."""
    micro_batch: int
    source: int
    """Pipeline rank that sends it."""
    target: int
    """Pipeline rank that receives it."""
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What a simulated step does. Times in the unit of the given ones; tuples are indexed by pipeline rank."""

    spans: tuple[tuple[Span, ...], ...]
    """Compute actions of each rank with their times, in order."""
    total: float
    """Time until the last rank has finished."""
    busy: tuple[float, ...]
    """Time each rank computes."""
    peak_live: tuple[int, ...]
    """Most activations each rank keeps at any moment, counted in chunks x micro-batches; see `peak_live`."""
    messages: tuple[Message, ...]
    """All messages, in no particular order."""

    @property
    def idle(self) -> tuple[float, ...]:
        """Time each rank waits, ``total - busy``."""
        return tuple(self.total - busy for busy in self.busy)

    def live(self, rank: int, sizes: Sequence[float] | None = None) -> list[tuple[float, float]]:
        """What a rank keeps over time.

        Args:
            rank: Pipeline rank.
            sizes: What one micro-batch keeps on each chunk, in any unit; by default 1.

        Returns:
            Times, and what is kept from each on; an activation counts from the start of its F to the end of its last
            action.
        """
        last = {(action.chunk, action.micro_batch): action for action, _, _ in self.spans[rank]}
        changes = []
        for action, start, end in self.spans[rank]:
            size = 1.0 if sizes is None else sizes[action.chunk]
            if action.kind is Kind.F:
                changes.append((start, size))
            if last[action.chunk, action.micro_batch] == action:
                changes.append((end, -size))
        kept, steps = 0.0, {}
        for time, change in changes:  # in order of time: a rank does one thing after another
            kept += change
            steps[time] = kept
        return list(steps.items())

    @property
    def bubble_fraction(self) -> float:
        """Idle time of all ranks as a fraction of their *total* time, as a measured idle fraction shows it."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.total) if self.total else 0.0


def peak_live(compute: Sequence[Action]) -> int:
    """Most activations that a rank with these compute actions keeps at once, in chunks x micro-batches.

    An activation is held from its F until the last action on it, which is the W of a zero-bubble schedule, else the B;
    without a backward it is gone when the F ends.
    """
    last = {(action.chunk, action.micro_batch): index for index, action in enumerate(compute)}
    live = peak = 0
    for index, action in enumerate(compute):
        live += action.kind is Kind.F
        peak = max(peak, live)
        live -= last[action.chunk, action.micro_batch] == index
    return peak


def simulate(
    schedule: Schedule,
    forward_time: Times = 1.0,
    backward_time: Times = 2.0,
    send_time: float = 0.0,
    *,
    weight_time: Times = 0.0,
    blocking_sends: bool = False,
) -> Timeline:
    """Run a schedule with the given times.

    A message travels once its send is reached and its receive is posted; messages of one kind between two ranks travel
    one after another and, like NCCL's, have no tags: the k-th send meets the k-th receive. Compute does not slow down
    messages, nor they compute.

    Args:
        schedule: What to run.
        forward_time: Time of F.
        backward_time: Time of B. In a schedule with W: of the part that B does.
        send_time: Time a message travels.
        weight_time: Time of W.
        blocking_sends: The worst case of a transport: a send holds up its rank until the receive is posted.

    Returns:
        The times of all compute actions and what follows from them.

    Raises:
        DeadlockError: If the ranks wait for each other, or a message has no receive, or another one than its own.
    """
    per_chunk = {
        kind: [float(times)] * schedule.num_chunks if isinstance(times, (int, float)) else times
        for kind, times in ((Kind.F, forward_time), (Kind.B, backward_time), (Kind.W, weight_time))
    }
    ranks = [_Rank(rank, schedule, per_chunk, blocking_sends) for rank in range(schedule.stages)]
    channels: defaultdict[tuple[bool, int, int], _Channel] = defaultdict(lambda: _Channel(send_time))
    # Times follow from the dependencies alone, so ranks may be run in any order, each as far as it can go.
    while any([rank.advance(channels) for rank in ranks]):
        pass
    stuck = [rank for rank in ranks if not rank.finished]
    if stuck or any(len(channel.sent) != len(channel.posted) for channel in channels.values()):
        where = "; ".join(f"rank {rank.rank} at {rank.current}" for rank in stuck) or "messages without send or receive"
        raise DeadlockError(
            f"The schedule {schedule.name!r} ({schedule.stages} stages x {schedule.virtual_stages} chunks,"
            f" {schedule.micro_batches} micro-batches) does not run to its end: {where}."
        )
    return Timeline(
        spans=tuple(tuple(rank.spans) for rank in ranks),
        total=max(rank.now for rank in ranks),
        busy=tuple(sum(end - start for _, start, end in rank.spans) for rank in ranks),
        peak_live=tuple(peak_live(schedule.compute(rank.rank)) for rank in ranks),
        messages=tuple(
            Message(Kind.F if forward else Kind.B, *name, source, target, end - send_time, end)
            for (forward, source, target), channel in channels.items()
            for name, end in channel.arrivals.items()
        ),
    )


class _Channel:
    """Messages of one kind from one rank to another, named by (receiving chunk, micro-batch)."""

    def __init__(self, send_time: float) -> None:
        self.send_time = send_time
        self.sent: list[tuple[tuple[int, int], float]] = []
        self.posted: list[tuple[tuple[int, int], float]] = []
        self.arrivals: dict[tuple[int, int], float] = {}
        self.met = 0
        self.free = 0.0

    def arrival(self, message: tuple[int, int]) -> float | None:
        """When ``message`` arrives, or None if that is not known yet."""
        while self.met < min(len(self.sent), len(self.posted)):
            (name, sent), (expected, posted) = self.sent[self.met], self.posted[self.met]
            if name != expected:
                raise DeadlockError(f"The message for (chunk, micro-batch) {name} meets the receive for {expected}.")
            self.free = self.arrivals[name] = max(self.free, sent, posted) + self.send_time
            self.met += 1
        return self.arrivals.get(message)


class _Rank:
    """One pipeline rank: how far it is, and what time it is there."""

    def __init__(self, rank: int, schedule: Schedule, times: dict[Kind, Sequence[float]], blocking: bool) -> None:
        self.rank, self.actions, self.placement = rank, schedule.actions[rank], schedule.placement
        self.times, self.blocking = times, blocking
        self.next = 0
        self.in_send = False
        self.now = 0.0
        self.spans: list[Span] = []
        self.done: dict[tuple[Kind, int, int], float] = {}

    @property
    def finished(self) -> bool:
        return self.next == len(self.actions)

    @property
    def current(self) -> Action:
        return self.actions[self.next]

    def advance(self, channels: defaultdict[tuple[bool, int, int], _Channel]) -> bool:
        """Go as far as possible; False if that is nowhere."""
        start = self.next
        while not self.finished and self._do(self.current, channels):
            self.next += 1
        return self.next > start

    def _do(self, action: Action, channels: defaultdict[tuple[bool, int, int], _Channel]) -> bool:
        kind, chunk, micro_batch, peer = action
        if kind.is_receive:
            channels[kind is Kind.RECV_F, peer, self.rank].posted.append(((chunk, micro_batch), self.now))
            return True
        if kind.is_send:
            forward = kind is Kind.SEND_F
            channel = channels[forward, self.rank, peer]
            if not self.in_send:
                channel.sent.append(((chunk + 1 if forward else chunk - 1, micro_batch), self.now))
            if self.blocking:
                self.in_send = len(channel.posted) < len(channel.sent)
                if self.in_send:
                    return False
                self.now = max(self.now, channel.posted[len(channel.sent) - 1][1])
            return True
        ready = self._ready(kind, chunk, micro_batch, channels)
        if ready is None:
            return False
        begin = max(self.now, ready)
        self.now = self.done[kind, chunk, micro_batch] = begin + self.times[kind][chunk]
        self.spans.append(Span(action, begin, self.now))
        return True

    def _ready(
        self, kind: Kind, chunk: int, micro_batch: int, channels: defaultdict[tuple[bool, int, int], _Channel]
    ) -> float | None:
        """When the data that a compute action needs is on this rank; None if that is not known yet."""
        if kind is Kind.W:
            return self.done.get((Kind.B, chunk, micro_batch))
        forward = kind is Kind.F
        if not forward and (Kind.F, chunk, micro_batch) not in self.done:
            return None
        source = chunk - 1 if forward else chunk + 1
        if not 0 <= source < len(self.placement):
            return 0.0
        if self.placement[source] == self.rank:
            return self.done.get((kind, source, micro_batch))
        return channels[forward, self.placement[source], self.rank].arrival((chunk, micro_batch))
