"""Saving while training goes on, and with every option of ModelCheckpoint: the files are those of the stock Trainer."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_3d.checkpoint import directory, is_checkpoint, writer
from lightning_3d.errors import CheckpointError
from tests.dist.lightning_modules import Mesh, Tokens, loader, make_trainer, on_ranks, rows, seeded, whole_weights

BATCH, STEPS = 4, 4


class Watched(Tokens):
    """Logs what file names are made of."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True)
        self.log("up", float(self.trainer.global_step), on_step=True)
        return loss


def callbacks(folder: Path) -> list[ModelCheckpoint]:
    """Ways to keep checkpoints, each with a folder of its own."""

    def make(name: str, filename: str, every: int | None = 1, **options: Any) -> ModelCheckpoint:
        return ModelCheckpoint(
            folder / name, filename, every_n_train_steps=every, save_on_train_epoch_end=False, **options
        )

    return [
        make("linked", "{step}", monitor="up", mode="max", save_top_k=1, save_last="link"),
        make("latest", "{epoch}-{step}", save_top_k=1),
        make("lowest", "{step}-{loss:.2f}", monitor="loss", save_top_k=2, save_last=True),
        make("same", "kept", every=2, save_top_k=-1, save_weights_only=True),
        make("versions", "best", every=2, monitor="up", mode="max", save_top_k=1),
        make("timed", "{step}", every=None, train_time_interval=timedelta(seconds=0), save_top_k=1),
    ]


def listing(folder: Path) -> dict[str, str | None]:
    """Every entry below, with what a link leads to."""
    found = {}
    for parent in sorted(folder.iterdir()):
        for entry in parent.iterdir():
            found[f"{parent.name}/{entry.name}"] = os.readlink(entry) if entry.is_symlink() else None
    return found


def keep(mesh: Mesh | None, folder: str, background: bool) -> Any:
    """Files after a run with all options, and losses of evaluating ``best`` and going on from ``last``."""
    path = Path(folder)
    kept = callbacks(path)
    options = {"async_save": background} if mesh else None
    trainer = make_trainer(mesh, options, callbacks=kept, max_steps=STEPS, enable_checkpointing=True)
    data = loader(rows(BATCH * STEPS), BATCH, mesh)
    trainer.fit(seeded(Watched), data)
    files = listing(path)
    again = make_trainer(
        mesh, options, callbacks=kept[:1], max_steps=STEPS + 1, max_epochs=2, enable_checkpointing=True
    )
    module = seeded(Watched)
    again.fit(module, data, ckpt_path="last")
    loss = float(again.callback_metrics["loss"])
    best = again.test(module, data, ckpt_path="best", verbose=False)[0]["test_loss"]
    return files, again.global_step, loss, best, listing(path)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return keep(None, str(tmp_path_factory.mktemp("stock")), False)


@pytest.mark.parametrize("background", [False, True], ids=["waiting", "background"])
def test_the_files_are_those_of_the_stock_trainer(tmp_path: Path, stock: Any, background: bool) -> None:
    for files, step, loss, best, later in on_ranks(keep, (2, 1, 1), str(tmp_path), background, timeout=110):
        assert files == stock[0]
        assert (step, later) == (stock[1], stock[4])
        assert loss == pytest.approx(stock[2], rel=1e-6)
        assert best == pytest.approx(stock[3], rel=1e-6)


class Fails(Callback):
    """On rank 1 the disk is full from a step on: while this saves itself and catches it, or in a callback's save."""

    def __init__(self, folder: Path, step: int, catch: bool) -> None:
        self.folder, self.step, self.catch = folder, step, catch
        self.seen: list[tuple[int, str]] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step != self.step:
            return
        trainer.strategy.finish_saving()
        original = writer.checksum
        if trainer.global_rank == 1:
            writer.checksum = full_disk
        if not self.catch:
            return
        try:
            trainer.save_checkpoint(self.folder / "kept.ckpt")
        except CheckpointError as error:
            self.seen.append((trainer.global_step, str(error)))
        finally:
            writer.checksum = original

    def on_exception(self, trainer: Trainer, module: Any, exception: BaseException) -> None:
        self.seen.append((trainer.global_step, str(exception)))


def full_disk(*args: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def fail(mesh: Mesh | None, folder: str) -> Any:
    """Weights after a run that has caught a failed save, and how a run ends whose save in the background fails."""
    path = Path(folder)
    caught = Fails(path, 2, catch=True)
    caught_callbacks = [caught] if mesh else []
    trainer = make_trainer(mesh, callbacks=caught_callbacks, max_steps=STEPS)
    trainer.fit(seeded(Watched), loader(rows(BATCH * STEPS), BATCH, mesh))
    weights = whole_weights(trainer)
    if mesh is None:
        return weights
    ended = Fails(path, 2, catch=False)
    keeper = ModelCheckpoint(path / "kept", "{step}", every_n_train_steps=1, save_last="link")
    options = {"async_save": True}
    trainer = make_trainer(mesh, options, callbacks=[ended, keeper], max_steps=50, enable_checkpointing=True)
    with contextlib.suppress(CheckpointError):
        trainer.fit(seeded(Watched), loader(rows(BATCH * 50), BATCH, mesh))
    return weights, caught.seen, ended.seen, sorted(entry.name for entry in path.rglob("*.ckpt"))


def test_a_full_disk_on_one_rank_is_told_on_all_and_training_can_go_on(tmp_path: Path) -> None:
    expected = fail(None, "")
    results = on_ranks(fail, (1, 2, 1), str(tmp_path))
    for name, value in expected.items():
        torch.testing.assert_close(results[0][0][name], value, rtol=1e-10, atol=1e-10)
    for _, caught, ended, files in results:
        assert caught == results[0][1] and ended == results[0][2]
        assert [step for step, _ in caught] == [2]
        assert ended[0][0] == 3  # where the next save waits for the one after step 2
        for _, message in (*caught, *ended):
            assert "rank 1 (pp0 dp1 tp0)" in message and "No space left on device" in message
        assert files == ["last.ckpt", "step=1.ckpt"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]


class Breaks(Callback):
    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            raise ArithmeticError("the user's own")


def test_a_save_under_way_is_complete_before_an_error_ends_the_run(tmp_path: Path, monkeypatch: Any) -> None:
    publish = directory.publish
    monkeypatch.setattr(directory, "publish", lambda path: (time.sleep(0.5), publish(path)))
    keeper = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2)
    callbacks = [Breaks(), keeper]
    trainer = make_trainer((1, 1, 1), {"async_save": True}, callbacks=callbacks, max_steps=4, enable_checkpointing=True)
    with pytest.raises(ArithmeticError):
        trainer.fit(seeded(Watched), loader(rows(BATCH * STEPS), BATCH, (1, 1, 1)))
    assert is_checkpoint(tmp_path / "step=2.ckpt")
    assert [entry.name for entry in tmp_path.iterdir()] == ["step=2.ckpt"]
    assert "file_exists" not in vars(keeper)
