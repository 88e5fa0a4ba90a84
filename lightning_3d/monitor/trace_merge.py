"""Traces of many ranks in one file and on one clock, which https://ui.perfetto.dev opens.

Torch's traces count from ``baseTimeNanoseconds`` on the calendar clock of their host; the timelines of this package
count on it as well. What the clocks of hosts are apart was measured at barriers when the run began
(:mod:`lightning_3d.monitor.clocks`) and stands in the record of the run; without a record the clocks are taken as they
are. Every rank becomes one process, named by its place on the mesh, and its threads and streams become its threads.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_3d.errors import ConfigError
from lightning_3d.monitor import record

HEADER = "lightning_3d"
"""Key of what our own traces say of themselves: ``rank``, and where their times count from."""
_ENDINGS = (".json", ".json.gz")
_IN_NAME = re.compile(r"rank[\s_=-]*(\d+)", re.IGNORECASE)
_FLOWS = ("s", "t", "f")
_ASYNC = ("b", "n", "e", "S", "T", "p", "F", "N", "O", "D")


@dataclass
class Trace:
    """One file."""

    path: Path
    rank: int
    base_ns: int
    """Nanoseconds since 1970 at which its times count 0, on the clock of its host."""
    events: list[dict[str, Any]]
    place: str = ""
    """Of the rank on the mesh, if the file tells."""
    corrected: bool = False
    """Whether its times are on the clock of rank 0 already."""


@dataclass
class Merged:
    """What was put together."""

    ranks: dict[int, list[Path]] = field(default_factory=dict)
    """Files of every rank."""
    skipped: dict[Path, str] = field(default_factory=dict)
    """Files that were left out, with the reason."""
    events: int = 0
    corrected: bool = False
    """Whether the offsets of the hosts' clocks were known."""
    seconds: float = 0.0
    """From the first event to the last."""


def merge(folder: Path, output: Path) -> Merged:
    """Write all traces of a folder, and of those in it, into one file.

    Args:
        folder: Where the traces are; ``.json`` or ``.json.gz``.
        output: The file to write; compressed if its name ends in ``.gz``.

    Raises:
        ConfigError: If there is no trace, or the folder holds those of several runs, which one cannot lay side by side.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder, seen from {Path.cwd()}. Give the log folder of the run.")
    places = _places(folder)
    merged = Merged(corrected=bool(places))
    traces: list[Trace] = []
    for path in sorted(path for path in folder.rglob("*") if path.name.endswith(_ENDINGS) and path != output):
        found = read(path)
        if not isinstance(found, str):
            traces += found
        elif found:
            merged.skipped[path] = found
    if not traces:
        reasons = "".join(f"\n  {path}: {why}" for path, why in merged.skipped.items())
        raise ConfigError(
            f"{folder} has no trace of a rank: files ending in {' or '.join(_ENDINGS)} with traceEvents. Make them with"
            f" Trainer(profiler='pytorch') or ThreeDMonitor.{reasons}"
        )
    events = one_timeline(traces, places)
    for trace in traces:
        merged.ranks.setdefault(trace.rank, []).append(trace.path)
    stamps = [(event["ts"], event["ts"] + event.get("dur", 0.0)) for event in events if event["ph"] != "M"]
    merged.events = len(stamps)
    merged.seconds = (max(end for _, end in stamps) - min(start for start, _ in stamps)) / 1e6 if stamps else 0.0
    _write(output, {"traceEvents": events, "displayTimeUnit": "ms", HEADER: {"merged": True}})
    return merged


def read(path: Path) -> list[Trace] | str:
    """The traces in a file, or why it is none; an empty reason for files that do not look like one at all."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt") as file:
            content = json.load(file)
    except (OSError, ValueError, EOFError) as error:
        return f"cannot be read: {error}"
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        return ""
    events = [event for event in content["traceEvents"] if isinstance(event, dict) and "ph" in event]
    own = content.get(HEADER) or {}
    if own.get("merged"):
        return ""
    base = _nanoseconds(own["base_us"]) if "base_us" in own else int(content.get("baseTimeNanoseconds", 0))
    if own.get("ranks_are_processes"):
        by_rank: dict[int, list[dict[str, Any]]] = {}
        for event in events:
            by_rank.setdefault(int(event.get("pid", 0)), []).append(event)
        return [Trace(path, rank, base, found, corrected=True) for rank, found in by_rank.items()]
    info = content.get("distributedInfo") or {}
    named = _IN_NAME.search(path.name)
    rank = own.get("rank", info.get("rank", int(named.group(1)) if named else None))
    if rank is None:
        return "does not say of which rank it is; have rank<N> in its name"
    place = " ".join(f"{axis}{own[axis]}" for axis in ("pp", "dp", "tp") if axis in own)
    return [Trace(path, int(rank), base, events, place)]


def stamp(nanoseconds: int) -> float:
    """A time or a length as traces have it, in microseconds.

    Readers make nanoseconds of it again, some by rounding and some by cutting off. A quarter of one more lets both come
    to the same; else an event that ends with the one it lies in may seem to end after it, and Perfetto leaves it out.
    """
    return (nanoseconds + 0.25) / 1e3


def one_timeline(traces: Iterable[Trace], places: Mapping[int, record.Place]) -> list[dict[str, Any]]:
    """The events of all traces, counted in microseconds from the first of them on the clock of rank 0."""
    result: list[dict[str, Any]] = []
    stamped: list[dict[str, Any]] = []
    threads: dict[tuple[int, Any, Any], int] = {}
    ids: dict[tuple[int, str], int] = {}
    named: set[int] = set()
    # Whole nanoseconds: microseconds since 1970 have no place for them in a float.
    shifts = [(trace, trace.base_ns + round(1e9 * _offset(trace, places))) for trace in traces]
    origin = min(
        (
            shift + _nanoseconds(event["ts"])
            for trace, shift in shifts
            for event in trace.events
            if event["ph"] != "M" and "ts" in event
        ),
        default=0,
    )
    for number, (trace, shift) in enumerate(shifts):
        if trace.rank not in named:
            named.add(trace.rank)
            result += _names(trace.rank, _title(trace, places))
        titles = _titles_of_processes(trace.events)
        for event in trace.events:
            if event["ph"] == "M":
                if event.get("name") != "thread_name":
                    continue
            elif "ts" not in event:
                continue
            key = (trace.rank, "step" if trace.corrected else event.get("pid"), event.get("tid"))
            if key not in threads:
                threads[key] = sum(1 for rank, _, _ in threads if rank == trace.rank) + 1
                if trace.corrected:
                    result.append(_named(trace.rank, threads[key], "steps of ThreeDMonitor"))
                elif not isinstance(event.get("pid"), int):  # torch's own rows, "Spans" and "Traces"
                    result.append(_named(trace.rank, threads[key], f"{event.get('pid')} {event.get('tid')}".strip()))
            moved = {**event, "pid": trace.rank, "tid": threads[key]}
            if event["ph"] == "M":
                process = titles.get(event.get("pid"), "")
                name = f"{event['args'].get('name', '')} {process}".strip()
                result.append(_named(trace.rank, threads[key], name))
                continue
            moved["ts"] = stamp(shift + _nanoseconds(event["ts"]) - origin)
            if "dur" in event:
                moved["dur"] = stamp(_nanoseconds(event["dur"]))
            if event["ph"] in _FLOWS or event["ph"] in _ASYNC:  # a number: Perfetto reads no other text than hex
                moved["id"] = ids.setdefault((number, str(event.get("id", event.get("id2", "")))), len(ids) + 1)
                moved.pop("id2", None)
            stamped.append(moved)
    stamped.sort(key=lambda event: event["ts"])
    return result + stamped


def _nanoseconds(microseconds: float) -> int:
    return round(1e3 * microseconds)


def _places(folder: Path) -> dict[int, record.Place]:
    """Of the last run that the folder, or one above it, has a record of."""
    for candidate in (folder, *folder.resolve().parents[:3]):
        if candidate == folder or (candidate / record.FILE).exists():
            with contextlib.suppress(ConfigError):
                if (run := record.last_run(candidate)) is not None:
                    return {place.rank: place for place in run.places}
    return {}


def _offset(trace: Trace, places: Mapping[int, record.Place]) -> float:
    return 0.0 if trace.corrected or trace.rank not in places else places[trace.rank].clock_offset_s


def _title(trace: Trace, places: Mapping[int, record.Place]) -> str:
    if trace.rank in places:
        return str(places[trace.rank])
    return f"rank {trace.rank}" + (f" ({trace.place})" if trace.place else "")


def _titles_of_processes(events: Iterable[Mapping[str, Any]]) -> dict[Any, str]:
    """What torch says of its processes: ``"GPU 0"`` for those that stand for a device."""
    return {
        event.get("pid"): label
        for event in events
        if event["ph"] == "M" and event.get("name") == "process_labels"
        for label in (str(event.get("args", {}).get("labels", "")),)
        if label.startswith("GPU")
    }


def _names(rank: int, title: str) -> list[dict[str, Any]]:
    common = {"ph": "M", "pid": rank, "tid": 0, "ts": 0}
    return [
        {**common, "name": "process_name", "args": {"name": title}},
        {**common, "name": "process_sort_index", "args": {"sort_index": rank}},
    ]


def _named(rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "ts": 0, "name": "thread_name", "args": {"name": name}}


def _write(output: Path, content: Mapping[str, Any]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.suffix == ".gz":
        with gzip.open(output, "wt") as file:
            json.dump(content, file)
    else:
        output.write_text(json.dumps(content))
