"""A simulated step in the Trace Event Format of Chrome, which https://ui.perfetto.dev opens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_3d.pictures.timeline import Panel
from lightning_3d.schedules import Kind

_NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weights"}
_MICROSECONDS = {"s": 1e6, "ms": 1e3, "us": 1.0, "µs": 1.0, "ns": 1e-3}


def chrome_trace(panels: Sequence[Panel]) -> dict[str, Any]:
    """Every schedule as a process, every rank as a thread, messages as arrows, what is kept as counters.

    A unit that is no time is shown as a millisecond.
    """
    events: list[dict[str, Any]] = []
    for process, panel in enumerate(panels):
        events += _events(process, panel)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(process: int, panel: Panel) -> list[dict[str, Any]]:
    scale = _MICROSECONDS.get(panel.time_unit, 1e3)
    events: list[dict[str, Any]] = [_name(process, 0, "process_name", panel.title)]
    slices: dict[tuple[Kind, int, int], tuple[float, float]] = {}
    for rank, spans in enumerate(panel.timeline.spans):
        events.append(_name(process, 2 * rank, "thread_name", f"rank {rank}"))
        events.append({**_name(process, 2 * rank, "thread_sort_index", ""), "args": {"sort_index": 2 * rank}})
        for (kind, chunk, micro_batch, _), start, end in spans:
            slices[kind, chunk, micro_batch] = (start * scale, end * scale)
            events.append(
                {
                    "name": f"{_NAMES[kind]} {micro_batch}",
                    "cat": _NAMES[kind],
                    "ph": "X",
                    "pid": process,
                    "tid": 2 * rank,
                    "ts": start * scale,
                    "dur": (end - start) * scale,
                    "args": {"chunk": chunk, "micro_batch": micro_batch},
                }
            )
        for time, value in panel.timeline.live(rank, panel.activations):
            name = f"kept by rank {rank} ({panel.memory_unit})"
            events.append({"name": name, "ph": "C", "pid": process, "ts": time * scale, "args": {"activations": value}})
    receivers: set[int] = set()
    for number, message in enumerate(panel.timeline.messages):
        source = message.chunk - 1 if message.kind is Kind.F else message.chunk + 1
        made = slices[message.kind, source, message.micro_batch]
        used = slices[message.kind, message.chunk, message.micro_batch]
        what = "activations" if message.kind is Kind.F else "gradients"
        common = {"name": what, "cat": "message", "pid": process, "id": f"{process}.{number}"}
        # An arrow belongs to the slice around its time, so both ends stand a little inside.
        events.append({**common, "ph": "s", "tid": 2 * message.source, "ts": made[1] - 0.01 * (made[1] - made[0])})
        events.append(
            {**common, "ph": "f", "bp": "e", "tid": 2 * message.target, "ts": used[0] + 0.01 * (used[1] - used[0])}
        )
        if message.end > message.start:
            row = 2 * message.target + 1
            receivers.add(message.target)
            events.append(
                {
                    "name": f"{what} {message.micro_batch} from rank {message.source}",
                    "cat": "message",
                    "ph": "X",
                    "pid": process,
                    "tid": row,
                    "ts": message.start * scale,
                    "dur": (message.end - message.start) * scale,
                    "args": {"chunk": message.chunk, "micro_batch": message.micro_batch},
                }
            )
    for rank in sorted(receivers):
        events.append(_name(process, 2 * rank + 1, "thread_name", f"rank {rank} receives"))
        events.append({**_name(process, 2 * rank + 1, "thread_sort_index", ""), "args": {"sort_index": 2 * rank + 1}})
    return events


def _name(process: int, thread: int, what: str, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
