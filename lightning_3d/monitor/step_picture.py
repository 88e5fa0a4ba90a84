"""A step as it was: what every stage did when, as a picture and as a trace of Chrome's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_3d.events import Event, Phase, StepEvents
from lightning_3d.monitor.ranges import name_of
from lightning_3d.monitor.trace_merge import HEADER, stamp
from lightning_3d.pictures.axes import time_axis
from lightning_3d.pictures.colours import IDLE, MESSAGE, OF_KIND, SERIES, ink_on, shade
from lightning_3d.pictures.drawing import Drawing, Rect, Text, text_width
from lightning_3d.schedules import Kind

_LEFT, _RIGHT, _TOP, _WIDTH = 92.0, 30.0, 70.0, 1100.0
_NUMBERS = 10.0
_COLOURS: Mapping[Phase, str] = {
    Phase.FORWARD: OF_KIND[Kind.F],
    Phase.BACKWARD: OF_KIND[Kind.B],
    Phase.WEIGHT: OF_KIND[Kind.W],
    Phase.TP: MESSAGE,
    Phase.PP_WAIT: IDLE,
    Phase.DP: SERIES[0],
    Phase.SYNC: "#bdbdbd",
    Phase.LOADER: SERIES[5],
    Phase.OPTIMIZER: SERIES[6],
    Phase.CHECKPOINT: "#5b5b5b",
    Phase.EVALUATION: "#f0e442",
}
_NAMES: Mapping[Phase, str] = {
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.WEIGHT: "backward of weights",
    Phase.TP: "tensor parallel",
    Phase.PP_WAIT: "waits for a stage",
    Phase.DP: "data parallel",
    Phase.SYNC: "waits for all",
    Phase.LOADER: "loader",
    Phase.OPTIMIZER: "optimizer",
    Phase.CHECKPOINT: "checkpoint",
    Phase.EVALUATION: "validation",
}


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """One rank's step, for a picture."""

    name: str
    """Such as ``"pp0 dp0 tp0"``."""
    stage: int
    rank: int
    step: StepEvents
    clock_offset_s: float = 0.0
    """Add it to the rank's calendar clock to have that of the first."""

    @property
    def shift(self) -> float:
        """Add it to a time of the rank's events to have seconds since 1970."""
        return self.step.wall + self.clock_offset_s - self.step.begin


def draw_step(ranks: Sequence[RankStep], predicted: float | None = None) -> Drawing:
    """Draw what ranks did in one step, one row for each, on one line of time.

    What lies within a forward or backward is drawn over it, waits for other stages over all of it, collectives over the
    lower part: what is left is the rank's own work.

    Args:
        ranks: Their events of the same step.
        predicted: Bubble to tell beside the picture.
    """
    first = min(rank.step.begin + rank.shift for rank in ranks)
    length = max(rank.step.end + rank.shift for rank in ranks) - first
    scale = (_WIDTH - _LEFT - _RIGHT) / length if length else 0.0
    title = f"step {ranks[0].step.step}: {1e3 * length:,.1f} ms, {ranks[0].step.micro_batches} micro-batches"
    if predicted is not None:
        title += f", predicted bubble {predicted:.1%}"
    height = 64.0 if len(ranks) <= 4 else 34.0 if len(ranks) <= 16 else 18.0
    bottom = _TOP + height * len(ranks)
    drawing = Drawing(_WIDTH, bottom + 46, title)
    drawing.add(Text(_LEFT, 18, title, 14, bold=True))
    _legend(drawing, {event.phase for rank in ranks for event in rank.step.events})

    def place(milliseconds: float) -> float:
        return _LEFT + milliseconds / 1e3 * scale

    time_axis(drawing, place, 1e3 * length, _TOP, bottom, "time (ms)")
    for row, rank in enumerate(ranks):
        y = _TOP + height * row
        drawing.add(Text(_LEFT - 8, y + height / 2 + 4, rank.name, 11, "end"))
        shift = rank.shift - first
        _boxes(drawing, rank, y + 2, height - 4, lambda time, shift=shift: _LEFT + (time + shift) * scale)
    return drawing


def _legend(drawing: Drawing, phases: set[Phase]) -> None:
    x = _LEFT
    for phase, name in _NAMES.items():
        if phase in phases:
            drawing.add(Rect(x, 36, 14, 12, _COLOURS[phase]), Text(x + 19, 46, name, 12))
            x += 19 + text_width(name, 12) * 0.88 + 14


def _boxes(drawing: Drawing, rank: RankStep, top: float, height: float, place: Any) -> None:
    chunks = sorted({event.chunk for event in rank.step.events if event.phase in (Phase.FORWARD, Phase.BACKWARD)})
    labels = []
    for event in rank.step.events:
        if event.phase is Phase.PIPELINE:
            continue
        colour, left, right = _COLOURS[event.phase], place(event.start), place(event.end)
        is_action = event.phase in (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT)
        if is_action and event.chunk in chunks:
            colour = shade(colour, chunks.index(event.chunk), len(chunks))
        if right - left < 0.3:
            continue
        gap = 1.0 if is_action and right - left >= 5 else 0.0
        upper = 0.6 * height if event.phase in (Phase.TP, Phase.DP) else 0.0
        drawing.add(Rect(left, top + upper, right - left - gap, height - upper, colour, _title(event)))
        text = str(event.micro_batch)
        if is_action and right - left >= text_width(text, _NUMBERS) + 4:
            labels.append(Text((left + right) / 2, top + 0.3 * height + 4, text, _NUMBERS, "middle", ink_on(colour)))
    drawing.add(*labels)


def _title(event: Event) -> str:
    where = f" of chunk {event.chunk}, micro-batch {event.micro_batch}" if event.micro_batch >= 0 else ""
    label = f" {event.label}" if event.label else ""
    size = f", {event.bytes:,} bytes" if event.bytes else ""
    return f"{_NAMES.get(event.phase, event.phase.value)}{label}{where}: {1e3 * event.seconds:.3f} ms{size}"


def step_trace(ranks: Sequence[RankStep]) -> dict[str, Any]:
    """The same step in the Trace Event Format, which https://ui.perfetto.dev opens: every rank is a process."""
    events: list[dict[str, Any]] = []
    first = min(rank.step.begin + rank.shift for rank in ranks)
    for rank in ranks:
        named = {"ph": "M", "pid": rank.rank, "tid": 0}
        events.append({**named, "name": "process_name", "args": {"name": f"rank {rank.rank} ({rank.name})"}})
        events.append({**named, "name": "process_sort_index", "args": {"sort_index": rank.rank}})
        shift = rank.shift - first
        for event in rank.step.events:
            row = (event.phase, event.chunk, event.micro_batch, event.label, event.bytes)
            start, end = (round(1e9 * (time + shift)) for time in (event.start, event.end))
            events.append(
                {
                    "name": name_of(row, rank.stage),  # as a profiler's trace calls it
                    "cat": event.phase.value,
                    "ph": "X",
                    "pid": rank.rank,
                    "tid": 0,
                    "ts": stamp(start),
                    "dur": stamp(end - start),
                    "args": {"chunk": event.chunk, "micro_batch": event.micro_batch, "bytes": event.bytes},
                }
            )
    # Their times are on rank 0's clock already, so that traces of a profiler can be laid beside them.
    header = {"base_us": 1e6 * first, "ranks_are_processes": True}
    return {"traceEvents": events, "displayTimeUnit": "ms", HEADER: header}
