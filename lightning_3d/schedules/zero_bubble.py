"""Zero-bubble schedules: weight gradients are put off and fill the bubble (Qi et al. 2024, arXiv:2401.10241).

The backward of a chunk is two actions: B makes the gradients of its inputs, which the previous chunk waits for; W makes
those of its weights, which nobody waits for before the optimizer's step.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import count

from lightning_3d.schedules.actions import Action, Kind


def h1_order(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> list[Action]:
    """Compute order of one pipeline rank under ZB-H1, which keeps as many activations as 1F1B's first rank.

    As 1F1B, with every W put off by ``rank`` micro-batches: later ranks have fewer activations waiting for their B, and
    may keep as many more waiting for their W.
    """
    warm_up = min(micro_batches, stages - 1 - rank)
    order = [Action(Kind.F, rank, i) for i in range(warm_up)]
    for i in range(micro_batches):
        if warm_up + i < micro_batches:
            order.append(Action(Kind.F, rank, warm_up + i))
        order.append(Action(Kind.B, rank, i))
        if i >= rank:
            order.append(Action(Kind.W, rank, i - rank))
    return order + [Action(Kind.W, rank, i) for i in range(max(0, micro_batches - rank), micro_batches)]


def h1_in_flight(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> int:
    """Most activations that ``rank`` keeps, in micro-batches: ``min(m, p)`` on every rank."""
    return min(micro_batches, stages)


def h1_bubble_fraction(stages: int, virtual_stages: int, micro_batches: int) -> float:
    """Idle fraction of a step's total time where F, B and W take the same time: ``(p - 1) / (3m + p - 1)`` for m >= p.

    The idle time is ``(p - 1)(F + B - W)`` (Table 1 of the paper); with m < p there are ``p - m`` turns more.
    """
    idle = stages - 1 + max(0, stages - micro_batches)
    return idle / (3 * micro_batches + idle)


def v_placement(stages: int, virtual_stages: int) -> tuple[int, ...]:
    """Pipeline rank of each chunk: down the ranks and up again, so the first rank computes the loss too."""
    return (*range(stages), *reversed(range(stages)))


def v_order(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> list[Action]:
    """Compute order of one pipeline rank under ZB-V (section 6 of the paper).

    No rank waits once it has begun if F, B and W take equal times and there are at least ``2p - 1`` micro-batches; with
    fewer it is that order without the micro-batches that are missing.
    """
    down, up = rank, 2 * stages - 1 - rank
    numbers: defaultdict[tuple[Kind, int], count[int]] = defaultdict(count)
    taken: defaultdict[tuple[Kind, int], int] = defaultdict(int)
    order: list[Action] = []

    def take(chunk: int, *kinds: Kind) -> None:
        for kind in kinds:
            order.append(Action(kind, chunk, next(numbers[kind, chunk])))
            taken[kind, chunk] += 1

    total = max(2 * stages - 1, micro_batches)
    for _ in range(2 * (stages - rank) - 1):
        take(down, Kind.F)
    for _ in range(rank):
        take(up, Kind.F)
        take(down, Kind.F)
    for _ in range(stages - rank):
        take(up, Kind.F, Kind.B, Kind.W)
    while taken[Kind.F, up] < total:
        take(down, *((Kind.F,) if taken[Kind.F, down] < total else ()), Kind.B, Kind.W)
        take(up, Kind.F, Kind.B, Kind.W)
    for _ in range(rank):
        take(down, Kind.B)
        take(up, Kind.B)
    for _ in range(stages - rank):
        take(down, Kind.B, Kind.W)
    for chunk in (up, down):
        take(chunk, *(Kind.W,) * (total - taken[Kind.W, chunk]))
    return [action for action in order if action.micro_batch < micro_batches]


def v_in_flight(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> int:
    """Most activations that ``rank`` keeps, in chunks x micro-batches: ``2p``, as much as 1F1B's first rank."""
    return min(micro_batches + rank + 1, 2 * micro_batches, 2 * stages)


def v_bubble_fraction(stages: int, virtual_stages: int, micro_batches: int) -> float:
    """Idle fraction of a step's total time where F, B and W take the same time: ``(p - 1) / (6m + p - 1)`` or more.

    What is left is that later ranks begin later, by one turn of a chunk each; the paper counts it as zero, because the
    next step may begin before this one has ended everywhere. Below ``m = 2p - 1`` ranks wait inside the step.
    """
    idle = max(stages - 1, 2 * (2 * stages - 1 - micro_batches))
    return idle / (6 * micro_batches + idle)
