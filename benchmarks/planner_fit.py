"""``python -m benchmarks.planner_fit``: fit the planner's constants to published runs, and write them down.

A damped Gauss-Newton on the logarithms of the constants, against the logarithm of predicted over measured step time.
An error above 20 % counts linearly (a run that nothing explains must not bend the rest), and every constant is held
near what the literature or a measurement says of it by a weak pull: the one-sigma width stands in `WIDTH`.

With ``--leave-out`` the fit is repeated without each source in turn, from the same start; ``benchmarks.planner`` reads
the constants found so, and says how well runs are predicted that the fit has not seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.published import CSV, Run, read
from lightning_3d.errors import ConfigError
from lightning_3d.planner import estimate
from lightning_3d.planner.constants import Constants

LEFT_OUT = Path(__file__).parent / "planner_left_out.json"
OUTPUT = Path(__file__).parents[1] / "lightning_3d" / "planner" / "fitted.py"
GENERATIONS = ("volta", "ampere", "hopper", "hopper-500w", "blackwell", "blackwell-ultra")
START: Mapping[str, float] = {
    # Of matrix products, by generation: what stas00/ml-engineering measured as best, less what power limits take.
    "gemm ampere": 0.85,
    "gemm hopper": 0.72,
    "gemm hopper-500w": 0.60,
    "gemm_fp8 hopper": 0.60,
    "gemm_fp8 blackwell": 0.60,
    "gemm_fp8 blackwell-ultra": 0.65,
    # FlashAttention-2 and cuDNN papers: 60-70 % of the peak on A100, 35-60 % on H100, forward and backward together.
    "attention ampere": 0.55,
    "attention hopper": 0.45,
    "attention hopper-500w": 0.35,
    "gemm_half_size": 200.0,
    "misaligned": 0.8,
    "elementwise": 1.0,
    "elementwise_eager": 2.0,
    "nvlink": 0.75,
    "network": 0.75,
    "latency_us": 2.0,
    "network_latency_us": 8.0,
    "launch_us": 4.0,
    "overlap_cost": 0.15,
    "step_overhead": 0.01,
}
"""Where the fit starts, and what it is pulled to. A name alone holds for every generation."""
WIDTH = 0.35
_HUBER = 0.2


def constants_of(values: Mapping[str, float]) -> dict[str, Constants]:
    """The table of constants from the names of `START`."""
    shared = {name: value for name, value in values.items() if " " not in name}
    table = {}
    for generation in GENERATIONS:
        own = dict(shared)
        for name in ("gemm", "gemm_fp8", "attention"):
            own[name] = _of(values, name, generation)
        table[generation] = Constants(**own)
    return table


def _of(values: Mapping[str, float], name: str, generation: str) -> float:
    """A constant of a generation; where there are no runs to fit it, what its kin has."""
    kin = {"volta": "ampere", "blackwell-ultra": "blackwell", "blackwell": "hopper", "hopper-500w": "hopper"}
    if name == "gemm_fp8" and generation == "hopper-500w":  # limited in power as its 16-bit products are
        return values["gemm_fp8 hopper"] * values["gemm hopper-500w"] / values["gemm hopper"]
    while f"{name} {generation}" not in values:
        if generation not in kin:
            return getattr(Constants(), name)
        generation = kin[generation]
    return values[f"{name} {generation}"]


def errors(runs: Sequence[Run], table: Mapping[str, Constants]) -> np.ndarray:
    """Logarithm of predicted over measured step time of every run."""
    predicted = [estimate(run.shape, run.cluster, run.layout, table).step_time_s for run in runs]
    return np.array([math.log(time / (run.step_time_s or math.nan)) for time, run in zip(predicted, runs, strict=True)])


def usable(runs: Sequence[Run]) -> list[Run]:
    """Runs with a measured step time that the planner accepts."""
    accepted = []
    for run in runs:
        try:
            estimate(run.shape, run.cluster, run.layout)
        except ConfigError:
            continue
        if run.step_time_s:
            accepted.append(run)
    return accepted


def fit(runs: Sequence[Run], start: Mapping[str, float] = START, rounds: int = 6) -> dict[str, float]:
    """Constants that fit the runs best."""
    names = list(START)
    anchor = np.log([START[name] for name in names])
    x = np.log([start[name] for name in names])
    many = Counter(run.source for run in runs)
    weight = np.array([many[run.source] ** -0.3 for run in runs])

    def residuals(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        error = errors(runs, constants_of(dict(zip(names, np.exp(x), strict=True))))
        robust = weight * np.where(np.abs(error) > _HUBER, np.sqrt(_HUBER / np.maximum(np.abs(error), 1e-9)), 1.0)
        return error, robust

    def cost(error: np.ndarray, x: np.ndarray) -> float:
        size = np.abs(error)
        loss = np.where(size > _HUBER, _HUBER * (2 * size - _HUBER), size**2)
        return float((weight**2 * loss).sum() / 0.08**2 + (((x - anchor) / WIDTH) ** 2).sum())

    error, robust = residuals(x)
    damping, best = 1.0, cost(error, x)
    for _ in range(rounds):
        columns = []
        for i in range(len(names)):
            moved = x.copy()
            moved[i] += 0.02
            columns.append((residuals(moved)[0] - error) / 0.02)
        jacobian = np.stack(columns, 1) * (robust / 0.08)[:, None]
        gradient = jacobian.T @ (robust / 0.08 * error) + (x - anchor) / WIDTH**2
        curvature = jacobian.T @ jacobian + np.eye(len(names)) / WIDTH**2
        for _ in range(5):
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient)
            tried = x + np.clip(step, -0.4, 0.4)
            new_error, new_robust = residuals(tried)
            if (found := cost(new_error, tried)) < best:
                gain, best = best - found, found
                x, error, robust, damping = tried, new_error, new_robust, damping / 3
                break
            damping *= 4
        else:
            break
        if gain < 0.1:
            break
    return {name: float(value) for name, value in zip(names, np.exp(x), strict=True)}


def as_text(table: Mapping[str, Constants]) -> str:
    """The module that holds the table."""
    lines = [
        '"""Constants by generation of GPU, written by ``python -m benchmarks.planner_fit``: do not edit."""',
        "",
        "from __future__ import annotations",
        "",
        "from lightning_3d.planner.constants import Constants",
        "",
        "FITTED = {",
    ]
    for generation, found in table.items():
        lines.append(f'    "{generation}": Constants(')
        lines += [f"        {name}={value:.4g}," for name, value in dataclasses.asdict(found).items()]
        lines.append("    ),")
    return "\n".join([*lines, "}", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, default=CSV)
    parser.add_argument("--dry", action="store_true", help="print the constants and write nothing")
    parser.add_argument("--leave-out", action="store_true", help="also without each source (about half an hour)")
    options = parser.parse_args()
    runs = usable(read(options.csv)[0])
    found = fit(runs)
    for name, value in found.items():
        print(f"{name:26s} {START[name]:8.3g} -> {value:8.3g}")
    error = np.abs(np.expm1(errors(runs, constants_of(found))))
    print(f"{len(runs)} runs: median {np.median(error):.1%}, within 25 %: {np.mean(error < 0.25):.1%}")
    if not options.dry:
        OUTPUT.write_text(as_text(constants_of(found)))
    if options.leave_out:
        without = {}
        for source in sorted({run.source for run in runs}):
            without[source] = fit([run for run in runs if run.source != source])
            own = [run for run in runs if run.source == source]
            error = np.abs(np.expm1(errors(own, constants_of(without[source]))))
            print(f"without {source}: median {np.median(error):.1%}", flush=True)
            LEFT_OUT.write_text(json.dumps(without, indent=1) + "\n")


if __name__ == "__main__":
    main()
