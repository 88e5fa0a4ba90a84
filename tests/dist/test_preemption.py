"""C49: a signal to stop reaches one rank at any moment: all ranks end between the same two steps, and save once."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_3d import ThreeDStrategy
from tests.dist.lightning_modules import Mesh, Tokens, loader, make_trainer, on_ranks, rows, seeded

BATCH, BATCHES, EPOCHS = 4, 4, 2
LAST = "last-preempted.ckpt"


class Sends(Callback):
    """Sends the signal to one rank, once, and notes the losses of all steps."""

    def __init__(self, where: str, rank: int, signum: signal.Signals = signal.SIGTERM) -> None:
        self.where, self.rank, self.signum = where, rank, signum
        self.stops = where != "never"
        self.losses: dict[int, float] = {}
        self.validated: list[tuple[int, float]] = []
        self.logged: list[int] = []

    def send(self, trainer: Trainer, where: str) -> None:
        if where == self.where and trainer.global_rank == self.rank:
            self.where = "sent"
            os.kill(os.getpid(), self.signum)

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            self.send(trainer, "step")
        if self.stops and trainer.global_step >= 2:
            time.sleep(0.3)  # real steps take longer than word of the signal
        if trainer.global_step == BATCHES - 1:
            self.send(trainer, "last step of the epoch")

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.losses[trainer.fit_loop.epoch_loop.total_batch_idx] = float(trainer.callback_metrics["loss"])
        self.logged.append(trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_validation_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int, *args: Any) -> None:
        if trainer.global_step == 2 and batch_idx == 0:
            self.send(trainer, "validation")

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        self.validated.append((trainer.global_step, float(trainer.callback_metrics["val"])))

    def on_save_checkpoint(self, trainer: Trainer, module: Any, checkpoint: Any) -> None:
        if trainer.global_step == 2:
            self.send(trainer, "save")


class Learns(Tokens):
    """Draws at random while batches are read, so that reading one too many would show."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch))


def shifted(samples: list[Tensor]) -> Tensor:
    """Collate with a draw from the generator of the host."""
    return torch.stack(samples).add(torch.randint(0, 3, ())).remainder(12)


def fit(mesh: Mesh | None, folder: str, sends: Sends, accumulate: int = 1, **options: Any) -> bool:
    """Train; whether it was stopped."""
    keeps = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = make_trainer(
        mesh,
        options,
        callbacks=[sends, keeps],
        enable_checkpointing=True,
        max_epochs=EPOCHS,
        val_check_interval=2,
        accumulate_grad_batches=accumulate,
        default_root_dir=folder,
    )
    data, held_out = rows(BATCH * BATCHES), rows(8, seed=3)
    try:
        trainer.fit(
            seeded(Learns),
            loader(data, BATCH, mesh, shuffle=True, collate_fn=shifted),
            loader(held_out, 4, mesh),
            ckpt_path="last",
        )
    except SIGTERMException:
        return True
    return False


def stop_and_go_on(mesh: Mesh, folder: str, cases: list[tuple[str, int, int]]) -> Any:
    results = []
    for number, (where, rank, accumulate) in enumerate(cases):
        place = f"{folder}/{number}"
        first, second = Sends(where, rank), Sends("never", 0)
        assert fit(mesh, place, first, accumulate), where
        saved = sorted(path.name for path in Path(place).iterdir())
        assert not fit(mesh, place, second, accumulate)
        results.append((first, second, saved))
    return [
        ((first.losses, second.losses), first.validated + second.validated, first.logged + second.logged, saved)
        for first, second, saved in results
    ]


def straight(folder: str, accumulate: int = 1) -> Sends:
    sends = Sends("never", 0)
    assert not fit((1, 1, 1), folder, sends, accumulate)
    return sends


@pytest.mark.slow
def test_c49_all_ranks_finish_the_step_save_once_and_go_on_exactly(tmp_path: Path) -> None:
    cases = [
        ("step", 3, 1),
        ("validation", 1, 1),
        ("save", 2, 1),
        ("last step of the epoch", 0, 1),
        ("step", 2, 2),
    ]
    expected = {accumulate: straight(str(tmp_path / f"straight{accumulate}"), accumulate) for accumulate in (1, 2)}
    ranks = on_ranks(stop_and_go_on, (2, 1, 2), str(tmp_path / "many"), cases)
    for rank, results in enumerate(ranks):
        for (where, _, accumulate), ((before, after), validated, logged, saved) in zip(cases, results, strict=True):
            told = f"rank {rank}, signal in {where}"
            whole = expected[accumulate]
            assert LAST in saved and not [name for name in saved if name.startswith(".")], told
            assert not before.keys() & after.keys(), told
            assert len(before) % accumulate == 0, told
            assert {**before, **after} == pytest.approx(whole.losses, rel=1e-10), told
            assert validated == [(step, pytest.approx(value, rel=1e-6)) for step, value in whole.validated], told
            assert logged == whole.logged, told
            assert max(before) == max(ranks[0][cases.index((where, _, accumulate))][0][0]), told


def stop_replicas(mesh: Mesh, folder: str) -> Any:
    first, second = Sends("step", 1, signal.SIGUSR1), Sends("never", 0)
    assert fit(mesh, folder, first)
    assert not fit(mesh, folder, second)
    assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL or first.where == "step"
    return first.losses, second.losses


def test_c49_replicas_and_another_signal(tmp_path: Path) -> None:
    expected = straight(str(tmp_path / "straight")).losses
    for before, after in on_ranks(stop_replicas, (1, 2, 1), str(tmp_path / "many")):
        assert 2 < len(before) < 2 * BATCHES
        assert {**before, **after}.keys() == expected.keys()


def test_one_rank_alone_stops_too(tmp_path: Path) -> None:
    first, second = Sends("step", 0), Sends("never", 0)
    assert fit((1, 1, 1), str(tmp_path / "a"), first)
    assert (tmp_path / "a" / LAST).is_dir()
    assert not fit((1, 1, 1), str(tmp_path / "a"), second)
    expected = straight(str(tmp_path / "straight"))
    assert {**first.losses, **second.losses} == pytest.approx(expected.losses, rel=1e-10)
    assert first.logged + second.logged == expected.logged
    assert ThreeDStrategy().config.preemption_grace_s is None


class Slow(Learns):
    """A step that takes far too long on one rank, once."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            for _ in range(600):
                time.sleep(0.1)
        return loss


def run_out_of_time(mesh: Mesh, second: bool) -> tuple[str, float]:
    said, start = io.StringIO(), time.monotonic()
    trainer = make_trainer(mesh, {} if second else {"preemption_grace_s": 1.0})
    if trainer.global_rank == 0:
        for delay in (3.0, 9.0) if second else (3.0,):
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with contextlib.redirect_stderr(said), contextlib.suppress(BaseException):
        trainer.fit(seeded(Slow), loader(rows(16), 4, mesh))
    return said.getvalue(), time.monotonic() - start


@pytest.mark.parametrize("second", [False, True], ids=["the grace is over", "a second signal"])
def test_a_step_that_takes_too_long_ends_without_a_save(second: bool) -> None:
    results = on_ranks(run_out_of_time, (1, 2, 1), second)
    text = "".join(said for said, _ in results)
    expected = (
        "was asked by a second SIGTERM" if second else "was asked to stop and has not within 1 s (preemption_grace_s)"
    )
    assert f"rank 0 (pp0 dp0 tp0) {expected}" in text
    assert max(seconds for _, seconds in results) < 55


def requeue(mesh: Mesh, folder: str, job: dict[str, str]) -> Any:
    os.environ.update(job)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    first, second = Sends("step", 1, signal.SIGUSR1), Sends("never", 0)
    seen = []
    for sends in (first, second):
        environment = SLURMEnvironment(auto_requeue=True)
        rank, world = int(os.environ["RANK"]), mesh[0] * mesh[1] * mesh[2]
        for name, value in {"local_rank": rank, "global_rank": rank, "world_size": world, "node_rank": 0}.items():
            setattr(environment, name, lambda value=value: value)
        trainer = make_trainer(
            mesh,
            {"cluster_environment": environment},
            callbacks=[sends],
            max_epochs=EPOCHS,
            val_check_interval=2,
            default_root_dir=folder,
        )
        with contextlib.suppress(SIGTERMException):
            trainer.fit(seeded(Learns), loader(rows(16), BATCH, mesh, collate_fn=shifted), loader(rows(8), 4, mesh))
        seen.append(dict(sends.losses))
    return seen


def test_slurm_requeues_once_after_one_save_of_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "scontrol"
    script.write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/requests\n")
    script.chmod(0o755)
    job = {
        "SLURM_JOB_ID": "77",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_NAME": "train",
        "SLURM_LOCALID": "0",
    }
    results = on_ranks(requeue, (2, 1, 1), str(tmp_path), job)
    assert (tmp_path / "requests").read_text() == "requeue 77\n"
    assert [path.name for path in tmp_path.glob("hpc_ckpt_*")] == ["hpc_ckpt_1.ckpt"]
    for before, after in results:
        assert before and after and not before.keys() & after.keys()
        assert sorted({**before, **after}) == list(range(BATCHES * EPOCHS))
