"""What a picture is made of. Lengths in pixels, from the top left corner; later shapes cover earlier ones."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rect:
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    """Colour as ``#rrggbb``."""
    title: str = ""
    """What a browser shows when the pointer rests on it."""


@dataclass(frozen=True)
class Line:
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    stroke: str
    """Colour as ``#rrggbb``."""
    width: float = 1.0


@dataclass(frozen=True)
class Text:
    """One line of text."""

    x: float
    """Where ``anchor`` is."""
    y: float
    """Of the base line."""
    text: str
    size: float = 12.0
    """Height of the font."""
    anchor: str = "start"
    """``"start"``, ``"middle"`` or ``"end"``."""
    fill: str = "#222222"
    """Colour as ``#rrggbb``."""
    bold: bool = False


Shape = Rect | Line | Text

DIGIT = 0.58
"""Width of a digit in a sans-serif font, in heights of the font; letters are a little narrower on average."""


def text_width(text: str, size: float) -> float:
    """About how wide a line of text is; fonts differ by a few percent."""
    return DIGIT * size * len(text)


@dataclass
class Drawing:
    """A picture of ``width`` x ``height``, to which shapes are added."""

    width: float
    height: float
    description: str = ""
    """For readers who cannot see it."""
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        """Put shapes on top."""
        self.shapes.extend(shapes)
