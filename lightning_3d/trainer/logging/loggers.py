"""Loggers over several ranks: one version of a run, and graphs of the whole model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.loggers import Logger as FabricLogger
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from lightning_3d.collectives import broadcast_object
from lightning_3d.initialization import is_deferred
from lightning_3d.mesh import Mesh


def agree_on_versions(loggers: Iterable[Logger], mesh: Mesh) -> None:
    """Give loggers that number their folders rank 0's number, before it makes them; collective."""
    numbered = [logger for logger in loggers if isinstance(logger, (CSVLogger, TensorBoardLogger))]
    if not numbered:
        return
    versions = broadcast_object([logger.version for logger in numbered] if mesh.rank == 0 else None, mesh.control_world)
    for logger, version in zip(numbered, versions, strict=True):
        logger._version = version


class Graphs:
    """Lets loggers draw the graph of the model while it is whole.

    Lightning asks them on rank 0 alone, when the model is laid out: what they run then would wait for the other ranks.
    """

    def __init__(self) -> None:
        self._served: list[Logger] = []

    def before_layout(self, loggers: Iterable[Logger], module: pl.LightningModule, mesh: Mesh, whole: bool) -> None:
        """Have graphs drawn on rank 0, if it holds the whole model."""
        for logger in loggers:
            draws = type(logger).log_graph not in (FabricLogger.log_graph, Logger.log_graph)
            if not draws or (isinstance(logger, TensorBoardLogger) and not logger._log_graph):
                continue
            if not whole or any(p.is_meta or is_deferred(p) for p in module.parameters()):
                why = "an earlier Trainer has laid it out" if not whole else "its parameters have no memory yet"
                rank_zero_warn(f"{type(logger).__name__} draws no graph: no rank holds the whole model ({why}).")
            elif mesh.rank == 0:
                logger.log_graph(module)
            vars(logger)["log_graph"] = _drawn
            self._served.append(logger)

    def remove(self) -> None:
        """End."""
        for logger in self._served:
            vars(logger).pop("log_graph", None)
        self._served.clear()


def _drawn(*args: Any, **kwargs: Any) -> None:
    return
