"""How long the loops run, and what they run when: steps, epochs, time, limits, validation within epochs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Timer
from torchmetrics.classification import MulticlassAccuracy

from tests.conformance.case import Case, Scene, at
from tests.conformance.conftest import cases
from tests.dist.lightning_modules import VOCAB, Mesh, Tokens

pytestmark = pytest.mark.timeout(600)


def fit(scene: Scene, rows: int = 12, batch: int = 4, **flags: Any) -> None:
    trainer = scene.trainer(**flags)
    trainer.fit(scene.module(), scene.loader(rows, batch), scene.loader(8, batch))


class Scheduled(Tokens):
    """With rates by step, by second epoch, and by a metric of validation."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step", "frequency": 2},
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "frequency": 2},
        ]


class OnPlateau(Tokens):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


def schedules(scene: Scene) -> None:
    """C46: as often as the optimizer steps, or per epoch."""
    trainer = scene.trainer(max_epochs=3, accumulate_grad_batches=2)
    trainer.fit(scene.module(Scheduled), scene.loader(20))
    trainer = scene.trainer(max_epochs=3)
    trainer.fit(scene.module(OnPlateau), scene.loader(), scene.loader(8))


def nothing_to_do(scene: Scene) -> None:
    """No steps, or no epochs."""
    module = scene.module()
    trainer = scene.trainer(max_steps=0)
    trainer.fit(module, scene.loader(), scene.loader(8))
    trainer.fit_loop.epoch_loop.max_steps = -1
    trainer.fit_loop.max_epochs = 0
    trainer.fit(module, scene.loader(), scene.loader(8))


def out_of_time(scene: Scene) -> None:
    """The clock of rank 0 counts: the others hear of it."""

    def age(trainer: Trainer, module: Any) -> None:
        timer = next(callback for callback in trainer.callbacks if isinstance(callback, Timer))
        if trainer.global_rank == 0:
            for stage in timer._start_time:
                timer._start_time[stage] = (timer._start_time[stage] or 0.0) - 7200.0

    trainer = scene.trainer(max_time="00:01:00:00", max_epochs=-1, callbacks=[at("on_train_batch_start", age, 5)])
    trainer.fit(scene.module(), scene.loader(), scene.loader(8))


def validation_by_the_clock(scene: Scene) -> None:
    """Every ten minutes by the clock of rank 0; the clocks of ranks differ."""

    def age(trainer: Trainer, module: Any) -> None:
        if trainer.global_rank == 0:
            trainer._last_val_time -= 700.0

    trainer = scene.trainer(
        val_check_interval="00:00:10:00", max_epochs=2, callbacks=[at("on_train_batch_start", age, 2)]
    )
    trainer.fit(scene.module(), scene.loader(16), scene.loader(8))


def several_loaders(scene: Scene) -> None:
    """C12: validation loaders of different lengths, within an epoch, after the sanity check of everything."""
    trainer = scene.trainer(max_epochs=1, val_check_interval=2, num_sanity_val_steps=-1)
    module = scene.module(ManyLoaders)
    several = [scene.loader(8), scene.loader(4), scene.loader(10)]
    trainer.fit(module, scene.loader(16), several)
    trainer = scene.trainer(limit_val_batches=1.0, limit_test_batches=1)
    scene.note("validated", trainer.validate(module, several, verbose=False))
    scene.note("tested", trainer.test(module, several, verbose=False))


class ManyLoaders(Tokens):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().test_step(batch, batch_idx)


class Gathers(Tokens):
    """Logs in steps with ``sync_dist``, and gathers, logs and computes metrics at the ends of epochs."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__(num_blocks)
        self.accuracy = MulticlassAccuracy(VOCAB, average="micro")
        self.seen = torch.zeros((), dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[:, :-1]).flatten(0, 1)
        self.accuracy.update(logits.detach(), batch[:, 1:].flatten())
        self.seen = self.seen + len(batch)
        loss = F.cross_entropy(logits, batch[:, 1:].flatten())
        self.log("train_loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("seen", self.all_gather(self.seen).sum(), sync_dist=True)
        self.log("accuracy", self.accuracy.compute(), sync_dist=True)
        self.accuracy.reset()

    def on_validation_epoch_end(self) -> None:
        self.log("validated", self.all_gather(torch.ones(2, dtype=torch.float64)).mean(), sync_dist=True)


def gather(scene: Scene) -> None:
    trainer = scene.trainer(max_epochs=2)
    trainer.fit(scene.module(Gathers), scene.loader(10), scene.loader(8))


LOOPS = (
    Case("max_epochs", fit, {"max_epochs": 2, "num_sanity_val_steps": 2}),
    Case("max_steps", fit, {"max_steps": 4, "max_epochs": -1}),
    Case("max_steps and accumulated batches", fit, {"max_steps": 4, "rows": 20, "accumulate_grad_batches": 2}),
    Case("nothing to do", nothing_to_do),
    Case("limit_train_batches=0", fit, {"limit_train_batches": 0}),
    Case("max_time", out_of_time, replicas=True),
    Case("val_check_interval=2", fit, {"rows": 20, "val_check_interval": 2, "accumulate_grad_batches": 3}),
    Case("val_check_interval=0.5", fit, {"rows": 16, "val_check_interval": 0.5}),
    Case(
        "val_check_interval over epochs",
        fit,
        {"max_epochs": 3, "val_check_interval": 4, "check_val_every_n_epoch": None},
        replicas=True,
    ),
    Case("val_check_interval by the clock", validation_by_the_clock, replicas=True),
    Case("check_val_every_n_epoch", fit, {"max_epochs": 3, "check_val_every_n_epoch": 2}),
    Case("limits as numbers", fit, {"limit_train_batches": 2, "limit_val_batches": 1}),
    Case("limits as shares", fit, {"rows": 16, "limit_train_batches": 0.5, "limit_val_batches": 0.5}, replicas=True),
    Case("limit_val_batches=0", fit, {"limit_val_batches": 0}),
    Case("overfit_batches=2", fit, {"overfit_batches": 2, "max_epochs": 2}),
    Case("overfit_batches=0.5", fit, {"rows": 16, "overfit_batches": 0.5}, replicas=True),
    Case("fast_dev_run", fit, {"fast_dev_run": True}),
    Case("fast_dev_run=2", fit, {"fast_dev_run": 2, "num_sanity_val_steps": 2}),
    Case("min_steps", fit, {"min_steps": 3, "max_epochs": 2}),
    Case("several loaders", several_loaders, replicas=True),
    Case("ragged batches", fit, {"rows": 10, "max_epochs": 2, "limit_val_batches": 2}),
    Case(
        "a batch smaller than the replicas",
        fit,
        {"rows": 9, "max_epochs": 2, "accumulate_grad_batches": 2},
        replicas=True,
    ),
    Case("schedules", schedules),
)


@cases(*LOOPS)
def test_loops_run_as_in_one_process(case: Case, mesh: Mesh, conforms: Callable[[Case, Mesh], None]) -> None:
    conforms(case, mesh)


@cases(Case("gathering", gather, replicas=True))
def test_c31_nothing_hangs_that_logs_and_gathers_at_the_end_of_an_epoch(
    case: Case, mesh: Mesh, conforms: Callable[[Case, Mesh], None]
) -> None:
    conforms(case, mesh)
