"""Axes: where ticks stand, and how numbers are written on them."""

from __future__ import annotations

import math
from collections.abc import Callable

from lightning_3d.pictures.colours import GRID, PALE_INK
from lightning_3d.pictures.drawing import Drawing, Line, Text


def ticks(highest: float, at_most: int) -> list[float]:
    """Round numbers from 0 to ``highest``, no more than about ``at_most``: steps of 1, 2 or 5 times a power of ten."""
    if highest <= 0:
        return [0.0]
    rough = highest / max(1, at_most)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [step * index for index in range(int(highest / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A number as short as it is exact enough: ``0``, ``12.5``, ``1,500``."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def time_axis(
    drawing: Drawing, place: Callable[[float], float], highest: float, top: float, bottom: float, label: str
) -> None:
    """Draw ticks and grid lines from ``top`` to ``bottom``, and the label after the last tick's number."""
    width = place(highest) - place(0.0)
    values = ticks(highest, max(2, int(width / 90)))
    for value in values:
        drawing.add(Line(((place(value), top), (place(value), bottom + 4)), GRID))
        drawing.add(Text(place(value), bottom + 16, number(value), 11, "middle", PALE_INK))
    drawing.add(Text(place(highest / 2), bottom + 32, label, 11, "middle", PALE_INK))
