"""Pipeline schedules as plain data: pure functions from sizes to one list of actions per pipeline rank.

`build` makes one, `simulate` runs it on paper. A new schedule is a file with ``order`` and ``in_flight`` and a line in
`SCHEDULES`. `ENGINE_SCHEDULES` names those that can train; the others are for simulation and planning. Nothing here
imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from lightning_3d.errors import ConfigError
from lightning_3d.schedules import gpipe, interleaved, one_f_one_b, zero_bubble
from lightning_3d.schedules.actions import Action, Kind, Schedule
from lightning_3d.schedules.communication import with_communication
from lightning_3d.schedules.simulate import DeadlockError, Message, Span, Timeline, peak_live, simulate

__all__ = [
    "ENGINE_SCHEDULES",
    "SCHEDULES",
    "Action",
    "DeadlockError",
    "Kind",
    "Message",
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


def _in_turn(stages: int, virtual_stages: int) -> tuple[int, ...]:
    return tuple(chunk % stages for chunk in range(stages * virtual_stages))


def _one_backward(stages: int, virtual_stages: int, micro_batches: int) -> float:
    turns = virtual_stages * max(micro_batches, stages) + min(micro_batches, stages) - 1
    return 1.0 - virtual_stages * micro_batches / turns


@dataclass(frozen=True)
class Rule:
    """What makes a schedule; the first two functions take (rank, stages, virtual_stages, micro_batches)."""

    order: Callable[[int, int, int, int], list[Action]]
    """Compute actions of one pipeline rank in a training step."""
    in_flight: Callable[[int, int, int, int], int]
    """Most activations that a rank keeps at once, in chunks x micro-batches."""
    virtual_stages: int | None = 1
    """Chunks that a rank holds; None where any number will do."""
    bubble_fraction: Callable[[int, int, int], float] = _one_backward
    """From (stages, virtual_stages, micro_batches); see `bubble_fraction`."""
    placement: Callable[[int, int], tuple[int, ...]] = _in_turn
    """From (stages, virtual_stages) the pipeline rank of each chunk."""
    splits_backward: bool = False
    """Whether the gradients of weights are actions of their own, W."""
    engine: bool = True
    """Whether the engine can run it; if not, it is for simulation and planning."""


SCHEDULES: Mapping[str, Rule] = MappingProxyType(
    {
        "gpipe": Rule(gpipe.order, gpipe.in_flight),
        "1f1b": Rule(one_f_one_b.order, one_f_one_b.in_flight),
        "interleaved_1f1b": Rule(interleaved.order, interleaved.in_flight, virtual_stages=None),
        "zb_h1": Rule(
            zero_bubble.h1_order,
            zero_bubble.h1_in_flight,
            bubble_fraction=zero_bubble.h1_bubble_fraction,
            splits_backward=True,
            engine=False,
        ),
        "zbv": Rule(
            zero_bubble.v_order,
            zero_bubble.v_in_flight,
            virtual_stages=2,
            bubble_fraction=zero_bubble.v_bubble_fraction,
            placement=zero_bubble.v_placement,
            splits_backward=True,
            engine=False,
        ),
    }
)
"""The known schedules by the name that users type."""

ENGINE_SCHEDULES: tuple[str, ...] = tuple(name for name, rule in SCHEDULES.items() if rule.engine)
"""Names of the schedules that the engine can run."""


@lru_cache(maxsize=64)
def build(name: str, stages: int, virtual_stages: int, micro_batches: int, forward_only: bool = False) -> Schedule:
    """Make the schedule of one step.

    Args:
        name: A name in `SCHEDULES`.
        stages: Pipeline ranks.
        virtual_stages: Chunks per pipeline rank; chunk c is on rank ``c % stages``, save in ``zbv``.
        micro_batches: Micro-batches in the step; any number, also fewer than stages.
        forward_only: Leave out the backward, for evaluation.

    Returns:
        The actions of all ranks. The same object for the same arguments.

    Raises:
        ConfigError: For an unknown name, a size below one, or a number of chunks per rank that the schedule cannot run.
    """
    rule = _rule(name, stages, virtual_stages, micro_batches)
    orders = (rule.order(rank, stages, virtual_stages, micro_batches) for rank in range(stages))
    compute = tuple(tuple(action for action in order if not forward_only or action.kind is Kind.F) for order in orders)
    placement = rule.placement(stages, virtual_stages)
    return with_communication(Schedule(name, stages, virtual_stages, micro_batches, forward_only, placement, compute))


def bubble_fraction(name: str, stages: int, virtual_stages: int, micro_batches: int) -> float:
    """Fraction of a training step's *total* time that ranks wait, when all chunks take the same time and messages none.

    ``(p - 1) / (vm + p - 1)`` for m >= p (Narayanan et al. 2021, section 2.2, where it is given per ideal time);
    with fewer micro-batches than stages each waits for its own data between two chunks of a rank and the step takes
    ``vp + m - 1`` turns instead of ``vm + p - 1``. Equal to the simulation, whatever a backward costs; where the
    backward is split (`Rule.splits_backward`), if F, B and W take the same time.

    Raises:
        ConfigError: As `build`.
    """
    return _rule(name, stages, virtual_stages, micro_batches).bubble_fraction(stages, virtual_stages, micro_batches)


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
    if rule.virtual_stages not in (None, virtual_stages):
        able = " or ".join(f"schedule={name!r}" for name, other in SCHEDULES.items() if other.virtual_stages is None)
        chunks = "one chunk" if rule.virtual_stages == 1 else f"{rule.virtual_stages} chunks"
        raise ConfigError(
            f"schedule={name!r} runs {chunks} per pipeline rank, but virtual_stages={virtual_stages}."
            f" Use virtual_stages={rule.virtual_stages} or {able}."
        )
    return rule
