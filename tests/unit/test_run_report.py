"""The report at the end of a run: what it times, counts and prints, with a stock Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer, seed_everything

from lightning_3d.models import GPT, ByteText
from lightning_3d.trainer import run_report
from lightning_3d.trainer.run_report import RankFacts, RunReport, Stopwatch, _rank_table, _waiting_by_stage


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that moves when told."""
    now = [0.0]
    monkeypatch.setattr(run_report, "_now", lambda: now[0])
    return now


def steps(watch: Stopwatch, clock: list[float], number: int, seconds: float) -> None:
    for _ in range(number):
        watch.begin_step()
        clock[0] += seconds
        watch.end_step()


def test_only_training_after_the_first_steps_is_timed(clock: list[float]) -> None:
    watch = Stopwatch(skip=2)
    steps(watch, clock, 2, 100.0)
    steps(watch, clock, 3, 2.0)
    watch.pause()
    clock[0] += 50.0  # a validation
    steps(watch, clock, 1, 6.0)
    watch.pause()
    watch.pause()
    assert watch.steps == 4
    assert watch.step_time == pytest.approx(3.0)


def test_too_few_steps_have_no_time(clock: list[float]) -> None:
    watch = Stopwatch(skip=5)
    steps(watch, clock, 5, 1.0)
    watch.pause()
    assert watch.step_time is None


def facts(rank: int, pp: int, waiting: float | None) -> RankFacts:
    return RankFacts(rank=rank, coordinates={"pp": pp, "dp": 0, "tp": 0}, peak_memory=10**6, waiting=waiting)


def test_waiting_is_the_mean_of_the_ranks_of_a_stage() -> None:
    ranks = [facts(0, 0, 0.1), facts(1, 0, 0.3), facts(2, 1, 0.4), facts(3, 1, 0.4)]
    assert _waiting_by_stage(ranks) == pytest.approx({0: 0.2, 1: 0.4})
    assert _waiting_by_stage([facts(0, 0, 0.1)]) == {}
    assert _rank_table(ranks).row_count == 4


def fit(tmp_path: Path, **options: Any) -> RunReport:
    for index in range(20):
        (tmp_path / f"file{index}.py").write_text("def value():\n    return 1\n" * 10)
    seed_everything(1)
    report = RunReport(**options)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=9,
        val_check_interval=3,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[report],
    )
    data = ByteText(str(tmp_path), sequence_length=8, batch_size=4, validation_share=0.3)
    trainer.fit(GPT(num_layers=1, width=16, num_heads=2, sequence_length=8, warmup_steps=2), datamodule=data)
    return report


def test_a_run_prints_its_table_and_a_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = fit(tmp_path, prompt="def ", length=12, skip_steps=2)
    printed = capsys.readouterr().out
    assert report.watch.steps == 7
    assert report.tokens_per_step == 4 * 9
    for text in ("layout", "tokens/s", "peak memory", "val_loss", "unigram entropy", "Sample", "def "):
        assert text in printed


def test_without_a_prompt_there_is_no_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path)
    printed = capsys.readouterr().out
    assert "layout" in printed
    assert "Sample" not in printed
