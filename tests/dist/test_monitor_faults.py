"""Field case C65: a slow rank, a slow loader and memory that grows are seen and named in every view of the run."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_3d import ThreeDMonitor, ThreeDPrometheus, ThreeDStrategy
from lightning_3d.cli.command import main
from lightning_3d.monitor import prometheus, record
from tests.harness import run_trainer

SLOW_RANK, SLOW_S = 3, 0.05
LEAKING_RANK, LEAK_FLOATS = 1, 1 << 20
READ_S = 0.015
STEPS, WINDOW = 39, 15  # three are left out, then two windows, and six batches that are looked at in the end


class Layer(nn.Module):
    """Sleeps on the slow rank, in the last layer alone: once per forward of its stage."""

    def __init__(self, sleeps: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.sleeps = sleeps

    def forward(self, x: Tensor) -> Tensor:
        if self.sleeps and torch.distributed.is_initialized() and torch.distributed.get_rank() == SLOW_RANK:
            time.sleep(SLOW_S)
        return torch.relu(self.linear(x))


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(sleeps=index == 3) for index in range(4))
        self.head = nn.Linear(16, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for block in self.blocks:
            x = block(x)
        loss = F.mse_loss(self.head(x), batch.sum(1, keepdim=True))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return STEPS * 8

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(READ_S)
        return torch.full((16,), index / 300.0)


class Hoarder(Callback):
    """Keeps a tensor of every step on one rank."""

    def __init__(self) -> None:
        self.hoard: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_rank == LEAKING_RANK:
            self.hoard.append(torch.ones(LEAK_FLOATS))


class Scraper(Callback):
    """What Prometheus would see of the job near its end, and how long training waits for it."""

    def __init__(self, exporter: ThreeDPrometheus) -> None:
        self.exporter = exporter
        self.text = ""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == STEPS - 1:
            (target,) = self.exporter.targets  # four ranks of one host share a port
            port = target.rpartition(":")[2]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                self.text = answer.read().decode()


def _faulty(rank: int, world: int, folder: str, taken: int) -> tuple[list[str], str]:
    prometheus._POST_S = 0.0  # every batch
    monitor = ThreeDMonitor(every_n_steps=10, window=WINDOW)
    scraper = Scraper(ThreeDPrometheus(port=taken, address="127.0.0.1"))
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=ThreeDStrategy(pipeline_parallel=2, data_parallel=2, num_micro_batches=2),
        max_steps=STEPS,
        logger=TensorBoardLogger(folder, name="", version="run"),
        callbacks=[monitor, scraper.exporter, scraper, Hoarder()],
        log_every_n_steps=10,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        trainer.fit(Model(), DataLoader(Rows(), batch_size=4))
    return [str(warning.message) for warning in caught], scraper.text


def test_c65_a_slow_rank_a_slow_loader_and_a_leak_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as somebody:  # has the port that the run would like
        somebody.bind(("127.0.0.1", 0))
        somebody.listen()
        results = run_trainer(4, _faulty, str(tmp_path), somebody.getsockname()[1], timeout=100)
    told = [texts for texts, _ in results]
    entries = list(record.read(tmp_path / "run"))
    slow = [entry for entry in entries if isinstance(entry, record.Straggler)]
    # Others may be named where the machine is busy, but for far less.
    slow = [one for one in slow if one.excess > SLOW_S]
    assert [(one.place.rank, one.phase) for one in slow] == [(SLOW_RANK, "forward")] * 3
    assert slow[-1].last_step == STEPS
    assert slow[0].last_step <= 20
    assert 0.9 * 2 * SLOW_S < slow[0].excess < 4 * SLOW_S
    warned = [text for text in told[0] if "forward" in text]
    assert len(warned) == 3 and f"rank {SLOW_RANK} (pp1 dp1 tp0) on {slow[0].place.host}" in warned[0]
    assert not any("z-score" in text for texts in told[1:] for text in texts)

    # Prometheus and TensorBoard see the same.
    seconds = {}
    for family in text_string_to_metric_families(results[0][1]):
        for sample in family.samples if family.name == "lightning3d_phase_seconds" else ():
            if sample.labels["phase"] == "forward":
                seconds[tuple(sample.labels[axis] for axis in ("pp", "dp", "tp"))] = sample.value
    assert len(seconds) == 4 and max(seconds, key=lambda place: seconds[place]) == ("1", "1", "0")
    board = EventAccumulator(str(tmp_path / "run")).Reload()
    assert {point.value for point in board.Scalars("slowest/compute_rank")} == {SLOW_RANK}
    assert board.Scalars("slowest/compute_excess_s")[-1].value > SLOW_S

    capsys.readouterr()
    main(["report", str(tmp_path), "--json", "--html", str(tmp_path / "report.html")])
    report = json.loads(capsys.readouterr().out)
    causes = {cause["kind"]: cause for cause in report["causes"]}
    assert {"straggler", "loader", "leak"} <= causes.keys()
    assert causes["straggler"]["rank"] == SLOW_RANK
    assert report["causes"][0]["kind"] == "leak"  # ends the run; the others cost what was planted, or a little more
    for kind, planted in (("straggler", 2 * SLOW_S), ("loader", 4 * READ_S)):
        assert 0.9 * planted < causes[kind]["lost"] * report["batch_s"] < 2 * planted, report["causes"]
    leak = next(entry for entry in entries if isinstance(entry, record.Leak))
    assert causes["leak"]["rank"] == leak.place.rank == LEAKING_RANK
    assert leak.bytes_per_step == pytest.approx(4 * LEAK_FLOATS, rel=0.2)
    assert leak.grown[0].what == f"Tensor float32 [{LEAK_FLOATS}] on cpu"
    assert leak.grown[0].more == WINDOW and "Hoarder.hoard" in leak.grown[0].where
    page = (tmp_path / "report.html").read_text()
    assert "<svg" in page and "Hoarder.hoard" in page

    main(["report", str(tmp_path)])
    out = capsys.readouterr().out
    assert "straggler" in out and "Share of a batch by rank" in out
