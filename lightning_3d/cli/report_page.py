"""A report as one HTML file without anything outside of it: causes, and where the time of every rank goes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lightning_3d.cli.report import PHASES, headline, shares
from lightning_3d.monitor.causes import Cause
from lightning_3d.monitor.run_figures import RunFigures
from lightning_3d.pictures import Bar, draw_bars, svg
from lightning_3d.pictures.colours import SERIES

_STYLE = """
body { font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif; color: #222;
  max-width: 1180px; margin: 2em auto; padding: 0 1.5em; }
h1 { font-size: 1.5em; margin-bottom: 0.2em; } h2 { font-size: 1.15em; margin-top: 2em; }
.pale { color: #666; } .scroll { overflow-x: auto; }
.cause { border-left: 4px solid #e69f00; background: #fdf5e6; padding: 0.5em 1em; margin: 0.8em 0; }
.cause.ends { border-color: #d55e00; background: #fbeee6; } .cause.hint { border-color: #0072b2; background: #eef5fb; }
.cause b { margin-right: 0.5em; } .cause p { margin: 0.2em 0; }
"""
_COLOURS = dict(zip(PHASES, (*SERIES[:2], "#d9d9d9", *SERIES[3:6], SERIES[2], SERIES[6]), strict=True))
_WIDTH = 1140.0
_MOST_BARS = 64
_GOOD = '<p class="cause hint">Nothing holds this run back by more than 2 % of a batch.</p>'


def page(figures: RunFigures, causes: Sequence[Cause], path: str) -> str:
    """The text of the file.

    Args:
        figures: Of the run.
        causes: What held it back, most costly first.
        path: Of the record.
    """
    blocks = "\n".join(_block(number, cause) for number, cause in enumerate(causes, 1)) or _GOOD
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>What held the run back</title><style>{_STYLE}</style></head><body>
<h1>What held the run back</h1>
<p class="pale">{escape(headline(figures))}<br>{escape(path)}</p>
{blocks}
<h2>Where the time goes</h2>
<div class="scroll">{_bars(figures, causes)}</div>
<p class="pale">compute: forward and backward without messages; tp, dp: messages that nothing hides, with waiting for
ranks that come late; pp: waiting for other stages; sync: waiting for others in messages of no one axis.</p>
<h2>From window to window</h2>
<div class="scroll">{_windows(figures)}</div>
</body></html>
"""


def _block(number: int, cause: Cause) -> str:
    kind = {"leak": "cause ends", "memory": "cause hint"}.get(cause.kind, "cause")
    lost = f"<b>{cause.lost:.0%} of a batch</b>" if cause.lost else ""
    return (
        f'<div class="{kind}"><p><b>{number}. {escape(cause.kind)}</b>{lost}{escape(cause.figure)}</p>'
        f"<p>→ {escape(cause.change)}</p></div>"
    )


def _bars(figures: RunFigures, causes: Sequence[Cause]) -> str:
    step = -(-len(figures.places) // _MOST_BARS)
    named = {cause.rank for cause in causes}
    bars = []
    for place in figures.places:
        if place.rank % step == 0 or place.rank in named:
            parts = {name: share * figures.step_s * 1e3 for name, share in shares(figures, place.rank).items()}
            label = f"rank {place.rank} (pp{place.pp} dp{place.dp} tp{place.tp})"
            bars.append(Bar(label, parts, f"{figures.memory_peak[place.rank] / 1e9:.2f} GB"))
    return svg(draw_bars(bars, "ms per batch", "Time of a batch by rank", colours=_COLOURS, width=_WIDTH))


def _windows(figures: RunFigures) -> str:
    stride = -(-len(figures.windows) // _MOST_BARS)
    bars = []
    for window in figures.windows[::stride]:
        parts = {}
        for name, phases in PHASES.items():
            values = [sum(rank.seconds[p].mean for p in phases if p in rank.seconds) for rank in window.ranks]
            parts[name] = 1e3 * sum(values) / len(values)
        bars.append(Bar(f"steps {window.first_step} to {window.last_step}", parts, f"{sum(parts.values()):.1f} ms"))
    return svg(draw_bars(bars, "ms per batch, mean of ranks", "Time of a batch", colours=_COLOURS, width=_WIDTH))
