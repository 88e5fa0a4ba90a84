"""``lightning-3d simulate``: what pipeline schedules do, on paper: timeline, bubble, memory, as tables and pictures."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_3d.cli.did_you_mean import suggest
from lightning_3d.cli.numbers import not_negative, positive, positive_number
from lightning_3d.cli.paths import check_writable, write_file
from lightning_3d.errors import ConfigError
from lightning_3d.pictures import Panel, chrome_trace, draw_timelines, png, svg
from lightning_3d.pictures.axes import number
from lightning_3d.planner.pipeline import CLOSED_FORM
from lightning_3d.schedules import ENGINE_SCHEDULES, SCHEDULES, build, simulate

_DESCRIPTION = """
Run pipeline schedules on paper, from the same lists of actions that training runs, and show when each rank works, how
long it waits (the bubble, as a fraction of the total time) and how many activations it keeps. Times are per stage;
without them a forward takes 1 and a backward 2.
"""
_EPILOG = """examples:
  lightning-3d simulate --stages 8 --micro-batches 32
  lightning-3d simulate --stages 8 --micro-batches 32 --schedule 1f1b,interleaved_1f1b,zb_h1,zbv -o compare.svg
  lightning-3d simulate --stages 4 --micro-batches 16 --forward-times 10,10,10,14 --send-time 1 --unit ms -o step.png
  lightning-3d simulate --stages 4 --micro-batches 16 -o trace.json      (open it at https://ui.perfetto.dev)"""
_SUFFIXES = (".svg", ".png", ".json")


def main(args: list[str]) -> int:
    """Run the command with the arguments after its name and return the exit code.

    Raises:
        ConfigError: For an unknown schedule, sizes or times that do not fit, or a kind of file that is not known.
    """
    parser = _parser()
    given = parser.parse_args(args)
    for path in given.output:
        if path.suffix not in _SUFFIXES:
            raise ConfigError(f"--output {path}: the name must end in one of {', '.join(_SUFFIXES)}.")
        check_writable("--output", path)
    panels = [_panel(name, given) for name in _names(given.schedule, given.virtual_stages)]
    for path in given.output:
        _write(path, panels, given.width)
    if given.json:
        print(json.dumps({"schedules": [_as_json(panel) for panel in panels]}))
    else:
        _print(panels)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-3d simulate",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--stages", type=positive, required=True, metavar="P", help="pipeline ranks")
    add("--micro-batches", type=positive, required=True, metavar="M", help="micro-batches of a step")
    add("--schedule", default="1f1b", metavar="NAME[,NAME...]", help=f"any of {', '.join(SCHEDULES)}; or 'all'")
    add(
        "--virtual-stages",
        type=positive,
        metavar="V",
        help="chunks per rank where there can be several (2)",
    )
    times = "one number, or a list over the model from its first layers to its last"
    add("--forward-times", type=_numbers, default=[1.0], metavar="T[,T...]", help=f"of a stage: {times}")
    add("--backward-times", type=_numbers, metavar="T[,T...]", help="whole backward (default: twice the forward)")
    add(
        "--weight-share",
        type=not_negative,
        default=0.5,
        metavar="X",
        help="part of a backward that is for weights",
    )
    add("--send-time", type=not_negative, default=0.0, metavar="T", help="time that a message travels (0)")
    add("--unit", default="", metavar="UNIT", help="unit of the times, such as ms")
    add("--activation-gb", type=_numbers, metavar="GB[,GB...]", help="what a stage keeps of one micro-batch")
    add("-o", "--output", type=Path, nargs="+", action="extend", default=[], metavar="FILE",
        help="write a picture (.svg, .png) or a trace for Perfetto (.json)")  # fmt: skip
    add("--width", type=positive_number, metavar="PIXELS", help="of the picture (default: enough for its numbers)")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def _numbers(text: str) -> list[float]:
    try:
        values = [float(part) for part in re.split(r"[,\s]+", text.strip())]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number or list of numbers such as 10,10,12") from None
    if not all(0 <= value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} must not be negative or infinite")
    return values


def _names(text: str, virtual_stages: int | None) -> list[str]:
    """The schedules that were asked for; ``all`` leaves out none."""
    names = list(SCHEDULES) if text == "all" else [name for name in re.split(r"[,\s]+", text) if name]
    for name in names:
        if name not in SCHEDULES:
            if name in CLOSED_FORM:
                raise ConfigError(
                    f"schedule={name!r} is known by the formula of its bubble only, for `lightning-3d plan` and"
                    " `estimate`; it has no list of actions to draw."
                )
            near = suggest(name, SCHEDULES, prefix="")
            raise ConfigError(f"schedule={name!r} is not known.{near} Known: {', '.join(SCHEDULES)}, all.")
    if virtual_stages is not None and not any(SCHEDULES[n].virtual_stages in (None, virtual_stages) for n in names):
        raise ConfigError(
            f"--virtual-stages {virtual_stages}: {', '.join(names)} cannot have so many chunks per rank. Use"
            " --schedule interleaved_1f1b, or leave the option out."
        )
    return names


def _panel(name: str, given: argparse.Namespace) -> Panel:
    virtual_stages = SCHEDULES[name].virtual_stages or (2 if given.virtual_stages is None else given.virtual_stages)
    schedule = build(name, given.stages, virtual_stages, given.micro_batches)
    backward_times = given.backward_times or [2 * time for time in given.forward_times]
    if given.weight_share > 1:
        raise ConfigError(f"--weight-share {given.weight_share} must lie between 0 and 1: a part of the backward.")

    def per_chunk(option: str, values: Sequence[float]) -> list[float]:
        return _per_chunk(option, values, given.stages, schedule.num_chunks)

    forward = per_chunk("--forward-times", given.forward_times)
    backward = per_chunk("--backward-times", backward_times)
    weight = [0.0] * schedule.num_chunks
    if SCHEDULES[name].splits_backward:
        weight = [time * given.weight_share for time in backward]
        backward = [time - part for time, part in zip(backward, weight, strict=True)]
    if not any(forward) and not any(backward):
        raise ConfigError("--forward-times and --backward-times are all 0: there is nothing to draw. Give a time.")
    timeline = simulate(schedule, forward, backward, given.send_time, weight_time=weight)
    unit = given.unit or ("" if given.forward_times == [1.0] else "given unit")
    if given.activation_gb:
        return Panel(schedule, timeline, per_chunk("--activation-gb", given.activation_gb), unit, "GB")
    return Panel(schedule, timeline, [1.0 / virtual_stages] * schedule.num_chunks, unit)


def _per_chunk(option: str, values: Sequence[float], stages: int, chunks: int) -> list[float]:
    """Share out what was given for equal pieces of the model over chunks, which may be more or fewer."""
    if len(values) == 1:
        return [values[0] * stages / chunks] * chunks
    if chunks % len(values) == 0:
        times = chunks // len(values)
        return [value / times for value in values for _ in range(times)]
    if len(values) % chunks == 0:
        size = len(values) // chunks
        return [sum(values[chunk * size : (chunk + 1) * size]) for chunk in range(chunks)]
    each = "one for every stage" if chunks == stages else f"{stages}, or {chunks}: one for every chunk"
    raise ConfigError(
        f"{option} has {len(values)} values, but the model is cut into {chunks} chunks. Give 1 value, or"
        f" {f'{stages}: ' if chunks == stages else ''}{each}, from the first layers to the last."
    )


def _write(path: Path, panels: Sequence[Panel], width: float | None) -> None:
    if path.suffix == ".json":
        content: str | bytes = json.dumps(chrome_trace(panels))
    elif path.suffix == ".svg":
        content = svg(draw_timelines(panels, width))
    else:
        content = png(draw_timelines(panels, width))
    write_file("--output", path, content)


def _as_json(panel: Panel) -> dict[str, Any]:
    schedule, timeline = panel.schedule, panel.timeline
    ranks = zip(timeline.busy, timeline.idle, panel.idle_fractions, timeline.peak_live, panel.kept, strict=True)
    return {
        "schedule": schedule.name,
        "stages": schedule.stages,
        "virtual_stages": schedule.virtual_stages,
        "micro_batches": schedule.micro_batches,
        "engine_runs_it": schedule.name in ENGINE_SCHEDULES,
        "time_unit": panel.time_unit or "forward of a stage",
        "total_time": timeline.total,
        "bubble_fraction_of_total": timeline.bubble_fraction,
        "messages": len(timeline.messages),
        "memory_unit": panel.memory_unit,
        "ranks": [
            {
                "rank": rank,
                "chunks": schedule.rank_chunks(rank),
                "busy": busy,
                "idle": idle,
                "bubble_fraction_of_total": fraction,
                "peak_live_chunk_activations": live,
                "peak_activations": kept,
            }
            for rank, (busy, idle, fraction, live, kept) in enumerate(ranks)
        ],
    }


def _print(panels: Sequence[Panel]) -> None:
    console = Console(highlight=False)
    first = panels[0]
    unit = f", {first.time_unit}" if first.time_unit else ""
    best = min(panel.timeline.total for panel in panels)
    console.print(f"{first.schedule.stages} stages, {first.schedule.micro_batches} micro-batches")
    table = _table("schedule", "chunks", f"step{unit}", "to best", "bubble of total", "most kept", "messages")
    for panel in panels:
        name = panel.schedule.name + ("" if panel.schedule.name in ENGINE_SCHEDULES else " *")
        timeline = panel.timeline
        table.add_row(
            name, str(panel.schedule.virtual_stages), number(timeline.total), f"{timeline.total / best:.3f}",
            f"{timeline.bubble_fraction:.1%}", number(max(panel.kept)), str(len(timeline.messages)),
        )  # fmt: skip
    console.print(table)
    if len(panels) == 1:
        ranks = _table("rank", f"busy{unit}", f"idle{unit}", "bubble of total", "most kept")
        rows = zip(first.timeline.busy, first.timeline.idle, first.idle_fractions, first.kept, strict=True)
        for rank, (busy, idle, fraction, kept) in enumerate(rows):
            ranks.add_row(str(rank), number(busy), number(idle), f"{fraction:.1%}", number(kept))
        console.print(ranks)
    time = f"Times in {first.time_unit}" if first.time_unit else "Times in forwards of a stage"
    console.print(f"{time}; kept: activations, in {first.memory_unit}.")
    if any(panel.schedule.name not in ENGINE_SCHEDULES for panel in panels):
        console.print("* for simulation and planning; training runs " + ", ".join(ENGINE_SCHEDULES) + ".")


def _table(first: str, *others: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right")
    return table
