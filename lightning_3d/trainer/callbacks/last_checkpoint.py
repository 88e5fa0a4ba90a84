"""``OnExceptionCheckpoint``: a checkpoint needs a part from every rank, so all must have come to the same place."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_3d.trainer.processes.failure import FailureGuard, say

_PATIENCE_S = 10.0
"""How long a rank that has raised waits for the others before it tells them to stop."""


class ExceptionCheckpoints:
    """Lets ``OnExceptionCheckpoint`` save where every rank has raised the same in the same batch, and else not wait."""

    def __init__(self) -> None:
        self._served: list[OnExceptionCheckpoint] = []

    def install(self, items: Iterable[pl.Callback], guard: FailureGuard) -> None:
        """Begin."""
        for item in items:
            if isinstance(item, OnExceptionCheckpoint) and "on_exception" not in vars(item):
                item.on_exception = _agreed(item.on_exception, item, guard)  # type: ignore[method-assign]
                self._served.append(item)

    def remove(self) -> None:
        """End."""
        for item in self._served:
            vars(item).pop("on_exception", None)
        self._served.clear()


def _agreed(save: Callable[..., None], item: OnExceptionCheckpoint, guard: FailureGuard) -> Callable[..., None]:
    def on_exception(trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        if guard.has_failed or guard.only_noticed(exception):
            return  # the rank that failed says why nothing is saved
        loop = trainer.fit_loop
        place = [type(exception).__name__, trainer.current_epoch, trainer.global_step, loop.epoch_loop.batch_idx]
        place.append(str(trainer.state.stage))
        if guard.meet(repr(place), _PATIENCE_S):
            save(trainer, module, exception)
        else:
            say(
                f"OnExceptionCheckpoint saves nothing to {item.ckpt_path}: a checkpoint needs a part from every rank,"
                f" and not all ranks have raised {type(exception).__name__} at this point. Where to go on from is the"
                " last checkpoint before: ModelCheckpoint(every_n_train_steps=...) makes them, and async_save=True"
                " makes them cheap.\n"
            )

    return on_exception
