"""Callbacks of the monitor on one rank: what they ask of the Trainer, and that they wait for no device."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.optim import SGD

from lightning_3d import ConfigError, ThreeDPrometheus, ThreeDStrategy
from lightning_3d.monitor import diagnosis as diagnosis_module
from lightning_3d.monitor import leaks, noticeboard, prometheus, record
from lightning_3d.monitor.diagnosis import Diagnosis
from lightning_3d.monitor.gauges import Gauges


def trainer_with(*callbacks: Callback, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ThreeDStrategy(1, 1, 1),
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **options,
    )


class OnDevice(Tensor):
    """A scalar that a GPU holds: to read its value is to wait for it."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("meta")

    def __float__(self) -> float:
        raise AssertionError("waited for the device")


def fake_trainer(*rates: Any, scaler: Any = None) -> Any:
    groups = [{"lr": rate} for rate in rates]
    return SimpleNamespace(
        optimizers=[SimpleNamespace(param_groups=groups)],
        precision_plugin=SimpleNamespace(scaler=scaler, step_skipped=False),
        strategy=SimpleNamespace(gradient_norm=lambda: torch.tensor(5.0)),
        accumulate_grad_batches=2,
    )


def test_a_learning_rate_on_a_device_is_told_when_it_has_arrived() -> None:
    gauges = Gauges()
    trainer = fake_trainer(0.5, torch.tensor(0.25), torch.tensor(2.0).as_subclass(OnDevice))
    assert gauges.read(trainer, 7) == {("learning_rate", "0", "0"): 0.5, ("learning_rate", "0", "1"): 0.25}
    name, step, copy, _ = gauges._scalars._underway[0]
    assert (name, step, copy.as_subclass(Tensor).item()) == (("learning_rate", "0", "2"), 7, 2.0)


def test_the_norm_is_asked_for_in_the_last_step_of_a_window_and_a_skipped_step_counts_once() -> None:
    gauges, trainer = Gauges(), fake_trainer(0.1)
    for batch in range(8):  # windows of four batches, two of which make a step
        if batch % 2:
            trainer.precision_plugin.step_skipped = batch == 3
            gauges.before_step(trainer, 4, batch)
        gauges.after_batch()
    assert [(name, step) for name, step, _ in gauges.arrived()] == [(("gradient_norm",), 3), (("gradient_norm",), 7)]
    assert gauges.skipped == 1  # and not in the batches after it, until the next step


class Many(BoringModel):
    """A learning rate for every one of many groups."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(300)]
        return SGD([{"params": self.layer.parameters()}, *groups], lr=0.1)


class Reads(Callback):
    def __init__(self, exporter: ThreeDPrometheus) -> None:
        self.exporter, self.text = exporter, ""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        port = self.exporter.targets[0].rpartition(":")[2]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            self.text = answer.read().decode()


@pytest.fixture
def every_batch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(prometheus, "_POST_S", 0.0)
    yield


def test_a_rank_with_too_many_groups_for_its_notice_is_not_taken_for_down(
    every_batch: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noticeboard, "_SIZE", 1 << 12)  # in place of thousands of groups
    exporter = ThreeDPrometheus(port=0, address="127.0.0.1")
    reads = Reads(exporter)
    with pytest.warns(UserWarning, match="301 groups"):
        trainer_with(exporter, reads, max_steps=2, default_root_dir=tmp_path).fit(Many())
    assert "lightning3d_rank_up{" in reads.text and "lightning3d_batches_total{" in reads.text
    assert "lightning3d_learning_rate{" not in reads.text


def test_a_list_of_targets_that_cannot_be_written_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    exporter = ThreeDPrometheus(port=0, address="127.0.0.1", targets_file=str(tmp_path / "file" / "run.json"))
    with pytest.raises(ConfigError, match="targets_file"):
        trainer_with(exporter, max_steps=1, default_root_dir=tmp_path).fit(BoringModel())
    assert exporter.targets == [] and exporter._endpoint is None


def test_the_first_batches_belong_to_no_window_when_gradients_are_accumulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    summarize = diagnosis_module.summarize

    def counting(rank: int, steps: Any, memory: Any) -> record.RankWindow:
        counted.append(len(steps))
        return summarize(rank, steps, memory)

    monkeypatch.setattr(diagnosis_module, "summarize", counting)
    watches = Diagnosis(every_n_steps=8, skip_steps=3, watch_memory=False)
    trainer_with(watches, max_steps=4, accumulate_grad_batches=4, default_root_dir=tmp_path).fit(BoringModel())
    # 16 batches: three are left out, eight fill a window (the last is told of when the next begins), five are left.
    assert counted == [7, 6]
    first, last = (entry for entry in record.read(tmp_path) if isinstance(entry, record.Window))
    assert (first.first_step, first.last_step, last.last_step) == (0, 2, 4)


def test_leaks_are_looked_for_in_the_shortest_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = iter(range(10**9, 10**11, 50 << 20))
    monkeypatch.setattr(leaks, "memory_in_use", lambda device: next(memory))
    with pytest.warns(UserWarning, match="grows by"):
        trainer_with(Diagnosis(every_n_steps=4), max_steps=23, default_root_dir=tmp_path).fit(BoringModel())
    assert any(isinstance(entry, record.Leak) for entry in record.read(tmp_path))
