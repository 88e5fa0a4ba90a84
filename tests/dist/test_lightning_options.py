"""Options of the Trainer, data modules and callbacks that change the course of training work as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    LearningRateFinder,
)
from torch.utils.data import DataLoader

from tests.dist.lightning_modules import (
    Mesh,
    Tokens,
    differences,
    loader,
    make_trainer,
    numbers,
    on_ranks,
    rows,
    seeded,
)
from tests.dist.lightning_modules import whole_weights as weights_of


class Data(LightningDataModule):
    """Notes down when it is asked for what."""

    def __init__(self, mesh: Mesh | None) -> None:
        super().__init__()
        self.mesh = mesh
        self.asked: list[str] = []

    def setup(self, stage: str) -> None:
        self.asked.append(f"setup {stage}")

    def train_dataloader(self) -> DataLoader[Any]:
        self.asked.append("train")
        return loader(rows(16), 4, self.mesh, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        self.asked.append("val")
        return loader(rows(8, seed=3), 4, self.mesh)

    def test_dataloader(self) -> DataLoader[Any]:
        return loader(rows(8, seed=4), 4, self.mesh)


class Freezes(Tokens):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.embed)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.embed, optimizer, lr=0.01)


def callbacks_of(name: str) -> list[Callback]:
    made: dict[str, Any] = {
        "accumulation by epoch": lambda: GradientAccumulationScheduler({0: 1, 1: 2}),
        "unfreezing": Unfreeze,
        "learning rate finder": lambda: LearningRateFinder(num_training_steps=4),
    }
    return [made[name]()] if name in made else []


CASES: dict[str, dict[str, Any]] = {
    "all defaults": {
        "logger": True,
        "enable_checkpointing": True,
        "enable_model_summary": True,
        "num_sanity_val_steps": 2,
    },
    "fractions": {"limit_train_batches": 0.5, "val_check_interval": 0.5, "limit_val_batches": 0.5, "max_epochs": 2},
    "new loaders": {"reload_dataloaders_every_n_epochs": 1, "check_val_every_n_epoch": 2, "max_epochs": 2},
    "overfitting": {"overfit_batches": 2, "max_epochs": 2},
    "accumulation by epoch": {"max_epochs": 2},
    "unfreezing": {"max_epochs": 2},
    "learning rate finder": {"enable_checkpointing": True},
    "fast run": {"fast_dev_run": 2},
}


def train(mesh: Mesh | None, folder: str) -> Any:
    found = []
    for name, options in CASES.items():
        module = seeded(Freezes if name == "unfreezing" else Tokens)
        data = Data(mesh)
        trainer = make_trainer(mesh, callbacks=callbacks_of(name), default_root_dir=folder, **options)
        trainer.fit(module, datamodule=data)
        seen = {**numbers(trainer.callback_metrics), "step": trainer.global_step, "epoch": trainer.current_epoch}
        weights = weights_of(trainer)
        seen |= trainer.test(module, datamodule=data, verbose=False)[0]
        found.append((seen, weights, data.asked))
    return found


@pytest.mark.parametrize("mesh", [(2, 2, 1)], ids=str)
def test_the_course_of_training_is_that_of_one_process(mesh: Mesh, tmp_path: Any) -> None:
    expected = train(None, str(tmp_path / "one"))
    for rank, results in enumerate(on_ranks(train, mesh, str(tmp_path / "many"))):
        for name, (got, got_weights, got_asked), (seen, weights, asked) in zip(CASES, results, expected, strict=True):
            assert not differences(got, seen), f"rank {rank}, {name}"
            assert got_asked == asked, f"rank {rank}, {name}"
            if rank == 0:
                for key, value in weights.items():
                    torch.testing.assert_close(got_weights[key], value, rtol=1e-9, atol=1e-11)
