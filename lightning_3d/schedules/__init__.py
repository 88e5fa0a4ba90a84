"""Pipeline schedules as plain data: pure functions from sizes to one list of actions per pipeline rank.

`build` makes one, `simulate` runs it on paper. A new schedule is a file with ``order`` and ``in_flight`` and a line in
`SCHEDULES`. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from lightning_3d.errors import ConfigError
from lightning_3d.schedules import gpipe, interleaved, one_f_one_b
from lightning_3d.schedules.actions import Action, Kind, Schedule
from lightning_3d.schedules.communication import with_communication
from lightning_3d.schedules.simulate import DeadlockError, Span, Timeline, peak_live, simulate

__all__ = [
    "SCHEDULES",
    "Action",
    "DeadlockError",
    "Kind",
    "Rule",
    "Schedule",
    "Span",
    "Timeline",
    "bubble_fraction",
    "build",
    "in_flight",
    "peak_live",
    "simulate",
]


@dataclass(frozen=True)
class Rule:
    """What makes a schedule; both functions take (rank, stages, virtual_stages, micro_batches)."""

    order: Callable[[int, int, int, int], list[Action]]
    """Compute actions of one pipeline rank in a training step."""
    in_flight: Callable[[int, int, int, int], int]
    """Most activations that a rank keeps at once, in chunks x micro-batches."""
    interleaves: bool = False
    """Whether a rank may hold more than one chunk."""


SCHEDULES: Mapping[str, Rule] = MappingProxyType(
    {
        "gpipe": Rule(gpipe.order, gpipe.in_flight),
        "1f1b": Rule(one_f_one_b.order, one_f_one_b.in_flight),
        "interleaved_1f1b": Rule(interleaved.order, interleaved.in_flight, interleaves=True),
    }
)
"""The known schedules by the name that users type."""


@lru_cache(maxsize=64)
def build(name: str, stages: int, virtual_stages: int, micro_batches: int, forward_only: bool = False) -> Schedule:
    """Make the schedule of one step.

    Args:
        name: A name in `SCHEDULES`.
        stages: Pipeline ranks.
        virtual_stages: Chunks per pipeline rank; chunk c is on rank ``c % stages``.
        micro_batches: Micro-batches in the step; any number, also fewer than stages.
        forward_only: Leave out the backward, for evaluation.

    Returns:
        The actions of all ranks. The same object for the same arguments.

    Raises:
        ConfigError: For an unknown name, a size below one, or several chunks per rank in a schedule without them.
    """
    rule = _rule(name, stages, virtual_stages, micro_batches)
    orders = (rule.order(rank, stages, virtual_stages, micro_batches) for rank in range(stages))
    compute = tuple(tuple(action for action in order if not forward_only or action.kind is Kind.F) for order in orders)
    placement = tuple(chunk % stages for chunk in range(stages * virtual_stages))
    return with_communication(Schedule(name, stages, virtual_stages, micro_batches, forward_only, placement, compute))


def bubble_fraction(name: str, stages: int, virtual_stages: int, micro_batches: int) -> float:
    """Fraction of a training step's *total* time that ranks wait, when all chunks take the same time and messages none.

    ``(p - 1) / (vm + p - 1)`` for m >= p (Narayanan et al. 2021, section 2.2, where it is given per ideal time);
    with fewer micro-batches than stages each waits for its own data between two chunks of a rank and the step takes
    ``vp + m - 1`` turns instead of ``vm + p - 1``. Equal to the simulation, whatever a backward costs.

    Raises:
        ConfigError: As `build`.
    """
    _rule(name, stages, virtual_stages, micro_batches)
    turns = virtual_stages * max(micro_batches, stages) + min(micro_batches, stages) - 1
    return 1.0 - virtual_stages * micro_batches / turns


def in_flight(name: str, stages: int, virtual_stages: int, micro_batches: int) -> tuple[int, ...]:
    """Most activations that each pipeline rank keeps at once in training, in chunks x micro-batches.

    Raises:
        ConfigError: As `build`.
    """
    rule = _rule(name, stages, virtual_stages, micro_batches)
    return tuple(rule.in_flight(rank, stages, virtual_stages, micro_batches) for rank in range(stages))


def _rule(name: str, stages: int, virtual_stages: int, micro_batches: int) -> Rule:
    """Look up a schedule and check the sizes for it."""
    known = ", ".join(repr(known) for known in SCHEDULES)
    if name not in SCHEDULES:
        raise ConfigError(f"schedule={name!r} is not known. Use one of {known}.")
    for what, size in (("stages", stages), ("virtual_stages", virtual_stages), ("micro_batches", micro_batches)):
        if size < 1:
            raise ConfigError(f"{what}={size} makes no pipeline schedule. Use 1 or more.")
    rule = SCHEDULES[name]
    if virtual_stages > 1 and not rule.interleaves:
        able = " or ".join(f"schedule={other!r}" for other in SCHEDULES if SCHEDULES[other].interleaves)
        raise ConfigError(
            f"schedule={name!r} runs one chunk per pipeline rank, but virtual_stages={virtual_stages}."
            f" Use virtual_stages=1 or {able}."
        )
    return rule
