"""C58: averaged weights are averaged in parts, element by element, and are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lightning_3d.checkpoint import to_lightning
from tests.dist.lightning_modules import Mesh, loader, make_trainer, on_ranks, seeded, whole_weights

BATCH = 4


class Odd(nn.Module):
    """Parts of 7 x 5 at tp2, uneven over replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 14)
        self.down = nn.Linear(14, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Odds(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 5)
        self.blocks = nn.ModuleList(Odd() for _ in range(4))
        self.head = nn.Linear(5, 1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))
        self.losses: list[float] = []

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x)[:, 0], batch.sum(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics.get("val_loss", 0.0)))

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps += 1  # buffers are averaged too

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


class ByHand(Callback):
    """What people write themselves: a dict of averages by name, swapped in for validation and kept in the state."""

    def __init__(self) -> None:
        self.shadow: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.shadow = self.shadow or {name: p.detach().clone() for name, p in module.named_parameters()}

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        for name, parameter in module.named_parameters():
            self.shadow[name].mul_(0.75).add_(parameter.detach(), alpha=0.25)

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.swap(module)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.swap(module)

    def swap(self, module: LightningModule) -> None:
        for name, parameter in module.named_parameters():
            before = parameter.detach().clone()
            parameter.data.copy_(self.shadow[name])
            self.shadow[name].copy_(before)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def all_at_once() -> WeightAveraging:
    return WeightAveraging(use_buffers=False, multi_avg_fn=get_ema_multi_avg_fn(0.8))


KINDS: dict[str, Any] = {
    "ema": lambda: EMAWeightAveraging(decay=0.75, update_starting_at_step=1),
    "multi": all_at_once,
    "swa": lambda: StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=2),
    "by_hand": ByHand,
}


def data() -> list[Tensor]:
    return list(torch.randn(2 * BATCH, 3, generator=torch.Generator().manual_seed(3)).double())


def train(mesh: Mesh | None, kind: str, options: dict[str, Any], epochs: int, resume: str | None, save: str) -> Any:
    """Validation losses, the final weights, and those that are saved."""
    trainer = make_trainer(mesh, options, callbacks=[KINDS[kind]()], max_epochs=4)
    trainer.fit_loop.max_epochs = epochs if kind != "swa" else 4
    if kind == "swa" and epochs < 4:
        trainer.callbacks.append(Stop(epochs))
    module = seeded(Odds).double()
    trainer.fit(module, loader(data(), BATCH, mesh), loader(data(), BATCH, mesh), ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)
    final = whole_weights(trainer)
    trainer.validate(module, loader(data(), BATCH, mesh), verbose=False)
    return module.losses, final


class Stop(Callback):
    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_train_epoch_end(self, trainer: Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.current_epoch + 1 >= self.epochs


def train_all(mesh: Mesh | None, jobs: list[tuple[Any, ...]]) -> list[Any]:
    return [train(mesh, *job) for job in jobs]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("one"))
    results = {}
    for kind in KINDS:
        [half] = train_all(None, [(kind, {}, 2, None, f"{folder}/{kind}.ckpt")])
        [whole] = train_all(None, [(kind, {}, 4, f"{folder}/{kind}.ckpt", f"{folder}/{kind}-4.ckpt")])
        results[kind] = (half, whole)
    return folder, results


def check(got: Any, wanted: Any, what: Any) -> None:
    assert got[0] == pytest.approx(wanted[0], rel=1e-10), what
    for name, value in got[1].items():
        assert torch.allclose(value, wanted[1][name], rtol=1e-10, atol=1e-10), (what, name)


@pytest.mark.parametrize("mesh, back", [((1, 1, 2), (2, 1, 1)), ((2, 1, 1), (1, 2, 1)), ((1, 2, 1), (1, 1, 2))])
def test_c58_averages_of_parts_are_those_of_the_whole_and_resume_elsewhere(
    mesh: Mesh, back: Mesh, one: Any, tmp_path: Path
) -> None:
    folder, expected = one
    zero = 3 if mesh[1] > 1 else 1
    first = [(kind, {"zero_stage": zero}, 2, None, f"{tmp_path}/{kind}.ckpt") for kind in KINDS]
    second = [(kind, {}, 4, f"{tmp_path}/{kind}.ckpt", "") for kind in KINDS]
    for kind, result in zip(KINDS, on_ranks(train_all, mesh, first)[0], strict=True):
        check(result, expected[kind][0], (mesh, kind))
        stock = torch.load(f"{folder}/{kind}.ckpt", weights_only=False)
        same_tree(to_lightning(f"{tmp_path}/{kind}.ckpt"), stock, kind)
    for kind, result in zip(KINDS, on_ranks(train_all, back, second)[0], strict=True):
        check(result, expected[kind][1], (mesh, back, kind))


def same_tree(got: Any, wanted: Any, path: str) -> None:
    """All tensors that the stock checkpoint holds outside of the optimizer are there, whole and equal."""
    for key, value in wanted.items():
        if isinstance(value, dict) and key not in ("loops", "optimizer_states"):
            same_tree(got[key], value, f"{path}.{key}")
        elif isinstance(value, Tensor):
            assert got[key].dtype == value.dtype, f"{path}.{key}"
            assert torch.allclose(got[key], value, rtol=1e-10, atol=1e-10), f"{path}.{key}"
