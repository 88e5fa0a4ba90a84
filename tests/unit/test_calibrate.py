"""Calibration on the CPU: what it writes is a cluster that the planner estimates with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lightning_3d.cli.calibrate import calibrate
from lightning_3d.errors import ConfigError
from lightning_3d.planner import Cluster, Layout, estimate, preset
from lightning_3d.planner.calibration import Measurement, as_cluster, measure
from tests.harness import run_ranks


def test_what_is_measured_here_is_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "here.yaml"
    assert calibrate(["--device", "cpu", "--size", "256", "--write", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    cluster = Cluster.from_file(file)
    assert cluster.device.tflops == pytest.approx(2 * told["measurement"]["matmul_tflops"])  # of 16 bits
    assert cluster.world_size == 1
    found = estimate(preset("gpt2"), cluster, Layout(precision="32-true", global_batch_size=1))
    # A step is about as fast as its products at the speed that was measured, but for what their shape gains or loses.
    operations = 6 * preset("gpt2").parameters * 1024
    assert found.step_time_s > 0.5 * operations / (told["measurement"]["matmul_tflops"] * 1e12)


def test_a_known_gpu_keeps_its_data_sheet() -> None:
    found = Measurement(
        device="NVIDIA H100 80GB HBM3",
        memory_gb=85.0,
        matmul_tflops=700.0,
        matmul_size=8192,
        attention_tflops=300.0,
        memory_GBps=2680.0,
        ranks=8,
        ranks_per_node=8,
        gather_GBps=360.0,
        latency_us=3.0,
    )
    content = as_cluster(found)
    assert content["gpu"] == "h100-80g" and content["gpus_per_node"] == 8
    assert content["measured"]["nvlink"] == pytest.approx(0.8)
    assert content["measured"]["hbm"] == pytest.approx(0.8)
    assert 0.7 < content["measured"]["gemm"] < 0.75  # 700 of 989, and what a product of this shape loses
    assert content["measured"]["attention"] == pytest.approx(300 / 989, abs=1e-3)


def _measured(rank: int, world: int) -> Measurement:
    return measure(torch.device("cpu"), 256)


def test_ranks_measure_their_collectives() -> None:
    found = run_ranks(_measured, 2)[0]
    assert found.ranks == 2 and found.gather_GBps > 0 and found.latency_us > 0
    measured = as_cluster(found)["measured"]
    assert measured.get("nvlink", measured.get("network")) == pytest.approx(1.0)  # its data sheet is what was measured


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too small"):
        calibrate(["--size", "8"])
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            calibrate(["--device", "cuda"])
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file, so nothing can lie below it"):
        calibrate(["--device", "cpu", "--size", "256", "--write", str(tmp_path / "file" / "such.yaml")])
