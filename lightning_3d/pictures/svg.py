"""A drawing as SVG."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import groupby

from lightning_3d.pictures.drawing import Drawing, Line, Rect, Shape, Text

FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


def svg(drawing: Drawing) -> str:
    """The text of an SVG file; also valid inside an HTML page."""
    width, height = _number(drawing.width), _number(drawing.height)
    body = "\n".join(
        line for style, shapes in groupby(drawing.shapes, key=_style) for line in _group(style, list(shapes))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' font-family="{FONTS}" role="img">\n<title>{escape(drawing.description)}</title>\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _style(shape: Shape) -> str:
    """Attributes that neighbours have in common, so that a picture of many boxes stays small."""
    if isinstance(shape, Rect):
        return f'fill="{shape.fill}" shape-rendering="crispEdges"'
    if isinstance(shape, Line):
        width = _number(shape.width)
        return f'fill="none" stroke="{shape.stroke}" stroke-width="{width}" stroke-linejoin="round"'
    weight = ' font-weight="600"' if shape.bold else ""
    return f'fill="{shape.fill}" font-size="{_number(shape.size)}" text-anchor="{shape.anchor}"{weight}'


def _group(style: str, shapes: list[Shape]) -> Iterator[str]:
    yield f"<g {style}>"
    yield from map(_element, shapes)
    yield "</g>"


def _element(shape: Shape) -> str:
    if isinstance(shape, Text):
        return f'<text x="{_number(shape.x)}" y="{_number(shape.y)}">{escape(shape.text)}</text>'
    if isinstance(shape, Line):
        return f'<polyline points="{" ".join(f"{_number(x)},{_number(y)}" for x, y in shape.points)}"/>'
    box = f'x="{_number(shape.x)}" y="{_number(shape.y)}" width="{_number(shape.width)}"'
    box += f' height="{_number(shape.height)}"'
    return f"<rect {box}><title>{escape(shape.title)}</title></rect>" if shape.title else f"<rect {box}/>"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
