"""How the checkpoints of a run appear, are linked to, and go: whatever strikes, what was complete stays in reach."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_3d import checkpoint as checkpoints
from lightning_3d.checkpoint import BackgroundSaves, Content
from lightning_3d.errors import CheckpointError
from lightning_3d.mesh import Mesh

_READ_NOTHING = (Logger.after_save_checkpoint, TensorBoardLogger.after_save_checkpoint)
_PREEMPTED = "hpc_ckpt_"
"""How the file names begin of what Lightning saves on a preemption signal, after which the job may be ended."""


@dataclass(eq=False)
class Saving:
    """Saves, links and removals of one rank, in an order that never leaves ``last`` or the best without a checkpoint.

    A checkpoint is removed only when the one after it is complete, and when no link beside it leads to it any more.
    """

    background: BackgroundSaves | None = None
    """Writes while training goes on; ``None``: the ranks wait for every save."""
    training: bool = False
    """Whether steps follow, at which the end of a save in the background is noticed."""
    resumed: Path | None = None
    """The checkpoint that this run goes on from,"""
    known_callbacks: frozenset[str] = frozenset()
    """and the keys of the callbacks whose state is in it."""
    _doomed: list[Path] = field(default_factory=list)
    """On rank 0: to be removed once no link leads to them."""
    _unseen: dict[Path, bool] = field(default_factory=dict)
    """On rank 0: whether paths will exist once all that is under way is done."""
    _served: list[ModelCheckpoint] = field(default_factory=list)
    _trainer: pl.Trainer | None = None

    def install(self, trainer: pl.Trainer) -> None:
        """Begin to serve the ``ModelCheckpoint`` callbacks of a Trainer."""
        self.remove()
        self._trainer = trainer
        for callback in trainer.checkpoint_callbacks:
            if not isinstance(callback, ModelCheckpoint):
                continue
            callback.file_exists = self._existence(callback)  # type: ignore[method-assign, assignment]
            if type(callback)._link_checkpoint is ModelCheckpoint._link_checkpoint:
                callback._link_checkpoint = self._link  # type: ignore[method-assign]
            self._served.append(callback)

    def remove(self) -> None:
        """End it."""
        for callback in self._served:
            vars(callback).pop("file_exists", None)
            vars(callback).pop("_link_checkpoint", None)
        self._served.clear()
        self._trainer, self.resumed, self.known_callbacks = None, None, frozenset()

    def save(self, path: str | os.PathLike[str], gather: Callable[[], Content], mesh: Mesh) -> None:
        """Write a checkpoint, or begin to; collective.

        Raises:
            CheckpointError: On every rank, if a rank could not write its part of this one or the one before it.
        """
        self.wait()
        target = checkpoints.agreed_path(path, mesh)
        if target in self._doomed:
            self._doomed.remove(target)
        content = gather()
        if self.background is None or not self.training or target.name.startswith(_PREEMPTED) or self._uploads():
            checkpoints.write(target, content, mesh)
            return
        self.background.start(target, content)
        self._unseen[target] = True

    def delete(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint once what is under way is complete; on rank 0."""
        folder = checkpoints.local_path(path)

        def act() -> None:
            if folder.is_symlink() or not checkpoints.links_to(folder):
                checkpoints.remove(folder)
            else:
                self._doomed.append(folder)

        if not self._later(act):
            act()
        self._unseen[folder] = False

    def look(self) -> None:
        """At every step; collective.

        Raises:
            CheckpointError: On every rank at the same step, if a save in the background failed.
        """
        if self.background is not None:
            self.background.look()

    def wait(self) -> None:
        """Until nothing is under way; collective.

        Raises:
            CheckpointError: On every rank, if a save in the background failed.
        """
        if self.background is not None:
            self.background.wait()
        self._unseen = dict.fromkeys(self._doomed, False)

    def give_up(self, patience_s: float) -> str | None:
        """When this rank fails: let what is under way come to its end; says what has become of it if that was bad."""
        self.training = False
        return self.background.give_up(patience_s) if self.background is not None else None

    def _later(self, action: Callable[[], None]) -> bool:
        return self.background is not None and self.background.then(action)

    def _link(self, trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
        """In the place of ``ModelCheckpoint._link_checkpoint``, which leaves a moment without ``last``."""
        if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
            target, path = checkpoints.local_path(filepath), checkpoints.local_path(linkpath)

            def act() -> None:
                checkpoints.link(target, path)
                doomed, self._doomed = self._doomed, []
                for folder in doomed:
                    if checkpoints.links_to(folder):
                        self._doomed.append(folder)
                    else:
                        checkpoints.remove(folder)

            if not self._later(act):
                act()
            self._unseen[path] = True
        trainer.strategy.barrier()

    def _existence(self, callback: ModelCheckpoint) -> Callable[[Any, pl.Trainer], bool]:
        exists = callback.file_exists

        def file_exists(filepath: Any, trainer: pl.Trainer) -> bool:
            on_disk = exists(filepath, trainer)
            try:
                path = checkpoints.local_path(filepath)
            except CheckpointError:
                return on_disk
            known = self._unseen.get(path, on_disk) if trainer.is_global_zero else False
            return trainer.strategy.reduce_boolean_decision(known and not self._takes_over(path, callback), all=False)

        return file_exists

    def _takes_over(self, path: Path, callback: ModelCheckpoint) -> bool:
        """Whether ``path`` is the ``last`` that this run goes on from, though its callback does not know.

        What was saved before the first ``last`` was made does not name it. The next one would get another name, and a
        ``last`` that is never renewed would stay behind.
        """
        if callback.state_key not in self.known_callbacks:
            return False  # the `last` of another callback, which it leaves alone
        if self.resumed is None or callback.last_model_path or not path.name.startswith(callback.CHECKPOINT_NAME_LAST):
            return False
        return path.name == self.resumed.name and path.parent.resolve() == self.resumed.parent.resolve()

    def _uploads(self) -> bool:
        """Whether a logger reads every checkpoint right after it was saved."""
        loggers = self._trainer.loggers if self._trainer is not None else ()
        names = [type(logger).__name__ for logger in loggers if _reads_checkpoints(logger)]
        if names:
            rank_zero_warn(
                f"async_save=True: {', '.join(names)} may read each checkpoint right after it was saved, so training"
                " waits for every save. Turn that off (log_model=False) to save in the background."
            )
        return bool(names)


def _reads_checkpoints(logger: Logger) -> bool:
    if type(logger).after_save_checkpoint in _READ_NOTHING:
        return False
    return bool(getattr(logger, "_log_model", getattr(logger, "_log_model_checkpoints", True)))
