"""Sizes chosen for a run: every rank has those of rank 0, and trains with them; a refusal reaches everybody."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy
from lightning_3d.config import ParallelConfig, Sizes
from lightning_3d.errors import ConfigError
from lightning_3d.models import GPT
from lightning_3d.planner import Cluster
from lightning_3d.trainer.setup import chooser
from tests.harness import run_ranks, run_trainer

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
MEMORY_GB = 0.014
"""Too little for a replica on each of two ranks, enough for half of one."""


def loss(strategy: Any, devices: int, late: bool) -> float:
    torch.manual_seed(0)
    rows = torch.randint(256, (16, 33), generator=torch.Generator().manual_seed(1))
    trainer = Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_steps=2, **QUIET)
    module = GPT(sequence_length=32, warmup_steps=1, build_late=late)
    trainer.fit(module, DataLoader(list(rows), batch_size=8))
    return float(trainer.callback_metrics["train_loss"])


def chosen(rank: int, world_size: int) -> list[tuple[Sizes, float]]:
    memory = MEMORY_GB if rank == 0 else 1000.0  # rank 1 alone would choose replicas
    cluster = Cluster(gpu="cpu", gpus_per_node=world_size, memory_gb=memory)
    chooser.cluster_here = lambda *args: cluster  # type: ignore[assignment]
    found = []
    for late in (False, True):
        strategy = ThreeDStrategy()
        value = loss(strategy, world_size, late)
        found.append((strategy.topology.sizes, value))
    return found


def test_ranks_take_the_sizes_of_rank_0_and_train_with_them() -> None:
    reference = loss("auto", 1, False)
    for found in run_trainer(2, chosen, timeout=120):
        for sizes, value in found:
            assert sizes == Sizes(pp=1, dp=1, tp=2)
            assert value == pytest.approx(reference, rel=1e-5)


def refused(rank: int, world_size: int) -> str:
    def nothing_fits() -> ParallelConfig:
        assert rank == 0
        raise ConfigError("nothing fits")

    with pytest.raises(ConfigError) as caught:
        chooser.agree(ParallelConfig(), nothing_fits)
    return str(caught.value)


def test_all_ranks_hear_of_it_where_rank_0_finds_no_sizes() -> None:
    assert run_ranks(refused, 2) == ["nothing fits"] * 2
