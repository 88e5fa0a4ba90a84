"""What each ``precision=`` string means, and how Lightning's plugins become ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import nn

from lightning_3d import ThreeDStrategy
from lightning_3d.errors import CheckpointError, ConfigError
from lightning_3d.precision import PRECISION_RULES, ThreeDPrecision
from lightning_3d.sharding import ZERO_RULES
from lightning_3d.sharding.loss_scale import LossScaler


def test_unknown_precision_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'bf16-mixed'"):
        ThreeDPrecision("8-bit")


@pytest.mark.parametrize(
    ("stock", "name"),
    [
        (Precision(), "32-true"),
        (DoublePrecision(), "64-true"),
        (HalfPrecision("bf16-true"), "bf16-true"),
        (HalfPrecision("16-true"), "16-true"),
        (MixedPrecision("bf16-mixed", "cpu"), "bf16-mixed"),
    ],
)
def test_stock_plugins_are_translated(stock: Precision, name: str) -> None:
    plugin = ThreeDPrecision.from_stock(stock)
    assert plugin.precision == name
    assert ThreeDPrecision.from_stock(plugin) is plugin


def test_the_settings_of_a_stock_scaler_are_kept() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
    plugin = ThreeDPrecision.from_stock(MixedPrecision("16-mixed", "cpu", scaler))
    assert plugin.state_dict() == scaler.state_dict() | {"scale": 128.0}


def test_a_stock_plugin_of_another_kind_is_refused() -> None:
    class Strange(Precision):
        pass

    with pytest.raises(ConfigError, match="Strange"):
        ThreeDPrecision.from_stock(Strange())


def test_state_of_the_scaler_crosses_to_stock_and_back() -> None:
    ours = LossScaler(512.0, growth_interval=3)
    ours.update(torch.tensor(0.0))
    stock = torch.amp.GradScaler("cpu")
    stock.load_state_dict(ours.state_dict())
    assert stock.state_dict() == ours.state_dict()
    other = LossScaler()
    other.load_state_dict(stock.state_dict())
    assert other.state_dict() == ours.state_dict()
    with pytest.raises(CheckpointError, match="_growth_tracker"):
        other.load_state_dict({"scale": 1.0})


@pytest.mark.parametrize("name", list(PRECISION_RULES))
def test_modules_inputs_and_contexts_have_the_types_of_the_table(name: str) -> None:
    plugin, rule = ThreeDPrecision(name), PRECISION_RULES[name]
    module = plugin.convert_module(nn.Linear(4, 4))
    assert module.weight.dtype == rule.kept
    batch = plugin.convert_input({"x": torch.ones(2, 4), "ids": torch.ones(2, dtype=torch.long), "text": "a"})
    assert batch["ids"].dtype == torch.long and batch["text"] == "a"
    assert batch["x"].dtype == rule.kept
    with plugin.forward_context():
        assert module(batch["x"]).dtype == rule.computed
    with plugin.module_init_context():
        assert nn.Linear(2, 2).weight.dtype == rule.kept
    assert torch.get_default_dtype() == torch.float32
    assert plugin.compute_dtype == (rule.computed if name.endswith("mixed") else None)


def test_every_batch_is_seen_before_it_is_converted() -> None:
    plugin = ThreeDPrecision("64-true")
    seen: list[object] = []
    plugin.on_batch = seen.append
    batch = [torch.ones(2)]
    plugin.convert_input(batch)
    assert seen[0] is batch


def test_the_table_of_zero_stages() -> None:
    counts = {stage: rule.collectives(units=5, micro_batches=4) for stage, rule in ZERO_RULES.items()}
    assert counts == {
        0: {"all_gather": 0, "reduce_scatter": 0},
        1: {"all_gather": 5, "reduce_scatter": 5},
        2: {"all_gather": 5, "reduce_scatter": 20},
        3: {"all_gather": 40, "reduce_scatter": 20},
    }


class SpoiltThenEmpty(BoringModel):
    """The first batch has a loss that is NaN, the others have none."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * float("nan") if batch_idx == 0 else None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_a_step_that_was_left_out_does_not_hold_the_schedule_of_batches_without_a_loss() -> None:
    module = SpoiltThenEmpty()
    trainer = Trainer(
        strategy=ThreeDStrategy(nonfinite="skip"),
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_train_batches=3,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2
