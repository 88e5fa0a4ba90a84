"""Flags that change how a run is set up rather than how long it is; profilers, data modules, what is logged when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities import rank_zero_only

from tests.conformance.case import FIRST, LOADED_LATER, Case, Scene, at
from tests.conformance.conftest import cases
from tests.dist.lightning_modules import Mesh, Tokens

pytestmark = pytest.mark.timeout(600)


def fit(scene: Scene, rows: int = 12, batch: int = 4, **flags: Any) -> None:
    trainer = scene.trainer(**flags)
    trainer.fit(scene.module(), scene.loader(rows, batch), scene.loader(8, batch))


def torch_settings(scene: Scene, **flags: Any) -> None:
    """What the flags set in torch, seen from within a batch."""

    def look(trainer: Trainer, module: LightningModule) -> None:
        scene.note(
            "torch",
            {
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "warn": torch.is_deterministic_algorithms_warn_only_enabled(),
                "anomaly": torch.is_anomaly_enabled(),
                "benchmark": torch.backends.cudnn.benchmark,
            },
        )

    trainer = scene.trainer(callbacks=[at("on_train_batch_start", look)], **flags)
    trainer.fit(scene.module(), scene.loader(8), scene.loader(4))


class OwnLoaders(Tokens):
    """Makes its loaders itself, of another size each time."""

    scene: Any = None
    made = 0

    def train_dataloader(self) -> Any:
        type(self).made += 1
        return self.scene().loader(4 + 4 * type(self).made)

    def val_dataloader(self) -> Any:
        return [self.scene().loader(8)]

    test_dataloader = predict_dataloader = val_dataloader


def own_loaders(scene: Scene, **flags: Any) -> None:
    kind = type("OwnLoaders", (OwnLoaders,), {"scene": lambda self: scene, "made": 0})
    module = scene.module(kind)
    trainer = scene.trainer(**flags)
    trainer.fit(module)
    scene.note("validated", trainer.validate(module, verbose=False))
    trainer.test(module, verbose=False)
    trainer.predict(module)


class Rows(LightningDataModule):
    scene: Any = None

    def train_dataloader(self) -> Any:
        return self.scene().loader(12)

    def val_dataloader(self) -> Any:
        return self.scene().loader(8)

    test_dataloader = predict_dataloader = val_dataloader

    def state_dict(self) -> dict[str, Any]:
        return {"read": 1}


def data_module(scene: Scene) -> None:
    data = scene.recorder.data_module(type("Rows", (Rows,), {"scene": lambda self: scene}))()
    module = scene.module()
    trainer = scene.trainer(enable_checkpointing=True, reload_dataloaders_every_n_epochs=1, max_epochs=2)
    trainer.fit(module, datamodule=data)
    trainer.validate(module, datamodule=data, verbose=False)
    trainer.test(module, datamodule=data, verbose=False)
    trainer.predict(module, datamodule=data)
    again = scene.trainer(max_epochs=3)
    again.fit(module, datamodule=data, ckpt_path=trainer.checkpoint_callback.best_model_path)


class InMemory(Logger):
    """A logger of somebody else, which keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    name = "memory"
    version = 0

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.told.append(["metrics", step, dict(metrics)])

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any) -> None:
        self.told.append(["hyperparameters", dict(params)])

    @rank_zero_only
    def save(self) -> None:
        self.told.append(["save"])

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.told.append(["finalize", status])


class Hyperparameters(Tokens):
    def __init__(self, num_blocks: int = 2, lr: float = 0.05) -> None:
        super().__init__(num_blocks, lr=lr)
        self.save_hyperparameters()


def logged(scene: Scene, rows: int = 28, **flags: Any) -> None:
    logger = InMemory()
    trainer = scene.trainer(logger=logger, **flags)
    module = scene.module(Hyperparameters)
    trainer.fit(module, scene.loader(rows), scene.loader(8))
    trainer.test(module, scene.loader(8), verbose=False)
    scene.note(f"{FIRST} logger", logger.told)


def defaults(scene: Scene) -> None:
    """Everything that a Trainer writes and shows if it is not told otherwise."""
    trainer = scene.trainer(
        logger=True, enable_checkpointing=None, enable_progress_bar=None, enable_model_summary=None, max_epochs=2
    )
    trainer.fit(scene.module(Hyperparameters), scene.loader(), scene.loader(8))
    scene.note("callbacks", [type(callback).__name__ for callback in trainer.callbacks])
    scene.note("log_dir", str(trainer.log_dir).replace(str(scene.folder), ""))
    scene.note("best", trainer.checkpoint_callback.best_model_path.replace(str(scene.folder), ""))


def barebones(scene: Scene) -> None:
    trainer = scene.trainer(
        barebones=True,
        logger=None,
        enable_checkpointing=None,
        enable_progress_bar=None,
        enable_model_summary=None,
        num_sanity_val_steps=None,
    )
    trainer.fit(scene.module(), scene.loader(), scene.loader(8))


def profiled(scene: Scene, profiler: Any) -> None:
    """How often each thing was timed, and that it took time."""

    def look(trainer: Trainer, module: LightningModule) -> None:
        if isinstance(trainer.profiler, AdvancedProfiler):
            scene.note("actions", sorted(filter(_everywhere, trainer.profiler.profiled_actions)))

    trainer = scene.trainer(
        profiler=profiler(scene.folder) if callable(profiler) else profiler, callbacks=[at("on_train_end", look)]
    )
    trainer.fit(scene.module(), scene.loader(), scene.loader(8))
    found = trainer.profiler
    if isinstance(found, SimpleProfiler):
        counts = {name: len(times) for name, times in found.recorded_durations.items()}
        scene.note("counts", {name: counts[name] for name in filter(_everywhere, counts)})
        batches = found.recorded_durations["run_training_batch"]
        assert sum(batches) >= sum(found.recorded_durations[_step_of(found)]) > 0


def _everywhere(action: str) -> bool:
    """Not named after the strategy, and not done by the first rank of a node alone."""
    return "Strategy]" not in action and "prepare_data" not in action


def _step_of(profiler: SimpleProfiler) -> str:
    return next(name for name in profiler.recorded_durations if name.endswith("training_step"))


def _simple(folder: Any) -> SimpleProfiler:
    return SimpleProfiler(dirpath=folder, filename="simple")


def _pytorch(folder: Any) -> PyTorchProfiler:
    return PyTorchProfiler(dirpath=folder, filename="torch", export_to_chrome=False)


RATES_KNOWN = {r"at callback.on_load_checkpoint\(\): lr": "as weights are loaded later, there are optimizers by then"}
TOLD_ELSEWHERE = {
    "Trainer\\(barebones=True": "what Lightning tells rank 0 from within a step, the last stage does not tell"
}
A_FILE_PER_RANK = {"^file only": "profilers of Lightning write a file for every rank, as under every strategy"}
FLAGS = (
    Case("gradient_clip_val", fit, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}, replicas=True),
    Case("gradient_clip_algorithm", fit, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    Case("deterministic", torch_settings, {"deterministic": True, "benchmark": True}),
    Case("deterministic=warn", torch_settings, {"deterministic": "warn", "detect_anomaly": True}),
    Case("inference_mode=False", fit, {"inference_mode": False}),
    Case("use_distributed_sampler=False", fit, {"use_distributed_sampler": False}, layouts=((2, 1, 2),)),
    Case("reload_dataloaders", own_loaders, {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 2}, replicas=True),
    Case("data module", data_module, known={**LOADED_LATER, **RATES_KNOWN}),
    Case("log_every_n_steps", logged, {"log_every_n_steps": 3, "max_epochs": 2}),
    Case(
        "log_every_n_steps and accumulation",
        logged,
        {"log_every_n_steps": 1, "accumulate_grad_batches": 2},
        replicas=True,
    ),
    Case("enable_autolog_hparams=False", logged, {"enable_autolog_hparams": False, "log_every_n_steps": 0, "rows": 8}),
    Case("defaults", defaults, replicas=True),
    Case("barebones", barebones, known=TOLD_ELSEWHERE),
    Case("profiler=simple", profiled, {"profiler": "simple"}),
    Case("profiler=advanced", profiled, {"profiler": "advanced"}),
    Case("profiler=pytorch", profiled, {"profiler": "pytorch"}, A_FILE_PER_RANK),
    Case("profiler with a file", profiled, {"profiler": _simple}, A_FILE_PER_RANK),
    Case("PyTorchProfiler with a file", profiled, {"profiler": _pytorch}, A_FILE_PER_RANK),
)


@cases(*FLAGS)
def test_flags_do_what_they_do_in_one_process(case: Case, mesh: Mesh, conforms: Callable[[Case, Mesh], None]) -> None:
    conforms(case, mesh)
