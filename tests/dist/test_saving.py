"""Saving while training goes on, and with every option of ModelCheckpoint: the files are those of the stock Trainer."""

from __future__ import annotations

import errno
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_3d.checkpoint import asynchronous, directory, is_checkpoint
from lightning_3d.errors import CheckpointError
from tests.dist.lightning_modules import Mesh, Tokens, loader, make_trainer, on_ranks, rows, seeded, whole_weights
from tests.harness import RankFailure

BATCH, STEPS = 4, 4


class Watched(Tokens):
    """Logs what file names are made of."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True)
        self.log("up", float(self.trainer.global_step), on_step=True)
        return loss


def callbacks(folder: Path) -> list[ModelCheckpoint]:
    """Ways to keep checkpoints, each with a folder of its own."""

    def make(name: str, filename: str, every: int | None = 1, **options: Any) -> ModelCheckpoint:
        return ModelCheckpoint(
            folder / name, filename, every_n_train_steps=every, save_on_train_epoch_end=False, **options
        )

    return [
        make("linked", "{step}", monitor="up", mode="max", save_top_k=1, save_last="link"),
        make("latest", "{epoch}-{step}", save_top_k=1),
        make("lowest", "{step}-{loss:.2f}", monitor="loss", save_top_k=2, save_last=True),
        make("same", "kept", every=2, save_top_k=-1, save_weights_only=True),
        make("versions", "best", every=2, monitor="up", mode="max", save_top_k=1),
        make("timed", "{step}", every=None, train_time_interval=timedelta(seconds=0), save_top_k=1),
    ]


def listing(folder: Path) -> dict[str, str | None]:
    """Every entry below, with what a link leads to."""
    found = {}
    for parent in sorted(folder.iterdir()):
        for entry in parent.iterdir():
            found[f"{parent.name}/{entry.name}"] = os.readlink(entry) if entry.is_symlink() else None
    return found


def keep(mesh: Mesh | None, folder: str, background: bool) -> Any:
    """Files after a run with all options, and losses of evaluating ``best`` and going on from ``last``."""
    path = Path(folder)
    kept = callbacks(path)
    options = {"async_save": background} if mesh else None
    trainer = make_trainer(mesh, options, callbacks=kept, max_steps=STEPS, enable_checkpointing=True)
    data = loader(rows(BATCH * STEPS), BATCH, mesh)
    trainer.fit(seeded(Watched), data)
    files = listing(path)
    again = make_trainer(
        mesh, options, callbacks=kept[:1], max_steps=STEPS + 1, max_epochs=2, enable_checkpointing=True
    )
    module = seeded(Watched)
    again.fit(module, data, ckpt_path="last")
    loss = float(again.callback_metrics["loss"])
    best = again.test(module, data, ckpt_path="best", verbose=False)[0]["test_loss"]
    return files, again.global_step, loss, best, listing(path)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return keep(None, str(tmp_path_factory.mktemp("stock")), False)


@pytest.mark.parametrize("background", [False, True], ids=["waiting", "background"])
def test_the_files_are_those_of_the_stock_trainer(tmp_path: Path, stock: Any, background: bool) -> None:
    for files, step, loss, best, later in on_ranks(keep, (2, 1, 1), str(tmp_path), background, timeout=110):
        assert files == stock[0]
        assert (step, later) == (stock[1], stock[4])
        assert loss == pytest.approx(stock[2], rel=1e-6)
        assert best == pytest.approx(stock[3], rel=1e-6)
