"""What is trained: the quickstart's GPT or a smaller one, on fixed random bytes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_3d.models import GPT


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of the model and of a batch."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    length: int = 128
    batch: int = 16
    """Samples per optimizer step, over all replicas."""

    def module(self) -> GPT:
        """The model, with the same weights at every call."""
        seed_everything(0, verbose=False)
        return GPT(
            num_layers=self.layers, width=self.width, num_heads=self.heads, sequence_length=self.length, warmup_steps=2
        )

    def loader(self, batch: int, replica: int = 0, replicas: int = 1) -> DataLoader[Tensor]:
        """Batches of ``batch`` samples; with several replicas, the share of one."""
        return DataLoader(_Rows(self.length + 1), batch_size=batch, sampler=_EveryNth(replica, replicas))

    def batches(self, batch: int, replica: int = 0, replicas: int = 1) -> Iterator[Tensor]:
        """The same without end, for loops written by hand."""
        return iter(self.loader(batch, replica, replicas))


class _Rows(Dataset[Tensor]):
    """Few samples that come again and again: a pass never ends while it is measured."""

    def __init__(self, length: int) -> None:
        self._rows = torch.randint(256, (64, length), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        return self._rows[index % 64]


class _EveryNth(Sampler[int]):
    def __init__(self, first: int, step: int) -> None:
        self._range = range(first, 1_000_000, step)

    def __iter__(self) -> Iterator[int]:
        return iter(self._range)

    def __len__(self) -> int:
        return len(self._range)


def trainer_fit(
    shape: Shape,
    make_strategy: Callable[[], Strategy | str],
    *,
    devices: int = 1,
    batch: int,
    replica: int = 0,
    replicas: int = 1,
    max_steps: int = 1_000_000,
    **options: Any,
) -> Callable[[Callback | None], None]:
    """A function that builds a Trainer and fits.

    Args:
        shape: Sizes.
        make_strategy: Called once, on the rank.
        devices: Ranks.
        batch: Samples of one loader's batch.
        replica: Whose samples are read, where the strategy does not see to it.
        replicas: Among how many.
        max_steps: Steps to train, unless a callback ends it before.
        **options: For the Trainer.
    """

    def fit(callback: Callback | None) -> None:
        warnings.filterwarnings("ignore", ".*(does not have many workers|does not support `sync_dist`).*")
        module = shape.module()
        Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=make_strategy(),
            max_steps=max_steps,
            max_epochs=-1,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[] if callback is None else [callback],
            **options,
        ).fit(module, shape.loader(batch, replica, replicas))

    return fit
