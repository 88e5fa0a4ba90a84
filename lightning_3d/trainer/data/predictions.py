"""Predictions: every sample once and in order on every rank, written once, in spite of fillers and peers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from lightning_3d.collectives import all_gather_object
from lightning_3d.errors import ConfigError
from lightning_3d.mesh import Mesh
from lightning_3d.trainer.data.ledger import BatchLedger
from lightning_3d.trainer.data.outputs import combine
from lightning_3d.trainer.data.sampler import ReplicaBatchSampler, ReplicaSampler, index_sampler, reads_everything


class PredictionGate:
    """Keeps fillers out of the results, puts those of all replicas together, and lets one rank write.

    What is written batch by batch is written by the reader of each replica, as it comes. What is written or returned
    at the end is that of all replicas, in the order in which one process would have it; it is gathered then, batch by
    batch, and only if somebody asks for it.

    Args:
        trainer: The Trainer, about to predict.
        mesh: The mesh.
        ledger: Knows which batches are fillers.
    """

    def __init__(self, trainer: Trainer, mesh: Mesh, ledger: BatchLedger) -> None:
        self._trainer = trainer
        self._mesh = mesh
        self._ledger = ledger
        self._gated: list[BasePredictionWriter] = []

    def install(self) -> None:
        """At the start of predicting (``Strategy.on_predict_start``)."""
        loop = self._trainer.predict_loop
        loop._predictions = [_Kept(self._ledger) for _ in loop._predictions]
        loop.epoch_batch_indices = [_Kept(self._ledger) for _ in loop.epoch_batch_indices]
        end = loop._on_predict_epoch_end

        def gathering_end() -> Any:
            self._gather()
            return end()

        # On the object: the hooks of callbacks and module come first in it, and no hook of a strategy before them.
        vars(loop)["_on_predict_epoch_end"] = gathering_end
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, BasePredictionWriter):
                self._gated.append(callback)
                # On the object: the class may be shared with a Trainer of another kind.
                vars(callback)["on_predict_batch_end"] = self._gate(callback.on_predict_batch_end)
                if self._mesh.rank:
                    vars(callback)["on_predict_epoch_end"] = _nothing

    def remove(self) -> None:
        """At the end of predicting (``Strategy.on_predict_end``)."""
        vars(self._trainer.predict_loop).pop("_on_predict_epoch_end", None)
        for callback in self._gated:
            vars(callback).pop("on_predict_batch_end", None)
            vars(callback).pop("on_predict_epoch_end", None)
        self._gated.clear()

    def _gate(self, hook: Callable[..., None]) -> Callable[..., None]:
        def gated(*args: Any, **kwargs: Any) -> None:
            if self._mesh.is_replica_reader and not self._ledger.current.filler:
                hook(*args, **kwargs)

        return gated

    def _gather(self) -> None:
        """Put the predictions of all replicas together. Collective over dp."""
        loop = self._trainer.predict_loop
        combined = loop._combined_loader
        if self._mesh.dp.size == 1 or combined is None:
            return
        self._refuse_more_than_there_is_room_for(loop._predictions)
        for number, loader in enumerate(combined.flattened):
            if reads_everything(loader.loader):
                continue
            kept, indices = loop._predictions[number], loop.epoch_batch_indices
            assert isinstance(kept, _Kept)
            seen: list[Any] = list(indices[number]) if number < len(indices) else []
            whole = _of_all_replicas(kept, seen, index_sampler(loader.loader), self._mesh)
            kept[:] = [prediction for prediction, _ in whole]
            if seen:
                indices[number][:] = [entry for _, entry in whole]

    def _refuse_more_than_there_is_room_for(self, predictions: list[Any]) -> None:
        """An error rather than a node that runs out of memory after hours of work."""
        own = _bytes_of(predictions)
        total = sum(all_gather_object(own, self._mesh.control_dp))
        processes = self._trainer.strategy.num_processes  # type: ignore[attr-defined]
        more, room = (total - own) * processes, _free_bytes()
        if any(all_gather_object(more > room, self._mesh.control_world)):
            raise ConfigError(
                f"The predictions of all replicas are {total / 1e9:.1f} GB, and every process holds what predict"
                f" returns: {processes} on this node, which has {room / 1e9:.1f} GB left. Pass return_predictions=False"
                " and write them with a BasePredictionWriter(write_interval='batch'), or predict less per sample."
            )


class _Kept(list[Any]):
    """A list to which nothing is appended for a filler batch."""

    def __init__(self, ledger: BatchLedger) -> None:
        super().__init__()
        self.sizes: list[int] = []
        """Samples of each batch."""
        self._ledger = ledger

    def append(self, item: Any) -> None:
        if not self._ledger.current.filler:
            self.sizes.append(self._ledger.current.size)
            super().append(item)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


def _of_all_replicas(
    kept: _Kept, indices: list[Any], sampler: ReplicaSampler | None, mesh: Mesh
) -> list[tuple[Any, Any]]:
    """Predictions and indices, one entry per batch of one process. Takes them out of ``kept`` as it goes on."""
    whole: list[tuple[Any, Any]] = []
    shared_out = isinstance(sampler, ReplicaBatchSampler)
    rounds = max(all_gather_object(len(kept), mesh.control_dp))
    mine = list(zip_longest(kept, kept.sizes, indices[: len(kept)]))
    kept.clear()
    mine.reverse()  # so that what has been sent can go
    for _ in range(rounds):
        own = (True, *mine.pop()) if mine else (False, None, 0, None)
        own = apply_to_collection(own, Tensor, _compact)
        parts = [part for part in all_gather_object(own, mesh.control_dp) if part[0]]
        if shared_out:
            sizes = [size for _, _, size, _ in parts]
            joined = [index for *_, entry in parts for index in entry or ()]
            whole.append((combine([part[1] for part in parts], sizes, sizes), joined))
        else:
            whole += [(prediction, entry) for _, prediction, _, entry in parts]
    return whole


def _bytes_of(value: Any) -> int:
    """Size of the tensors in it."""
    sizes: list[int] = []
    apply_to_collection(value, Tensor, lambda tensor: sizes.append(tensor.numel() * tensor.itemsize))
    return sum(sizes)


def _free_bytes() -> float:
    """Host memory that can still be had; infinity where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return float("inf")


def _compact(tensor: Tensor) -> Tensor:
    """Without the rest of what it is a view of, which would be sent along."""
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.itemsize:
        return tensor.clone()
    return tensor


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
