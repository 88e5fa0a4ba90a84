"""``python -m benchmarks.planner``: the planner's step times and memory beside those of published runs.

Another CSV with the same columns is evaluated with ``--csv``; ``--json`` gives one object with every run.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner_fit import LEFT_OUT, constants_of, family
from benchmarks.published import CSV, Run, read
from lightning_3d.errors import ConfigError
from lightning_3d.planner import Estimate, estimate

_FEWEST = 3
"""Layouts of the same model and cluster from which a rank correlation is worth a name."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One run: predicted beside measured. Relative errors are predicted / measured - 1."""

    id: str
    source: str
    group: str
    """Same model, cluster and batch: only the layout differs."""
    layout: str
    samples: int
    """Of a step."""
    measured_as: str
    measured_s: float | None
    predicted_s: float
    time_error: float | None
    left_out_error: float | None
    """With constants fitted without the run's source and its kin; ``None`` for a source that the fit has not seen."""
    measured_gb: float | None
    predicted_gb: float
    memory_error: float | None


def compare(run: Run, without: Mapping[str, Mapping[str, float]]) -> Comparison:
    """Predict a run."""
    found = estimate(run.shape, run.cluster, run.layout)
    memory = _memory(run, found)
    left_out = None
    if family(run.source) in without:
        table = constants_of(without[family(run.source)])
        left_out = estimate(run.shape, run.cluster, run.layout, table).step_time_s
    seconds = run.step_time_s
    return Comparison(
        id=run.id,
        source=run.source,
        group=(
            f"{run.shape.parameters / 1e9:.4g}B s{run.shape.seq_len} h{run.shape.hidden} a{run.shape.heads}"
            f" on {run.cluster} in {run.layout.precision}"
        ),
        layout=str(run.layout),
        samples=run.layout.samples,
        measured_as=run.measured_as,
        measured_s=seconds,
        predicted_s=found.step_time_s,
        time_error=found.step_time_s / seconds - 1 if seconds else None,
        left_out_error=left_out / seconds - 1 if seconds and left_out else None,
        measured_gb=run.memory_gb,
        predicted_gb=memory,
        memory_error=memory / run.memory_gb - 1 if run.memory_gb else None,
    )


def _memory(run: Run, found: Estimate) -> float:
    """Predicted memory in the way the run's was measured: which rank, and by whom."""
    if run.memory_of_last:
        return found.memory[-1].total / 1e9
    return found.device_memory_gb if run.memory_of_device else found.memory_gb


def rank_correlations(found: Iterable[Comparison]) -> dict[str, tuple[int, float]]:
    """Spearman's correlation of predicted and measured time per sample, by group of at least three layouts."""
    groups = defaultdict(list)
    for item in found:
        if item.measured_s:
            groups[item.group].append(item)
    result = {}
    for name, items in groups.items():
        if len({item.layout for item in items}) >= _FEWEST:
            result[name] = (
                len(items),
                spearman([item.predicted_s for item in items], [item.measured_s or 0.0 for item in items]),
            )
    return result


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation; equal values share their mean rank."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        array = np.asarray(values)
        return np.array([(array < value).sum() + ((array == value).sum() - 1) / 2 for value in array])

    a, b = ranks(first), ranks(second)
    a, b = a - a.mean(), b - b.mean()
    size = math.sqrt(float((a @ a) * (b @ b)))
    return float(a @ b) / size if size else math.nan


def summary(errors: Sequence[float]) -> dict[str, float]:
    """Median of the absolute error, share within 25 %, and the bias (median of the error itself)."""
    array = np.asarray(errors)
    return {
        "runs": len(array),
        "median": float(np.median(np.abs(array))),
        "within_25": float(np.mean(np.abs(array) <= 0.25)),
        "bias": float(np.median(array)),
    }


def evaluate(path: Path = CSV) -> dict[str, Any]:
    """All of a CSV as plain data."""
    runs, left_out = read(path)
    without = json.loads(LEFT_OUT.read_text()) if LEFT_OUT.exists() else {}
    found = []
    for run in runs:
        if run.faults:
            left_out[run.id] = run.faults
        try:
            found.append(compare(run, without))
        except ConfigError as error:
            left_out[run.id] = str(error)
    kinds: dict[str, Callable[[Comparison], float | None]] = {
        "time": lambda item: item.time_error,
        "left_out": lambda item: item.left_out_error,
        "memory": lambda item: item.memory_error,
    }
    by_source: dict[str, dict[str, Any]] = defaultdict(dict)
    overall = {}
    for kind, get in kinds.items():
        errors: dict[str, list[float]] = defaultdict(list)
        for item in found:
            if (relative := get(item)) is not None:
                errors[item.source].append(relative)
        for source, values in errors.items():
            by_source[source][kind] = summary(values)
        if errors:
            overall[kind] = summary([value for values in errors.values() for value in values])
    return {
        "overall": overall,
        "by_source": dict(by_source),
        "rank_correlation": rank_correlations(found),
        "runs": [asdict(item) for item in found],
        "not_evaluated": left_out,
    }


def as_text(result: Mapping[str, Any]) -> str:
    """What a person reads."""
    lines = [
        f"{'run':42s} {'measured':>10s} {'predicted':>10s} {'error':>7s} {'unseen':>7s} {'GB':>6s} {'pred.':>6s}"
        "  layout"
    ]
    for run in result["runs"]:
        if run["measured_s"] is None and run["measured_gb"] is None:
            continue
        measured = f"{run['measured_s']:9.3f}s" if run["measured_s"] else f"{'-':>10s}"
        gigabytes = (
            f"{run['measured_gb']:6.1f} {run['predicted_gb']:6.1f}" if run["measured_gb"] else f"{'-':>6s} {'':6s}"
        )
        lines.append(
            f"{run['id']:42s} {measured} {run['predicted_s']:9.3f}s {_percent(run['time_error'])}"
            f" {_percent(run['left_out_error'])} {gigabytes}  {run['layout']}"
        )
    lines += ["", f"{'source':62s} {'runs':>4s} {'time':>6s} {'bias':>7s} {'unseen':>7s} {'memory':>7s}"]
    for source, kinds in result["by_source"].items():
        lines.append(_row(source, kinds))
    lines.append(_row("all", result["overall"]))
    for kind, name in (
        ("time", "step time"),
        ("left_out", "step time, own source and its kin left out of the fit"),
        ("memory", "memory"),
    ):
        if kind in result["overall"]:
            of = result["overall"][kind]
            lines.append(
                f"{name}: {of['runs']} runs, median absolute error {of['median']:.1%},"
                f" within 25 %: {of['within_25']:.1%}"
            )
    lines += ["", "rank correlation of layouts of the same model and cluster:"]
    lines += [f"  {value:5.2f}  {count:2d} runs  {name}" for name, (count, value) in result["rank_correlation"].items()]
    values = [value for _, value in result["rank_correlation"].values()]
    if values:
        lines.append(f"  {np.nanmean(values):5.2f}  mean of {len(values)} groups")
    lines += ["", "not evaluated:"] + [f"  {name}: {why}" for name, why in result["not_evaluated"].items()]
    return "\n".join(lines)


def _percent(error: float | None) -> str:
    return f"{'':7s}" if error is None else f"{error:+7.1%}"


def _row(name: str, kinds: Mapping[str, Any]) -> str:
    time, unseen, memory = (kinds.get(kind) for kind in ("time", "left_out", "memory"))
    return (
        f"{name[:62]:62s} {time['runs'] if time else 0:4d} {time['median']:6.1%} {time['bias']:+7.1%}"
        if time
        else f"{name[:62]:62s} {'':4s} {'':6s} {'':7s}"
    ) + f" {unseen['median'] if unseen else math.nan:7.1%} {memory['median'] if memory else math.nan:7.1%}".replace(
        "nan%", "   -"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, default=CSV, help="runs with the columns of published_runs.csv")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    try:
        result = evaluate(options.csv)
    except ConfigError as error:
        parser.error(str(error))
    print(json.dumps(result, indent=1) if options.json else as_text(result))


if __name__ == "__main__":
    main()
