"""Stacked bars, lying: memory by kind, time by cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_3d.pictures.axes import number, ticks
from lightning_3d.pictures.colours import GRID, INK, PALE_INK, SERIES, ink_on
from lightning_3d.pictures.drawing import Drawing, Line, Rect, Text, text_width

_ROW, _GAP = 22.0, 6.0
_VALUES = 10.0


@dataclass(frozen=True)
class Bar:
    """One bar: its name, its parts in order, and what is written at its end."""

    label: str
    parts: Mapping[str, float]
    note: str = ""

    @property
    def total(self) -> float:
        """Length of the bar."""
        return sum(self.parts.values())


def draw_bars(
    bars: Sequence[Bar],
    unit: str,
    title: str,
    limit: tuple[float, str] | None = None,
    colours: Mapping[str, str] | None = None,
    width: float = 900.0,
) -> Drawing:
    """Draw bars below each other on one scale.

    Args:
        bars: All with the same names of parts.
        unit: Of the lengths, for the axis.
        title: Heading.
        limit: A length to mark with a line, and what it means.
        colours: Of the parts by name; others take the next of the palette.
        width: Pixels.
    """
    names = list(dict.fromkeys(name for bar in bars for name in bar.parts))
    palette = iter(SERIES)
    of = {name: (colours or {}).get(name) or next(palette) for name in names}
    left = 16 + max(text_width(bar.label, 12) for bar in bars)
    right = 24 + max(text_width(bar.note, 11) for bar in bars)
    longest = max([bar.total for bar in bars] + ([limit[0]] if limit else []))
    scale = (width - left - right) / longest if longest else 0.0
    top = 70.0
    bottom = top + len(bars) * (_ROW + _GAP)
    drawing = Drawing(width, bottom + 46, title)
    drawing.add(Text(0, 16, title, 14, bold=True))
    x = 0.0
    for name in names:
        drawing.add(Rect(x, 31, 14, 12, of[name]), Text(x + 19, 41, name, 12))
        x += 19 + text_width(name, 12) + 14
    for value in ticks(longest, 8):
        place = left + value * scale
        drawing.add(Line(((place, top - 4), (place, bottom)), GRID))
        drawing.add(Text(place, bottom + 14, number(value), 11, "middle", PALE_INK))
    drawing.add(Text(left + longest * scale / 2, bottom + 31, unit, 11, "middle", PALE_INK))
    for row, bar in enumerate(bars):
        y = top + row * (_ROW + _GAP)
        drawing.add(Text(left - 8, y + 15, bar.label, 12, "end"))
        place = left
        for name, value in bar.parts.items():
            drawing.add(Rect(place, y, value * scale, _ROW, of[name], f"{name}: {number(value)} {unit}"))
            text = number(float(f"{value:.3g}"))
            if value * scale > text_width(text, _VALUES) + 6:
                drawing.add(Text(place + value * scale / 2, y + 15, text, _VALUES, "middle", ink_on(of[name])))
            place += value * scale
        drawing.add(Text(place + 6, y + 15, bar.note, 11, fill=PALE_INK))
    if limit is not None:
        place = left + limit[0] * scale
        drawing.add(Line(((place, top - 8), (place, bottom)), INK, 1.5))
        drawing.add(Text(place, top - 12, limit[1], 11, "end"))
    return drawing
