"""A signal to stop: whichever rank it reaches, all finish the step, save once, and end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_3d.mesh import Mesh
from lightning_3d.trainer.processes.failure import FailureGuard, say
from lightning_3d.trainer.state import StatefulStrategy

STOP, REQUEUE = 1, 2
"""What a signal asks for: to save and end, and under SLURM also to be started again."""
_AGAIN_AFTER_S = 5.0  # a scheduler and torchrun may both pass on one and the same signal
_LOOK_EVERY = 2  # periods of the guard's thread


class Preemption:
    """Takes signals in place of Lightning, whose handlers talk to other ranks wherever the signal finds them.

    A handler only notes the wish. The guard's thread tells it to the store, and the ranks that read batches look
    there. In the message with which they agree on the next batch they say whether they know; once all do, the batch is
    not handed out, on any rank: every rank stands between the same two steps, with validation and callbacks behind it.
    That costs no message. In the middle of accumulated gradients the next such place is awaited.

    Args:
        guard: Whose thread talks to the store, and which ends the job when it takes too long.
        grace_s: Seconds from the signal to the end of the job, at most.
    """

    def __init__(self, guard: FailureGuard, grace_s: float | None) -> None:
        self._guard = guard
        self._grace_s = grace_s
        self._trainer: pl.Trainer | None = None
        self._mesh: Mesh | None = None
        self._store: Any = None
        self._periods = 0
        self._forget()

    def __reduce__(self) -> tuple[Any, ...]:
        return Preemption, (self._guard, self._grace_s)  # signals come to one process

    def _forget(self) -> None:
        self.wish = 0
        """What this rank has been asked for, or knows that another was: 0 is nothing."""
        self.agreed = False
        """Whether all ranks are on their way out."""
        self._since: float | None = None
        self._told = False
        self._signum = 0
        self._untrained = True

    # --- signals ---------------------------------------------------------------------------------------------------

    def install(self, trainer: pl.Trainer, mesh: Mesh) -> Preemption:
        """At the beginning of a run, before Lightning registers handlers."""
        self._forget()
        self._trainer, self._mesh = trainer, mesh
        connector = trainer._signal_connector
        replaced: dict[str, Any] = {
            "_sigterm_notifier_fn": self._on_stop,
            "_slurm_sigusr_handler_fn": self._on_requeue,
        }
        vars(connector).update(replaced)
        # Lightning's own agreement: a broadcast and a wait for the device in each step.
        vars(trainer.fit_loop.epoch_loop)["_broadcast_sigterm_tensor"] = _nothing
        with contextlib.suppress(ValueError):  # not in the main thread
            if _is_free(signal.SIGUSR1) and not _requeues(trainer):
                signal.signal(signal.SIGUSR1, self._on_user_signal)
        self._guard.each_period = self._look
        self._guard.patient = self._grace_s is not None
        return self

    def remove(self) -> None:
        """At the end of a run."""
        if self._trainer is None:
            return
        for name in ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"):
            vars(self._trainer._signal_connector).pop(name, None)
        vars(self._trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)
        self._guard.each_period, self._guard.patient = None, False
        self._trainer = None

    def _on_stop(self, signum: int, _: Any) -> None:
        self._ask(STOP, signum)

    def _on_requeue(self, signum: int, _: Any) -> None:
        self._ask(REQUEUE, signum)

    def _on_user_signal(self, signum: int, _: Any) -> None:
        if self._trainer is None:  # between runs it does what it does without us
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        else:
            self._ask(STOP, signum)

    def _ask(self, wish: int, signum: int) -> None:
        now = time.monotonic()
        if self._signum == signum and self._since is not None and now - self._since > _AGAIN_AFTER_S:
            name = signal.Signals(signum).name
            self._guard.trip(f"{self._where} was asked by a second {name} to end at once", announce=True)
            return
        self.wish = max(self.wish, wish)
        self._signum = self._signum or signum
        self._since = self._since if self._since is not None else now

    # --- agreement -------------------------------------------------------------------------------------------------

    def _look(self, signals: set[int], store: Any, scope: str) -> None:
        """In the guard's thread, several times a second."""
        self._periods += 1
        if not self.wish and signal.SIGTERM in signals:  # the main thread is in C++, and its handler has to wait
            self._ask(STOP, signal.SIGTERM)
        key = f"{scope}/stop"
        if self.wish and not self._told:
            store.set(key, str(self.wish))
            self._told = True
        elif not self.wish and self._periods % _LOOK_EVERY == 0 and self._reads and store.check([key]):
            self.wish, self._told = int(store.get(key)), True
        late = self._grace_s is not None and self._since is not None and time.monotonic() - self._since > self._grace_s
        if late:
            self._guard.trip(
                f"{self._where} was asked to stop and has not within {self._grace_s:g} s (preemption_grace_s)", True
            )

    @property
    def _reads(self) -> bool:
        return self._mesh is not None and self._mesh.is_replica_reader

    @property
    def _where(self) -> str:
        return self._mesh.where if self._mesh is not None else "this rank"

    def ends(self, loader: object, wish: int) -> bool:
        """Whether the run ends before the batch that ``loader`` is about to hand out; the same on all ranks.

        Args:
            loader: As the Trainer has it.
            wish: What all ranks that read batches know of; 0 if one of them does not know yet.
        """
        trainer = self._trainer
        assert trainer is not None
        if trainer.state.fn == TrainerFn.FITTING:
            if trainer.state.stage is not RunningStage.TRAINING:
                return False
            combined = trainer.fit_loop._combined_loader
            if combined is None or combined.flattened[0] is not loader:  # of several, the first one is asked first
                return False
            progress = trainer.fit_loop.epoch_loop.batch_progress
            started = progress.current.ready
            if wish and started % trainer.accumulate_grad_batches == 0:
                self.wish, self.agreed = wish, True
            self._untrained = self._untrained and self.agreed
        elif wish:
            self.wish, self.agreed = wish, True
        return self.agreed

    # --- the end ---------------------------------------------------------------------------------------------------

    def handles(self, exception: BaseException) -> bool:
        """Save, if it is by agreement that the run ends with ``exception``; collective then, and false otherwise.

        Raises:
            CheckpointError: On all ranks, if saving failed.
        """
        if not self.agreed or not isinstance(exception, SIGTERMException):
            return False
        self.agreed = False
        try:
            self.save()
        except BaseException as error:
            self._guard.failed(error)
            raise
        return True

    def save(self) -> None:
        """Save once, where it will be found again; collective. Under SLURM's auto-requeue also ask for a new start.

        Raises:
            CheckpointError: On all ranks.
        """
        trainer = self._trainer
        assert trainer is not None
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._guard.patient = True  # writing may stand at one place for long
        try:
            with _as_resumed(trainer):
                self._save(trainer)
        finally:
            self._guard.patient = self._grace_s is not None

    def _save(self, trainer: pl.Trainer) -> None:
        connector = trainer._signal_connector
        if self.wish == REQUEUE and _requeues(trainer):
            type(connector)._slurm_sigusr_handler_fn(connector, self._signum or signal.SIGUSR1, None)  # type: ignore[arg-type]
            return
        if self._untrained:
            rank_zero_info("Asked to stop before a step was trained: there is nothing to save.")
            return
        path = _path(trainer)
        if path is None:
            return
        trainer.save_checkpoint(path)
        assert isinstance(trainer.strategy, StatefulStrategy)
        trainer.strategy.finish_saving()
        if trainer.is_global_zero:
            say(f"Asked to stop: all ranks have finished step {trainer.global_step} and saved {path}.\n")


def _nothing() -> None:
    """Nothing to do."""


def _is_free(signum: signal.Signals) -> bool:
    """Whether nobody handles a signal, or an earlier run of ours: Lightning puts that back when it ends."""
    handler = signal.getsignal(signum)
    return handler is signal.SIG_DFL or isinstance(getattr(handler, "__self__", None), Preemption)


def _requeues(trainer: pl.Trainer) -> bool:
    environment = trainer._accelerator_connector.cluster_environment
    return isinstance(environment, SLURMEnvironment) and bool(environment.auto_requeue)


def _path(trainer: pl.Trainer) -> str | None:
    """Where to save; None if there is no need to, or no wish."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(callback, OnExceptionCheckpoint) for callback in callbacks):
        return None
    keepers = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
    saved = [it for it in keepers if getattr(it, "save_on_exception", False)]  # of Lightning since 2.6
    if any(it._last_global_step_saved == trainer.global_step for it in saved):
        return None
    if SLURMEnvironment.detect():
        return str(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))
    keeper = next((it for it in keepers if it.dirpath is not None), None)
    if keeper is None:
        rank_zero_info("Asked to stop. Nothing is saved, because the Trainer has no ModelCheckpoint.")
        return None
    # `ckpt_path="last"` takes the newest of those whose names begin so.
    return os.path.join(str(keeper.dirpath), f"{keeper.CHECKPOINT_NAME_LAST}-preempted{keeper.FILE_EXTENSION}")


class _as_resumed:
    """For the time of a save, the count of steps that Lightning's loop goes on from.

    A loop that is resumed where validation would follow takes it as done and counts its step, which here is counted
    already: other checkpoints are written from within a step.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._loop = trainer.fit_loop.epoch_loop
        fetcher: Any = trainer.fit_loop._data_fetcher
        check: Callable[[Any], bool] = self._loop._should_check_val_fx
        self._ahead = int(
            fetcher is not None and getattr(trainer, "_val_check_time_interval", None) is None and check(fetcher)
        )

    def __enter__(self) -> None:
        self._loop._batches_that_stepped -= self._ahead

    def __exit__(self, *_: object) -> None:
        self._loop._batches_that_stepped += self._ahead
