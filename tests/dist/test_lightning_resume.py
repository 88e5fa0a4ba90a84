"""A run that is stopped and goes on, at the same layout or another, is the run that was never stopped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.dist.lightning_modules import Mesh, Tokens, loader, make_trainer, on_ranks, rows, seeded

BATCH = 12
STEPS, STOP = 6, 3


class Learns(Tokens):
    """AdamW with two groups and a schedule by steps."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        plain = [p for name, p in self.named_parameters() if "norm" in name]
        decayed = [p for name, p in self.named_parameters() if "norm" not in name]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0, "lr": 0.02}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        return [optimizer], [
            {
                "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.05, 0.02], total_steps=20),
                "interval": "step",
            }
        ]


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[int, float, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        rate = trainer.optimizers[0].param_groups[1]["lr"]
        self.seen.append((trainer.global_step, float(trainer.callback_metrics["loss"]), rate))


class Repeated(Learns):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch))


def evaluate_then_train(mesh: Mesh | None) -> Any:
    """Validate, fit with sanity check, validate, fit again: with the same objects."""
    module, losses = seeded(Repeated), Losses()
    data = rows(8)
    trainer = make_trainer(mesh, callbacks=[losses], num_sanity_val_steps=2, max_epochs=1)
    first = trainer.validate(module, loader(data, 4, mesh), verbose=False)
    trainer.fit(module, loader(data, 4, mesh), loader(data, 4, mesh))
    second = trainer.validate(module, loader(data, 4, mesh), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(data, 4, mesh), loader(data, 4, mesh))
    other = make_trainer(mesh, max_epochs=1, callbacks=[losses])
    other.fit(module, loader(data, 4, mesh), loader(data, 4, mesh))
    assert module.training
    return first, second, losses.seen


@pytest.mark.parametrize("mesh", [(2, 1, 2), (1, 2, 1)], ids=str)
def test_c29_evaluation_before_training_leaves_training_as_it_is(mesh: Mesh) -> None:
    first, second, losses = evaluate_then_train(None)
    for got_first, got_second, got_losses in on_ranks(evaluate_then_train, mesh):
        assert got_first == [pytest.approx(first[0], rel=1e-6)]
        assert got_second == [pytest.approx(second[0], rel=1e-6)]
        assert got_losses == [pytest.approx(item, rel=1e-10) for item in losses]


class Drops(Learns):
    """Dropout inside and outside of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.3)
        for block in self.blocks:
            block.up = torch.nn.Sequential(block.up, torch.nn.Dropout(0.3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def stop_and_go_on(mesh: Mesh, folder: str) -> Any:
    runs = []
    for path in (None, f"{folder}/kept.ckpt"):
        losses = Losses()
        saver = ModelCheckpoint(folder, "kept", every_n_train_steps=STOP, save_top_k=-1, enable_version_counter=False)
        callbacks: list[Callback] = [losses] if path else [losses, saver]
        trainer = make_trainer(
            mesh, callbacks=callbacks, max_steps=STEPS - 1, max_epochs=-1, enable_checkpointing=not path
        )
        trainer.fit(seeded(Drops), loader(rows(BATCH * 4), BATCH, mesh, shuffle=True), ckpt_path=path)
        runs.append(losses.seen)
    return runs


@pytest.mark.parametrize("mesh", [(2, 1, 2), (1, 2, 1)], ids=str)
def test_dropout_goes_on_with_the_masks_it_would_have_had(mesh: Mesh, tmp_path: Any) -> None:
    for straight, resumed in on_ranks(stop_and_go_on, mesh, str(tmp_path)):
        assert resumed == [pytest.approx(item, rel=1e-10) for item in straight[STOP:]]
