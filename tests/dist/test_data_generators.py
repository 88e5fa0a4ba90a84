"""A run that goes on draws the orders of later epochs as one that never stopped, from generators of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_3d import ThreeDStrategy
from tests.harness import run_trainer

SAMPLES, BATCH, EPOCHS = 12, 4, 4


class Reads(LightningModule):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(batch.tolist())
        return self.layer(batch.float().unsqueeze(1)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


class Saves(Callback):
    """Once, in the hook and after as many steps as it is told."""

    def __init__(self, hook: str, steps: int, path: str) -> None:
        self.steps, self.path = steps, path
        setattr(self, hook, self._save)

    def _save(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == self.steps:
            trainer.save_checkpoint(self.path)


def made(kind: str, replicas: int) -> DataLoader[int]:
    data: Any = list(range(SAMPLES))
    own, batch = torch.Generator().manual_seed(5), BATCH // replicas
    weights = [1.0 + index % 3 for index in data]
    match kind:
        case "loader":
            return DataLoader(data, batch, shuffle=True, generator=own)
        case "workers":
            return DataLoader(data, batch, shuffle=True, generator=own, num_workers=1)
        case "with replacement":
            sampler: Any = RandomSampler(data, replacement=True, num_samples=60, generator=own)
            return DataLoader(data, batch, sampler=sampler)
        case "weighted":
            return DataLoader(
                data, batch, sampler=WeightedRandomSampler(weights, SAMPLES, generator=own), generator=own
            )
        case "subset":
            return DataLoader(data, batch, sampler=SubsetRandomSampler(data, generator=own))
        case _:
            return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data, generator=own), batch, False))


_LONG = pytest.mark.long
KINDS = [
    *("loader", "with replacement", "weighted"),
    *(pytest.param(kind, marks=_LONG) for kind in ("workers", "subset", "batch sampler")),
]
MOMENTS = [("on_train_batch_end", 1), ("on_train_batch_end", 3), ("on_train_epoch_end", 3), ("on_train_batch_end", 5)]


def run(kind: str, replicas: int, callbacks: list[Callback], path: str | None = None) -> list[list[int]]:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = ThreeDStrategy(data_parallel=replicas)
    trainer = Trainer(
        accelerator="cpu", devices=replicas, strategy=strategy, max_epochs=EPOCHS, callbacks=callbacks,
        enable_model_summary=False, **quiet,
    )  # fmt: skip
    module = Reads()
    trainer.fit(module, made(kind, replicas), ckpt_path=path)
    return module.seen


def differing(kind: str, replicas: int, folder: str, moments: list[tuple[str, int]]) -> list[str]:
    """Moments after which a run that goes on reads other samples than one that was not stopped."""
    per_epoch = 15 if kind == "with replacement" else 3
    saves = [
        Saves(hook, steps * per_epoch // 3, f"{folder}/{kind} {number}.ckpt")
        for number, (hook, steps) in enumerate(moments)
    ]
    whole = run(kind, replicas, list(saves))
    rests = [run(kind, replicas, [], save.path) for save in saves]
    return [
        f"{save.path}: {rest[:5]} is not {whole[save.steps :][:5]}"
        for save, rest in zip(saves, rests, strict=True)
        if rest != whole[save.steps :]
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_later_epochs_go_on_as_if_the_run_had_not_stopped(kind: str, tmp_path: Path) -> None:
    assert not differing(kind, 1, str(tmp_path), MOMENTS)


def of_all_kinds(rank: int, world: int, folder: str) -> list[str]:
    return [text for kind in ("loader", "with replacement") for text in differing(kind, world, folder, MOMENTS[:2])]


def test_later_epochs_go_on_on_every_replica(tmp_path: Path) -> None:
    assert run_trainer(2, of_all_kinds, str(tmp_path)) == [[], []]
