"""Decisions by the clock: ranks look at theirs at different moments, so all do what the first one finds."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lightning_3d.collectives import broadcast_object
from lightning_3d.events import Phase
from lightning_3d.mesh import Mesh

_DECIDE = "_should_check_val_fx"


def follow_one_clock(trainer: pl.Trainer, mesh: Mesh) -> None:
    """Let rank 0 decide for all whether it is time to validate, where ``val_check_interval`` is a time.

    Lightning asks the clock of every rank; some would validate while the others go on training, and both wait for ever.
    ``max_time`` and ``train_time_interval`` of checkpoints Lightning settles by itself.
    """
    loop = trainer.fit_loop.epoch_loop
    by_time = getattr(trainer, "_val_check_time_interval", None) is not None
    if mesh.world.size == 1 or not by_time or _DECIDE in vars(loop):
        return
    of_this_rank = getattr(loop, _DECIDE)

    def decide_together(*args: Any) -> bool:
        with mesh.events.span(Phase.SYNC, label="decision"):
            return bool(broadcast_object(of_this_rank(*args), mesh.control_world, 0))

    vars(loop)[_DECIDE] = decide_together
