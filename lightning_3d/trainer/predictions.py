"""Predictions: every sample once, written by one rank of its replica, in spite of fillers and peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from lightning_3d.mesh import Mesh
from lightning_3d.trainer.batches import BatchLedger


class PredictionGate:
    """Keeps fillers out of the results, and lets only the reader of each replica write.

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
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, BasePredictionWriter):
                self._gated.append(callback)
                # On the object: the class may be shared with a Trainer of another kind.
                vars(callback)["on_predict_batch_end"] = self._gate(callback.on_predict_batch_end)
                if not self._mesh.is_replica_reader:
                    vars(callback)["on_predict_epoch_end"] = _nothing

    def remove(self) -> None:
        """At the end of predicting (``Strategy.on_predict_end``)."""
        for callback in self._gated:
            vars(callback).pop("on_predict_batch_end", None)
            vars(callback).pop("on_predict_epoch_end", None)
        self._gated.clear()

    def _gate(self, hook: Callable[..., None]) -> Callable[..., None]:
        def gated(*args: Any, **kwargs: Any) -> None:
            if self._mesh.is_replica_reader and not self._ledger.current.filler:
                hook(*args, **kwargs)

        return gated


class _Kept(list[Any]):
    """A list to which nothing is appended for a filler batch."""

    def __init__(self, ledger: BatchLedger) -> None:
        super().__init__()
        self._ledger = ledger

    def append(self, item: Any) -> None:
        if not self._ledger.current.filler:
            super().append(item)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
