"""Lightning's callbacks that take parameters for whole tensors, served for the time of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from lightning_3d.checkpoint import ModelState
from lightning_3d.mesh import Mesh
from lightning_3d.trainer.averaging import Averaging
from lightning_3d.trainer.data_assignment import DataAssignment


class ServedCallbacks:
    """All of them, as the strategy calls them."""

    def __init__(self) -> None:
        self._finetuning = Finetuning()
        self._averaging = Averaging()
        self._assignment = DataAssignment()

    def before_setup(self, module: pl.LightningModule | None, mesh: Mesh) -> None:
        """Before the ``setup`` hook of the callbacks of the Trainer that ``module`` belongs to."""
        if mesh.world.size > 1 and module is not None and module._trainer is not None:
            self._averaging.before_setup(_of(module.trainer), module)

    def install(
        self, trainer: pl.Trainer, module: pl.LightningModule, state: Callable[[], ModelState], mesh: Mesh
    ) -> None:
        """Begin, once ``module`` is laid out; ``state`` gives the rank's view of it."""
        self._finetuning.install(_of(trainer))
        self._assignment.install()
        self._averaging.install(_of(trainer), module, state, mesh, trainer.state.fn == TrainerFn.FITTING)

    def remove(self) -> None:
        """End."""
        self._finetuning.remove()
        self._assignment.remove()
        self._averaging.remove()


def _of(trainer: pl.Trainer) -> Sequence[pl.Callback]:
    return trainer.callbacks  # type: ignore[attr-defined]


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
