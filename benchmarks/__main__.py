"""``python -m benchmarks``: run the cases and print the table."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import os
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.cases import CASES, Case, memory, race
from benchmarks.contest import Turns
from tests.harness import run_trainer

_TIME_LIMIT_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one case gave."""

    case: Case
    milliseconds: tuple[float, float]
    """Medians of ours and the peer."""
    ratio: float
    """Median over the rounds of ours / peer: both turns of a round see the same machine."""
    spread: tuple[float, float]
    """Quartiles of the same."""
    cpu_ratio: float
    """The same of processor time, summed over ranks."""
    megabytes: tuple[list[float], list[float]]
    """Peak memory by rank."""
    difference: float
    """Largest relative difference of the losses of the same step."""

    @property
    def is_met(self) -> bool:
        """Whether the target is met."""
        return self.ratio <= self.case.target


def measure(case: Case) -> Row:
    """Run a case in processes of its own."""
    by_rank: list[list[Turns]] = _quietly(case, race)
    mine, peer = by_rank[0]
    ratios = sorted(a / b for a, b in zip(mine.wall, peer.wall, strict=True))
    cpu = [[sum(turns[i].cpu[r] for turns in by_rank) for r in range(case.rounds)] for i in (0, 1)]
    # The loss is known to every rank of ours, and to those of the last stage of a peer.
    known = next(turns[1].losses for turns in by_rank if turns[1].losses)
    index = next(i for i, turns in enumerate(by_rank) if turns[1].losses)
    pairs = list(zip(by_rank[index][0].losses, known, strict=False))[:5]
    peaks = [[value / 2**20 for value in _quietly(case, memory, name)] for name in case.contenders]
    return Row(
        case=case,
        milliseconds=(1e3 * statistics.median(mine.wall), 1e3 * statistics.median(peer.wall)),
        ratio=statistics.median(ratios),
        spread=(ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]),
        cpu_ratio=statistics.median(a / b for a, b in zip(*cpu, strict=True)),
        megabytes=(peaks[0], peaks[1]),
        difference=max(abs(a - b) / abs(b) for a, b in pairs),
    )


def _quietly(case: Case, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``fn`` on the ranks of a case; what they print is shown only if one fails."""
    with contextlib.redirect_stdout(io.StringIO()):
        return run_trainer(case.ranks, fn, case, *args, timeout=_TIME_LIMIT_S)


_COLUMNS = (
    ("case", 14), ("what", 42), ("against", 20), ("ms", 8), ("peer ms", 8), ("ratio", 6), ("quartiles", 12),
    ("target", 7), ("met", 4), ("cpu", 5), ("peak MB per rank", 24), ("peer's", 24), ("loss differs", 12),
)  # fmt: skip


def header() -> str:
    """The names of the columns."""
    return "  ".join(name.ljust(width) for name, width in _COLUMNS)


def line(row: Row) -> str:
    """A row of the table."""
    case = row.case
    cells = (
        case.name,
        case.what,
        case.peer,
        f"{row.milliseconds[0]:.1f}",
        f"{row.milliseconds[1]:.1f}",
        f"{row.ratio:.2f}",
        f"{row.spread[0]:.2f}-{row.spread[1]:.2f}",
        f"{case.target:.2f}",
        "yes" if row.is_met else "no",
        f"{row.cpu_ratio:.2f}",
        _peaks(row.megabytes[0]),
        _peaks(row.megabytes[1]),
        f"{row.difference:.0e}",
    )
    return "  ".join(cell.ljust(width) for cell, (_, width) in zip(cells, _COLUMNS, strict=True))


def _peaks(megabytes: list[float]) -> str:
    if len(megabytes) > 4:
        return f"{min(megabytes):.1f} to {max(megabytes):.1f}"
    return " ".join(f"{value:.1f}" for value in megabytes)


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = [case.name for case in CASES]
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"which to run, or how their names begin: {names}")
    parser.add_argument("--rounds", type=int, help="turns of each contender; fewer is faster and noisier")
    options = parser.parse_args(arguments)
    chosen = [case for case in CASES if not options.cases or case.name.startswith(tuple(options.cases))]
    if not chosen:
        parser.error(f"no case begins with {' or '.join(options.cases)}; there are {', '.join(names)}")
    load = os.getloadavg()[0]
    print(
        f"{datetime.date.today()}, {os.cpu_count()} cores ({platform.machine()}), load {load:.1f} at the start,"
        f" torch {torch.__version__}, one thread per rank"
    )
    print(header())
    rows = []
    for case in chosen:
        rows.append(measure(case if options.rounds is None else replace(case, rounds=options.rounds)))
        print(line(rows[-1]), flush=True)
    missed = [row.case.name for row in rows if not row.is_met]
    print(f"missed: {', '.join(missed)}" if missed else "every target is met")
    return 0


if __name__ == "__main__":
    sys.exit(main())
