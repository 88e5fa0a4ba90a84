"""Loggers over several ranks hold what they hold in one process: the same values at the same steps, once."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from tests.conformance.case import Case, Scene
from tests.conformance.conftest import cases
from tests.conformance.record import plain
from tests.dist.lightning_modules import Mesh, Tokens

pytestmark = pytest.mark.timeout(900)
ONE_REPLICA: tuple[Mesh, ...] = ((2, 1, 2),)
SMALL: tuple[Mesh, ...] = ((2, 1, 2), (2, 2, 1))


class Service(Logger):
    """As third parties write them: a client that only rank 0 has, and files of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._client: list[Any] | None = None
        self._finished: list[str] = []

    @property
    def name(self) -> str:
        return "service"

    @property
    def version(self) -> str:
        return "run 1"

    @property
    def save_dir(self) -> str:
        return str(self._folder)

    @property
    @rank_zero_experiment
    def experiment(self) -> list[Any]:
        if self._client is None:
            self._client = []
            with (self._folder / "runs").open("a") as file:
                file.write("one run\n")
        return self._client

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.experiment.append(["metrics", plain(metrics), step])

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.experiment.append(["hyperparameters", plain(dict(params))])

    @rank_zero_only
    def log_note(self, note: str, step: int) -> None:
        self.experiment.append(["note", note, step])

    @rank_zero_only
    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        self.experiment.append(["checkpoint", Path(checkpoint_callback.best_model_path).name])

    @rank_zero_only
    def save(self) -> None:
        self.experiment.append(["save"])

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.experiment.append(["finalize", status])


class Hyper(Tokens):
    def __init__(self, num_blocks: int, rate: float = 0.05) -> None:
        super().__init__(num_blocks, lr=rate)
        self.save_hyperparameters()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.logger is not None
        self.logger.experiment.add_scalar("in_hook", batch_idx, self.global_step)
        self.log("logged_in_hook", float(batch_idx))

    def on_validation_epoch_end(self) -> None:
        self.logger.log_metrics({"by_hand": 1.0}, self.global_step)
        self.print("validated", self.global_step)


for_rank_zero: list[str] = []
"""What the function below was called with in this process."""


@rank_zero_only
def on_rank_zero(what: str) -> None:
    for_rank_zero.append(what)
    print("on rank zero:", what)


class WritesInSteps(Hyper):
    """Calls loggers where the loss is, in all the ways people do."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.logger.experiment.add_text("before the model", f"step {self.global_step}", self.global_step)
        logits = self(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        board, table, service = self.loggers
        assert isinstance(board, TensorBoardLogger)
        board.experiment.add_scalar("loss in step", loss.detach(), self.global_step)
        board.experiment.add_scalars("pair", {"loss": loss.item(), "twice": 2 * loss.detach()}, self.global_step)
        if self.trainer.is_global_zero:
            table.log_metrics({"loss of rank 0": loss.item()}, self.global_step)
        if self.global_rank == 0:
            service.log_note(f"{service.name}, {service.version}", self.global_step)
        on_rank_zero("trained")
        self.print("trained", self.global_step)
        self.log_dict({"loss": loss, "twice": 2 * loss}, prog_bar=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.loss(batch)
        assert self.trainer.log_dir is not None  # a broadcast
        self.logger.experiment.add_scalar(f"val/{Path(self.trainer.log_dir).name}", loss, batch_idx)
        self.log("val_loss", loss)


def log(scene: Scene, kind: type[Hyper]) -> None:
    board, table = TensorBoardLogger(scene.folder, "board"), CSVLogger(scene.folder, "table")
    service = Service(scene.folder)
    kept = ModelCheckpoint(monitor="val_loss")
    for_rank_zero.clear()
    printed = io.StringIO()
    with redirect_stdout(printed):
        trainer = scene.trainer(
            callbacks=[kept],
            logger=[board, table, service],
            max_epochs=2,
            log_every_n_steps=2,
            enable_checkpointing=True,
        )
        trainer.fit(scene.module(kind), scene.loader(), scene.loader(8))
    scene.note(
        "folders", [str(Path(path or "").relative_to(scene.folder)) for path in (trainer.log_dir, board.log_dir)]
    )
    scene.note("versions", [logger.version for logger in trainer.loggers])
    told: dict[str, Any] = {}
    if trainer.is_global_zero:
        told = {"service": service.experiment, "runs": (scene.folder / "runs").read_text(), **read(board, table)}
        told["printed"] = [
            line for line in printed.getvalue().splitlines() if line.startswith(("validated", "trained"))
        ]
    for name, value in trainer.strategy.broadcast(told).items():
        scene.note(name, value)
    ran = sum(rank["ran"] for rank in gathered(trainer, {"ran": len(for_rank_zero)}))
    # Once per micro-batch: what is for rank 0 alone runs where the step is whole.
    scene.note("calls of what is for rank 0", ran / (2 if scene.mesh is not None else 1))


def read(board: TensorBoardLogger, table: CSVLogger) -> dict[str, Any]:
    events = EventAccumulator(board.log_dir).Reload()
    tags = events.Tags()
    rows = csv.DictReader((Path(table.log_dir) / "metrics.csv").read_text().splitlines())
    return {
        "scalars": {tag: [[e.step, round(e.value, 5)] for e in events.Scalars(tag)] for tag in tags["scalars"]},
        "texts": {tag: [e.step for e in events.Tensors(tag)] for tag in tags["tensors"]},
        "graph": tags["graph"],
        "rows": [{key: float(value) for key, value in row.items() if value} for row in rows],
        "hparams": (Path(board.log_dir) / "hparams.yaml").read_text(),
    }


def gathered(trainer: Trainer, value: dict[str, Any]) -> list[dict[str, Any]]:
    if trainer.world_size == 1:
        return [value]
    everyone: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(everyone, value)
    return everyone


def draw(scene: Scene) -> None:
    board = TensorBoardLogger(scene.folder, "board", log_graph=True)
    module = scene.module(Hyper)
    module.example_input_array = torch.zeros(2, 6, dtype=torch.long)
    trainer = scene.trainer(logger=board, max_steps=2)
    trainer.fit(module, scene.loader())
    nodes: list[str] = []
    if trainer.is_global_zero:
        graph = EventAccumulator(board.log_dir).Reload().Graph()
        nodes = sorted(node.name for node in graph.node if "/" in node.name)
    scene.note("nodes", trainer.strategy.broadcast(nodes))


def default(scene: Scene, logger: bool) -> None:
    trainer = scene.trainer(logger=logger, max_steps=1)
    trainer.fit(scene.module(), scene.loader())
    scene.note("log_dir", str(Path(trainer.log_dir or "").relative_to(scene.folder)))
    scene.note("loggers", [len(trainer.loggers), trainer.lightning_module.logger is None])


DRAWN = "rank 0 draws before the model is laid out, while it is whole, so hooks see the example input earlier"

LOGGERS = (
    Case("hooks", log, {"kind": Hyper}, layouts=SMALL),
    Case("steps", log, {"kind": WritesInSteps}, layouts=ONE_REPLICA),
    Case("graph", draw, known={"batch_transfer|transfer_batch": DRAWN}, layouts=SMALL),
    Case("default", default, {"logger": True}, layouts=ONE_REPLICA),
    Case("none", default, {"logger": False}, layouts=ONE_REPLICA),
)


@cases(*LOGGERS)
def test_loggers_hold_what_they_hold_in_one_process(
    case: Case, mesh: Mesh, conforms: Callable[[Case, Mesh], None]
) -> None:
    conforms(case, mesh)
