"""The picture of a simulated step: what every rank does when, how long it waits, and what it keeps meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_3d.pictures.axes import number, ticks, time_axis
from lightning_3d.pictures.colours import GRID, IDLE, INK, MESSAGE, OF_KIND, PALE_INK, ink_on, ramp, shade
from lightning_3d.pictures.drawing import Drawing, Line, Rect, Text, text_width
from lightning_3d.schedules import SCHEDULES, Kind, Schedule, Timeline

_LEFT, _RIGHT, _GAP = 74.0, 168.0, 34.0
_NUMBERS = 10.0
"""Size of the numbers in the boxes; smaller ones cannot be read."""
_TITLES_AT_MOST = 6000
_MEMORY_HEIGHT = 96.0
_LINES_AT_MOST = 8


@dataclass(frozen=True)
class Panel:
    """One schedule in a picture."""

    schedule: Schedule
    timeline: Timeline
    activations: Sequence[float]
    """What one micro-batch keeps on each chunk, in ``unit_of_memory``."""
    time_unit: str = ""
    """Such as ``"ms"``; empty: forwards of a stage."""
    memory_unit: str = "micro-batches of a stage"

    @property
    def title(self) -> str:
        """Name and sizes."""
        schedule = self.schedule
        chunks = f" × {schedule.virtual_stages} chunks" if schedule.virtual_stages > 1 else ""
        return f"{schedule.name}: {schedule.stages} stages{chunks}, {schedule.micro_batches} micro-batches"

    @property
    def kept(self) -> list[float]:
        """Most that each rank keeps at once, in ``memory_unit``."""
        ranks = range(self.schedule.stages)
        return [max(value for _, value in self.timeline.live(rank, self.activations)) for rank in ranks]

    @property
    def idle_fractions(self) -> list[float]:
        """Idle time of each rank as a fraction of the total time."""
        total = self.timeline.total
        return [idle / total if total else 0.0 for idle in self.timeline.idle]


def draw_timelines(panels: Sequence[Panel], width: float | None = None) -> Drawing:
    """Draw one schedule, or several below each other on one time scale.

    Args:
        panels: The schedules; the unit of time is that of the first.
        width: Pixels; by default enough for the numbers of the micro-batches, between 900 and 1,800.
    """
    longest = max(panel.timeline.total for panel in panels)
    width = width or _LEFT + _RIGHT + min(1800.0 - _LEFT - _RIGHT, max(660.0, _wanted(panels, longest)))
    scale = (width - _LEFT - _RIGHT) / longest if longest else 0.0
    rows = [_row_height(panel) for panel in panels]
    heights = [
        48 + row * panel.schedule.stages + 46 + 22 + _MEMORY_HEIGHT for panel, row in zip(panels, rows, strict=True)
    ]
    drawing = Drawing(width, 38 + sum(heights) + _GAP * (len(panels) - 1) + 18, _description(panels))
    _legend(drawing, panels)
    top = 38.0
    for panel, row, height in zip(panels, rows, heights, strict=True):
        _panel(drawing, panel, top, row, scale, longest)
        top += height + _GAP
    return drawing


def _wanted(panels: Sequence[Panel], longest: float) -> float:
    """Pixels at which the numbers fit into the shortest boxes."""
    shortest = min(
        (span.end - span.start for panel in panels for spans in panel.timeline.spans for span in spans), default=1.0
    )
    digits = len(str(max(panel.schedule.micro_batches for panel in panels) - 1))
    return longest / shortest * (text_width("0" * digits, _NUMBERS) + 5) if shortest > 0 else 0.0


def _row_height(panel: Panel) -> float:
    stages = panel.schedule.stages
    return 26.0 if stages <= 8 else 22.0 if stages <= 16 else 14.0 if stages <= 32 else 9.0


def _strip_height(panel: Panel) -> float:
    """Room for messages below a row: none where they take no time, or rows are too low."""
    moving = any(message.end > message.start for message in panel.timeline.messages)
    return 4.0 if moving and _row_height(panel) >= 20 else 0.0


def _description(panels: Sequence[Panel]) -> str:
    return "; ".join(f"{panel.title}, idle {panel.timeline.bubble_fraction:.1%} of the total time" for panel in panels)


def _legend(drawing: Drawing, panels: Sequence[Panel]) -> None:
    split = [panel for panel in panels if SCHEDULES[panel.schedule.name].splits_backward]
    entries = [("forward", OF_KIND[Kind.F])]
    entries.append(("backward (zero-bubble: of inputs)" if split else "backward", OF_KIND[Kind.B]))
    if split:
        entries.append(("backward of weights", OF_KIND[Kind.W]))
    entries.append(("idle", IDLE))
    if any(map(_strip_height, panels)):
        entries.append(("message arriving", MESSAGE))
    x = _LEFT
    for name, colour in entries:
        drawing.add(Rect(x, 13, 14, 12, colour), Text(x + 19, 23, name, 12))
        x += 19 + text_width(name, 12) * 0.88 + 14
    if any(panel.schedule.virtual_stages > 1 for panel in panels):
        drawing.add(Text(x, 23, "darker: later chunk", 12, fill=PALE_INK))


def _panel(drawing: Drawing, panel: Panel, top: float, row: float, scale: float, longest: float) -> None:
    schedule, timeline = panel.schedule, panel.timeline
    unit = f" {panel.time_unit}" if panel.time_unit else " forwards of a stage"

    def place(time: float) -> float:
        return _LEFT + time * scale

    drawing.add(Text(_LEFT, top + 16, panel.title, 14, bold=True))
    facts = f"step {number(timeline.total)}{unit}, bubble {timeline.bubble_fraction:.1%} of the total time"
    drawing.add(Text(_LEFT, top + 34, facts, 12, fill=PALE_INK))
    table = drawing.width - _RIGHT
    drawing.add(Text(table + 62, top + 34, "bubble", 11, "end", PALE_INK))
    drawing.add(Text(table + 156, top + 34, "most kept", 11, "end", PALE_INK))
    first = top + 48
    bottom = first + row * schedule.stages
    time_axis(drawing, place, longest, first, bottom, f"time ({unit.strip()})")
    with_titles = sum(map(len, timeline.spans)) <= _TITLES_AT_MOST
    strip = _strip_height(panel)
    for rank, (kept, idle) in enumerate(zip(panel.kept, panel.idle_fractions, strict=True)):
        y = first + row * rank
        size = min(12.0, row - 1)
        drawing.add(Text(_LEFT - 8, y + row / 2 + size / 3, f"rank {rank}", size, "end"))
        drawing.add(Rect(place(0), y + 1, timeline.total * scale, row - 2 - strip, IDLE))
        _boxes(drawing, panel, rank, place, y + 1, row - 2 - strip, with_titles)
        drawing.add(Text(table + 62, y + row / 2 + size / 3, f"{idle:.1%}", size, "end"))
        drawing.add(Text(table + 156, y + row / 2 + size / 3, number(kept), size, "end"))
    if strip:
        for message in timeline.messages:
            y = first + row * message.target + row - 1 - strip
            length = max(0.5, (message.end - message.start) * scale)
            drawing.add(Rect(place(message.start), y + 0.5, length, strip - 1, MESSAGE))
    _memory(drawing, panel, bottom + 46 + 22, place, longest)


def _boxes(
    drawing: Drawing,
    panel: Panel,
    rank: int,
    place: Callable[[float], float],
    top: float,
    height: float,
    with_titles: bool,
) -> None:
    local = {chunk: index for index, chunk in enumerate(panel.schedule.rank_chunks(rank))}
    unit = f" {panel.time_unit}" if panel.time_unit else ""
    labels = []
    for (kind, chunk, micro_batch, _), start, end in panel.timeline.spans[rank]:
        left, right = place(start), place(end)
        gap = 1.0 if right - left >= 5 else 0.25 * (right - left) if right - left >= 2 else 0.0
        colour = shade(OF_KIND[kind], local[chunk], len(local))
        title = ""
        if with_titles:
            title = f"{kind.value} of chunk {chunk}, micro-batch {micro_batch}: {number(start)} to {number(end)}{unit}"
        drawing.add(Rect(left, top, right - left - gap, height, colour, title))
        text = str(micro_batch)
        if right - left - gap >= text_width(text, _NUMBERS) + 3 and height >= _NUMBERS + 1:
            middle = (left + right - gap) / 2
            labels.append(Text(middle, top + height / 2 + 3.5, text, _NUMBERS, "middle", ink_on(colour)))
    drawing.add(*labels)


def _memory(drawing: Drawing, panel: Panel, top: float, place: Callable[[float], float], longest: float) -> None:
    """Draw what ranks keep over time; of many ranks some."""
    stages = panel.schedule.stages
    highest = max(panel.kept) or 1.0
    bottom = top + _MEMORY_HEIGHT

    def level(value: float) -> float:
        return bottom - value / (1.08 * highest) * _MEMORY_HEIGHT

    drawing.add(Text(_LEFT, top - 6, f"activations kept ({panel.memory_unit})", 11, fill=PALE_INK))
    for value in ticks(highest, 4):
        drawing.add(Line(((_LEFT, level(value)), (place(longest), level(value))), GRID))
        drawing.add(Text(_LEFT - 8, level(value) + 4, number(value), 11, "end", PALE_INK))
    count = min(stages, _LINES_AT_MOST)
    shown = [round(index * (stages - 1) / max(1, count - 1)) for index in range(count)]
    for index, rank in enumerate(shown):
        colour = ramp(index, len(shown))
        points, value = [(place(0.0), level(0.0))], 0.0
        for time, after in panel.timeline.live(rank, panel.activations):
            points += [(place(time), level(value)), (place(time), level(after))]
            value = after
        drawing.add(Line(tuple(points), colour, 1.4))
        y = top + 10 + index * (_MEMORY_HEIGHT - 6) / max(8, len(shown))
        x = drawing.width - _RIGHT + 26
        drawing.add(Rect(x, y - 5, 16, 3, colour), Text(x + 22, y, f"rank {rank}", 11, fill=INK))
