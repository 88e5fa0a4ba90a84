"""Checkpoints that the loops go on from, evaluation by itself and after training, fitting again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.conformance.case import LOADED_LATER, Case, Scene, at
from tests.conformance.conftest import cases
from tests.dist.lightning_modules import Mesh, Tokens

pytestmark = pytest.mark.timeout(600)


class Keeps(Tokens):
    """Writes down the progress that a checkpoint holds when one is saved and when one is loaded."""

    scene: Any = None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rates, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        scene = self.scene()
        scene.note(f"saved {len(scene.recorder.happened.notes)}", _progress_of(checkpoint))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        scene = self.scene()
        scene.note(f"loaded {len(scene.recorder.happened.notes)}", _progress_of(checkpoint))


def _progress_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Progress in the checkpoint, but for where the loaders stand, which stock Lightning does not keep."""
    found = {
        f"{name}.{key}": value
        for name, loop in checkpoint["loops"].items()
        for key, value in loop.items()
        if key != "state_dict"
    }
    return {**found, "epoch": checkpoint["epoch"], "global_step": checkpoint["global_step"]}


def keeping(scene: Scene) -> Any:
    # In float64 from the start: one process loads weights before it converts the module, and would round them.
    return scene.module(type("Keeps", (Keeps,), {"scene": lambda self: scene})).double()


def resume(scene: Scene, where: str, **flags: Any) -> None:
    """Save at the end of epochs and between, and go on in another Trainer from the end of one.

    From the middle stock Lightning begins the data of the epoch again; C19 looks at how it goes on here.
    """
    saving = ModelCheckpoint(
        scene.folder / "kept", filename="{step}", every_n_train_steps=2, save_top_k=-1, save_last=True
    )
    trainer = scene.trainer(enable_checkpointing=True, callbacks=[saving], max_epochs=2, **flags)
    trainer.fit(keeping(scene), scene.loader(12), scene.loader(8))
    path = "last" if where == "last" else str(scene.folder / "kept" / where)
    saving = ModelCheckpoint(scene.folder / "kept", filename="{step}", save_last=True)
    again = scene.trainer(enable_checkpointing=True, callbacks=[saving], max_epochs=3, **flags)
    again.fit(keeping(scene), scene.loader(12), scene.loader(8), ckpt_path=path)
    scene.note("last model", saving.last_model_path.replace(str(scene.folder), ""))


def evaluate(scene: Scene) -> None:
    """C07, C29: before training, after it, and with the best of its checkpoints."""
    module = scene.module()
    before = scene.trainer()
    scene.note("before", before.validate(module, scene.loader(8), verbose=False))
    saving = ModelCheckpoint(scene.folder, monitor="val_loss", filename="{step}-{val_loss:.4f}", save_top_k=2)
    trainer = scene.trainer(enable_checkpointing=True, callbacks=[saving], max_epochs=3, num_sanity_val_steps=2)
    trainer.fit(module, scene.loader(), scene.loader(8))
    scene.note("best", [saving.best_model_path.replace(str(scene.folder), ""), saving.best_model_score])
    scene.note("validated", trainer.validate(module, scene.loader(8), verbose=False))
    scene.note("tested", trainer.test(dataloaders=scene.loader(8), ckpt_path="best", verbose=False))
    trainer.predict(module, scene.loader(8), return_predictions=False)
    scene.note("trained on", [trainer.global_step, trainer.current_epoch])
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, scene.loader(), scene.loader(8))


def validate_within(scene: Scene) -> None:
    """Metrics of every kind at the end of each phase, and the mode that modules are left in."""

    def look(trainer: Trainer, module: LightningModule) -> None:
        scene.note(f"training {trainer.global_step}", [child.training for child in module.children()])

    module = scene.module()
    trainer = scene.trainer(
        max_epochs=2, callbacks=[at("on_train_epoch_end", look)], limit_test_batches=1, limit_predict_batches=0.5
    )
    trainer.fit(module, scene.loader())
    trainer.test(module, scene.loader(), verbose=False)
    trainer.predict(module, scene.loader(16), return_predictions=False)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, scene.loader(8), scene.loader(10))


RESUMING = (
    Case("from the last checkpoint", resume, {"where": "last"}, LOADED_LATER, replicas=True),
    Case("from the end of an epoch", resume, {"where": "step=6.ckpt"}, LOADED_LATER),
    Case("evaluation around training", evaluate, replicas=True),
    Case("training without validation", validate_within),
)


@cases(*RESUMING)
def test_runs_go_on_as_in_one_process(case: Case, mesh: Mesh, conforms: Callable[[Case, Mesh], None]) -> None:
    conforms(case, mesh)
