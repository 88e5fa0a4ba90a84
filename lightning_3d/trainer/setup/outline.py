"""The layers of a module that makes them late, known before anything is made: a copy without memory."""

from __future__ import annotations

import copy
import itertools

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_3d.initialization import deferring, reading_late
from lightning_3d.trainer.data.host_random import HostRandomState


class NotYetKnown(Exception):
    """The layers of a module depend on what there is only later, say its data."""


def outline(module: pl.LightningModule, trainer: pl.Trainer | None = None) -> pl.LightningModule:
    """``module``, or a copy with the layers that its ``configure_model`` will make, without memory for them.

    Modules that hold parameters already are taken as they are. Random generators are left where they were.

    Raises:
        NotYetKnown: If the layers cannot be made ahead of time.
    """
    if not is_overridden("configure_model", module) or next(iter(module.parameters()), None) is not None:
        return module
    state = HostRandomState.get()
    try:
        trial = _copied(module, trainer)
        with deferring(1, draws=False), reading_late(1):
            trial.configure_model()
    except Exception as error:
        raise NotYetKnown(
            f"{type(module).__name__}.configure_model cannot be tried before the start"
            f" ({type(error).__name__}: {error}), so it is not known how much memory the module takes"
        ) from error
    finally:
        state.set()
    return trial


def _copied(module: pl.LightningModule, trainer: pl.Trainer | None) -> pl.LightningModule:
    """Its parts are copied, so that nothing of the module changes; tensors and the Trainer are the same ones."""
    memo = {id(tensor): tensor for tensor in itertools.chain(module.parameters(), module.buffers())}
    trial = copy.deepcopy(module, memo)
    trial._trainer = module._trainer or trainer
    return trial
