"""The zoo: every model in the plainest LightningModule that trains it, with its data."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.zoo import hugging_face, torch_models

MODELS = {**hugging_face.MODELS, **torch_models.MODELS}
BATCH, STEPS = 4, 2


class Plain(LightningModule):
    """The module a user of any of these models would write."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.model(**batch)
        self.log("train_loss", out.loss)
        return out.loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make(name: str) -> Plain:
    """The module of a zoo model, with seeded weights."""
    torch.manual_seed(3)
    return Plain(MODELS[name][0]())


def data(name: str) -> list[Any]:
    """Samples for :data:`STEPS` batches of :data:`BATCH`."""
    sample = MODELS[name][1]
    return [sample(seed) for seed in range(STEPS * BATCH)]
