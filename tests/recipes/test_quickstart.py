"""The quickstart as a user runs it: the same numbers in 3D and in one process, and a report at the end."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
STEPS = 20
ONE_PROCESS = ("--trainer.devices=1", "--trainer.strategy.pipeline_parallel=1", "--trainer.strategy.tensor_parallel=1")


def command(folder: Path, *args: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    """What ``lightning-3d`` with these arguments does, started in ``folder``."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PL_")}
    environment |= {"COLUMNS": "160", "PYTHONPATH": str(RECIPE.parents[1])}
    return subprocess.run(
        [sys.executable, "-m", "lightning_3d", *args],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        timeout=timeout,
    )


def train(folder: Path, name: str, *args: str) -> tuple[dict[int, float], str]:
    """Loss of every step, and what the run printed."""
    done = command(
        folder,
        *("fit", "--config", str(RECIPE), f"--trainer.max_steps={STEPS}", "--trainer.limit_val_batches=0"),
        *("--trainer.log_every_n_steps=1", "--trainer.enable_checkpointing=false", "--trainer.callbacks=null"),
        *("--trainer.callbacks=lightning_3d.RunReport", "--trainer.callbacks.prompt=import"),
        *("--trainer.callbacks.length=20", "--trainer.enable_progress_bar=false"),
        *("--trainer.logger=lightning.pytorch.loggers.CSVLogger", "--trainer.logger.save_dir=."),
        *(f"--trainer.logger.name={name}", *args),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    with (folder / name / "version_0" / "metrics.csv").open() as file:
        losses = {int(row["step"]): float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]}
    return losses, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_d_has_the_loss_curve_of_one_process_and_reports(tmp_path: Path) -> None:
    curve, printed = train(tmp_path, "three_d")
    reference, _ = train(tmp_path, "one", *ONE_PROCESS)
    assert sorted(curve) == sorted(reference) == list(range(STEPS))
    for step, loss in reference.items():
        assert curve[step] == pytest.approx(loss, rel=1e-4), f"step {step}"
    assert reference[STEPS - 1] < 3.2 < 5 < reference[0], reference
    for text in ("pp2 x dp2 x tp2 = 8 ranks", "stage 1", "bubble, predicted", "tokens/s", "unigram entropy", "Sample"):
        assert text in printed
    assert (tmp_path / "three_d" / "version_0" / "config.yaml").exists()


@pytest.mark.timeout(300)
def test_bad_input_from_a_shell_ends_with_2_and_without_a_traceback(tmp_path: Path) -> None:
    done = command(tmp_path, "fit", "--config", str(RECIPE), "--trainer.strategy.pipeline_parallel=3", timeout=120)
    assert done.returncode == 2
    assert "error: " in done.stderr
    assert "3" in done.stderr
    assert "Traceback" not in done.stderr
