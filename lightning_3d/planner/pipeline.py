"""How long a pipeline takes: the engine's own action lists run on paper, fast enough for a search.

The times of an action list follow from two rules: an action starts when its rank is free and its input is there. So
one pass over the actions, in an order that respects both, gives all of them; that order depends on the sizes only and
is kept. The result is that of :func:`lightning_3d.schedules.simulate` as long as a message takes no longer than an
action (tested). A step of many micro-batches repeats itself between warm-up and drain: what lies beyond a few rounds
is added at the rate of the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lightning_3d.schedules import SCHEDULES, Kind

CLOSED_FORM = ("zb_h2",)
"""Zero-bubble schedules known by their formula (Qi et al. 2024, tables 1 and 2) until they are built."""
SCHEDULE_NAMES = tuple(dict.fromkeys((*SCHEDULES, *CLOSED_FORM)))
_ROUNDS = 4
"""Rounds of as many micro-batches as stages that are simulated before the rest is extrapolated."""


@dataclass(frozen=True)
class _Order:
    """Compute actions of all ranks, sorted so that what an action waits for stands before it."""

    chunk: tuple[int, ...]
    kind: tuple[int, ...]
    """0, 1, 2 for F, B, W."""
    before: tuple[int, ...]
    """Position of the action before it on its rank; that of a time of zero, the last one, if there is none."""
    needs: tuple[int, ...]
    """Position of the action that makes its input."""
    travels: tuple[bool, ...]
    """Whether the input comes from another rank."""
    rank: tuple[int, ...]


@lru_cache(maxsize=512)
def _order(name: str, stages: int, virtual_stages: int, micro_batches: int) -> _Order:
    rule = SCHEDULES[name]
    chunks = stages * virtual_stages
    lists = [rule.order(rank, stages, virtual_stages, micro_batches) for rank in range(stages)]
    owner = chunk_ranks(name, stages, virtual_stages)
    zero = sum(map(len, lists))
    position: dict[tuple[Kind, int, int], int] = {}
    rows: list[tuple[int, int, int, int, bool, int]] = []
    last, index = [zero] * stages, [0] * stages
    while len(rows) < zero:
        progress = len(rows)
        for rank, actions in enumerate(lists):
            while index[rank] < len(actions):
                kind, chunk, micro_batch, _ = actions[index[rank]]
                source, travels = zero, False
                if kind is Kind.W:
                    source = position.get((Kind.B, chunk, micro_batch), -1)
                elif 0 <= (other := chunk - 1 if kind is Kind.F else chunk + 1) < chunks:
                    source = position.get((kind, other, micro_batch), -1)
                    travels = owner[other] != rank
                if source < 0:
                    break
                position[kind, chunk, micro_batch] = len(rows)
                rows.append((chunk, (Kind.F, Kind.B, Kind.W).index(kind), last[rank], source, travels, rank))
                last[rank] = len(rows) - 1
                index[rank] += 1
        if len(rows) == progress:
            raise AssertionError(f"schedule {name!r} deadlocks")  # tested never to happen
    return _Order(*zip(*rows, strict=True))


@dataclass(frozen=True)
class PipelineTime:
    """One step of a pipeline, in seconds."""

    total: float
    """Until the last rank has finished."""
    busy: tuple[float, ...]
    """Time each rank computes."""

    @property
    def bubble_fraction(self) -> float:
        """Idle time of all ranks as a fraction of their *total* time."""
        return max(0.0, 1.0 - sum(self.busy) / (len(self.busy) * self.total)) if self.total else 0.0


def pipeline_time(
    name: str,
    stages: int,
    virtual_stages: int,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float],
    send: float = 0.0,
) -> PipelineTime:
    """The time of a step.

    Args:
        name: Schedule.
        stages: Pipeline ranks.
        virtual_stages: Chunks per rank.
        micro_batches: Micro-batches of the step.
        forward: Time of F of every chunk.
        backward: Time of the whole backward of every chunk, weight gradients included.
        weight: The part of it that makes the gradients of the weights.
        send: Time that a message travels.
    """
    work = [f + b for f, b in zip(forward, backward, strict=True)]
    owners = chunk_ranks(name, stages, virtual_stages)
    busy = tuple(
        micro_batches * sum(w for w, owner in zip(work, owners, strict=True) if owner == rank) for rank in range(stages)
    )
    if stages == 1:
        return PipelineTime(busy[0], busy)
    if name not in SCHEDULES:
        # (p - 1)(F + B - 2W), where B leaves the weights' part of the backward out.
        each = [max(0.0, w - 3 * b) for w, b in zip(work, weight, strict=True)]
        fill = sum(each) - max(each) + 2 * (stages - 1) * send
        return PipelineTime(max(busy) + fill, busy)
    few = min(micro_batches, _ROUNDS * stages + micro_batches % stages)
    total = _run(name, stages, virtual_stages, few, forward, backward, weight, send)
    if few < micro_batches:
        # With unequal chunks rounds take turns in being longer and shorter: two of them, and never less than the work.
        shorter = _run(name, stages, virtual_stages, few - 2 * stages, forward, backward, weight, send)
        rate = max((total - shorter) / (2 * stages), max(busy) / micro_batches)
        total += (micro_batches - few) * rate
    return PipelineTime(total, busy)


def _run(
    name: str,
    stages: int,
    virtual_stages: int,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float],
    send: float,
) -> float:
    order = _order(name, stages, virtual_stages, micro_batches)
    if 2 in order.kind:
        backward = [b - w for b, w in zip(backward, weight, strict=True)]
    times = (forward, backward, weight)
    ends = [0.0] * (len(order.chunk) + 1)
    rows = zip(order.chunk, order.kind, order.before, order.needs, order.travels, strict=True)
    for position, (chunk, kind, before, needs, travels) in enumerate(rows):
        start, arrival = ends[before], ends[needs] + send if travels else ends[needs]
        ends[position] = (arrival if arrival > start else start) + times[kind][chunk]
    return max(ends)


def chunk_ranks(name: str, stages: int, virtual_stages: int) -> tuple[int, ...]:
    """Pipeline rank of every chunk."""
    return SCHEDULES[name if name in SCHEDULES else "1f1b"].placement(stages, virtual_stages)


def in_flight_chunks(name: str, rank: int, stages: int, virtual_stages: int, micro_batches: int) -> int:
    """Most activations that a rank keeps at once, in chunks x micro-batches."""
    if name == "zb_h2":
        return min(micro_batches, 2 * (stages - rank) - 1)
    known = name if name in SCHEDULES else "1f1b"
    return SCHEDULES[known].in_flight(rank, stages, virtual_stages, micro_batches)
