"""``lightning-3d report``: what held a run back, with the figure and the change that it suggests."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_3d.monitor import record
from lightning_3d.monitor.causes import Cause, causes_of
from lightning_3d.monitor.run_figures import RunFigures, figures_of

_DESCRIPTION = """
Say what held a run back (bubble, exposed messages of tensor and data parallelism, loader, slow ranks, memory), most
costly first, with the figure for each and the change that it suggests. Reads monitor/record.jsonl, which ThreeDMonitor
and Diagnosis write into the log folder; also while the run goes on.
"""
_EPILOG = """examples:
  lightning-3d report lightning_logs/version_0
  lightning-3d report lightning_logs --html report.html                  (of the newest version)"""
PHASES = {
    "compute": ("forward", "backward", "weight"),
    "tp": ("tp",),
    "pp": ("pp_wait",),
    "dp": ("dp",),
    "loader": ("loader",),
    "optimizer": ("optimizer",),
    "sync": ("sync",),
    "other": ("other", "checkpoint"),
}
"""What tables and pictures tell apart, and the phases in it."""
_MOST_ROWS = 32


def main(args: list[str]) -> int:
    """Run the command with the arguments after its name and return the exit code.

    Raises:
        ConfigError: The folder has no record, or the run ended before its first window.
    """
    parser = argparse.ArgumentParser(
        "lightning-3d report",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="LOGDIR", help="log folder of the run (trainer.log_dir), or one above it")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    given = parser.parse_args(args)
    path = record.find(given.folder)
    figures = figures_of(record.read(path))
    causes = causes_of(figures)
    if given.html is not None:
        from lightning_3d.cli.report_page import page

        given.html.parent.mkdir(parents=True, exist_ok=True)
        given.html.write_text(page(figures, causes, str(path)))
    if given.json:
        print(json.dumps(as_json(figures, causes)))
    else:
        _print(figures, causes, path)
    return 0


def headline(figures: RunFigures) -> str:
    """What the run was, in a line."""
    run = figures.run
    pp, dp, tp = run.sizes
    first, last = figures.windows[0].first_step, figures.windows[-1].last_step
    tokens = f", {figures.job.tokens_per_s:,.0f} tokens/s" if figures.job.tokens_per_s else ""
    devices = sorted({place.device for place in run.places})
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started))
    return (
        f"pp{pp} x dp{dp} x tp{tp} on {', '.join(devices)}, started {started}; steps {first} to {last},"
        f" {figures.step_s * 1e3:,.1f} ms per batch{tokens}"
    )


def shares(figures: RunFigures, rank: int) -> dict[str, float]:
    """Share of a batch by what tables tell apart."""
    seconds = figures.seconds[rank]
    whole = sum(seconds.values()) or 1.0
    return {name: sum(seconds.get(phase, 0.0) for phase in phases) / whole for name, phases in PHASES.items()}


def as_json(figures: RunFigures, causes: list[Cause]) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "run": dataclasses.asdict(figures.run),
        "batch_s": figures.step_s,
        "tokens_per_s": figures.job.tokens_per_s,
        "micro_batches": figures.micro_batches,
        "bubble": figures.job.bubble,
        "causes": [dataclasses.asdict(cause) for cause in causes],
        "ranks": [
            {**dataclasses.asdict(place), "shares": shares(figures, place.rank), "memory_peak": peak}
            for place, peak in zip(figures.places, figures.memory_peak, strict=True)
        ],
    }


def _print(figures: RunFigures, causes: list[Cause], path: Path) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    console.print(f"{path}\n{headline(figures)}\n", markup=False, soft_wrap=True)
    if not causes:
        console.print("Nothing holds this run back by more than 2 % of a batch.\n")
    for number, cause in enumerate(causes, 1):
        lost = f" ({cause.lost:.0%} of a batch)" if cause.lost else ""
        console.print(Text(f"{number}. {cause.kind}", style="bold") + Text(f"{lost}: {cause.figure}"))
        console.print(Text(f"   → {cause.change}"))
    console.print()
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title="Share of a batch by rank", title_justify="left")
    for name in ("rank", "pp", "dp", "tp", *PHASES, "peak memory"):
        table.add_column(name, justify="right", no_wrap=True)
    step = -(-len(figures.places) // _MOST_ROWS)
    named = {cause.rank for cause in causes}
    for place in figures.places:
        if place.rank % step and place.rank not in named:
            continue
        table.add_row(
            *map(str, (place.rank, place.pp, place.dp, place.tp)),
            *(f"{share:.1%}" for share in shares(figures, place.rank).values()),
            f"{figures.memory_peak[place.rank] / 1e6:,.0f} MB",
        )
    console.print(table)
