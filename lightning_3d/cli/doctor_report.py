"""The doctor's findings as tables for people."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_3d.cli.examination import Examination


def render(found: Examination, console: Console | None = None) -> None:
    """Print ``found`` on stdout, or on ``console``."""
    console = console or Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    sizes = found.sizes
    console.print(f"[bold]{escape(found.model)}[/bold]: {found.parameters:,} parameters")
    console.print(
        f"at pp{sizes['pipeline_parallel']} x dp{sizes['data_parallel']} x tp{sizes['tensor_parallel']}"
        + ("" if found.layout is None else f": {escape(str(found.layout).splitlines()[0].partition(', ')[2])}")
    )
    for show in (_blocks, _cut, _layers, _ties):
        show(found, console)
    if found.problems:
        parts = ", ".join(problem.part for problem in found.problems)
        console.print(f"\n[bold red]Problems: {parts}[/bold red]")
    else:
        console.print("\n[bold green]Nothing was found that would be refused.[/bold green]")


def _print(console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in _NUMBERS else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(f"\n[bold]{title}[/bold]")
    console.print(table)


_NUMBERS = ("count", "parameters", "cost", "alike")


def _blocks(found: Examination, console: Console) -> None:
    if not found.blocks:
        console.print(
            "\n[bold]Blocks[/bold]: none found. Name a list of layers with --pipeline_blocks to cut a pipeline."
        )
        return
    rows = [(item.name, item.kind, str(item.count), f"{item.parameters:,}") for item in found.blocks]
    _print(console, "Blocks", ("list", "class", "count", "parameters"), rows)


def _cut(found: Examination, console: Console) -> None:
    if len(found.chunks) < 2:
        return
    stages = found.sizes["pipeline_parallel"]
    rows = []
    for item in found.chunks:
        stage = f"{item.stage} (chunk {item.chunk})" if len(found.chunks) > stages else str(item.stage)
        outside = ", ".join(item.outside) or "-"
        rows.append((stage, _span(item.blocks), outside, f"{item.parameters:,}", f"{item.share:.1%}"))
    _print(console, "Cut", ("stage", "blocks", "and outside of them", "parameters", "cost"), rows)
    console.print(f"cost {escape(found.cost_source)}; even is {1 / stages:.1%} per stage")
    if found.everywhere:
        console.print(f"on every stage: the parameters of {escape(', '.join(found.everywhere))}")


def _span(names: Sequence[str]) -> str:
    first, last = names[0], names[-1]
    if first == last:
        return first
    parent, _, key = last.rpartition(".")
    return f"{first} .. {key if first.rpartition('.')[0] == parent else last}"


def _layers(found: Examination, console: Console) -> None:
    rows: dict[tuple[str, str, str, str], int] = {}
    for layer in found.layers:
        name = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", layer.name)
        key = (name, layer.kind, layer.source, layer.note)
        rows[key] = rows.get(key, 0) + 1
    cut = [(key[0], str(count), *key[1:]) for key, count in rows.items() if key[2] != "replicated"]
    if cut:
        _print(console, "Cut over tensor-parallel ranks", ("layer", "count", "cut", "said by", "note"), cut)
    whole = [(key[0], str(count), key[3] or "-") for key, count in rows.items() if key[2] == "replicated"]
    if whole:
        _print(console, "Whole on every tensor-parallel rank", ("layer", "count", "why"), whole)
    if found.checks:
        checks = [(c["block"], str(c["count"]), "yes" if c["passed"] else "no", c["result"]) for c in found.checks]
        _print(console, "Cut blocks against whole ones, in numbers", ("block", "alike", "cut", "result"), checks)


def _ties(found: Examination, console: Console) -> None:
    rows = [(" = ".join(tie.names), ", ".join(map(str, tie.stages))) for tie in found.ties]
    if rows:
        _print(console, "Shared parameters", ("names", "on stages"), rows)
