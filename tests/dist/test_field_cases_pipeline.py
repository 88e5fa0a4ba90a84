"""Field case C35: encoder-decoders and skip connections through the Trainer, over more stages than the zoo has."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_3d import ThreeDStrategy
from tests.harness import run_trainer
from tests.parity.record import Numbers, compare, run
from tests.zoo.models import BATCH, STEPS, data, make


class Early(LightningModule):
    """Logs, and adds to its loss, what the first stage computes; reads an encoder's states in the last block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 12)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        x = self.embed(batch["ids"])
        early = x.square().mean()
        first = None
        for block in self.blocks:
            x = x + torch.tanh(block(x))
            first = x if first is None else first
        loss = F.cross_entropy((self.head(x) + first.mean()).flatten(0, 1), batch["labels"].flatten()) + 0.1 * early
        self.log("train_loss", loss)
        self.log("early", early.detach() + first.mean())
        return {"loss": loss, "first": first.detach().mean()}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx)["loss"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _early() -> Early:
    torch.manual_seed(5)
    return Early()


def _tokens() -> list[dict[str, Tensor]]:
    ids = torch.randint(12, (STEPS * BATCH, 7), generator=torch.Generator().manual_seed(1))
    return [{"ids": row[:-1], "labels": row[1:]} for row in ids]


def _train(name: str, stages: int) -> Numbers:
    strategy = ThreeDStrategy(pipeline_parallel=stages, num_micro_batches=2, timeout_s=60.0) if stages > 1 else None
    return run(
        _early if name == "early" else functools.partial(make, name),
        _tokens() if name == "early" else data(name),
        strategy=strategy,
        devices=stages,
        steps=STEPS,
        global_batch=BATCH,
        limit_val_batches=1,
    )


def _ranks(rank: int, world: int, names: list[str]) -> list[Numbers]:
    return [_train(name, world) for name in names]


@pytest.mark.parametrize(("stages", "names"), [(2, ["early"]), (4, ["early", "U-Net", "nn.Transformer"])])
def test_c35_values_of_early_stages_reach_late_ones(stages: int, names: list[str]) -> None:
    results: list[Any] = run_trainer(stages, _ranks, names, timeout=90)
    for name, got in zip(names, results[0], strict=True):
        differences = compare(_train(name, 1), got)
        worst = {kind: found for kind, found in differences.items() if found.value > 1e-10}
        assert not worst, f"{name}: {worst}"
