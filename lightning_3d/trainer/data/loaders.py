"""From the user's loader to the one that the Trainer iterates."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import RunningStage

from lightning_3d.config import ParallelConfig
from lightning_3d.errors import ConfigError
from lightning_3d.mesh import Mesh
from lightning_3d.trainer.data.batches import SharedLoader, Stopping
from lightning_3d.trainer.data.global_batch import CHANGES, accumulated_batches
from lightning_3d.trainer.data.host_random import GeneratorStates
from lightning_3d.trainer.data.ledger import BatchLedger
from lightning_3d.trainer.data.sampler import set_batch_size, shard, take_over_sampling


class LoaderGate:
    """Gives every replica its part of the data, read once and shared within the replica.

    Args:
        trainer: The Trainer.
        mesh: The mesh.
        ledger: Where facts about batches are noted.
        config: ``global_batch_size`` and ``elastic`` are read.
        stopping: Asked before each batch whether the run ends there.
    """

    def __init__(
        self, trainer: pl.Trainer, mesh: Mesh, ledger: BatchLedger, config: ParallelConfig, stopping: Stopping
    ) -> None:
        self._trainer = trainer
        self._mesh = mesh
        self._ledger = ledger
        self._stopping = stopping
        self._global_batch_size = config.global_batch_size
        self._uneven = config.elastic  # replicas come and go, and the batch stays
        self._shards = take_over_sampling(trainer)

    def process(self, loader: Any) -> Any:
        """The loader to iterate in place of ``loader``."""
        stage = self._trainer.state.stage
        whole = None
        if self._global_batch_size is not None and stage is RunningStage.TRAINING:
            size, whole = self._batch_sizes(self._global_batch_size)
            loader = set_batch_size(loader, size)
        tracked = stage is RunningStage.PREDICTING
        if self._shards:
            loader = shard(loader, self._mesh.dp, whole, runs=tracked)
        epochs = None
        if stage is RunningStage.TRAINING:
            epochs = _TrainingEpochs(self._trainer)
            self._restore_generators(loader)
        return SharedLoader(
            loader, self._mesh, self._ledger, track_indices=tracked, epochs=epochs, stopping=self._stopping
        )

    def _restore_generators(self, loader: Any) -> None:
        """Put a loader's own generators where they stood at the end of an epoch: Lightning then hands on no state."""
        loop = self._trainer.fit_loop
        if not loop.restarting and loop._combined_loader_states_to_load:
            state = loop._combined_loader_states_to_load.pop(0)  # loaders come in the order of their states
            GeneratorStates.of(loader).set(state.get("generators", ()))

    def _batch_sizes(self, global_batch_size: int) -> tuple[int, int | None]:
        """Samples in a replica's batch and, only where they do not divide evenly, in that of all replicas."""
        replicas, accumulated = self._mesh.dp.size, accumulated_batches(self._trainer)
        if accumulated is None:
            raise ConfigError(
                f"global_batch_size={global_batch_size} is to be the samples of every optimizer step, but {CHANGES}."
                " Leave one of the two out."
            )
        together = global_batch_size // accumulated
        if self._uneven and self._shards and together >= replicas and not global_batch_size % accumulated:
            return -(-together // replicas), together if together % replicas else None
        size, rest = divmod(global_batch_size, replicas * accumulated)
        if rest or not size:
            raise ConfigError(
                f"global_batch_size={global_batch_size} is not a multiple of {replicas * accumulated} (data_parallel="
                f"{replicas} x accumulate_grad_batches={accumulated}), so replicas would read different amounts. Use"
                f" {max(1, size) * replicas * accumulated} or {(size + 1) * replicas * accumulated}."
            )
        return size, None


class _TrainingEpochs:
    """The Trainer's count of epochs, as a loader needs it."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    @property
    def current(self) -> int:
        return int(vars(self._trainer.fit_loop.epoch_progress.current)["processed"])

    @property
    def steps(self) -> int:
        return int(self._trainer.global_step)

    @property
    def at_end(self) -> bool:
        # Lightning counts a batch as completed after `on_train_batch_end`. A checkpoint of that hook in the last batch
        # of an epoch is resumed with the next epoch; one that is written later with the rest of this one.
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        current = progress.current
        last = progress.is_last_batch or current.ready >= self._trainer.num_training_batches
        return last and current.completed < current.ready
