"""The figures of a job over a window of steps, from what every rank did: speed, bubble, shares of time, memory."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_3d.config import Sizes
from lightning_3d.mesh import coordinates
from lightning_3d.monitor.record import RankWindow

COMPUTE = ("forward", "backward", "weight")
SHARES = ("compute", "tp", "pp", "dp", "loader", "other")
"""What the time of a step is divided into."""


class Slowest(NamedTuple):
    """The rank that spends most time on something."""

    rank: int
    excess_s: float
    """Seconds per step more than the median of the ranks that do the same kind of thing."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A job over a window of steps. A step is a batch; validation in the midst of it is left out."""

    step_s: float
    samples_per_s: float
    """Of all replicas."""
    tokens_per_s: float | None
    """Of all replicas; ``None`` where the tokens of a batch are not known."""
    num_ranks: int
    bubble: tuple[float, ...]
    """Of every rank, the share of the pipeline's time (that of the stage that takes longest) in which it did not
    work; empty without a pipeline."""
    shares: tuple[Mapping[str, float], ...]
    """Of every rank, the shares of a step by :data:`SHARES`; they sum to 1."""
    memory: tuple[int, ...]
    """Of every rank, bytes in use."""
    memory_peak: tuple[int, ...]
    slowest: Mapping[str, Slowest]
    """By what: ``"compute"``, ``"optimizer"`` and, of ranks that read data, ``"loader"``; where one takes longest."""

    @property
    def mean_shares(self) -> dict[str, float]:
        """Shares of a step, mean over ranks."""
        return {name: statistics.fmean(share[name] for share in self.shares) for name in SHARES}

    @property
    def tokens_per_s_per_rank(self) -> float | None:
        """Tokens per second and device."""
        return None if self.tokens_per_s is None else self.tokens_per_s / self.num_ranks


def figures(ranks: Sequence[RankWindow], sizes: Sizes, tokens_per_sample: float | None = None) -> Figures | None:
    """The figures of the job from those of its ranks.

    Args:
        ranks: One window per rank, in order.
        sizes: Of the mesh.
        tokens_per_sample: Where given, tokens are counted by it and not by the batch's ids.

    Returns:
        The figures, or ``None`` where a rank knows the times of no step yet.
    """
    if not all(rank.steps for rank in ranks):
        return None
    step = statistics.fmean(rank.step_s for rank in ranks)
    places = [coordinates(index, sizes) for index in range(len(ranks))]
    readers = [rank for rank, (pp, _, tp) in zip(ranks, places, strict=True) if pp == tp == 0]
    samples = sum(rank.samples for rank in readers)
    tokens = samples * tokens_per_sample if tokens_per_sample is not None else sum(rank.tokens for rank in readers)
    longest: dict[tuple[int, int], float] = {}
    for rank, (_, dp, tp) in zip(ranks, places, strict=True):
        longest[dp, tp] = max(longest.get((dp, tp), 0.0), rank.pipeline_s)
    whole = [longest[dp, tp] for _, dp, tp in places]
    pipelined = sizes.pp > 1 and all(whole)
    return Figures(
        step_s=step,
        samples_per_s=samples / step,
        tokens_per_s=tokens / step if tokens else None,
        num_ranks=len(ranks),
        bubble=tuple(1 - rank.busy_s / length for rank, length in zip(ranks, whole, strict=True)) if pipelined else (),
        shares=tuple(_shares(rank, length - rank.pipeline_s) for rank, length in zip(ranks, whole, strict=True)),
        memory=tuple(rank.memory for rank in ranks),
        memory_peak=tuple(rank.memory_peak for rank in ranks),
        slowest=_slowest(ranks, readers),
    )


def utilisation(figures: Figures, flops_per_sample: float, peak_flops: float) -> float:
    """Model-FLOPs utilisation: operations that the samples need, over those that all devices could have done.

    Args:
        figures: Of the job.
        flops_per_sample: Forward and backward, nothing that is computed twice.
        peak_flops: Of one device, per second.
    """
    return figures.samples_per_s * flops_per_sample / (figures.num_ranks * peak_flops)


def _shares(rank: RankWindow, drain: float) -> Mapping[str, float]:
    """Shares of a step.

    Args:
        rank: Its window.
        drain: Seconds that the pipeline runs on after this rank's part of it; it spends them waiting for what all
            ranks do together next, and so they are the pipeline's.
    """
    seconds = {name: spread.mean for name, spread in rank.seconds.items()}
    found = {name: seconds.get(name, 0.0) for name in ("tp", "dp", "loader")}
    found["compute"] = sum(seconds.get(name, 0.0) for name in COMPUTE)
    found["pp"] = seconds.get("pp_wait", 0.0) + min(max(0.0, drain), seconds.get("sync", 0.0))
    total = sum(seconds.values()) or 1.0
    shares = {name: value / total for name, value in found.items()}
    return {**shares, "other": 1.0 - sum(shares.values())}


def _slowest(ranks: Sequence[RankWindow], readers: Sequence[RankWindow]) -> dict[str, Slowest]:
    def took(*names: str) -> list[tuple[float, int]]:
        return [(sum(rank.seconds[name].mean for name in names if name in rank.seconds), rank.rank) for rank in ranks]

    # All wait for the slowest loader; it shows in what each reader waits for its own.
    reading = [(rank.reading.mean, rank.rank) for rank in readers]
    found = {}
    for name, values in (("compute", took(*COMPUTE)), ("loader", reading), ("optimizer", took("optimizer"))):
        most, rank = max(values, key=lambda value: value[0])
        excess = most - statistics.median(seconds for seconds, _ in values)
        if excess > 0:  # all that wait for one another wait alike: none of them is the slowest
            found[name] = Slowest(rank, excess)
    return found
