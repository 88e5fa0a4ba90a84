"""A checkpoint that cannot be read is refused while there is one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_3d import ThreeDStrategy
from lightning_3d.errors import CheckpointError
from lightning_3d.trainer.setup.preflight import check_checkpoint


def _trainer(start_method: Any, folder: Path) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ThreeDStrategy(start_method=start_method),
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.mark.parametrize("what", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("start_method", ["popen", "fork"])
def test_no_process_starts_for_a_checkpoint_that_is_not_there(start_method: str, what: str, tmp_path: Path) -> None:
    trainer = _trainer(start_method, tmp_path)
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        getattr(trainer, what)(BoringModel(), ckpt_path=tmp_path / "nowhere")
    assert not trainer.strategy.launcher.procs  # type: ignore[union-attr]


def test_no_process_starts_for_a_checkpoint_of_which_a_file_is_cut_short(tmp_path: Path) -> None:
    module = BoringModel()
    writer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ThreeDStrategy(),
        max_steps=1,
        limit_val_batches=0,
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    writer.fit(module)
    writer.save_checkpoint(tmp_path / "saved")
    file = next((tmp_path / "saved").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    trainer = _trainer("popen", tmp_path)
    with pytest.raises(CheckpointError, match="the checkpoint is incomplete"):
        trainer.fit(BoringModel(), ckpt_path=tmp_path / "saved")
    assert not trainer.strategy.launcher.procs  # type: ignore[union-attr]


def test_a_file_of_the_stock_trainer_and_names_that_lightning_looks_up_pass(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "stock.ckpt")

    def run(model: object, ckpt_path: object = None) -> None: ...

    for path in (None, "best", "last", "hpc", "registry:name", tmp_path / "stock.ckpt"):
        check_checkpoint(run, (None, path), {})
    with pytest.raises(CheckpointError):
        check_checkpoint(run, (None,), {"ckpt_path": tmp_path / "other.ckpt"})
    check_checkpoint(lambda: None, (), {})
