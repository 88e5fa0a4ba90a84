"""How runs end early: ``should_stop`` from every hook, skipped batches and epochs, errors and Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.conformance.case import Case, Scene, at
from tests.conformance.compare import differences
from tests.conformance.conftest import cases
from tests.conformance.play import play_here, play_on_ranks
from tests.dist.lightning_modules import Mesh, Tokens, rows

pytestmark = pytest.mark.timeout(600)

TRAINING_HOOKS = (
    "on_fit_start",
    "on_sanity_check_end",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
)


class StopIn(Callback):
    """Asks the Trainer to stop in whichever hook it is told to, once."""

    hook = ""


def _stop_in(name: str) -> Any:
    def stop(self: StopIn, trainer: Trainer, module: LightningModule, *args: Any, **kwargs: Any) -> None:
        if self.hook == name:
            self.hook, trainer.should_stop = "", True

    return stop


for _name in TRAINING_HOOKS:
    setattr(StopIn, _name, _stop_in(_name))


def stop_everywhere(scene: Scene, hooks: tuple[str, ...]) -> None:
    """One Trainer that fits again and again, and is stopped in another hook every time."""
    stop = StopIn()
    trainer = scene.trainer(max_epochs=0, callbacks=[stop], val_check_interval=2, num_sanity_val_steps=1)
    module = scene.module()
    for hook in hooks:
        stop.hook, trainer.should_stop = hook, False
        trainer.fit_loop.max_epochs = trainer.current_epoch + 2
        trainer.fit(module, scene.loader(16), scene.loader(8))
        scene.note(f"stopped in {hook}", [trainer.should_stop, trainer.global_step, trainer.current_epoch])


def stop_at(scene: Scene, hook: str = "on_train_batch_end", nth: int = 1, rows: int = 12, **flags: Any) -> None:
    def stop(trainer: Trainer, module: LightningModule) -> None:
        trainer.should_stop = True

    trainer = scene.trainer(callbacks=[at(hook, stop, nth)], **flags)
    trainer.fit(scene.module(), scene.loader(rows), scene.loader(8))


class StopsItself(Tokens):
    """Decides in one micro-batch of one replica, where the loss is: on the last stage."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if bool((batch == rows(8)[5]).all(-1).any()) and float(loss.detach()) > 0:
            self.trainer.should_stop = True
        return loss


def stop_in_step(scene: Scene) -> None:
    scene.trainer(max_epochs=2).fit(scene.module(StopsItself), scene.loader(20), scene.loader(8))


class SkipsEpochs(Tokens):
    """Leaves the first epoch after its second batch, and the second before its first."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 - 2 * self.current_epoch else None


def skip_epochs(scene: Scene) -> None:
    scene.trainer(max_epochs=3).fit(scene.module(SkipsEpochs), scene.loader(16), scene.loader(8))


class SkipsBatches(Tokens):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


def skip_batches(scene: Scene) -> None:
    scene.trainer(max_epochs=2).fit(scene.module(SkipsBatches), scene.loader(12))
    accumulating = scene.trainer(accumulate_grad_batches=2)
    accumulating.fit(scene.module(SkipsBatches), scene.loader(16))


STOPS = (
    Case("stop before training", stop_everywhere, {"hooks": TRAINING_HOOKS[:4]}),
    Case("stop in a batch", stop_everywhere, {"hooks": TRAINING_HOOKS[4:10]}),
    Case("stop in validation", stop_everywhere, {"hooks": TRAINING_HOOKS[10:]}, replicas=True),
    Case("stop in training_step", stop_in_step, replicas=True),
    Case("stop before min_steps", stop_at, {"min_steps": 5, "max_epochs": 3, "rows": 16}),
    Case("stop before min_epochs", stop_at, {"min_epochs": 2, "max_epochs": 4}),
    Case("epochs cut short", skip_epochs, replicas=True),
    Case(
        "batches without a loss",
        skip_batches,
        replicas=True,
        known={
            r"on_(before|after)_backward\(\) \(after": "the loss of such a batch is zero: its hooks are called",
            "`training_step` returned `None`": "as above; stock Lightning refuses it on several ranks",
        },
    ),
)


@cases(*STOPS)
def test_runs_stop_as_in_one_process(case: Case, mesh: Mesh, conforms: Callable[[Case, Mesh], None]) -> None:
    conforms(case, mesh)


def fail(scene: Scene, hook: str, error: type[BaseException], **flags: Any) -> None:
    def what(trainer: Trainer, module: LightningModule) -> None:
        raise error("of the user")

    trainer = scene.trainer(callbacks=[at(hook, what)], **flags)
    trainer.fit(scene.module(), scene.loader(), scene.loader(8))


FAILURES = (
    Case("error in on_train_batch_end", fail, {"hook": "on_train_batch_end", "error": ValueError}),
    Case("error in on_validation_epoch_end", fail, {"hook": "on_validation_epoch_end", "error": ValueError}),
    Case("Ctrl-C in on_train_batch_start", fail, {"hook": "on_train_batch_start", "error": KeyboardInterrupt}),
)


def test_a_run_that_fails_calls_on_exception_on_every_rank(tmp_path: Any) -> None:
    mesh = (2, 1, 1)
    played = play_on_ranks(FAILURES, mesh, tmp_path)
    for case in FAILURES:
        expected, seen = play_here(case, tmp_path / "one" / case.name), played[case.name]
        assert not isinstance(seen, str), seen
        for happened in seen:
            assert "callback.on_exception()" in happened.calls, f"{case}: {happened.calls[-8:]}"
        # A rank may hear of another's failure before it comes to its own; the first does not.
        assert any(
            happened.error == expected.error and not differences(expected, happened, rank)
            for rank, happened in enumerate(seen)
        ), {rank: differences(expected, happened, rank) for rank, happened in enumerate(seen)}
