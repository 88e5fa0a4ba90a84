"""Which ranks are slow, from what each did by itself: a slow rank makes the others wait, so waiting is no work.

Ranks are held against those that do the same: the other replicas and tensor-parallel ranks of their stage, and, where a
stage has one rank only, the other stages with their shares of the model. The score is a robust z-score: how many times
the usual spread a rank's median lies above that of the others, which it is left out of, so that one of two can stand
out. The spread is that of the others' medians (median absolute deviation, scaled as for a normal distribution), at
least the standard error that a difference of two such medians has by the scatter of single steps. 3.5 is the limit
that Iglewicz and Hoaglin (1993) recommend. The spread has a floor, a share of the usual step: what matters less than
that names nobody.
"""

from __future__ import annotations

import bisect
import math
import operator
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from lightning_3d.monitor.record import NAUGHT, Place, RankWindow, Spread, Straggler

LIMIT = 3.5
"""Least robust z-score of a rank that is named."""
LEAST_SHARE = 0.05
"""Least part of a step that a named rank loses the others."""
LEAST_S = 1e-3
"""Least seconds per step, for steps that are so short that a scheduler's tick is a large part of them."""
UNEQUAL = 0.3
"""Part of the expected time by which stages may differ: what they cost was estimated, not measured."""
FEWEST_STEPS = 4
"""Steps that a window needs; of fewer, a median says nothing."""

OWN = ("forward", "backward", "weight", "optimizer", "loader", "checkpoint", "other")
"""Phases in which a rank works for itself."""
WAITS = {"tp": ("pp", "dp"), "dp": ("pp", "tp")}
"""Phases that end on all ranks of a group at once: who waits least came last. With the axes that a group shares."""
_SCALE = 1.4826
"""Standard deviations of a normal distribution in a median absolute deviation."""
_MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""Standard error of the median of n values is this times their standard deviation over sqrt(n), for large n."""


class Outlier(NamedTuple):
    """A value that stands out."""

    rank: int
    """Index among the values."""
    value: float
    usual: float
    score: float


def outliers(values: Sequence[Spread], steps: int, floor: float, limit: float = LIMIT) -> list[Outlier]:
    """Those whose medians lie far above the others'.

    Args:
        values: One per rank.
        steps: Of how many steps each is the median.
        floor: Least value of the spread times ``limit``: least difference that counts, in the unit of the values.
        limit: Least score.

    Returns:
        Those found, with how many spreads they lie above the median of the others.
    """
    if len(values) < 2:
        return []
    medians = sorted(value.median for value in values)
    scatter = sorted(value.mad for value in values)
    deviations: dict[float, list[float]] = {}  # by the median of the others, of which there are three at most
    found = []
    for index, value in enumerate(values):
        usual = _median_without(medians, value.median)
        if usual not in deviations:
            deviations[usual] = sorted(abs(median - usual) for median in medians)
        between = _median_without(deviations[usual], abs(value.median - usual))
        within = math.hypot(value.mad, _median_without(scatter, value.mad))
        spread = max(_SCALE * max(between, _MEDIAN_ERROR * within / math.sqrt(steps)), floor / limit)
        score = (value.median - usual) / spread if spread > 0 else 0.0
        if score >= limit:
            found.append(Outlier(index, value.median, usual, score))
    return found


def _median_without(ordered: Sequence[float], value: float) -> float:
    """The median of all but one; of thousands of ranks, each is left out once, and they are sorted once."""
    hole = bisect.bisect_left(ordered, value)

    def at(index: int) -> float:
        return ordered[index + (index >= hole)]

    middle, is_odd = divmod(len(ordered) - 1, 2)
    return at(middle) if is_odd else (at(middle - 1) + at(middle)) / 2


def stragglers(
    windows: Sequence[RankWindow], places: Sequence[Place], shares: Sequence[float] = (), limit: float = LIMIT
) -> list[Straggler]:
    """The slow ranks of a window of steps, worst first, each with the phase in which it loses most.

    Args:
        windows: What every rank did, in the order of ``places``.
        places: Where they are.
        shares: Share of every stage in the cost of the model; empty if not known.
        limit: Least robust z-score.
    """
    if any(window.steps < FEWEST_STEPS for window in windows) or len(windows) != len(places):
        return []
    step = statistics.median(window.usual_s or window.step_s for window in windows)
    steps = min(window.steps for window in windows)
    floor = max(LEAST_SHARE * step, LEAST_S)
    found: dict[int, Straggler] = {}

    def name(rank: int, phase: str, outlier: Outlier) -> None:
        worse = Straggler(
            place=places[rank],
            phase=phase,
            seconds=outlier.value,
            usual=outlier.usual,
            score=round(outlier.score, 1),
            step_s=step,
        )
        if rank not in found or worse.excess > found[rank].excess:
            found[rank] = worse

    for phase in OWN:
        values = [_own(window, phase) for window in windows]
        for ranks in _groups(places, _worker(phase)):
            if len(ranks) > 1:
                for outlier in outliers([values[rank] for rank in ranks], steps, floor, limit):
                    name(ranks[outlier.rank], phase, outlier)
        if phase in ("forward", "backward", "weight"):
            for rank, outlier in _lonely(values, places, shares, steps, floor, limit):
                name(rank, phase, outlier)
    for phase, axes in WAITS.items():
        values = [window.seconds.get(phase, NAUGHT) for window in windows]
        for ranks in _groups(places, operator.attrgetter(*axes)):
            longest = max(values[rank].median for rank in ranks)
            late = [Spread(0.0, longest - values[rank].median, values[rank].mad) for rank in ranks]
            for outlier in outliers(late, steps, floor, limit) if len(ranks) > 1 else ():
                if ranks[outlier.rank] not in found:
                    name(ranks[outlier.rank], "entry", outlier)
    return sorted(found.values(), key=lambda straggler: -straggler.excess)


def message(found: Sequence[Straggler]) -> str:
    """What a person reads about the slow ranks of one window."""
    lines = []
    for one in found:
        what = "comes to collectives" if one.phase == "entry" else f"takes {one.seconds * 1e3:.1f} ms for {one.phase}"
        than = f"{one.excess * 1e3:.1f} ms after" if one.phase == "entry" else f"against {one.usual * 1e3:.1f} ms of"
        lines.append(
            f"{one.place} {what} {than} its peers in every step: {one.excess / one.step_s:.0%} of a step of"
            f" {one.step_s * 1e3:.1f} ms (robust z-score {one.score:.1f}, steps {one.first_step} to {one.last_step})"
        )
    return "\n".join(lines)


def _own(window: RankWindow, phase: str) -> Spread:
    # All ranks wait for the slowest loader; it shows in what each waits for its own.
    return window.reading if phase == "loader" else window.seconds.get(phase, NAUGHT)


def _worker(phase: str) -> Callable[[Place], Hashable]:
    """The key of ranks that do the same work in a phase: only the first rank of a replica reads data."""
    if phase == "loader":
        return lambda place: place.pp == 0 and place.tp == 0
    return lambda place: place.pp


def _groups(places: Sequence[Place], key: Callable[[Place], Hashable]) -> list[list[int]]:
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, place in enumerate(places):
        groups[key(place)].append(index)
    return list(groups.values())


def _lonely(
    values: Sequence[Spread],
    places: Sequence[Place],
    shares: Sequence[float],
    steps: int,
    floor: float,
    limit: float,
) -> list[tuple[int, Outlier]]:
    """Stages of one rank each, against each other, by what their part of the model should cost."""
    stages = _groups(places, lambda place: place.pp)
    if any(len(ranks) > 1 for ranks in stages) or len(stages) < 2 or len(shares) != len(stages) or not all(shares):
        return []
    even = 1 / len(stages)
    scaled = [
        Spread(*(part * even / shares[place.pp] for part in value)) for value, place in zip(values, places, strict=True)
    ]
    usual = statistics.median(value.median for value in scaled)
    return [(outlier.rank, outlier) for outlier in outliers(scaled, steps, max(floor, UNEQUAL * usual), limit)]
