"""Samples of an optimizer step, where a callback says how many batches are accumulated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_3d.config import ParallelConfig
from lightning_3d.errors import ConfigError
from lightning_3d.trainer.data.global_batch import accumulated_batches
from lightning_3d.trainer.data.ledger import BatchLedger
from lightning_3d.trainer.data.loaders import LoaderGate


def trainer(*plans: dict[int, int], accumulate: int = 1) -> Trainer:
    callbacks: list[Any] = [GradientAccumulationScheduler(plan) for plan in plans]
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    return Trainer(callbacks=callbacks, accumulate_grad_batches=accumulate, devices=1, **options)


def test_batches_of_a_step_are_known_before_the_scheduler_has_set_them() -> None:
    assert accumulated_batches(None) == 1
    assert accumulated_batches(trainer(accumulate=3)) == 3
    assert accumulated_batches(trainer({0: 4})) == 4
    assert accumulated_batches(trainer({0: 4, 2: 4})) == 4
    assert accumulated_batches(trainer({2: 4})) is None


def test_a_global_batch_is_shared_out_over_all_batches_of_a_step() -> None:
    mesh: Any = SimpleNamespace(dp=SimpleNamespace(size=2))
    stopping: Any = None

    def sizes(plan: dict[int, int]) -> tuple[int, int | None]:
        config = ParallelConfig(global_batch_size=16)
        return LoaderGate(trainer(plan), mesh, BatchLedger(2), config, stopping)._batch_sizes(16)

    assert sizes({0: 4}) == (2, None)
    with pytest.raises(ConfigError, match="samples of every optimizer step, but GradientAccumulationScheduler changes"):
        sizes({0: 1, 1: 2})
