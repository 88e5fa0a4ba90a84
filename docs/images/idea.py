"""Draws docs/images/idea.svg: ``python docs/images/idea.py``. Needs nothing but Python."""

from __future__ import annotations

from html import escape
from pathlib import Path

STYLE = """
text { font: 14px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328 }
.head { font-weight: 600; font-size: 15px }
.small { font-size: 12px }
.quiet { fill: #59636e }
.page { fill: #ffffff }
.card { fill: #f6f8fa; stroke: #d1d9e0 }
.rank { fill: #ffffff; stroke: #8c959f }
.absent { fill: none; stroke: #afb8c1; stroke-dasharray: 3 3 }
.embed { fill: #d29922 } .block { fill: #3b82d6 } .norm { fill: #57ab5a } .out { fill: #2f9e7e }
.state { fill: #a371d6 }
.line { stroke: #59636e; stroke-width: 1.5; fill: none; marker-start: url(#tip); marker-end: url(#tip) }
.once { stroke: #59636e; stroke-width: 1.5; fill: none; marker-end: url(#tip) }
.tip { fill: #59636e }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .quiet { fill: #9198a1 } .page { fill: #0d1117 }
  .card { fill: #151b23; stroke: #3d444d } .rank { fill: #0d1117; stroke: #656c76 } .absent { stroke: #545d68 }
  .line, .once { stroke: #9198a1 } .tip { fill: #9198a1 }
}
"""

PARTS = [
    ("token_embedding", "embed", 0),
    ("blocks.0", "block", 0),
    ("blocks.1", "block", 0),
    ("blocks.2", "block", 1),
    ("blocks.3", "block", 1),
    ("norm", "norm", 1),
    ("head", "out", 1),
]
"""Name, kind and pipeline stage of the parts of a small GPT; all but the norm are cut over tensor-parallel ranks."""

BAR, STEP = 13, 17
BOX_WIDTH, BOX_HEIGHT = 104, 190


def rect(x: float, y: float, width: float, height: float, kind: str, radius: float = 3) -> str:
    """A rounded rectangle."""
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" class="{kind}"/>'


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text."""
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "line") -> str:
    """An arrow, with two heads unless ``kind`` is ``once``."""
    return f'<path d="M{x1} {y1} L{x2} {y2}" class="{kind}"/>'


def module(x: float, y: float) -> list[str]:
    """The user's module, whole."""
    drawn = [rect(x, y, 214, 262, "card", 8), text(x + 14, y + 24, "Your LightningModule", "head")]
    drawn.append(text(x + 14, y + 42, "unchanged", "small quiet"))
    for row, (name, kind, _) in enumerate(PARTS):
        top = y + 56 + row * 22
        drawn += [rect(x + 14, top, 50, 16, kind), text(x + 74, top + 13, name, "small")]
    drawn.append(text(x + 14, y + 228, "training_step(batch)", "small"))
    drawn.append(text(x + 14, y + 246, "configure_optimizers()", "small"))
    return drawn


def rank(x: float, y: float, pp: int, dp: int, tp: int) -> list[str]:
    """One rank with what it holds."""
    drawn = [rect(x, y, BOX_WIDTH, BOX_HEIGHT, "rank", 6)]
    drawn.append(text(x + BOX_WIDTH / 2, y + 18, f"rank {(pp * 2 + dp) * 2 + tp}", "", "middle"))
    left, width = x + 12, BOX_WIDTH - 24
    for row, (_, kind, stage) in enumerate(PARTS):
        top = y + 30 + row * STEP
        drawn.append(rect(left, top, width, BAR, "absent"))
        if stage == pp and kind == "norm":
            drawn.append(rect(left, top, width, BAR, kind))
        elif stage == pp:
            drawn.append(rect(left + tp * width / 2, top, width / 2, BAR, kind))
    top = y + 30 + len(PARTS) * STEP + 12
    drawn += [rect(left, top, width, BAR, "absent"), rect(left + dp * width / 2, top, width / 2, BAR, "state")]
    return drawn


def mesh(x: float, y: float) -> list[str]:
    """Eight ranks at pp2 x dp2 x tp2, with what they say to each other."""
    drawn, group, across, down = [], 2 * BOX_WIDTH + 42, 64, 54
    for dp in range(2):
        drawn.append(text(x + dp * (group + across) + group / 2, y - 8, f"replica dp{dp}", "head", "middle"))
    for pp in range(2):
        top = y + pp * (BOX_HEIGHT + 24 + down)
        label = text(0, 0, f"stage pp{pp}", "head", "middle")
        drawn.append(f'<g transform="translate({x - 12} {top + BOX_HEIGHT / 2 + 12}) rotate(-90)">{label}</g>')
        for dp in range(2):
            left = x + dp * (group + across)
            drawn.append(rect(left, top, group, BOX_HEIGHT + 24, "card", 8))
            for tp in range(2):
                drawn += rank(left + 10 + tp * (BOX_WIDTH + 22), top + 12, pp, dp, tp)
            middle = left + 10 + BOX_WIDTH
            drawn.append(line(middle + 3, top + 70, middle + 19, top + 70))
            drawn.append(text(middle + 11, top + 62, "tp", "small quiet", "middle"))
        drawn.append(line(x + group + 6, top + 100, x + group + across - 6, top + 100))
        drawn.append(text(x + group + across / 2, top + 90, "dp", "small quiet", "middle"))
    for dp in range(2):
        left = x + dp * (group + across) + group / 2
        drawn.append(line(left, y + BOX_HEIGHT + 30, left, y + BOX_HEIGHT + 24 + down - 6))
        drawn.append(text(left + 12, y + BOX_HEIGHT + 24 + down / 2 + 5, "pp", "small quiet"))
    return drawn


def legend(x: float, y: float) -> list[str]:
    """What colours and arrows mean."""
    kinds = {
        "block": "values that this rank holds",
        "absent": "held by others: takes no memory here",
        "state": "its share of the optimizer state, ZeRO-1",
    }
    drawn = []
    for row, (kind, meaning) in enumerate(kinds.items()):
        drawn += [rect(x, y + row * 24, 30, BAR, kind), text(x + 40, y + 11 + row * 24, meaning, "small")]
    said = [("tp", "sums inside every layer"), ("dp", "gradients, once per step"), ("pp", "activations, gradients")]
    for row, (axis, what) in enumerate(said):
        drawn.append(text(x + 330, y + 11 + row * 24, axis, "small quiet"))
        drawn.append(text(x + 360, y + 11 + row * 24, what, "small"))
    return drawn


def draw() -> str:
    """The picture."""
    width, height = 910, 640
    parts = [rect(0, 0, width, height, "page", 10), *module(20, 154)]
    parts += [line(242, 286, 294, 286, "once"), text(266, 276, '"3d"', "small quiet", "middle")]
    parts += [*mesh(328, 44), *legend(328, 552)]
    shape = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse"'
    tip = f'<marker id="tip" {shape}><path d="M0 0 L8 4 L0 8 z" class="tip"/></marker>'
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    title = "One LightningModule laid out on 8 ranks: 2 pipeline stages, 2 replicas, 2 tensor-parallel ranks"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{title}</title>",
            f"<style>{STYLE}</style>",
            f"<defs>{tip}</defs>",
            *parts,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw())
