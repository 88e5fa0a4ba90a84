"""Colours that stay apart for colour-blind readers and in print (Okabe and Ito's palette)."""

from __future__ import annotations

from lightning_3d.schedules import Kind

INK = "#222222"
PALE_INK = "#666666"
GRID = "#dddddd"
IDLE = "#ededed"
MESSAGE = "#cc79a7"
OF_KIND = {Kind.F: "#56b4e9", Kind.B: "#e69f00", Kind.W: "#009e73"}
"""Sky blue, orange, bluish green: different in lightness too."""
SERIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c")
"""For things that have no colour of their own."""


def mix(colour: str, other: str, part: float) -> str:
    """``colour`` with ``part`` (0 to 1) of ``other``."""
    pairs = [(int(colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in pairs)


def shade(colour: str, index: int, count: int) -> str:
    """One of ``count`` shades of a colour, from light to dark; the colour itself if there is only one."""
    if count == 1:
        return colour
    place = index / (count - 1)
    if place < 0.5:
        return mix(colour, "#ffffff", 0.4 * (1 - 2 * place))
    return mix(colour, "#000000", 0.24 * (2 * place - 1))


def ink_on(colour: str) -> str:
    """Black or white: what is read better on ``colour``."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 120 else INK


def ramp(index: int, count: int) -> str:
    """One of ``count`` colours in an order that the eye sees: from dark blue over green to yellow."""
    stops = ("#31508c", "#2a8a8c", "#5cb85c", "#d9b310")
    place = (index / (count - 1) if count > 1 else 0.0) * (len(stops) - 1)
    low = min(int(place), len(stops) - 2)
    return mix(stops[low], stops[low + 1], place - low)
