"""The answer of ``lightning-3d dry-run`` as tables that a person reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from lightning_3d.dry_run import DryRun, StageReport
from lightning_3d.dry_run.allocations import KINDS
from lightning_3d.dry_run.comparison import GB, Comparison

_MOMENTS = 12


@dataclass(frozen=True)
class _Unit:
    """In what sizes are told."""

    name: str
    size: float

    @classmethod
    def of(cls, found: DryRun) -> _Unit:
        return cls("GB", GB) if found.fullest.peak_bytes >= GB / 10 else cls("MB", 1e6)

    def of_bytes(self, number: float) -> str:
        return f"{number / self.size:.2f}" if number >= self.size / 100 or not number else f"{number / self.size:.1g}"

    def __str__(self) -> str:
        return f"{self.name} ({self.size:.0e} bytes)".replace("e+0", "e")


def render(found: DryRun, against: Comparison) -> None:
    """Print it."""
    console = Console(width=160, highlight=False)
    console.print(str(found.layout), markup=False)
    console.print(f"{found.samples} samples per replica and step, in micro-batches of {found.micro_batch}\n")
    _memory(console, found, against)
    _work(console, found)
    _timeline(console, found.fullest, _Unit.of(found))
    _comparison(console, found, against)
    _notes(console, found)


def _memory(console: Console, found: DryRun, against: Comparison) -> None:
    room, unit = against.gpu_bytes, _Unit.of(found)
    kinds = [kind for kind in KINDS if any(stage.memory.get(kind) for stage in found.stages)]
    table = Table(title=f"Memory at the fullest moment, in {unit}", title_justify="left", box=SIMPLE)
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
            *(unit.of_bytes(stage.memory.get(kind, 0)) for kind in kinds),
            unit.of_bytes(stage.peak_bytes),
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
    unit = _Unit.of(found)
    table = Table(title="One optimizer step of a rank", title_justify="left", box=SIMPLE)
    for name in ("stage", "TFLOP", "axis", "operation", "ranks", "times", unit.name, f"{unit.name} sent on a ring"):
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
                unit.of_bytes(message["bytes"]),
                unit.of_bytes(message["sent_bytes"]),
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


def _timeline(console: Console, stage: StageReport, unit: _Unit) -> None:
    moments = stage.record.timeline
    if not moments:
        return
    top = max(held for _, held in moments) or 1
    step = max(1, len(moments) // _MOMENTS)
    run = f"{stage.record.micro_batches_run} micro-batches run"
    console.print(f"\nMemory of stage {stage.stage} over the step, in {unit.name} ({run})")
    for start in range(0, len(moments), step):
        name, held = max(moments[start : start + step], key=lambda item: item[1])
        console.print(f"  {name:<28.28} {unit.of_bytes(held):>9} {'#' * round(40 * held / top)}", markup=False)


def _comparison(console: Console, found: DryRun, against: Comparison) -> None:
    if against.gpu:
        needed, room = against.needed_bytes / GB, against.gpu_bytes / GB
        console.print(
            f"\nWith what CUDA, NCCL and the allocator take, the fullest stage needs about {needed:.1f} GB of the"
            f" {room:.0f} GB of a {against.gpu}."
        )
    if against.note:
        console.print(f"\n{against.note}", markup=False)
    if not against.estimated:
        return
    unit = _Unit.of(found)
    table = Table(title=f"\nDry run (and the planner's estimate), {unit.name}", title_justify="left", box=SIMPLE)
    table.add_column("stage", justify="right")
    kinds = list(against.found[0])
    for kind in kinds:
        table.add_column(kind, justify="right")
    table.add_column("total", justify="right")
    for stage, here, there in zip(found.stages, against.found, against.estimated, strict=True):
        cells = [f"{unit.of_bytes(here[kind])} ({unit.of_bytes(there[kind])})" for kind in kinds]
        table.add_row(
            str(stage.stage), *cells, f"{unit.of_bytes(sum(here.values()))} ({unit.of_bytes(sum(there.values()))})"
        )
    console.print(table)
    if against.step_time_s is not None:
        console.print(f"The planner's step on these GPUs: {against.step_time_s:.3g} s")


def _notes(console: Console, found: DryRun) -> None:
    if found.warning:
        console.print(f"\nwarning: {found.warning}", markup=False)
    if found.note:
        console.print(f"\nnote: {found.note}", markup=False)
    reads: dict[str, int] = {}
    for stage in found.stages:
        reads.update(stage.record.reads)
    if reads:
        lines: Sequence[str] = [f"{line} ({count} times)" for line, count in sorted(reads.items())]
        console.print(f"\nValues that were read, and taken to be zero: {', '.join(lines)}", markup=False)


def _count(number: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.4g}{name}"
    return str(number)
