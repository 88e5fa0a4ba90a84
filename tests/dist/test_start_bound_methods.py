"""What somebody has put on an instance is there in ranks that start as functions, and trains the same weights."""

from __future__ import annotations

from functools import partial, update_wrapper
from types import MethodType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Module(LightningModule):
    """Has no optimizer of its own, as ``--optimizer`` is meant for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()


class Data(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Tensor]:
        raise AssertionError("of the class")


class Noting(Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        raise AssertionError("of the class")


def training_step(self: Module, batch: Tensor, batch_idx: int) -> Tensor:
    loss = 3 * type(self).training_step(self, batch, batch_idx)
    self.log("loss", loss)
    return loss


def forward(self: Block, x: Tensor) -> Tensor:
    return torch.tanh(self.linear(x))


def train_dataloader(self: Data, rows: int) -> DataLoader[Tensor]:
    values = torch.linspace(-1, 1, rows * 4, dtype=torch.float64).view(rows, 4)
    return DataLoader(values, batch_size=4)


def on_train_batch_end(self: Noting, trainer: Trainer, *args: Any) -> None:
    optimizer = trainer.optimizers[0]
    trainer.callback_metrics["rate"] = torch.tensor(optimizer.param_groups[0]["lr"])
    trainer.callback_metrics["sgd"] = torch.tensor(float(type(optimizer).__name__ == "SGD"))


def trained(devices: int, **options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    module, data, callback = Module(), Data(), Noting()
    module.training_step = MethodType(training_step, module)  # type: ignore[method-assign]
    module.blocks[0].forward = MethodType(forward, module.blocks[0])  # type: ignore[method-assign]
    data.train_dataloader = partial(MethodType(train_dataloader, data), rows=8)  # type: ignore[method-assign]
    callback.on_train_batch_end = MethodType(on_train_batch_end, callback)  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    # As LightningCLI puts on what --optimizer and --lr_scheduler name.
    configure = partial(LightningCLI.configure_optimizers, optimizer=optimizer, lr_scheduler=scheduler)
    update_wrapper(configure, LightningCLI.configure_optimizers)
    module.configure_optimizers = MethodType(configure, module)  # type: ignore[method-assign]
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        precision="64-true",
        max_epochs=2,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, datamodule=data)
    return {name: value.detach() for name, value in module.named_parameters()}, dict(trainer.callback_metrics)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("start_method", ["forkserver", pytest.param("spawn", marks=pytest.mark.long)])
def test_methods_of_instances_are_those_of_one_process(start_method: str) -> None:
    weights, metrics = trained(1)
    got, of_ranks = trained(2, strategy=ThreeDStrategy(pipeline_parallel=2, start_method=start_method))
    assert metrics["sgd"] == of_ranks["sgd"] == 1
    assert metrics["rate"] == of_ranks["rate"] == 0.125
    torch.testing.assert_close(of_ranks["loss"], metrics["loss"], rtol=1e-10, atol=1e-10)
    for name, value in weights.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-10, msg=name)
