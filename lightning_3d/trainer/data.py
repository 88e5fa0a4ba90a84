"""From the user's loader to what the Trainer iterates on this rank."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from lightning_3d.errors import ConfigError
from lightning_3d.mesh import Mesh
from lightning_3d.trainer.batches import BatchLedger, SharedLoader
from lightning_3d.trainer.sampler import set_batch_size, shard, take_over_sampling


class ReplicaData:
    """Makes loaders read what this replica computes with. Make one before the Trainer asks for loaders.

    Args:
        trainer: The Trainer. Its own distributed sampler is turned off; ``use_distributed_sampler=False`` is honoured.
        mesh: The mesh.
        global_batch_size: Samples per optimizer step over all replicas and accumulated batches; ``None`` leaves the
            batch size of the loaders, which then counts per replica.
    """

    def __init__(self, trainer: Trainer, mesh: Mesh, global_batch_size: int | None = None) -> None:
        self.ledger = BatchLedger(mesh.dp.size)
        self._trainer = trainer
        self._mesh = mesh
        self._global_batch_size = global_batch_size
        self._shards = take_over_sampling(trainer)

    def process(self, loader: Any) -> Any:
        """The loader of this rank (``Strategy.process_dataloader``). Collective.

        Raises:
            ConfigError: when ``global_batch_size`` does not divide or cannot be set.
        """
        if isinstance(loader, SharedLoader):  # a CombinedLoader is changed by Lightning and may come again
            loader.ledger = self.ledger
            return loader
        if self._global_batch_size is not None and self._trainer.training:
            loader = set_batch_size(loader, self._replica_batch_size(self._global_batch_size))
        if self._shards:
            loader = shard(loader, self._mesh.dp)
        return SharedLoader(loader, self._mesh, self.ledger, track_indices=self._trainer.predicting)

    def _replica_batch_size(self, global_batch_size: int) -> int:
        replicas, accumulated = self._mesh.dp.size, self._trainer.accumulate_grad_batches
        size, rest = divmod(global_batch_size, replicas * accumulated)
        if rest or size == 0:
            raise ConfigError(
                f"global_batch_size={global_batch_size} does not divide by {replicas} replicas x"
                f" accumulate_grad_batches={accumulated}. Take a multiple of {replicas * accumulated}."
            )
        return size
