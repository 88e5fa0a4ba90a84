"""Trains the whole zoo at every layout and writes what came of it into ``results.json`` and the README.

``python -m tests.zoo.table [MODEL ...]``; with names only these are trained, and the rest is kept as it was.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.harness import RankFailure
from tests.zoo.models import MODELS
from tests.zoo.run import LAYOUTS, SINGLE, WHOLE_BATCH, attempt, tolerance

RESULTS = Path(__file__).with_name("results.json")
README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- zoo: made by python -m tests.zoo.table -->", "<!-- /zoo -->"

Results = dict[str, dict[str, dict[str, Any]]]


def load() -> Results:
    """What the last runs have left: model -> layout -> largest difference, cut share, whole layers, blocks."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def train(names: Sequence[str]) -> Results:
    """Train the models at all layouts; a failure is told and leaves no cell."""
    results = load()
    for name in names:
        results[name] = {}
        for layout in LAYOUTS:
            if name in WHOLE_BATCH and "dp" in layout:
                continue
            try:
                outcome = attempt(name, layout)
            except RankFailure as failure:
                print(f"{name} at {layout}: {str(failure).splitlines()[0]}", flush=True)
                continue
            results[name][layout] = {
                "worst": outcome.worst,
                "cut": round(outcome.cut, 2),
                "whole": sorted(set(outcome.whole)),
                "blocks": list(outcome.blocks),
            }
            print(f"{name} at {layout}: {outcome.worst:.0e}", flush=True)
    return {name: results[name] for name in MODELS if name in results}


def render(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """The table as Markdown."""
    heads = [layout.replace(".", "·") for layout in LAYOUTS]
    lines = [f"| model | {' | '.join(heads)} | cut by tp |", "|---" * (len(heads) + 2) + "|"]
    for name, row in results.items():
        cells = [_cell(name, layout, row.get(layout)) for layout in LAYOUTS]
        share = row["tp2"]["cut"] if "tp2" in row else 0.0
        lines.append(f"| {name}{' (float32)' if name in SINGLE else ''} | {' | '.join(cells)} | {share:.0%} |")
    return "\n".join(lines)


def _cell(name: str, layout: str, cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "—" if name in WHOLE_BATCH and "dp" in layout else "fails"
    return f"{cell['worst']:.0e}" if cell["worst"] <= tolerance(name) else f"**differs {cell['worst']:.0e}**"


def main(names: Sequence[str]) -> None:
    """Train, and write both files."""
    results = train(names or list(MODELS))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    text = README.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    README.write_text(f"{before}{BEGIN}\n{render(results)}\n{END}{after}")


if __name__ == "__main__":
    main(sys.argv[1:])
