"""What a run writes about itself while it trains: ``monitor/record.jsonl`` in its log folder, one JSON object a line.

Each names its ``"entry"``: ``"run"`` once at the start of every run (a resumed one adds another), then a ``"window"``
every N steps with the figures of all ranks (later one for several), and a ``"straggler"`` or a ``"leak"`` where one was
found. Only rank 0 writes, line by line, so that a run that dies leaves what it had. ``lightning-3d report`` reads it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lightning_3d.errors import ConfigError

FILE = Path("monitor", "record.jsonl")
"""Where it lies in the log folder."""

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Who and where a rank is."""

    rank: int
    host: str
    pp: int
    dp: int
    tp: int
    device: str = "cpu"
    """Name of its device, such as ``"NVIDIA H200"``."""
    memory_bytes: int = 0
    """Memory of its device; 0 where that is not known."""
    clock_offset_s: float = 0.0
    """Add it to a time of this rank's calendar clock to have that of rank 0."""

    def __str__(self) -> str:
        return f"rank {self.rank} (pp{self.pp} dp{self.dp} tp{self.tp}) on {self.host}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """What does not change while a run trains."""

    started: float
    """Seconds since 1970."""
    places: tuple[Place, ...]
    """All ranks, in order."""
    schedule: str = "1f1b"
    virtual_stages: int = 1
    num_micro_batches: int | None = None
    """As far as it is known before the first batch."""
    shares: tuple[float, ...] = ()
    """Share of every stage in the cost of the model, as planned; empty without a pipeline."""
    zero_stage: int = 1
    sequence_parallel: bool = False
    activation_checkpointing: str | int | None = None
    accumulated: int = 1
    """Batches per optimizer step."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Ranks along pp, dp and tp."""
        return (
            1 + max(place.pp for place in self.places),
            1 + max(place.dp for place in self.places),
            1 + max(place.tp for place in self.places),
        )


class Spread(NamedTuple):
    """Values of several steps, in short."""

    mean: float
    median: float
    mad: float
    """Median absolute deviation from the median."""


NAUGHT = Spread(0.0, 0.0, 0.0)
"""No time at all."""


@dataclass(frozen=True, kw_only=True)
class RankWindow:
    """What one rank did in a window of steps."""

    rank: int
    steps: int
    """Steps whose times were known when the window closed."""
    step_s: float = 0.0
    """Mean time of a step."""
    usual_s: float = 0.0
    """Median time of a step, which a few long ones do not change; 0 where only the mean was written down."""
    seconds: Mapping[str, Spread] = field(default_factory=dict)
    """Time of a step by phase, without what lies within it and is of another phase; ``"other"`` is the rest."""
    micro_batches: float = 0.0
    """Mean per step."""
    samples: float = 0.0
    """Of its replica, mean per step."""
    tokens: float = 0.0
    pipeline_s: float = 0.0
    """Mean per step, from this rank's first action of the pipeline to its last; 0 without a pipeline."""
    busy_s: float = 0.0
    """Of that, time in forwards and backwards, without the waits for other stages within them."""
    reading: Spread = NAUGHT
    """Time of a step in which this rank itself waited for its data loader; ``seconds["loader"]`` also has the wait for
    the loaders of other replicas."""
    memory: int = 0
    """Bytes in use at the end of the window: of the device's allocator, or of the process on a CPU."""
    memory_peak: int = 0


@dataclass(frozen=True, kw_only=True)
class Window:
    """What all ranks did in a window of steps."""

    first_step: int
    last_step: int
    wall: float
    """Seconds since 1970 when it closed."""
    ranks: tuple[RankWindow, ...]
    windows: int = 1
    """Windows of the run that it is the mean of."""


def mean_rank_window(windows: Sequence[RankWindow]) -> RankWindow:
    """One window out of several of a rank, each by its number of steps; of memory the most."""
    steps = sum(window.steps for window in windows)

    def mean(values: Iterable[float]) -> float:
        return sum(value * window.steps for value, window in zip(values, windows, strict=True)) / max(1, steps)

    def spread(values: Sequence[Spread]) -> Spread:
        return Spread(*(mean(value[part] for value in values) for part in range(3)))

    names = sorted({name for window in windows for name in window.seconds})
    return RankWindow(
        rank=windows[0].rank,
        steps=steps,
        step_s=mean(window.step_s for window in windows),
        usual_s=mean(window.usual_s or window.step_s for window in windows),
        seconds={name: spread([window.seconds.get(name, NAUGHT) for window in windows]) for name in names},
        micro_batches=mean(window.micro_batches for window in windows),
        samples=mean(window.samples for window in windows),
        tokens=mean(window.tokens for window in windows),
        pipeline_s=mean(window.pipeline_s for window in windows),
        busy_s=mean(window.busy_s for window in windows),
        reading=spread([window.reading for window in windows]),
        memory=max(window.memory for window in windows),
        memory_peak=max(window.memory_peak for window in windows),
    )


def mean_window(windows: Sequence[Window]) -> Window:
    """One window out of several that follow each other."""
    return Window(
        first_step=windows[0].first_step,
        last_step=windows[-1].last_step,
        wall=windows[-1].wall,
        ranks=tuple(mean_rank_window(ranks) for ranks in zip(*(window.ranks for window in windows), strict=True)),
        windows=sum(window.windows for window in windows),
    )


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that stands out from those that do the same work."""

    place: Place
    phase: str
    seconds: float
    """Median time of a step in this phase; for ``"entry"``, time by which it comes late to collectives."""
    usual: float
    """The same of its peers."""
    score: float
    """Robust z-score."""
    step_s: float
    """Median time of a step."""
    first_step: int = 0
    last_step: int = 0

    @property
    def excess(self) -> float:
        """Seconds per step that it takes more than its peers."""
        return self.seconds - self.usual


class Growth(NamedTuple):
    """A kind of allocation that has become more."""

    what: str
    """Such as ``"Tensor float32 [256, 1024] on cpu"``."""
    more: int
    """How many more there are."""
    bytes: int
    where: str = ""
    """Who holds it, or which line made it, where that can be told."""


@dataclass(frozen=True, kw_only=True)
class Leak:
    """Memory of a rank that grows though the shapes of its batches do not change."""

    place: Place
    kind: str
    """``"device"`` or ``"process"``."""
    bytes_per_step: float
    bytes: int
    """In use at the end."""
    first_step: int
    last_step: int
    grown: tuple[Growth, ...] = ()
    """What has become more, largest first; empty where the allocator does not tell."""


_RUN = '{"entry":"run",'
"""How the line of a run begins."""
_LINES = 50
"""Windows in the record after which each next line is the mean of twice as many."""
_KINDS: dict[str, type] = {"run": Run, "window": Window, "straggler": Straggler, "leak": Leak}
Entry = Run | Window | Straggler | Leak


class Writer:
    """Adds lines to the record of a run; used on rank 0.

    A window has a few hundred bytes for every rank. After some the mean of two is written in their place, then that of
    four and so on: a run of a month on thousands of ranks leaves a file that can be read.

    Args:
        folder: The log folder of the run.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder, FILE)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._held: Window | None = None
        self._together = 1
        """Windows that become one line."""
        self._lines = 0
        if self.path.exists():
            _end_line(self.path)

    def write(self, entry: Entry) -> None:
        """Add an entry; it is in the file when this returns, but for a window that waits for others."""
        if not isinstance(entry, Window):
            self._add(entry)
            return
        # One by one: thousands of ranks by hundreds of windows have no place in memory.
        self._held = entry if self._held is None else mean_window((self._held, entry))
        if self._held.windows == self._together:
            self.flush()
            self._lines += 1
            self._together *= 1 if self._lines % _LINES else 2

    def flush(self) -> None:
        """Write the windows that wait."""
        held, self._held = self._held, None
        if held is not None:
            self._add(held)

    def _add(self, entry: Entry) -> None:
        kind = next(name for name, of in _KINDS.items() if isinstance(entry, of))
        line = json.dumps({"entry": kind, **vars(entry)}, separators=(",", ":"), default=vars)
        with self.path.open("a") as file:
            file.write(line + "\n")


def _end_line(path: Path) -> None:
    """What a killed process was writing must not become one with what follows."""
    with path.open("r+b") as file:
        if file.seek(0, os.SEEK_END) > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def read(folder: str | Path) -> Iterator[Entry]:
    """The entries of a run, in order.

    Raises:
        ConfigError: There is no record in the folder, or its lines are something else.
    """
    path = find(folder)
    with path.open() as file:
        for number, line in enumerate(file, 1):
            try:
                values = json.loads(line)
            except json.JSONDecodeError:
                continue  # the last line of a process that was killed
            kind = values.pop("entry", None) if isinstance(values, dict) else None
            if kind not in _KINDS:
                raise ConfigError(f"{path}, line {number}: {line[:60]!r} is no entry of a record of ThreeDMonitor.")
            yield _build(_KINDS[kind], values)


def last_run(folder: str | Path) -> Run | None:
    """The last run of a record, without what it did.

    Raises:
        ConfigError: There is no record in the folder.
    """
    found = None
    with find(folder).open() as file:
        for line in file:
            if line.startswith(_RUN):
                with contextlib.suppress(json.JSONDecodeError):  # its process was killed
                    found = _build(Run, json.loads(line))
    return found


def find(folder: str | Path) -> Path:
    """The record in a log folder, or in the last of its versions.

    Raises:
        ConfigError: There is none.
    """
    root = Path(folder)
    if root.is_file():
        return root
    if (root / FILE).exists():
        return root / FILE
    if not root.exists():
        raise ConfigError(f"{folder} does not exist, seen from {Path.cwd()}. Give the log folder of a run.")
    found = sorted(root.rglob(str(FILE)), key=lambda path: path.stat().st_mtime) if root.is_dir() else []
    if not found:
        raise ConfigError(
            f"{folder} has no {FILE}, seen from {Path.cwd()}. Give the log folder of a run (trainer.log_dir) that had"
            " ThreeDMonitor among its callbacks."
        )
    return found[-1]


def _build(kind: type[_T], values: Mapping[str, Any]) -> _T:
    """An entry from JSON; fields that a later version has added are left out."""
    known = {entry.name for entry in dataclasses.fields(kind)}  # type: ignore[arg-type]
    given = {name: value for name, value in values.items() if name in known}
    if kind is Run:
        given["places"] = tuple(_build(Place, place) for place in given["places"])
        given["shares"] = tuple(given.get("shares", ()))
    elif kind is Window:
        given["ranks"] = tuple(_build(RankWindow, rank) for rank in given["ranks"])
    elif kind is RankWindow:
        given["seconds"] = {name: Spread(*spread) for name, spread in given.get("seconds", {}).items()}
        given |= {"reading": Spread(*given["reading"])} if "reading" in given else {}
    elif kind in (Straggler, Leak):
        given["place"] = _build(Place, given["place"])
        given |= {"grown": tuple(Growth(*entry) for entry in given["grown"])} if "grown" in given else {}
    return kind(**given)
