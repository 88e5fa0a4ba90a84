"""A small job for torchrun whose ranks come and go: ``elastic_job.py FOLDER TP PP DP STEPS``.

Rank 0 appends a line of JSON for each step to FOLDER/steps: the step, the loss, and the ranks along every axis.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy

BATCH, EVERY = 6, 4


class Module(LightningModule):
    """Four blocks of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for block in self.blocks:
            x = x + block(x)
        loss = F.mse_loss(x, batch.roll(1, -1))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Notes(Callback):
    """Writes down every step; a step takes a while."""

    def __init__(self, folder: str, pause_s: float) -> None:
        self.path, self.pause_s = Path(folder, "steps"), pause_s

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_rank == 0:
            sizes = trainer.strategy.topology.sizes
            loss = float(trainer.callback_metrics["loss"])
            line = {"step": trainer.global_step, "loss": loss, "sizes": [sizes.pp, sizes.dp, sizes.tp]}
            with self.path.open("a") as file:
                file.write(json.dumps(line | {"pid": os.getpid()}) + "\n")
        time.sleep(self.pause_s)


def train(folder: str, tp: int, pp: int, dp: int, steps: int, pause_s: float = 0.25, elastic: bool = True) -> None:
    """Train from the last checkpoint, if there is one."""
    seed_everything(3, verbose=False)
    rows = list(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)).double())
    strategy = ThreeDStrategy(
        tensor_parallel=tp,
        pipeline_parallel=pp,
        data_parallel=dp,
        num_micro_batches=2 if pp > 1 else None,
        global_batch_size=BATCH,
        elastic=elastic,
        hang_timeout_s=20 if elastic else None,
        tp_plan={"blocks.*.0": "colwise", "blocks.*.2": "rowwise"} if tp > 1 else "auto",
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        precision="64-true",
        max_steps=steps,
        callbacks=[
            Notes(folder, pause_s),
            ModelCheckpoint(f"{folder}/kept", every_n_train_steps=EVERY, save_last=True),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(rows, batch_size=1, shuffle=True), ckpt_path="last")


if __name__ == "__main__":
    train(sys.argv[1], *map(int, sys.argv[2:6]))
