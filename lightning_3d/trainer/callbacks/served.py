"""Lightning's callbacks that take a rank for the whole job, served for the time of a run, or refused before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, BatchSizeFinder, ModelPruning
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from lightning_3d.checkpoint import ModelState
from lightning_3d.errors import ConfigError
from lightning_3d.mesh import Mesh
from lightning_3d.monitor.monitor import ThreeDMonitor
from lightning_3d.monitor.prometheus import ThreeDPrometheus
from lightning_3d.trainer.callbacks.averaging import Averaging
from lightning_3d.trainer.callbacks.last_checkpoint import ExceptionCheckpoints
from lightning_3d.trainer.callbacks.measuring_callbacks import RateSearch, serve_throughput
from lightning_3d.trainer.callbacks.model_summary import Summaries
from lightning_3d.trainer.data.ledger import BatchLedger
from lightning_3d.trainer.logging.loggers import Graphs, agree_on_versions
from lightning_3d.trainer.logging.notices import Notices
from lightning_3d.trainer.module.data_assignment import DataAssignment
from lightning_3d.trainer.processes.failure import FailureGuard


class ServedCallbacks:
    """All of them, and loggers, as the strategy calls them."""

    def __init__(self) -> None:
        self._finetuning = Finetuning()
        self._averaging = Averaging()
        self._assignment = DataAssignment()
        self._rate_search = RateSearch()
        self._last_checkpoints = ExceptionCheckpoints()
        self._summaries = Summaries()
        self._graphs = Graphs()
        self._notices = Notices()

    def before_setup(self, module: pl.LightningModule | None, mesh: Mesh, guard: FailureGuard) -> None:
        """Before the ``setup`` hook of the callbacks of the Trainer that ``module`` belongs to.

        Raises:
            ConfigError: for a callback that cannot work over several ranks.
        """
        if mesh.world.size > 1 and module is not None and module._trainer is not None:
            items = _of(module.trainer)
            refuse(items)
            agree_on_versions(module.trainer.loggers, mesh)
            self._averaging.before_setup(items, module)
            self._last_checkpoints.install(items, guard)

    def before_layout(self, trainer: pl.Trainer, module: pl.LightningModule, mesh: Mesh, whole: bool) -> None:
        """Before ``module`` is laid out, unless an earlier Trainer has done so: it is not ``whole`` then."""
        for item in _of(trainer):
            if isinstance(item, (ThreeDMonitor, ThreeDPrometheus)) and whole:
                item.before_layout(module, mesh)
        if mesh.world.size == 1:
            return
        self._graphs.before_layout(trainer.loggers, module, mesh, whole)
        if trainer.state.fn == TrainerFn.FITTING:
            self._summaries.before_layout(_of(trainer), module, mesh, whole)

    def install(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        state: Callable[[], ModelState],
        mesh: Mesh,
        ledger: BatchLedger,
    ) -> None:
        """Begin, once ``module`` is laid out; ``state`` gives the rank's view of it."""
        self._notices.install(mesh)
        self._finetuning.install(_of(trainer))
        self._assignment.install()
        self._rate_search.install(_of(trainer), mesh, ledger)
        serve_throughput(_of(trainer), mesh)
        self._averaging.install(_of(trainer), module, state, mesh, trainer.state.fn == TrainerFn.FITTING)

    def remove(self) -> None:
        """End."""
        self._finetuning.remove()
        self._assignment.remove()
        self._averaging.remove()
        self._rate_search.remove()
        self._last_checkpoints.remove()
        self._summaries.remove()
        self._graphs.remove()
        self._notices.remove()


def _of(trainer: pl.Trainer) -> Sequence[pl.Callback]:
    return trainer.callbacks  # type: ignore[attr-defined]


def refuse(items: Iterable[pl.Callback]) -> None:
    """Refuse callbacks that cannot work over several ranks.

    Raises:
        ConfigError: saying what to do instead.
    """
    for item in items:
        if isinstance(item, BatchSizeFinder):
            raise ConfigError(
                "BatchSizeFinder (or Tuner.scale_batch_size) was given, which tries batch sizes until a process runs"
                " out of memory; of several ranks one runs out where the others go on and wait for it. Choose the batch"
                " size by hand: micro_batch_size bounds what a step holds in memory, whatever the size of the batch."
            )
        if isinstance(item, ModelPruning):
            raise ConfigError(
                "ModelPruning was given, which masks whole weights and chooses what to mask among them, but a rank"
                " holds a part of the model. Prune the weights in one process after training, from"
                " strategy.full_state_dict()."
            )


class Finetuning:
    """Lets ``BaseFinetuning`` and its kind unfreeze parameters over several ranks.

    Whether the optimizer has a parameter they find out by comparing values, which sharded parameters, and those of
    other stages, refuse. The parameter is the same object or it is not, so that is what is compared while installed.
    """

    def __init__(self) -> None:
        self._before: Any = None

    def install(self, items: Sequence[pl.Callback]) -> None:
        """Begin, if one of the callbacks unfreezes parameters."""
        if self._before is None and any(isinstance(item, BaseFinetuning) for item in items):
            self._before = vars(BaseFinetuning)["filter_on_optimizer"]
            BaseFinetuning.filter_on_optimizer = staticmethod(_not_in)  # type: ignore[method-assign]

    def remove(self) -> None:
        """End."""
        if self._before is not None:
            BaseFinetuning.filter_on_optimizer = self._before  # type: ignore[method-assign]
            self._before = None


def _not_in(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [parameter for parameter in params if id(parameter) not in known]
