"""Every hook of Lightning fires in Lightning's order, once, on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

from tests.dist.lightning_modules import Mesh, Tokens, loader, make_trainer, on_ranks, rows, seeded

# Called per micro-batch, on the ranks where the work is: the cut of the batch is what the strategy is for.
PER_MICRO_BATCH = {"backward"}
# Weights are loaded once the module is laid out, as under Lightning's own sharded strategies.
LOADING = {"on_load_checkpoint", "configure_optimizers"}
# On one rank per node, as under every strategy.
PER_NODE = {"prepare_data"}

HOOKS = sorted(
    name
    for kind in (ModelHooks, DataHooks, CheckpointHooks)
    for name in vars(kind)
    if not name.startswith("_") and not name.endswith("_dataloader") and name != "configure_sharded_model"
)
OPTIMIZATION = [
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "configure_gradient_clipping",
    "configure_optimizers",
    "configure_callbacks",
    "backward",
]
CALLBACK_HOOKS = sorted(
    name for name in vars(Callback) if not name.startswith("_") and callable(getattr(Callback, name))
)


class Record:
    """The calls, in order. An object of its own, which is no state of the module."""

    def __init__(self) -> None:
        self.calls: list[str] = []


def _recorded(record: Record, who: str, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        details = [str(value) for value in (*args, *kwargs.values()) if type(value) in (int, str)]
        record.calls.append(f"{who}.{name}({', '.join(details)})")
        return original(*args, **kwargs)

    return call


def recording_module(record: Record) -> LightningModule:
    hooks: dict[str, Any] = {}
    for name in [*HOOKS, *OPTIMIZATION]:
        hooks[name] = _recorded(record, "module", name, getattr(Scheduled, name))
    return seeded(type("Recording", (Scheduled,), hooks))


def recording_callback(record: Record) -> Callback:
    hooks = {name: _recorded(record, "callback", name, getattr(Callback, name)) for name in CALLBACK_HOOKS}
    return type("RecordingCallback", (Callback,), hooks)()


class Scheduled(Tokens):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        steps = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": steps, "interval": "step"}}


def everything(mesh: Mesh | None, folder: str) -> dict[str, list[str]]:
    """Fit, validate, test and predict; the calls of each."""
    batch = 4
    record = Record()
    module = recording_module(record)
    calls: dict[str, list[str]] = {}

    def trainer(**options: Any) -> Trainer:
        record.calls = []
        return make_trainer(mesh, callbacks=[recording_callback(record)], gradient_clip_val=0.5, **options)

    data = rows(18)
    fit = trainer(
        num_sanity_val_steps=1,
        accumulate_grad_batches=2,
        val_check_interval=2,
        limit_train_batches=5,
        limit_val_batches=2,
        max_epochs=2,
        default_root_dir=folder,
        enable_checkpointing=True,
    )
    fit.fit(module, loader(data, batch, mesh), loader(data, batch, mesh))
    calls["fit"] = record.calls
    again = trainer(max_epochs=3, limit_train_batches=1, limit_val_batches=1)
    again.fit(
        module, loader(data, batch, mesh), loader(data, batch, mesh), ckpt_path=fit.checkpoint_callback.best_model_path
    )
    calls["resumed fit"] = record.calls
    other = trainer(limit_val_batches=2, limit_test_batches=1, limit_predict_batches=1)
    other.validate(module, [loader(data, batch, mesh), loader(data[:4], batch, mesh)], verbose=False)
    other.test(module, loader(data, batch, mesh), verbose=False)
    other.predict(module, loader(data, batch, mesh))
    calls["evaluations"] = record.calls
    return calls


def _without(calls: list[str], names: set[str]) -> list[str]:
    return [call for call in calls if call.split(".")[1].split("(")[0] not in names]


@pytest.mark.parametrize("mesh", [(2, 1, 2), (2, 2, 1)], ids=str)
def test_hooks_fire_in_the_order_of_one_process(mesh: Mesh, tmp_path: Any) -> None:
    expected = everything(None, str(tmp_path / "one"))
    for rank, got in enumerate(on_ranks(everything, mesh, str(tmp_path / "many"))):
        for run, calls in expected.items():
            skipped = PER_MICRO_BATCH | PER_NODE | (LOADING if run == "resumed fit" else set())
            assert _without(got[run], skipped) == _without(calls, skipped), f"rank {rank}, {run}"
            assert Counter(_without(got[run], PER_MICRO_BATCH | PER_NODE)) == Counter(
                _without(calls, PER_MICRO_BATCH | PER_NODE)
            )
        prepared = sum(call.startswith("module.prepare_data") for calls in got.values() for call in calls)
        assert prepared == (
            sum(c.startswith("module.prepare_data") for cs in expected.values() for c in cs) if rank == 0 else 0
        )
