"""``python -m benchmarks.planner_fit``: fit the planner's constants to published runs, and write them down.

Gauss-Newton on the logarithms of the constants, against the logarithm of predicted over measured step time.
An error above 20 % counts linearly (a run that nothing explains must not bend the rest), and every constant is held
near what the literature or a measurement says of it by a weak pull: the one-sigma width stands in `WIDTH`.

The fit is repeated without each family of sources in turn; ``benchmarks.planner`` reads the constants found so, and
says how well runs are predicted that the fit has not seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
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
    # FlashAttention-2 and 3: 60 % of the peak on A100, 35 % and 60 % on H100, less forward and backward together.
    "attention ampere": 0.55,
    "attention hopper": 0.45,
    "portable_attention hopper": 0.65,
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
"""Of the pull, in logarithms: a constant that no run speaks of stays within about a third of where it starts."""
SIGMA = 0.08
"""Error that is expected of a good model."""
_HUBER, _MOVE = 0.2, 0.02


def constants_of(values: Mapping[str, float]) -> dict[str, Constants]:
    """The table of constants from the names of `START`."""
    shared = {name: value for name, value in values.items() if " " not in name}
    table = {}
    for generation in GENERATIONS:
        own = dict(shared)
        for name in ("gemm", "gemm_fp8", "attention", "portable_attention"):
            own[name] = _of(values, name, generation)
        table[generation] = Constants(**own)
    return table


def _of(values: Mapping[str, float], name: str, generation: str) -> float:
    """A constant of a generation; where there are no runs to fit it, what its kin has."""
    kin = {"volta": "ampere", "blackwell-ultra": "blackwell", "blackwell": "hopper", "hopper-500w": "hopper"}
    if name in ("gemm_fp8", "attention") and generation == "hopper-500w":  # limited in power as its products are
        return values[f"{name} hopper"] * values["gemm hopper-500w"] / values["gemm hopper"]
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


def fit(runs: Sequence[Run], start: Mapping[str, float] = START, rounds: int = 5) -> dict[str, float]:
    """Constants that fit the runs best: each round makes the model linear where it stands and solves that."""
    names = list(START)
    x, best = np.log([start[name] for name in names]), math.inf
    for _ in range(rounds):
        error, jacobian = linear(runs, dict(zip(names, np.exp(x), strict=True)))
        if (found := _cost(error, x)) > best - 0.5:
            break
        best = found
        print(f"cost {best:.1f}", flush=True)
        x = solve(x, error, jacobian, np.ones(len(runs)))
    return {name: float(value) for name, value in zip(names, np.exp(x), strict=True)}


def linear(runs: Sequence[Run], values: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
    """Errors of the runs, and their derivatives by the logarithms of the constants."""
    error, columns = errors(runs, constants_of(values)), []
    for name, value in values.items():
        moved = errors(runs, constants_of({**values, name: value * math.exp(_MOVE)}))
        columns.append((moved - error) / _MOVE)
    return error, np.stack(columns, 1)


def solve(x: np.ndarray, error: np.ndarray, jacobian: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The best constants (their logarithms) of the linear model around ``x``; a weight of 0 leaves a run out."""
    anchor = np.log(list(START.values()))
    moved = x.copy()
    for _ in range(30):
        now = error + jacobian @ (moved - x)
        robust = weight * np.sqrt(np.minimum(1.0, _HUBER / np.maximum(np.abs(now), 1e-9))) / SIGMA
        scaled = jacobian * robust[:, None]
        curvature = scaled.T @ scaled + np.eye(len(x)) / WIDTH**2
        step = np.linalg.solve(curvature, -(scaled.T @ (robust * now) + (moved - anchor) / WIDTH**2))
        moved = np.clip(moved + step, x - 0.5, x + 0.5)
    return moved


def left_out(runs: Sequence[Run], values: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """For every family of sources what fits all other runs best, in the linear model around the fit of all."""
    error, jacobian = linear(runs, values)
    x, found = np.log(list(values.values())), {}
    for name in sorted({family(run.source) for run in runs}):
        others = np.array([float(family(run.source) != name) for run in runs])
        moved = solve(x, error, jacobian, others)
        found[name] = {key: float(value) for key, value in zip(values, np.exp(moved), strict=True)}
    return found


def family(source: str) -> str:
    """Sources of the same people: their first word (two tables of a paper, all of Megatron-LM's)."""
    return source.split(" ")[0]


def _cost(error: np.ndarray, x: np.ndarray) -> float:
    size = np.abs(error)
    loss = np.where(size > _HUBER, _HUBER * (2 * size - _HUBER), size**2)
    pull = (x - np.log(list(START.values()))) / WIDTH
    return float(loss.sum() / SIGMA**2 + (pull**2).sum())


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
    options = parser.parse_args()
    runs = usable(read(options.csv)[0])
    found = fit(runs)
    for name, value in found.items():
        print(f"{name:26s} {START[name]:8.3g} -> {value:8.3g}")
    error = np.abs(np.expm1(errors(runs, constants_of(found))))
    print(f"{len(runs)} runs: median {np.median(error):.1%}, within 25 %: {np.mean(error < 0.25):.1%}")
    if not options.dry:
        OUTPUT.write_text(as_text(constants_of(found)))
        LEFT_OUT.write_text(json.dumps(left_out(runs, found), indent=1) + "\n")


if __name__ == "__main__":
    main()
