"""Precision through the Trainer: overflow on one stage, norms that hooks see, and clipping as under one process."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d import ThreeDStrategy
from lightning_3d.precision import ThreeDPrecision
from lightning_3d.sharding.loss_scale import LossScaler
from tests.harness import run_trainer


class Layer(nn.Module):
    def __init__(self, width: int, gain: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.normal_(self.linear.weight, std=gain)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Task(pl.LightningModule):
    def __init__(self, overflow_at: int | None = None, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(3, 8)
        self.layers = nn.ModuleList(Layer(8, 10.0**-i) for i in range(4))
        self.head = nn.Linear(8, 1)
        if frozen:
            self.embed.requires_grad_(False)
            self.layers[0].requires_grad_(False)
            self.layers[1].requires_grad_(False)
        self.overflow_at = overflow_at
        self.rates: list[float] = []
        self.skipped: list[bool] = []
        self.scales: list[float] = []
        self.norms: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, ThreeDStrategy):
            self.norms.append(strategy.gradient_norm(2.0).item())
            precision = self.trainer.precision_plugin
            self.skipped.append(precision.step_skipped)
            self.scales.append(precision.state_dict().get("scale", 1.0))
        else:
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            self.norms.append(torch.nn.utils.get_total_norm(grads).item())
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_after_backward(self) -> None:
        strategy = self.trainer.strategy
        if self.overflow_at == self.trainer.global_step and isinstance(strategy, ThreeDStrategy):
            mesh = strategy.topology
            if (mesh.pp.rank, mesh.dp.rank, mesh.tp.rank) == (1, 0, 0) and len(self.rates) == self.overflow_at:
                gradient = self.layers[3].linear.weight.grad
                getattr(gradient, "_local_tensor", gradient)[0, 0] = float("inf")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(32, 3, generator=generator), torch.randn(32, 1, generator=generator))
    return DataLoader(data, batch_size=8)


def _options(**more: Any) -> dict[str, Any]:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return {"accelerator": "cpu", "max_steps": 4, **quiet, **more}


def _full(module: pl.LightningModule) -> dict[str, Tensor]:
    values = {}
    for name, parameter in module.named_parameters():
        if parameter.__class__.__name__ == "Placeholder" or hasattr(parameter, "meta"):
            continue
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        values[name] = whole.detach().clone()
    return values


def _fit(
    rank: int, world: int, strategy: dict[str, Any], trainer: dict[str, Any], task: dict[str, Any], f16: bool
) -> dict[str, Any]:
    module = Task(**task)
    if f16:
        trainer = {**trainer, "plugins": [ThreeDPrecision("16-mixed", LossScaler(64.0))]}
    runner = pl.Trainer(devices=world, strategy=ThreeDStrategy(**strategy), **_options(**trainer))
    loader = _loader()
    per_replica = DataLoader(loader.dataset, batch_size=8 // strategy.get("data_parallel", 1))
    runner.fit(module, per_replica)
    return {
        "rates": module.rates,
        "skipped": module.skipped,
        "scales": module.scales,
        "norms": module.norms,
        "weights": _full(module),
    }


def _one_process(trainer: dict[str, Any], task: dict[str, Any]) -> Task:
    module = Task(**task)
    pl.Trainer(devices=1, **_options(**trainer)).fit(module, _loader())
    return module


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "trainer",
    [
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05, "max_steps": 2},
    ],
)
def test_clipping_equals_one_process(zero: int, trainer: dict[str, Any]) -> None:
    trainer = {**trainer, "precision": "64-true"}
    expected = _one_process(trainer, {})
    strategy = {"pipeline_parallel": 2, "data_parallel": 2, "zero_stage": zero, "num_micro_batches": 2}
    weights: dict[str, Tensor] = {}
    for found in run_trainer(4, _fit, strategy, trainer, {}, False):
        assert found["norms"] == pytest.approx(expected.norms, rel=1e-10)
        weights.update(found["weights"])
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("zero", [0, 1])
def test_overflow_on_one_stage_skips_everywhere_and_holds_the_schedule(zero: int, frozen: bool) -> None:
    strategy = {"pipeline_parallel": 2, "data_parallel": 2, "zero_stage": zero, "num_micro_batches": 2}
    for found in run_trainer(4, _fit, strategy, {}, {"overflow_at": 1, "frozen": frozen}, True):
        assert found["skipped"] == [False, True, False, False]
        assert found["scales"] == [64.0, 32.0, 32.0, 32.0]
        assert found["rates"] == pytest.approx([0.01, 0.005, 0.005, 0.01 / 3])


def test_float16_without_a_pipeline_scales_the_loss_once() -> None:
    expected = _one_process({}, {})
    for found in run_trainer(2, _fit, {"data_parallel": 2}, {}, {}, True):
        assert found["skipped"] == [False] * 4
        assert found["norms"] == pytest.approx(expected.norms, rel=2e-2)
