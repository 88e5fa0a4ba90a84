"""Field cases of saving: kills at any moment (C45), and one rank that works alone for long (C51)."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_3d.checkpoint import directory, is_checkpoint, save, writer
from lightning_3d.checkpoint.full import consolidate
from lightning_3d.config import Sizes
from lightning_3d.errors import CheckpointError
from lightning_3d.mesh import build_mesh
from tests.checkpoint_model import build
from tests.dist.lightning_modules import Mesh, Tokens, loader, make_trainer, on_ranks, rows, seeded, whole_weights
from tests.harness import RankFailure, run_ranks

BATCH, BATCHES = 4, 8


class Noted(Callback):
    """Writes down, on rank 0, every loss, and every step whose checkpoint is known to be complete."""

    def __init__(self, folder: Path, behind: int) -> None:
        self.folder = folder
        self.behind = behind

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.is_global_zero and trainer.global_step > self.behind:
            self._note("complete", f"{trainer.global_step - self.behind}")

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *args: Any) -> None:
        if trainer.is_global_zero:
            self._note("losses", f"{trainer.global_step} {float(outputs['loss'])!r}")

    def _note(self, name: str, line: str) -> None:
        with (self.folder / name).open("a") as file:
            file.write(line + "\n")


class Killed(Callback):
    """Kills its process ``after_s`` seconds after the first step of a run, wherever it then is."""

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s

    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        timer = threading.Timer(self.after_s, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()


def train(
    mesh: Mesh | None, folder: str, steps: int, background: bool = False, kill: dict[int, float] | None = None
) -> dict[str, Tensor]:
    """Train from the last checkpoint on and save at every step; rank r is killed after ``kill[r]`` seconds."""
    path = Path(folder)
    callbacks: list[Callback] = [
        ModelCheckpoint(
            path / "kept", "{step}", every_n_train_steps=1, save_last="link", save_on_train_epoch_end=False
        ),
        Noted(path, 1 if background else 0),
    ]
    rank = int(os.environ.get("RANK", "0"))
    if kill and rank in kill:
        callbacks.append(Killed(kill[rank]))
    trainer = (
        make_trainer(
            mesh,
            {"async_save": background} if mesh else None,
            callbacks=callbacks,
            max_steps=steps,
            max_epochs=-1,
            enable_checkpointing=mesh is not None,
        )
        if mesh
        else make_trainer(None, callbacks=callbacks[1:], max_steps=steps, max_epochs=-1)
    )
    data = loader(rows(BATCH * BATCHES), BATCH, mesh, shuffle=True)
    trainer.fit(seeded(Tokens), data, ckpt_path="last" if mesh else None)
    return whole_weights(trainer)


def noted(folder: Path, name: str) -> list[str]:
    """Whole lines of what was written down."""
    file = folder / name
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")] if file.exists() else []


def _step(path: Path) -> int:
    """From ``step=7.ckpt``, or ``step=7-v1.ckpt`` where a kill came between the save of step 7 and the link to it."""
    return int(path.stem.removeprefix("step=").partition("-")[0])


def check(folder: Path) -> int:
    """Every checkpoint there is loads whole, ``last`` leads to one, and nothing that was complete is lost."""
    complete = max((int(line) for line in noted(folder, "complete")), default=0)
    kept = folder / "kept"
    seen = [entry for entry in kept.iterdir() if not entry.name.startswith(".")] if kept.exists() else []
    steps = []
    for entry in seen:
        assert entry.exists(), f"{entry.name} leads to {os.readlink(entry)}, which is not there"
        consolidate(entry)
        if not entry.is_symlink():
            steps.append(_step(entry))
    assert max(steps, default=0) >= complete
    if complete > 1:  # the very first link follows the first checkpoint
        last = kept / "last.ckpt"
        assert _step(last.resolve()) >= complete - 1
    return complete


def kill_and_go_on(folder: Path, mesh: Mesh, rounds: int, longest_s: float, seed: int) -> int:
    """Rounds that end in a kill, each gone on with by the next; the steps that were made."""
    draw = random.Random(seed)
    ranks = mesh[0] * mesh[1] * mesh[2]
    for number in range(rounds):
        moment = draw.uniform(0.0, longest_s)
        victims = range(ranks) if number % 2 else [draw.randrange(ranks)]
        with pytest.raises(RankFailure, match="died, exit code -9"):
            background = number % 4 in (1, 2)
            on_ranks(train, mesh, str(folder), 10**6, background, dict.fromkeys(victims, moment), timeout=300)
        check(folder)
        Noted(folder, 0)._note("rounds", f"{number + 1}")
    steps = check(folder) + 3
    weights = on_ranks(train, mesh, str(folder), steps, timeout=110)[0]
    # A kill between a save and the removal after it leaves one checkpoint more, as under the stock Trainer.
    left = [entry.name for entry in (folder / "kept").iterdir() if not entry.name.startswith("step=")]
    assert left == ["last.ckpt"]
    assert os.readlink(folder / "kept" / "last.ckpt") == f"step={steps}.ckpt"
    straight = folder / "straight"
    straight.mkdir()
    for name, value in train(None, str(straight), steps).items():
        torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-10, msg=name)
    losses: dict[str, float] = {}
    for step, loss in map(str.split, noted(folder, "losses")):
        assert float(loss) == pytest.approx(losses.setdefault(step, float(loss)), rel=1e-9), f"step {step} made twice"
    return steps


def test_c45_no_kill_loses_a_checkpoint_that_was_complete(tmp_path: Path) -> None:
    steps = kill_and_go_on(tmp_path, (1, 2, 1), rounds=4, longest_s=2.5, seed=1)
    assert steps >= 3


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_c45_a_hundred_kills_of_eight_ranks(tmp_path: Path) -> None:
    rounds = int(os.environ.get("LIGHTNING_3D_KILLS", "100"))
    steps = kill_and_go_on(tmp_path, (2, 2, 2), rounds=rounds, longest_s=8.0, seed=int(time.time()))
    print(f"{rounds} kills, {steps} steps")


class Slow(Tokens):
    """Rank 0 prepares the data for long."""

    seconds = 0.0

    def prepare_data(self) -> None:
        time.sleep(self.seconds)


def work_alone(mesh: Mesh, folder: str, limit: float, seconds: float) -> bool:
    """Train with one save, in a job whose collectives may take ``limit`` seconds."""
    module = seeded(Slow)
    module.seconds = seconds
    publish = directory.publish
    directory.publish = lambda path: (time.sleep(seconds), publish(path))  # rank 0 calls it
    keeper = ModelCheckpoint(folder, "kept", every_n_train_steps=2)
    options = {"timeout_s": limit}
    trainer = make_trainer(mesh, options, callbacks=[keeper], max_steps=3, enable_checkpointing=True)
    trainer.fit(module, loader(rows(BATCH * 3), BATCH, mesh))
    directory.publish = publish
    return is_checkpoint(f"{folder}/kept.ckpt")


@pytest.mark.slow
def test_c51_rank_zero_may_work_longer_alone_than_a_collective_may_take(tmp_path: Path) -> None:
    assert on_ranks(work_alone, (1, 2, 1), str(tmp_path), 10.0, 12.0) == [True, True]


def wait_too_long(rank: int, world: int, folder: str) -> list[str]:
    """What is raised when rank 0 is slow at writing, and when it is slow at the end."""
    meshes = [build_mesh(Sizes(pp=1, dp=2, tp=1), torch.device("cpu"), timedelta(seconds=3)) for _ in range(2)]
    state = build(Sizes(pp=1, dp=2, tp=1), shard=False).state
    naps: list[float] = []

    def nap(then: Callable[..., Any], *args: Any) -> Any:
        if rank == 0 and naps:
            time.sleep(naps.pop())
        return then(*args)

    messages = []
    for mesh, module, name in zip(meshes, (writer, directory), ("checksum", "publish"), strict=True):
        dist.barrier()  # whose limit is that of the test
        naps[:] = [8.0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, functools.partial(nap, getattr(module, name)))
            with pytest.raises(CheckpointError if rank else Exception) as caught:
                save(f"{folder}/c", {"global_step": 1}, state, mesh)
        messages.append(str(caught.value))
    return messages


def test_c51_who_waits_too_long_says_for_which_rank_and_what(tmp_path: Path) -> None:
    messages = run_ranks(wait_too_long, 2, str(tmp_path))[1]
    for message, phase in zip(messages, ("Writing the checkpoint", "Saving to"), strict=True):
        assert f"rank 0 (pp0 dp0 tp0), which is at: {phase}" in message
        assert "rank 1 (pp0 dp1 tp0) has waited" in message and "wait_timeout_s" in message
