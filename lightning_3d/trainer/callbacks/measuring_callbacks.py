"""Lightning's callbacks that measure one process, made to measure the job: learning rate search and throughput."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ThroughputMonitor
from lightning.pytorch.tuner import lr_finder
from torch import Tensor

from lightning_3d.collectives import all_reduce
from lightning_3d.mesh import Mesh
from lightning_3d.trainer.data.ledger import BatchLedger


class RateSearch:
    """Lets ``LearningRateFinder`` (and ``Tuner.lr_find``) look at the loss of the global batch.

    It would look at that of rank 0's replica. Its progress bar, otherwise one per rank, is shown by rank 0.
    """

    def __init__(self) -> None:
        self._served: list[LearningRateFinder] = []

    def install(self, items: Iterable[pl.Callback], mesh: Mesh, ledger: BatchLedger) -> None:
        """Begin."""
        for item in items:
            if isinstance(item, LearningRateFinder) and "lr_find" not in vars(item):
                item.lr_find = _searching(item.lr_find, mesh, ledger)  # type: ignore[method-assign]
                self._served.append(item)

    def remove(self) -> None:
        """End."""
        for item in self._served:
            vars(item).pop("lr_find", None)
        self._served.clear()


def _searching(search: Callable[..., None], mesh: Mesh, ledger: BatchLedger) -> Callable[..., None]:
    watcher = lr_finder._LRCallback

    def find(*args: Any, **kwargs: Any) -> None:
        begin, end = watcher.on_train_batch_start, watcher.on_train_batch_end

        def on_train_batch_start(callback: Any, *args: Any) -> None:
            if mesh.rank != 0:
                callback.progress_bar_refresh_rate = 0
            begin(callback, *args)

        def on_train_batch_end(callback: Any, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            if mesh.dp.size > 1:
                loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
                outputs = {"loss": _over_replicas(loss.detach(), ledger.current.share, mesh)}
            end(callback, trainer, module, outputs, *args)

        watcher.on_train_batch_start = on_train_batch_start  # type: ignore[assignment]
        watcher.on_train_batch_end = on_train_batch_end  # type: ignore[assignment]
        try:
            search(*args, **kwargs)
        finally:
            watcher.on_train_batch_start, watcher.on_train_batch_end = begin, end  # type: ignore[method-assign]

    return find


def _over_replicas(loss: Tensor, share: float, mesh: Mesh) -> Tensor:
    weighted = loss.double() * share if share else torch.zeros_like(loss, dtype=torch.float64)
    return all_reduce(weighted, mesh.dp).to(loss.dtype)


def serve_throughput(items: Iterable[pl.Callback], mesh: Mesh) -> None:
    """Let ``ThroughputMonitor`` tell what the job does, once its ``setup`` hook has run.

    It takes every rank for one that works on samples of its own. Here those of a replica share a batch: the rates of a
    device are its share of its replica's, and those of the job the sum over devices.
    """
    share = mesh.dp.size / mesh.world.size
    for item in items:
        for throughput in item._throughputs.values() if isinstance(item, ThroughputMonitor) else ():
            if share != 1 and "compute" not in vars(throughput):
                throughput.compute = _shared(throughput.compute, share)  # type: ignore[method-assign]


def _shared(compute: Callable[[], Any], share: float) -> Callable[[], Any]:
    def shared() -> dict[str, float]:
        rates = ("_per_sec", "mfu")
        return {key: value * share if key.endswith(rates) else value for key, value in compute().items()}

    return shared
