"""What a run writes about itself while it trains: ``monitor/record.jsonl`` in its log folder, one JSON object a line.

Each names its ``"entry"``: ``"run"`` once at the start of every run (a resumed one adds another), then a ``"window"``
every N steps with the figures of all ranks, and a ``"straggler"`` or a ``"leak"`` where one was found. Only rank 0
writes; a line is complete or not there, so that a run that dies leaves what it had. ``lightning-3d report`` reads it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
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


_KINDS: dict[str, type] = {"run": Run, "window": Window, "straggler": Straggler, "leak": Leak}
Entry = Run | Window | Straggler | Leak


class Writer:
    """Adds lines to the record of a run; used on rank 0.

    Args:
        folder: The log folder of the run.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder, FILE)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, entry: Entry) -> None:
        """Add an entry; it is in the file when this returns."""
        kind = next(name for name, of in _KINDS.items() if isinstance(entry, of))
        line = json.dumps({"entry": kind, **dataclasses.asdict(entry)}, separators=(",", ":"))
        with self.path.open("a") as file:
            file.write(line + "\n")


def read(folder: str | Path) -> Iterator[Entry]:
    """The entries of a run, in order.

    Raises:
        ConfigError: There is no record in the folder, or its lines are something else.
    """
    path = find(folder)
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            continue  # the last line of a process that was killed
        kind = values.pop("entry", None) if isinstance(values, dict) else None
        if kind not in _KINDS:
            raise ConfigError(f"{path}, line {number}: {line[:60]!r} is no entry of a record of ThreeDMonitor.")
        yield _build(_KINDS[kind], values)


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
