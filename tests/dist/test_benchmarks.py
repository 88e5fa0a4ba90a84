"""The benchmarks measure what they say: both sides train the same model, and the GPU check runs without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lightning.pytorch import LightningModule
from torch import nn

from benchmarks import gpu_check
from benchmarks.cases import CASES, memory, race
from benchmarks.workload import Shape
from tests.harness import run_trainer

TINY = Shape(layers=4, width=16, heads=4, length=8, batch=8)
BY_NAME = {case.name: replace(case, shape=TINY, rounds=1, steps=1) for case in CASES}


@pytest.mark.parametrize("name", ["b-32-bare", "b-32-dtensor", "c-pp2", "d-tp2", "d-222", "e"])
def test_both_sides_of_a_case_compute_the_same_losses(name: str) -> None:
    case = BY_NAME[name]
    by_rank = run_trainer(case.ranks, race, case)
    for mine, peer in by_rank:
        assert len(mine.wall) == len(peer.wall) == 1
        if peer.losses:  # a peer knows its loss on the last stage only
            assert mine.losses == pytest.approx(peer.losses, rel=1e-5)
    assert any(peer.losses for _, peer in by_rank)


def test_peak_memory_is_that_of_tensors() -> None:
    case = BY_NAME["b-32-bare"]
    (peak, other) = run_trainer(case.ranks, memory, case, "bare tensors")
    inputs = 256 * 32 * 4  # one activation of 256 tokens
    assert 10 * inputs < peak < 200 * inputs
    assert other == pytest.approx(peak, rel=0.2)


def test_the_gpu_check_runs_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    code = gpu_check.main(["--device", "cpu", "--tiny", "--steps", "4", "--runs", "3d", "dp2", "pp2 tp2"])
    table = capsys.readouterr().out
    assert code == 0, table
    assert table.count(" ok") == 2 * 4


def test_flops_count_matrices_and_attention() -> None:
    model = gpu_check.TINY[0]
    module: LightningModule = model.build()
    matrices = sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))
    per_token = 6 * matrices + 12 * model.layers * model.width * model.length
    assert model.flops(module) == pytest.approx(per_token * model.batch * model.length, rel=0.05)
