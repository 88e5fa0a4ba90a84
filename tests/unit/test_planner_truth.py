"""The planner beside published runs: the figures that docs/planner.md promises, and rows with holes."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.planner import as_text, evaluate, spearman
from benchmarks.published import CSV, as_run
from lightning_3d.errors import ConfigError


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return evaluate()


def test_step_times_are_within_a_tenth(result: dict[str, Any]) -> None:
    seen, unseen = result["overall"]["time"], result["overall"]["left_out"]
    assert seen["runs"] >= 200 and unseen["runs"] == seen["runs"]
    assert seen["median"] <= 0.10 and seen["within_25"] >= 0.90
    assert unseen["median"] <= 0.10 and unseen["within_25"] >= 0.90


def test_memory_is_within_a_twentieth(result: dict[str, Any]) -> None:
    assert result["overall"]["memory"]["runs"] >= 70
    assert result["overall"]["memory"]["median"] <= 0.07


def test_layouts_of_a_model_are_ranked_right(result: dict[str, Any]) -> None:
    assert np.mean([value for _, value in result["rank_correlation"].values()]) >= 0.8


def test_a_run_out_of_memory_does_not_fit_and_the_others_do() -> None:
    from lightning_3d.planner import estimate

    with CSV.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["id"].startswith("bloom")]
    fits = {row["id"]: estimate(run.shape, run.cluster, run.layout).fits for row in rows for run in [as_run(row)]}
    assert [name for name, fit in fits.items() if not fit] == ["bloom-0228-184b-tp4pp6-oom"]


def test_every_row_is_evaluated_or_its_hole_named(result: dict[str, Any]) -> None:
    with CSV.open(newline="") as file:
        names = {row["id"] for row in csv.DictReader(file)}
    assert {run["id"] for run in result["runs"]} | set(result["not_evaluated"]) == names
    text = as_text(result)
    assert all(name in text for name in result["not_evaluated"])
    json.dumps(result)


def test_a_file_of_other_rows_with_holes(tmp_path: Path) -> None:
    with CSV.open(newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["id"] == "bloom-176b-final")
    holes = ("vocab", "kv_heads", "virtual_pp", "zero_stage", "micro_batch", "heads", "precision", "params_b")
    rows = [row, {**row, "id": "holes", **dict.fromkeys(holes, "")}, {**row, "id": "nothing", "hidden": ""}]
    path = tmp_path / "other.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerows({**row, "source": "not seen before"} for row in rows)
    found = evaluate(path)
    assert [run["id"] for run in found["runs"]] == ["bloom-176b-final", "holes"]
    assert all(abs(run["time_error"]) < 0.25 and run["left_out_error"] is None for run in found["runs"])
    assert list(found["not_evaluated"]) == ["nothing"]


def test_a_file_that_cannot_be_evaluated_is_told_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv cannot be read"):
        evaluate(tmp_path / "none.csv")
    path = tmp_path / "short.csv"
    path.write_text("id,gpu,hidden\na,h100-80g,1024\n")
    with pytest.raises(ConfigError, match="lacks the columns n_gpus, layers, seq_len, tp, pp, global_batch"):
        evaluate(path)


def test_a_bad_cell_is_named_and_costs_no_other(tmp_path: Path) -> None:
    with CSV.open(newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["id"] == "bloom-176b-final")
    bad = {
        "memory": ("mem_gb_per_gpu", "a lot"), "zero": ("step_time_s", "0"), "endless": ("step_time_s", "inf"),
        "half": ("layers", "70.5"),
    }  # fmt: skip
    path = tmp_path / "bad.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerows({**row, "id": name, column: value} for name, (column, value) in bad.items())
    found = evaluate(path)
    assert all(bad[name][0] + "=" in found["not_evaluated"][name] for name in bad)
    times = {run["id"]: (run["measured_s"] is not None, run["measured_gb"] is not None) for run in found["runs"]}
    assert times["memory"][0] and not times["memory"][1] and not times["zero"][0]
    assert "half" not in times


def test_rank_correlation() -> None:
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(0.866, abs=1e-3)
