"""A drawing as PNG, by Pillow."""

from __future__ import annotations

from io import BytesIO

from PIL import Image, ImageDraw, ImageFont

from lightning_3d.errors import ConfigError
from lightning_3d.pictures.drawing import Drawing, Line, Rect, Text

_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}
_SMOOTH = 2
"""Boxes and lines are drawn so many times larger and then averaged; letters have smooth edges by themselves."""
_MOST_PIXELS = 60_000_000


def png(drawing: Drawing, scale: float = 2.0) -> bytes:
    """The bytes of a PNG file.

    Args:
        drawing: What to draw.
        scale: Pixels of the file per pixel of the drawing; 2 is sharp on today's screens.

    Raises:
        ConfigError: If it would be too large to draw.
    """
    size = (round(drawing.width * scale), round(drawing.height * scale))
    if size[0] * size[1] > _MOST_PIXELS:
        raise ConfigError(f"A picture of {size[0]} x {size[1]} pixels is too large for PNG. Write SVG, or draw less.")
    large = Image.new("RGB", (size[0] * _SMOOTH, size[1] * _SMOOTH), "white")
    pen, zoom = ImageDraw.Draw(large), scale * _SMOOTH
    for shape in drawing.shapes:
        if isinstance(shape, Rect):
            x, y = round(shape.x * zoom), round(shape.y * zoom)
            right, bottom = round((shape.x + shape.width) * zoom), round((shape.y + shape.height) * zoom)
            if right > x and bottom > y:
                pen.rectangle((x, y, right - 1, bottom - 1), fill=shape.fill)
        elif isinstance(shape, Line):
            points = [(x * zoom, y * zoom) for x, y in shape.points]
            pen.line(points, fill=shape.stroke, width=max(1, round(shape.width * zoom)))
    image = large.resize(size, Image.Resampling.BOX)
    pen = ImageDraw.Draw(image)
    for shape in drawing.shapes:
        if isinstance(shape, Text):
            font = ImageFont.load_default(shape.size * scale * 0.95)
            thick = 0.02 * shape.size * scale if shape.bold else 0
            place = (shape.x * scale, shape.y * scale)
            # Pillow's own font has the letters of plain English only.
            pen.text(
                place,
                shape.text.replace("×", "x").replace("·", "-").replace("–", "-"),
                shape.fill,
                font,
                _ANCHORS[shape.anchor],
                stroke_width=thick,
            )
    file = BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()
