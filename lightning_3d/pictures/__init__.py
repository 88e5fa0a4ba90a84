"""Pictures as data: a `Drawing` is a list of shapes, which `svg` writes down and `png` fills into pixels.

Both are a page of code each. SVG needs nothing, and a browser, an editor and a page of documentation show it; PNG is
drawn by Pillow, which tensorboard brings along anyway. A plotting library would add more code than this project has.
"""

from __future__ import annotations

from lightning_3d.pictures.bars import Bar, draw_bars
from lightning_3d.pictures.drawing import Drawing
from lightning_3d.pictures.png import png
from lightning_3d.pictures.svg import svg
from lightning_3d.pictures.timeline import Panel, draw_timelines
from lightning_3d.pictures.trace import chrome_trace

__all__ = ["Bar", "Drawing", "Panel", "chrome_trace", "draw_bars", "draw_timelines", "png", "svg"]
