"""How many samples an optimizer step takes, and the schedulers that want to know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.types import LRSchedulerConfig

from lightning_3d.config import ParallelConfig
from lightning_3d.errors import ConfigError
from lightning_3d.lr_scaling import BatchScaledLR
from lightning_3d.mesh import Mesh
from lightning_3d.trainer.data.sampler import ReplicaBatchSampler

CHANGES = "GradientAccumulationScheduler changes the number of accumulated batches during the run"


def tell_schedulers(
    configs: Iterable[LRSchedulerConfig], trainer: pl.Trainer, config: ParallelConfig, mesh: Mesh
) -> None:
    """Fill in the global batch of every :class:`BatchScaledLR` that was not told it.

    Raises:
        ConfigError: if one counts epochs in place of optimizer steps, contradicts the strategy, or the batch is not
            known.
    """
    for item in configs:
        scheduler: Any = item.scheduler
        if not isinstance(scheduler, BatchScaledLR):
            continue
        if scheduler.changes_with_steps and (item.interval != "step" or item.frequency != 1):
            raise ConfigError(
                f"BatchScaledLR counts optimizer steps, but Lightning moves it every {item.frequency}"
                f" {item.interval}(s), so warm-up and decay would last as many times longer. Return"
                " scheduler.configured() from configure_optimizers, or {'scheduler': scheduler, 'interval': 'step'}."
            )
        told = config.global_batch_size
        if scheduler.global_batch_size is None:
            scheduler.set_global_batch_size(told or samples_per_step(trainer, mesh))
        elif told is not None and scheduler.global_batch_size != told:
            raise ConfigError(
                f"BatchScaledLR was given global_batch_size={scheduler.global_batch_size}, the strategy"
                f" global_batch_size={told}: it would scale by another batch than it trains with. Leave it out of the"
                " scheduler."
            )


def samples_per_step(trainer: pl.Trainer, mesh: Mesh) -> int:
    """Samples that all replicas together take for one optimizer step, as the training loader and the Trainer say.

    Raises:
        ConfigError: if that is not one number: several loaders, batches of unknown size, or a changing accumulation.
    """
    accumulated = accumulated_batches(trainer)
    if accumulated is None:
        raise _unknown(CHANGES)
    trainer.fit_loop.setup_data()
    combined = trainer.fit_loop._combined_loader
    loaders = combined.flattened if combined is not None else []
    if len(loaders) != 1:
        raise _unknown(f"there are {len(loaders)} training loaders")
    loader: Any = loaders[0]
    sampler = getattr(loader, "batch_sampler", None)
    replicas = mesh.dp.size
    if isinstance(sampler, ReplicaBatchSampler):  # what it cuts are batches of all replicas
        size, replicas = sampler.source.batch_size, 1
    else:
        size = getattr(sampler, "batch_size", None) or getattr(loader, "batch_size", None)
    if not isinstance(size, int) or isinstance(size, bool):
        raise _unknown("the training loader has no batch_size")
    return size * replicas * accumulated


def accumulated_batches(trainer: pl.Trainer | None) -> int | None:
    """Batches that an optimizer step takes (1 without a Trainer); ``None`` if their number changes during the run.

    ``trainer.accumulate_grad_batches`` itself is 1 until a ``GradientAccumulationScheduler`` sees the first epoch.
    """
    if trainer is None:
        return 1
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    plans = [item.scheduling for item in callbacks if isinstance(item, GradientAccumulationScheduler)]
    numbers = {number for plan in plans for number in plan.values()} or {trainer.accumulate_grad_batches}
    return numbers.pop() if len(numbers) == 1 else None


def _unknown(reason: str) -> ConfigError:
    return ConfigError(
        f"BatchScaledLR scales by the samples of an optimizer step, which are not one known number: {reason}. Pass"
        " global_batch_size to it, or to the strategy."
    )
