"""``last`` over runs that are killed and go on: one name, which leads to the newest checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_3d import ThreeDStrategy
from lightning_3d.checkpoint import read
from lightning_3d.config import Sizes
from lightning_3d.mesh import build_mesh

MESH = build_mesh(Sizes(pp=1, dp=1, tp=1), torch.device("cpu"))


def run_to(folder: Path, step: int, save_last: Any, path: Path | str = "last") -> None:
    """A run that saves at every step goes on from its last checkpoint, if there is one."""
    keeper = ModelCheckpoint(
        folder, "{step}", every_n_train_steps=1, save_last=save_last, save_on_train_epoch_end=False
    )
    trainer = Trainer(
        strategy=ThreeDStrategy(),
        accelerator="cpu",
        devices=1,
        max_steps=step,
        limit_train_batches=9,
        limit_val_batches=0,
        callbacks=[keeper],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel(), ckpt_path=path)


def step_of(path: Path) -> int:
    """The step at which a checkpoint was saved."""
    return int(read(path, MESH)["global_step"])


@pytest.mark.parametrize("save_last", ["link", True])
def test_a_run_that_was_killed_after_its_first_save_renews_the_last_it_goes_on_from(
    tmp_path: Path, save_last: Any
) -> None:
    run_to(tmp_path, 1, save_last)  # whose checkpoint does not know of `last`, which follows it
    run_to(tmp_path, 3, save_last)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["last.ckpt", "step=3.ckpt"]
    assert step_of(tmp_path / "last.ckpt") == 3


def test_it_may_be_named_through_a_link_to_its_folder(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "scratch").symlink_to(tmp_path / "runs")
    run_to(tmp_path / "runs", 1, "link")
    run_to(tmp_path / "runs", 2, "link", tmp_path / "scratch" / "last.ckpt")
    assert sorted(entry.name for entry in (tmp_path / "runs").iterdir()) == ["last.ckpt", "step=2.ckpt"]


def test_another_last_stays(tmp_path: Path) -> None:
    run_to(tmp_path, 1, "link")
    run_to(tmp_path, 2, "link", tmp_path / "step=1.ckpt")  # not by that name: nothing says that it is this run's
    assert step_of(tmp_path / "last.ckpt") == 1 and step_of(tmp_path / "last-v1.ckpt") == 2
