"""The report at the end of a run: what it times, counts and prints, with a stock Trainer."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer, seed_everything

from lightning_3d.events import Event, Phase, StepEvents
from lightning_3d.models import GPT, ByteText
from lightning_3d.trainer.logging.run_report import RankFacts, RunReport, Totals, _rank_table, bubble_of_stages


def step(seconds: float, *events: Event) -> StepEvents:
    return StepEvents(step=0, begin=0.0, end=seconds, wall=0.0, events=events, samples=2, tokens=10)


def event(phase: Phase, start: float, end: float) -> Event:
    return Event(phase, 0, 0, start, end, "", 0)


def test_only_training_after_the_first_steps_is_timed() -> None:
    totals = Totals(skip=2)
    for taken in (step(100.0), step(100.0), step(2.0), step(50.0, event(Phase.EVALUATION, 2.0, 48.0)), step(6.0)):
        totals.add(taken)
    assert (totals.steps, totals.samples, totals.tokens) == (3, 6, 30)
    assert totals.step_time == pytest.approx(4.0)


def test_too_few_steps_have_no_time() -> None:
    totals = Totals(skip=5)
    for _ in range(5):
        totals.add(step(1.0))
    assert totals.step_time is None


def facts(rank: int, pp: int, pipeline: float, busy: float) -> RankFacts:
    place = {"pp": pp, "dp": rank % 2, "tp": 0}
    return RankFacts(rank=rank, coordinates=place, peak_memory=10**6, pipeline_s=pipeline, busy_s=busy)


def test_the_bubble_is_a_share_of_the_time_of_the_stage_that_takes_longest() -> None:
    ranks = [facts(0, 0, 10.0, 9.0), facts(1, 0, 20.0, 14.0), facts(2, 1, 8.0, 6.0), facts(3, 1, 16.0, 12.0)]
    assert bubble_of_stages(ranks) == pytest.approx({0: 0.2, 1: 0.4})
    assert bubble_of_stages([facts(0, 0, 10.0, 9.0)]) == {}
    assert _rank_table(ranks).row_count == 4


def test_thousands_of_ranks_take_no_time_and_no_thousands_of_rows() -> None:
    ranks = [replace(facts(rank, rank % 8, 10.0, 9.0), peak_memory=rank) for rank in range(8192)]
    start = time.perf_counter()
    assert len(bubble_of_stages(ranks)) == 8
    table = _rank_table(ranks)
    assert time.perf_counter() - start < 1
    assert table.row_count == 64 and table.title == "Ranks: the 64 fullest of 8,192"
    assert next(iter(table.columns[0].cells)) == "8128"


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
    assert report.totals.steps == 7
    assert report.totals.tokens == 7 * 4 * 9
    for text in ("layout", "tokens/s", "peak memory", "val_loss", "unigram entropy", "Sample", "def "):
        assert text in printed


def test_without_a_prompt_there_is_no_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path)
    printed = capsys.readouterr().out
    assert "layout" in printed
    assert "Sample" not in printed
