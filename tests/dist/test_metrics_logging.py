"""``self.log`` with every option, from every hook and from callbacks: the values of one process, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from tests.dist.lightning_modules import Mesh, Tokens, loader, make_trainer, on_ranks, rows, seeded
from tests.dist.test_metrics_values import Values


class Everything(Callback):
    """All three views of what is logged, after every batch and epoch."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[Values]]] = []

    def _note(self, when: str, trainer: Trainer) -> None:
        views = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
        self.seen.append((when, [{key: torch.as_tensor(value).double() for key, value in v.items()} for v in views]))

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._note("batch", trainer)

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:
        self._note("validation", trainer)

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        self._note("end", trainer)


class Options(Tokens):
    """Types, reductions and options; some keys in some batches only."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        value = batch.double()
        both: dict[str, Any] = {"on_step": True, "on_epoch": True}
        self.log("whole", int(batch.max()), reduce_fx="max", **both)
        self.log("true", True, on_epoch=True)
        self.log("none_true", (batch > 100).any(), on_epoch=True)
        self.log("half", torch.tensor(0.5, dtype=torch.bfloat16), on_epoch=True)
        self.log("long", batch.max(), reduce_fx=max, on_epoch=True)
        self.log("nan", float("nan"), on_epoch=True)
        self.log("later_nan", torch.tensor(float("nan") if batch_idx else 1.0), on_epoch=True)
        self.log("infinite", float("inf"), on_epoch=True)
        self.log("mean", value.mean(), **both)
        self.log("sized", value.mean(), batch_size=len(batch), on_epoch=True)
        self.log("total", value.sum(), reduce_fx=torch.sum, **both)
        self.log("least", value.min(), reduce_fx=torch.min, on_step=False, on_epoch=True)
        self.log("bar", value.mean(), prog_bar=True, logger=False)
        self.log("of_rank_zero", value.mean(), rank_zero_only=True, on_epoch=True)
        self.log("one_value", value.mean().reshape(1))
        self.log_dict({"first": value.mean(), "second": 3}, sync_dist=True, on_epoch=True)
        if batch_idx % 2:
            self.log("sometimes", value.mean(), **both)
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        value = batch.double()
        self.log("val_loss", self.loss(batch))
        self.log("val_mean", value.mean(), sync_dist=True)
        self.log("val_total", value.sum(), reduce_fx="sum", sync_dist=True)
        self.log("val_step", value.mean(), on_step=True, on_epoch=False)
        self.log("val_most", value.max(), reduce_fx="max")
        if batch_idx:
            self.log("val_later", value.mean())


def _log_step(self: Any, name: str) -> None:
    self.log(name, torch.tensor(self.trainer.global_step + 1.0, dtype=torch.float64), sync_dist=True)


def _logging(name: str) -> Any:
    def hook(self: Any, *args: Any) -> None:
        _log_step(self, name)

    return hook


HOOKS = [
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
]


class Hooks(Tokens):
    """Logs in every hook that may."""

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.log("of_batch", batch.double().mean(), on_step=True, on_epoch=True)
        self.log("samples", float(len(batch)), reduce_fx="sum", on_step=False, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("most", 3.0, reduce_fx="max")
        self.log("given_sum", 2.0, reduce_fx="sum")


for _name in HOOKS:
    setattr(Hooks, _name, _logging(_name))


class Logs(Callback):
    """A callback of the user's: through the module, and by its own ``log``."""

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Tensor, batch_idx: int) -> None:
        module.log("callback", batch.double().mean(), on_step=True, on_epoch=True)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        self.log("callback_sum", batch.double().sum(), reduce_fx="sum", on_epoch=True, sync_dist=True)

    def on_validation_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        module.log("callback_val", args[1].double().mean())

    def on_validation_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        module.log("callback_val_end", 1.5, sync_dist=True)

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        module.log("callback_end", 2.5)


def logged(mesh: Mesh | None) -> Any:
    results = []
    for kind in (Options, Hooks):
        everything = Everything()
        trainer = make_trainer(mesh, callbacks=[everything, Logs()], max_epochs=2, log_every_n_steps=1)
        trainer.fit(seeded(kind), loader(rows(13), 4, mesh), loader(rows(7, seed=3), 4, mesh))
        results.append(everything.seen)
    return results


@pytest.mark.parametrize("mesh", [(2, 2, 1), pytest.param((1, 2, 2), marks=pytest.mark.long)], ids=str)
def test_what_steps_hooks_and_callbacks_log_is_what_one_process_logs(mesh: Mesh) -> None:
    expected = logged(None)
    for rank, results in enumerate(on_ranks(logged, mesh, timeout=150)):
        for got, wanted in zip(results, expected, strict=True):
            assert [when for when, _ in got] == [when for when, _ in wanted]
            for number, ((when, views), (_, one)) in enumerate(zip(got, wanted, strict=True)):
                for mine, theirs in zip(views, one, strict=True):
                    where = f"rank {rank}, {number}: {when}"
                    assert mine.keys() == theirs.keys(), where
                    for key, value in theirs.items():
                        assert float(mine[key]) == pytest.approx(float(value), rel=1e-10, nan_ok=True), (where, key)
