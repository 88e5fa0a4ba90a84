"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)."""

from __future__ import annotations

from lightning_3d.schedules.actions import Action, Kind


def order(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> list[Action]:
    """Compute order of one pipeline rank.

    Bubble as in 1F1B, but every rank keeps the activations of all micro-batches. Backwards run in the order of the
    forwards, so that gradients travel in that order too.
    """
    forwards = [Action(Kind.F, rank, i) for i in range(micro_batches)]
    backwards = [Action(Kind.B, rank, i) for i in range(micro_batches)]
    return forwards + backwards


def in_flight(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> int:
    """Most activations that ``rank`` keeps, in micro-batches: all of them."""
    return micro_batches
