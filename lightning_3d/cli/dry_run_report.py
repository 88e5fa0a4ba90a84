"""The answer of ``lightning-3d dry-run`` as tables that a person reads."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from lightning_3d.dry_run import DryRun, StageReport
from lightning_3d.dry_run.allocations import KINDS
from lightning_3d.dry_run.comparison import GB, Comparison

_MOMENTS = 12


def render(found: DryRun, against: Comparison) -> None:
    """Print it."""
    console = Console(width=None, soft_wrap=True, highlight=False)
    console.print(str(found.layout), markup=False)
    console.print(f"{found.samples} samples per replica and step, in micro-batches of {found.micro_batch}\n")
    _memory(console, found, against)
    _work(console, found)
    _timeline(console, found.fullest)
    _comparison(console, found, against)
    _notes(console, found)


def _memory(console: Console, found: DryRun, against: Comparison) -> None:
    room = against.gpu_bytes
    kinds = [kind for kind in KINDS if any(stage.memory.get(kind) for stage in found.stages)]
    table = Table(title="Memory at the fullest moment, in GB (1e9 bytes)", title_justify="left")
    for name in ("stage", "rank", "blocks", "parameters", "kept"):
        table.add_column(name, justify="right")
    for kind in kinds:
        table.add_column(kind, justify="right")
    table.add_column("peak", justify="right")
    table.add_column("of GPU" if room else "during", justify="right")
    for stage in found.stages:
        table.add_row(
            str(stage.stage) + ("*" if stage.alike else ""),
            str(stage.rank),
            str(len(stage.blocks)),
            _count(stage.parameters),
            _count(stage.kept_parameters),
            *(_gb(stage.memory.get(kind, 0)) for kind in kinds),
            _gb(stage.peak_bytes),
            f"{stage.peak_bytes / room:.0%}" if room else stage.record.peak.when,
        )
    console.print(table)
    alike = [stage for stage in found.stages if stage.alike]
    if alike:
        first, last = alike[0].alike
        console.print(
            f"* not run: alike to stages {first} and {last}, which were, but for the micro-batches in flight.\n"
        )


def _work(console: Console, found: DryRun) -> None:
    table = Table(title="One optimizer step of a rank", title_justify="left")
    for name in ("stage", "TFLOP", "axis", "operation", "ranks", "times", "GB", "GB sent on a ring"):
        table.add_column(name, justify="right")
    for stage in _telling(found):
        head = (str(stage.stage), f"{stage.record.work.flops / 1e12:.4g}")
        for message in stage.messages:
            table.add_row(
                *head,
                message["axis"],
                message["operation"],
                str(message["ranks"]),
                str(message["count"]),
                _gb(message["bytes"]),
                _gb(message["sent_bytes"]),
            )
            head = ("", "")
        if head[0]:
            table.add_row(*head)
    console.print(table)


def _telling(found: DryRun) -> list[StageReport]:
    """One stage of each that differ in what they do."""
    seen: list[StageReport] = []
    for stage in found.stages:
        if not any(stage.record.work == other.record.work for other in seen):
            seen.append(stage)
    return seen


def _timeline(console: Console, stage: StageReport) -> None:
    moments = stage.record.timeline
    if not moments:
        return
    top = max(held for _, held in moments) or 1
    step = max(1, len(moments) // _MOMENTS)
    console.print(f"\nMemory of stage {stage.stage} over the step ({stage.record.micro_batches_run} micro-batches run)")
    for start in range(0, len(moments), step):
        name, held = max(moments[start : start + step], key=lambda item: item[1])
        console.print(f"  {name:<28.28} {_gb(held):>9} {'#' * round(40 * held / top)}", markup=False)


def _comparison(console: Console, found: DryRun, against: Comparison) -> None:
    if against.note:
        console.print(f"\n{against.note}", markup=False)
    if not against.estimated:
        return
    table = Table(title="\nDry run (and the planner's estimate), GB", title_justify="left")
    table.add_column("stage", justify="right")
    kinds = list(against.found[0])
    for kind in kinds:
        table.add_column(kind, justify="right")
    table.add_column("total", justify="right")
    for stage, here, there in zip(found.stages, against.found, against.estimated, strict=True):
        cells = [f"{_gb(here[kind])} ({_gb(there[kind])})" for kind in kinds]
        table.add_row(str(stage.stage), *cells, f"{_gb(sum(here.values()))} ({_gb(sum(there.values()))})")
    console.print(table)
    if against.step_time_s is not None:
        console.print(f"The planner's step on these GPUs: {against.step_time_s:.2f} s")


def _notes(console: Console, found: DryRun) -> None:
    if found.warning:
        console.print(f"\nwarning: {found.warning}", markup=False)
    reads: dict[str, int] = {}
    for stage in found.stages:
        reads.update(stage.record.reads)
    if reads:
        lines: Sequence[str] = [f"{line} ({count} times)" for line, count in sorted(reads.items())]
        console.print(f"\nValues that were read, and taken to be zero: {', '.join(lines)}", markup=False)


def _gb(size: float) -> str:
    return f"{size / GB:.2f}" if size >= GB else f"{size / GB:.4g}"


def _count(number: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.4g}{name}"
    return str(number)
