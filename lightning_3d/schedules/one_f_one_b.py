"""1F1B: a warm-up, then one forward and one backward in turn (PipeDream-Flush, arXiv:2006.09503)."""

from __future__ import annotations

from lightning_3d.schedules.actions import Action, Kind


def order(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> list[Action]:
    """Compute order of one pipeline rank.

    A rank runs as many forwards ahead as there are ranks behind it: the first backward reaches it just when it is done
    with them. From then on each forward is followed by the oldest backward.
    """
    forwards = [Action(Kind.F, rank, i) for i in range(micro_batches)]
    backwards = [Action(Kind.B, rank, i) for i in range(micro_batches)]
    warm_up = min(micro_batches, stages - 1 - rank)
    steady = [action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair]
    return forwards[:warm_up] + steady + backwards[micro_batches - warm_up :]


def in_flight(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> int:
    """Most activations that ``rank`` keeps, in micro-batches: ``min(m, p - rank)``."""
    return min(micro_batches, stages - rank)
