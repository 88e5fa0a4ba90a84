"""Callbacks and schedulers that decide from metrics decide the same on every rank, and as under one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from tests.dist.lightning_modules import Mesh, Tokens, loader, make_trainer, on_ranks, rows, seeded


class Monitored(Tokens):
    """Logs what is monitored in a step and in an epoch-end hook."""

    def on_validation_epoch_start(self) -> None:
        self.seen: list[Tensor] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.seen.append(loss)
        self.log("val_loss", loss)

    def on_validation_epoch_end(self) -> None:
        self.log("val_end", torch.stack(self.seen).mean())

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=4.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.25)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


def checkpoint_and_test(mesh: Mesh | None, folder: str) -> Any:
    """Rates, best path, score, what is on disk, and the test of the best."""
    best = ModelCheckpoint(folder, "{epoch}-{val_end:.4f}", monitor="val_end", save_top_k=2, save_last=True)
    rates = Rates()
    trainer = make_trainer(
        mesh,
        enable_checkpointing=True,
        logger=CSVLogger(folder, "logs"),
        callbacks=[best, LearningRateMonitor("epoch"), rates],
        max_epochs=4,
        num_sanity_val_steps=2,
    )
    trainer.fit(seeded(Monitored), loader(rows(12), 4, mesh), loader(rows(8, seed=3), 4, mesh))
    tested = trainer.test(dataloaders=loader(rows(8, seed=3), 4, mesh), ckpt_path="best", verbose=False)
    found = sorted(path.name for path in Path(folder).iterdir() if path.name != "logs")
    return rates.seen, Path(best.best_model_path).name, float(best.best_model_score), found, tested


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize("mesh", [(2, 1, 2), (2, 2, 1)], ids=str)
def test_c07_the_best_checkpoints_are_those_of_one_process(mesh: Mesh, tmp_path: Path) -> None:
    rates, best, score, found, tested = checkpoint_and_test(None, str(tmp_path / "one"))
    assert len(found) == 3
    assert len(set(rates)) > 1, "the plateau scheduler should have had something to do"
    for got in on_ranks(checkpoint_and_test, mesh, str(tmp_path / "many")):
        assert got[0] == rates
        assert got[1:2] + got[3:4] == (best, found)
        assert got[2] == pytest.approx(score, rel=1e-6)
        assert got[4] == [pytest.approx(tested[0], rel=1e-6)]


class StopsUnsynced(Tokens):
    """A metric that is worse on some replicas, and never synced by the user."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.loss(batch)
        rising = self.current_epoch * float(batch[:, 0].float().mean() > 2)
        self.log("val_loss", rising - 0.1 * self.current_epoch)

    def on_train_epoch_end(self) -> None:
        self.log("by_hand", float(self.current_epoch), sync_dist=True)


def stop_early(mesh: Mesh | None) -> Any:
    data = rows(4)
    for index, row in enumerate(data):
        row[0] = 4 * (index % 2)  # replica 1 of two sees the large ones
    stopped = []
    for at_train_end in (False, True):
        stopper = EarlyStopping("val_loss", patience=1, check_on_train_epoch_end=at_train_end)
        trainer = make_trainer(mesh, callbacks=[stopper], max_epochs=6)
        trainer.fit(seeded(StopsUnsynced), loader(data, 4, mesh), loader(data, 4, mesh))
        stopped.append((stopper.stopped_epoch, trainer.current_epoch, trainer.global_step))
    return stopped


@pytest.mark.parametrize("mesh", [(2, 2, 1)], ids=str)
def test_c30_early_stopping_stops_all_ranks_at_once(mesh: Mesh) -> None:
    results = on_ranks(stop_early, mesh)
    assert all(result == results[0] for result in results)
    assert all(stopped > 0 for stopped, *_ in results[0])


class OneCycle(Tokens):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        by_step = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
        by_epoch = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}, {"scheduler": by_epoch, "interval": "epoch"}]


def cycle(mesh: Mesh | None) -> Any:
    rates = Rates()
    trainer = make_trainer(mesh, callbacks=[rates], max_epochs=3, accumulate_grad_batches=2)
    trainer.fit(seeded(OneCycle), loader(rows(16), 4, mesh))
    return rates.seen, [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs]


def test_schedulers_step_as_often_as_under_one_process() -> None:
    expected = cycle(None)
    for got in on_ranks(cycle, (2, 1, 1)):
        assert got == expected
