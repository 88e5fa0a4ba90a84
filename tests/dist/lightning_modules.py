"""Ordinary LightningModules, and how one is trained under the stock Trainer or under the 3D strategy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from pytest import approx
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy
from tests.harness import run_trainer

VOCAB, WIDTH, LENGTH = 12, 8, 6
Mesh = tuple[int, int, int]
"""Pipeline stages, replicas, tensor-parallel ranks: outermost first, as ranks are numbered."""


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tokens(LightningModule):
    """Predicts the next token; as short as a language model can be."""

    def __init__(self, num_blocks: int = 4, vocab: int = VOCAB, lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(vocab, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self(batch[:, :-1]).argmax(-1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def rows(num: int, vocab: int = VOCAB, seed: int = 7) -> list[Tensor]:
    """Token rows, ``LENGTH + 1`` long."""
    return list(torch.randint(vocab, (num, LENGTH + 1), generator=torch.Generator().manual_seed(seed)))


def loader(data: Any, batch_size: int, mesh: Mesh | None, **options: Any) -> DataLoader[Any]:
    """A loader whose global batch, over all replicas, has ``batch_size`` samples; under one process too."""
    return DataLoader(data, batch_size=batch_size // (mesh[1] if mesh else 1), **options)


def make_trainer(mesh: Mesh | None, options: dict[str, Any] | None = None, **trainer: Any) -> Trainer:
    """A quiet Trainer in float64: the stock one for ``mesh=None``, else one with the 3D strategy."""
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    strategy: Any = "auto"
    if mesh is not None:
        pp, dp, tp = mesh
        strategy = ThreeDStrategy(
            pipeline_parallel=pp,
            data_parallel=dp,
            tensor_parallel=tp,
            **{**({"num_micro_batches": 2} if pp > 1 else {}), **(options or {})},
        )
    arguments = {**quiet, "num_sanity_val_steps": 0, "precision": "64-true", "max_epochs": 1, **trainer}
    devices = 1 if mesh is None else mesh[0] * mesh[1] * mesh[2]
    return Trainer(accelerator="cpu", devices=devices, strategy=strategy, **arguments)


def seeded(make: Any, *args: Any, **kwargs: Any) -> Any:
    """What ``make`` gives from the seed that all runs share."""
    seed_everything(11, verbose=False)
    return make(*args, **kwargs)


def on_ranks(fn: Any, mesh: Mesh, *args: Any, **options: Any) -> list[Any]:
    """``fn(mesh, *args)`` on the ranks of a mesh."""
    return run_trainer(mesh[0] * mesh[1] * mesh[2], _call, fn, mesh, args, **options)


def _call(rank: int, world: int, fn: Any, mesh: Mesh, args: Sequence[Any]) -> Any:
    return fn(mesh, *args)


def numbers(metrics: Any) -> dict[str, float]:
    """Metrics as plain numbers."""
    return {key: float(value) for key, value in metrics.items()}


def differences(got: dict[str, float], expected: dict[str, float], tolerance: float = 1e-6) -> dict[str, Any]:
    """The entries that are not equal, each with both values."""
    keys = sorted(got.keys() | expected.keys())
    pairs = {key: (got.get(key), expected.get(key)) for key in keys}
    return {key: pair for key, pair in pairs.items() if None in pair or pair[0] != approx(pair[1], rel=tolerance)}


def whole_weights(trainer: Trainer) -> dict[str, Tensor]:
    """The state dict of the whole model; on rank 0."""
    strategy, module = trainer.strategy, trainer.lightning_module
    state = strategy.full_state_dict() if isinstance(strategy, ThreeDStrategy) else module.state_dict()
    return {name: value.detach().clone() for name, value in state.items()}
