"""What Lightning tells the user of several ranks: once, and no advice that cannot apply."""

from __future__ import annotations

import contextlib
import logging
import warnings
from typing import Any

from lightning.fabric.utilities.warnings import PossibleUserWarning
from typing_extensions import override

from lightning_3d.mesh import Mesh

_CALLBACKS = "lightning.pytorch.callbacks"
_ADVICE = r"It is recommended to use `self\.log\(.*sync_dist=True\)`"


class Notices:
    """Quiets them for the time of a run.

    Some of Lightning's callbacks (EarlyStopping, BackboneFinetuning) say on every rank what is the same on all: it is
    left to rank 0. And ``self.log(..., sync_dist=True)`` is recommended for what hooks log, which with one replica
    changes nothing; with several, :class:`~lightning_3d.trainer.logging.hook_logs.HookLogs` combines what they log.
    """

    def __init__(self) -> None:
        self._quiet = _Quiet()
        self._loggers: list[logging.Logger] = []
        self._entry: Any = None

    def install(self, mesh: Mesh) -> None:
        """Begin."""
        self.remove()
        if mesh.world.rank > 0:
            names = [name for name in logging.root.manager.loggerDict if name.startswith(_CALLBACKS)]
            self._loggers = [logging.getLogger(name) for name in names]
            for logger in self._loggers:  # each, because what a logger hands up is not filtered again
                logger.addFilter(self._quiet)
        if mesh.dp.size == 1:
            warnings.filterwarnings("ignore", message=_ADVICE, category=PossibleUserWarning)
            self._entry = warnings.filters[0]

    def remove(self) -> None:
        """End."""
        for logger in self._loggers:
            logger.removeFilter(self._quiet)
        self._loggers = []
        if self._entry is not None:
            with contextlib.suppress(ValueError):  # somebody has put the filters back
                warnings.filters.remove(self._entry)  # type: ignore[attr-defined]
            self._entry = None


class _Quiet(logging.Filter):
    @override
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO
