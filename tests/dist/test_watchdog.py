"""A rank that hangs is named with its place, action and stack, and the job ends."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger

from lightning_3d import ThreeDStrategy
from lightning_3d.config import Sizes
from lightning_3d.errors import ConfigError
from lightning_3d.mesh import build_mesh
from lightning_3d.progress import Progress
from lightning_3d.schedules import Action, Kind
from lightning_3d.trainer.processes.failure import FailureGuard
from lightning_3d.trainer.processes.watchdog import Watchdog
from tests.dist.lightning_modules import Mesh, Tokens, loader, make_trainer, on_ranks, rows, seeded
from tests.harness import run_ranks

LIMIT_S = 2.0


def _fault(rank: int, world: int, fault: str) -> str:
    """What this rank prints when the job hangs by a fault."""
    mesh = build_mesh(Sizes(pp=2, dp=1, tp=1), torch.device("cpu"))
    guard, progress = FailureGuard(), Progress()
    watchdog = Watchdog(guard, progress, LIMIT_S)
    guard.start(mesh)
    watchdog.start(mesh)
    progress.enter("training batch")
    progress.act(Action(Kind.F, rank, 3))
    processes: list[Any] = [None] * world
    dist.all_gather_object(processes, os.getpid())
    if rank == 1 and fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            if rank == 1 and fault == "sleeps":
                _wait_for_a_file_that_never_comes()
            elif rank == 1 and fault == "other":
                dist.recv(torch.zeros(1), 0)
            else:
                dist.all_reduce(torch.ones(1))
        except BaseException as error:
            guard.failed(error)
    if rank == 0 and fault == "stopped":
        os.kill(processes[1], signal.SIGCONT)
    watchdog.stop()
    guard.stop()
    return said.getvalue()


def _wait_for_a_file_that_never_comes() -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.05)


def test_a_rank_that_is_busy_while_the_others_wait_is_named_with_its_stack() -> None:
    start = time.monotonic()
    text = "".join(run_ranks(_fault, 2, "sleeps"))
    assert time.monotonic() - start < 30
    assert "no progress for 2 s (hang_timeout_s)" in text
    assert "rank 1 (pp1 dp0 tp0), stage 1, hangs: training batch, pipeline action F1.3, for" in text
    assert "_wait_for_a_file_that_never_comes" in text
    assert "held up by it: rank 0 (pp0 dp0 tp0)" in text


def test_ranks_that_wait_for_each_other_are_all_shown() -> None:
    text = "".join(run_ranks(_fault, 2, "other"))
    assert "all ranks wait for each other" in text
    assert "rank 0 (pp0 dp0 tp0): training batch" in text and "rank 1 (pp1 dp0 tp0): training batch" in text
    assert "all_reduce" in text and "recv" in text


def test_a_process_that_does_not_answer_is_the_one() -> None:
    text = "".join(run_ranks(_fault, 2, "stopped"))
    assert "rank 1 (pp1 dp0 tp0), stage 1, does not answer" in text


class Hangs(Tokens):
    """The loss of the second batch never comes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            _wait_for_a_file_that_never_comes()
        return loss


def _train(mesh: Mesh, folder: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(BaseException):
        options = {"hang_timeout_s": LIMIT_S, "debug_collectives": True}
        trainer = make_trainer(mesh, options, max_steps=3, logger=CSVLogger(folder, name="", version="run"))
        trainer.fit(seeded(Hangs), loader(rows(24), 8, mesh))
    sys.stderr.flush()
    return said.getvalue()


def test_a_hanging_step_ends_the_run_and_names_the_stage(tmp_path: Path) -> None:
    start = time.monotonic()
    text = "".join(on_ranks(_train, (2, 1, 1), str(tmp_path)))
    assert time.monotonic() - start < 40
    assert "rank 1 (pp1 dp0 tp0), stage 1, hangs: training batch, after 1 optimizer steps, pipeline action F1.0" in text
    assert "in training_step" in text
    # With the flight recorder on, every rank has written down what it has sent, and where it stands.
    dumps = tmp_path / "run" / "flight_recorder"
    assert str(dumps) in text
    for rank in range(2):
        entries = pickle.loads((dumps / f"rank_{rank}").read_bytes())["entries"]
        assert "gloo:broadcast" in {entry["profiling_name"] for entry in entries}
    assert "in training_step" in (dumps / "standing_1.txt").read_text()


def test_a_limit_that_is_no_time_is_refused() -> None:
    for wrong in (0, -1.0, True, "a minute"):
        with pytest.raises(ConfigError, match="hang_timeout_s"):
            ThreeDStrategy(hang_timeout_s=wrong)  # type: ignore[arg-type]
