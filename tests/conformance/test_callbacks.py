"""Every callback that Lightning ships does over several ranks what it does in one process."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import rich
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    OnExceptionCheckpoint,
    RichModelSummary,
    RichProgressBar,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn

from tests.conformance.case import Case, Scene
from tests.conformance.conftest import cases
from tests.conformance.record import plain
from tests.dist.lightning_modules import WIDTH, Mesh, Tokens, loader, rows, whole_weights

pytestmark = pytest.mark.timeout(900)
SMALL: tuple[Mesh, ...] = ((2, 1, 2), (2, 2, 1))
REPLICAS: tuple[Mesh, ...] = ((2, 2, 1),)


def fit(scene: Scene, *callbacks: Callback, module: Any = None, **flags: Any) -> Trainer:
    trainer = scene.trainer(callbacks=callbacks, **{"max_epochs": 2, **flags})
    trainer.fit(module or scene.module(), scene.loader(), scene.loader(8))
    return trainer


def note_of_rank_zero(scene: Scene, trainer: Trainer, name: str, value: Any) -> None:
    """What only rank 0 knows, as every rank's note."""
    scene.note(name, trainer.strategy.broadcast(value))


# --- checkpoints and stopping ----------------------------------------------------------------------------------------


def checkpoint(scene: Scene, **options: Any) -> None:
    kept = ModelCheckpoint(scene.folder / "kept", **options)
    fit(scene, kept, enable_checkpointing=True, max_epochs=3)

    def name(path: str) -> str:
        return str(Path(path).relative_to(scene.folder)) if path else ""

    scene.note("best", [name(kept.best_model_path), kept.best_model_score])
    scene.note("worst of the best", [name(kept.kth_best_model_path), kept.kth_value])
    scene.note("scores", {name(path): score for path, score in kept.best_k_models.items()})
    scene.note("last", name(kept.last_model_path))
    links = [path for path in (scene.folder / "kept").iterdir() if path.is_symlink()]
    scene.note("links", [(path.name, path.readlink().name) for path in links])


CHECKPOINTS = tuple(
    Case(f"checkpoint-{name}", checkpoint, options, layouts=SMALL)
    for name, options in {
        "link": {
            "monitor": "val_loss",
            "save_top_k": 2,
            "save_last": "link",
            "filename": "{epoch}-{val_loss:.3f}",
        },
        "steps": {"every_n_train_steps": 4, "save_top_k": -1},
        "train-end": {
            "monitor": "train_loss_epoch",
            "mode": "max",
            "save_on_train_epoch_end": True,
            "filename": "{step}-{train_loss_epoch:.3f}",
            "save_last": True,
        },
        "interval": {"train_time_interval": timedelta(0), "save_top_k": 2, "monitor": "train_loss_step"},
        "weights": {"save_weights_only": True, "filename": "weights"},
        "plain-names": {
            "every_n_epochs": 2,
            "save_top_k": -1,
            "filename": "{epoch:02d}-{step:03d}",
            "auto_insert_metric_name": False,
        },
    }.items()
)


class Diverges(Tokens):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch) * (1.0 if self.current_epoch < 2 else torch.nan))


def stop(scene: Scene, **options: Any) -> None:
    stopper = EarlyStopping(**{"monitor": "val_loss", **options})
    trainer = fit(scene, stopper, module=scene.module(Diverges), max_epochs=4)
    scene.note("stopped", [stopper.stopped_epoch, stopper.wait_count, float(stopper.best_score)])
    scene.note("reason", [str(getattr(stopper, name, None)) for name in ("stopping_reason", "stopping_reason_message")])
    scene.note("steps", trainer.global_step)


STOPS = tuple(
    Case(f"stop-{name}", stop, options, layouts=SMALL[:1])
    for name, options in {
        "not-finite": {"check_finite": True},
        "good-enough": {"stopping_threshold": 2.4, "check_on_train_epoch_end": True},
        "worse": {"divergence_threshold": 0.1},
        "patience": {"min_delta": 0.5, "patience": 1},
        "no-key": {"monitor": "nothing", "strict": False},
    }.items()
)


# --- rates and batches -----------------------------------------------------------------------------------------------


class Loads(Tokens):
    """Has its own loaders, as tuning asks for."""

    mesh: Mesh | None = None

    def train_dataloader(self) -> Any:
        return loader(rows(16), 4, self.mesh)

    def val_dataloader(self) -> Any:
        return loader(rows(8, seed=3), 4, self.mesh)


def find_rate(scene: Scene) -> None:
    finder = LearningRateFinder(min_lr=1e-4, max_lr=1.0, num_training_steps=16)
    trainer = scene.trainer(callbacks=[finder], max_epochs=6)
    module = scene.module(Loads)
    module.mesh = scene.mesh
    trainer.fit(module)
    assert finder.optimal_lr is not None
    scene.note("found", [finder.optimal_lr.results, module.lr, trainer.optimizers[0].param_groups[0]["lr"]])


def tune_rate(scene: Scene) -> None:
    trainer = scene.trainer(max_epochs=6)
    module = scene.module(Loads)
    module.mesh = scene.mesh
    found = Tuner(trainer).lr_find(module, min_lr=1e-4, max_lr=1.0, num_training=16)
    assert found is not None
    scene.note("found", [found.results, module.lr])


class Rates(Tokens):
    def configure_optimizers(self) -> Any:
        groups = [{"params": self.blocks.parameters(), "lr": 0.1, "name": "blocks"}, {"params": self.head.parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "name": "steps"}}


def monitor_rates(scene: Scene) -> None:
    logger = CSVLogger(scene.folder, "csv")
    monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    trainer = fit(scene, monitor, module=scene.module(Rates), logger=logger, log_every_n_steps=1)
    scene.note("rates", monitor.lrs)
    note_of_rank_zero(scene, trainer, "columns", (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0])


def accumulate(scene: Scene) -> None:
    fit(scene, GradientAccumulationScheduler({0: 1, 1: 2, 2: 3}), max_epochs=4)


# --- weights ---------------------------------------------------------------------------------------------------------


class Backbone(nn.Module):
    def __init__(self, whole: Tokens) -> None:
        super().__init__()
        self.embed, self.blocks = whole.embed, whole.blocks

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class OnBackbone(Tokens):
    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.backbone = Backbone(self)
        del self.embed, self.blocks

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.backbone(tokens)))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def finetune(scene: Scene) -> None:
    tuning = BackboneFinetuning(1, lambda_func=lambda epoch: 1.5, backbone_initial_ratio_lr=0.1)
    trainer = fit(scene, tuning, module=scene.module(OnBackbone), max_epochs=4)
    weights = {name: float(value.square().sum()) for name, value in whole_weights(trainer).items()}
    note_of_rank_zero(scene, trainer, "weights", weights)
    scene.note("groups", [len(group) for group in trainer.optimizers[0].param_groups])


# --- what is shown ---------------------------------------------------------------------------------------------------


def summarise(scene: Scene) -> None:
    """Also of a model that is run for its sizes, with a tie between its ends."""
    printed = io.StringIO()
    console = rich.get_console()
    before, console.file = console.file, printed
    try:
        for kind, depth in ((ModelSummary, 2), (RichModelSummary, 1)):
            module = scene.module(Tied)
            module.example_input_array = torch.zeros(2, 6, dtype=torch.long)
            summary = kind(depth)
            show, shown = summary.summarize, list[Any]()

            def note_and_show(*args: Any, show: Any = show, shown: list[Any] = shown, **kwargs: Any) -> None:
                shown.append([plain(list(args)), kwargs])
                show(*args, **kwargs)

            summary.summarize = note_and_show  # type: ignore[method-assign]
            trainer = fit(scene, summary, module=module, max_steps=1)
            note_of_rank_zero(scene, trainer, kind.__name__, shown)
    finally:
        console.file = before
    # The example input goes through the model before it is laid out, so its hooks come before configure_optimizers.
    scene.recorder.happened.events.clear()
    note_of_rank_zero(scene, trainer, "printed", [line.rstrip() for line in printed.getvalue().splitlines()])


class Tied(Tokens):
    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.head = nn.Linear(WIDTH, self.embed.num_embeddings, bias=False)
        self.head.weight = self.embed.weight


def show_progress(scene: Scene, kind: Callable[[], Callback]) -> None:
    printed = io.StringIO()
    console = rich.get_console()
    before, console.file = console.file, printed
    try:
        with redirect_stdout(printed):
            bar = kind()
            trainer = fit(scene, bar, enable_progress_bar=True)
            trainer.test(trainer.lightning_module, scene.loader(8))
            trainer.predict(trainer.lightning_module, scene.loader(8))
    finally:
        console.file = before
    assert trainer.is_global_zero or not printed.getvalue().strip()
    metrics = "|".join(rf"{name}\W+[\d.]+" for name in ("train_loss_epoch", "val_loss", "test_loss"))
    found = re.findall(rf"Epoch 1\b|\b3/3\b|\b2/2\b|{metrics}", printed.getvalue())
    note_of_rank_zero(scene, trainer, "bars", sorted({re.sub(r"[^\w.]+", " ", part) for part in found}))


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(scene: Scene) -> None:
    """Samples are counted per device as under DDP; the rates of the job are those of all replicas."""
    monitor = ThroughputMonitor(len, lambda batch: batch.numel(), window_size=2)
    logger = CSVLogger(scene.folder, "csv")
    trainer = fit(scene, monitor, DeviceStatsMonitor(cpu_stats=True), logger=logger, log_every_n_steps=1)
    scene.recorder.happened.events.clear()  # full of times
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    keys = {key for row in rows for key in row}
    scene.note("stats", sorted(key for key in keys if "DeviceStats" in key))
    replicas = 1 if scene.mesh is None else scene.mesh[1]
    scene.note("samples", [row["train/samples"] * replicas for row in rows if "train/samples" in row])
    if scene.mesh is not None:
        last = [row for row in rows if "train/samples_per_sec" in row][-1]
        times = [row["train/time"] for row in rows if "train/time" in row]
        assert last["train/samples_per_sec"] == pytest.approx(4 / (times[-1] - times[-2]))
        assert last["train/device/samples_per_sec"] * trainer.world_size == pytest.approx(last["train/samples_per_sec"])


def time_out(scene: Scene) -> None:
    timer = Timer(timedelta(seconds=1))
    trainer = fit(scene, timer, max_epochs=10_000)
    assert trainer.global_step and timer.time_elapsed("train") > 0
    steps = trainer.strategy.broadcast(trainer.global_step)
    scene.recorder.happened.events.clear()  # as many as the second had room for
    scene.note("stopped with all others", steps == trainer.global_step)


# --- the user's own --------------------------------------------------------------------------------------------------


class Counts(Callback):
    """With a state, and entries of its own in checkpoints."""

    def __init__(self) -> None:
        self.batches = 0
        self.loaded: Any = None

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "values": torch.arange(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = dict(state)

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = self.batches

    def on_load_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.batches = checkpoint["mine"]


class Configured(Tokens):
    def configure_callbacks(self) -> Any:
        self.counts = Counts()
        return [self.counts, EarlyStopping("val_loss", patience=9)]


def own_callbacks(scene: Scene) -> None:
    seen: list[Any] = []
    lambdas = LambdaCallback(
        on_train_epoch_start=lambda trainer, module: seen.append(trainer.current_epoch),
        on_train_end=lambda trainer, module: seen.append("end"),
    )
    kept = ModelCheckpoint(scene.folder, save_last=True)
    trainer = fit(scene, kept, lambdas, module=scene.module(Configured), enable_checkpointing=True)
    scene.note("kinds", [type(item).__name__ for item in trainer.callbacks])  # type: ignore[attr-defined]
    again = scene.module(Configured)
    resumed = scene.trainer(max_epochs=3)
    # `configure_optimizers` comes before `on_load_checkpoint` here; this is about callbacks.
    scene.recorder.happened.events.clear()
    resumed.fit(again, scene.loader(), scene.loader(8), ckpt_path=scene.folder / "last.ckpt")
    scene.recorder.happened.events.clear()
    scene.note("state", [again.counts.loaded, again.counts.batches, seen])


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *args: Any) -> None:
        self.written.append((prediction, indices, args[1:]))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.written.append((predictions, indices))


def write_predictions(scene: Scene) -> None:
    writer = Writer()
    trainer = scene.trainer(callbacks=[writer])
    trainer.predict(scene.module(), scene.loader(10))
    assert trainer.is_global_zero or not writer.written
    note_of_rank_zero(scene, trainer, "written", plain(writer.written))


class Raises(Tokens):
    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step == 4:
            raise ValueError("on every rank")


def raise_everywhere(scene: Scene) -> None:
    saves = OnExceptionCheckpoint(scene.folder, "exception")
    fit(scene, saves, module=scene.module(Raises), enable_checkpointing=True)


CALLBACKS = (
    *CHECKPOINTS,
    *STOPS,
    Case("find_rate", find_rate, layouts=REPLICAS),
    Case("tune_rate", tune_rate, layouts=SMALL[:1]),
    Case("monitor_rates", monitor_rates, layouts=SMALL[:1]),
    Case("accumulate", accumulate, layouts=SMALL),
    Case("finetune", finetune, layouts=SMALL),
    Case("summarise", summarise, layouts=SMALL),
    Case("rich_progress", show_progress, {"kind": RichProgressBar}, layouts=REPLICAS),
    Case("tqdm_progress", show_progress, {"kind": TQDMProgressBar}, layouts=REPLICAS),
    Case("measure", measure, layouts=SMALL),
    Case("time_out", time_out, layouts=SMALL[:1]),
    Case("own_callbacks", own_callbacks, layouts=SMALL[:1]),
    Case("write_predictions", write_predictions, layouts=SMALL[:1]),
    Case("raise_everywhere", raise_everywhere, layouts=REPLICAS),
)


@cases(*CALLBACKS)
def test_callbacks_do_what_they_do_in_one_process(
    case: Case, mesh: Mesh, conforms: Callable[[Case, Mesh], None]
) -> None:
    conforms(case, mesh)
