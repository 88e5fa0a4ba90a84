"""The figures of a whole run, from its record: where the time of a step went on every rank, without its first steps."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lightning_3d.config import Sizes
from lightning_3d.errors import ConfigError
from lightning_3d.monitor.figures import COMPUTE, Figures, figures
from lightning_3d.monitor.record import Entry, Leak, Place, Run, Straggler, Window, mean_rank_window, mean_window


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A rank that was named in one window or several."""

    place: Place
    phase: str
    excess_s: float
    """Seconds per step that it took more than its peers, mean of the windows in which it was named."""
    windows: int


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """One run, as the report sees it."""

    run: Run
    windows: tuple[Window, ...]
    """Each with the mean of its ranks in place of them."""
    job: Figures
    """Speed, bubble, shares of time and memory, mean of the windows."""
    seconds: tuple[dict[str, float], ...]
    """Of every rank, mean time of a batch by phase."""
    usual: tuple[dict[str, float], ...]
    """Of every rank, median time of a batch by phase: what a few long ones do not change."""
    usual_s: float
    """Median time of a batch."""
    micro_batches: float
    samples: float
    """Of a replica, per batch; mean."""
    slow: tuple[Slow, ...]
    """Worst first."""
    leaks: tuple[Leak, ...] = field(default=())
    """The last of every rank, fastest first."""

    @property
    def step_s(self) -> float:
        """Mean time of a batch."""
        return self.job.step_s

    @property
    def num_windows(self) -> int:
        """Windows of the run, in each of which ranks were looked at."""
        return sum(window.windows for window in self.windows)

    @property
    def memory_peak(self) -> tuple[int, ...]:
        """Of every rank, bytes; where only what is in use is known, the most of that."""
        return tuple(map(max, self.job.memory_peak, self.job.memory))

    @property
    def places(self) -> tuple[Place, ...]:
        """All ranks."""
        return self.run.places

    def mean(self, phase: str) -> float:
        """Mean over ranks of the seconds of a phase."""
        return statistics.fmean(seconds.get(phase, 0.0) for seconds in self.seconds)

    def exposed(self, phase: str, axes: Sequence[str]) -> float:
        """Seconds that messages of a phase themselves cost, without waiting for ranks that come late.

        All ranks of a group leave a collective at about the same time: who comes last waits for the transfer alone.

        Args:
            phase: Such as ``"tp"``.
            axes: Of the mesh, whose indices the ranks of a group share.
        """
        groups: defaultdict[tuple[int, ...], list[float]] = defaultdict(list)
        for place, seconds in zip(self.places, self.seconds, strict=True):
            groups[tuple(getattr(place, axis) for axis in axes)].append(seconds.get(phase, 0.0))
        return statistics.fmean(min(values) for values in groups.values())

    def stage_seconds(self, phases: Sequence[str] = COMPUTE) -> list[float]:
        """Seconds per batch of every stage in these phases, of its ranks that are not slow; with its messages of tp.

        Messages of tensor parallelism lie within forwards and backwards, and are shared out among them by their time.
        """
        slow = {one.place.rank for one in self.slow}
        result = []
        for stage in range(self.run.sizes[0]):
            ranks = [place.rank for place in self.places if place.pp == stage]
            healthy = [rank for rank in ranks if rank not in slow] or ranks
            values = []
            for rank in healthy:
                mine = self.seconds[rank]
                own = sum(mine.get(phase, 0.0) for phase in phases)
                every = sum(mine.get(phase, 0.0) for phase in COMPUTE) or 1.0
                values.append(own + mine.get("tp", 0.0) * own / every)
            result.append(statistics.median(values))
        # A stage of one rank that is slow has no healthy peer: what it takes too much is known.
        for one in self.slow:
            alone = sum(place.pp == one.place.pp for place in self.places) == 1
            if alone and one.phase in phases:
                result[one.place.pp] = max(0.0, result[one.place.pp] - one.excess_s)
        return result


def figures_of(entries: Iterable[Entry]) -> RunFigures:
    """The figures of the last run in a record.

    Raises:
        ConfigError: The run ended before its first window.
    """
    run: Run | None = None
    windows: list[Window] = []
    whole: Window | None = None
    found: list[Straggler] = []
    leaks: dict[tuple[int, str], Leak] = {}
    for entry in entries:
        if isinstance(entry, Run):
            run = entry
            windows, whole, found, leaks = [], None, [], {}
        elif isinstance(entry, Window):  # of thousands of ranks only one window at a time has a place in memory
            windows.append(dataclasses.replace(entry, ranks=(mean_rank_window(entry.ranks),)))
            whole = mean_window((entry,) if whole is None else (whole, entry))
        elif isinstance(entry, Straggler):
            found.append(entry)
        else:
            leaks[entry.place.rank, entry.kind] = entry
    ranks = () if whole is None else whole.ranks
    job = None if run is None or whole is None else figures(ranks, Sizes(*run.sizes))
    if run is None or job is None:
        raise ConfigError(
            "The run has written down no window of steps: it was killed before the first was full, or trained on fewer"
            " batches than tell anything (3 are left out, 4 are the least). Train longer, or use"
            " ThreeDMonitor(window=4)."
        )
    readers = [rank for rank, place in zip(ranks, run.places, strict=True) if place.pp == 0 and place.tp == 0]
    found = [one for one in found if one.last_step <= windows[-1].last_step]  # of windows that are written
    return RunFigures(
        run=run,
        windows=tuple(windows),
        job=job,
        seconds=tuple({name: spread.mean for name, spread in rank.seconds.items()} for rank in ranks),
        usual=tuple({name: spread.median for name, spread in rank.seconds.items()} for rank in ranks),
        usual_s=statistics.median(rank.usual_s for rank in ranks),
        micro_batches=statistics.fmean(rank.micro_batches for rank in ranks),
        samples=statistics.fmean(rank.samples for rank in readers),
        slow=_slow(found),
        leaks=tuple(sorted(leaks.values(), key=lambda leak: -leak.bytes_per_step)),
    )


def _slow(found: Iterable[Straggler]) -> tuple[Slow, ...]:
    groups: defaultdict[tuple[int, str], list[Straggler]] = defaultdict(list)
    for one in found:
        groups[one.place.rank, one.phase].append(one)
    slow = [
        Slow(
            place=group[-1].place,
            phase=phase,
            excess_s=statistics.fmean(one.excess for one in group),
            windows=len(group),
        )
        for (_, phase), group in groups.items()
    ]
    return tuple(sorted(slow, key=lambda one: -one.excess_s * one.windows))
