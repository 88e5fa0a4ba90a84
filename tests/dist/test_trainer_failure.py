"""A job of which one rank fails ends soon, with the first error in sight and nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from lightning_3d.config import Sizes
from lightning_3d.mesh import build_mesh
from lightning_3d.trainer.processes.failure import FailureGuard, SiblingFailure
from tests.harness import run_ranks

ROOT = Path(__file__).parents[2]
LIMIT_S = 30.0
START_S = 120.0


class _Run:
    """A job under way, in a session of its own."""

    def __init__(self, folder: Path, start_method: str, fault: str, script: str = "failing_job.py") -> None:
        self.folder = folder
        command = [sys.executable]
        if start_method == "torchrun":
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        command += [str(ROOT / "tests" / script), start_method, fault, str(folder)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.errors = folder / "stderr"
        with self.errors.open("wb") as errors, Path(folder, "stdout").open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=errors, start_new_session=True
            )

    def wait_for(self, name: str) -> float:
        """When the file appeared."""
        deadline = time.monotonic() + START_S
        while not (path := Path(self.folder, name)).exists():
            assert time.monotonic() < deadline, f"{name} never came\n{self.text}"
            assert self.process.poll() is None or Path(self.folder, name).exists(), self.text
            time.sleep(0.05)
        return path.stat().st_mtime

    def end(self, since: float) -> int:
        """The exit status of a job that ends, all of it, in time."""
        code = self.process.wait(max(0.1, since + LIMIT_S - time.time()))
        left = [process for process in psutil.process_iter(["cmdline"]) if self._is_ours(process)]
        psutil.wait_procs(left, timeout=max(0.1, since + LIMIT_S - time.time()))
        assert not [process for process in left if process.is_running()], self.text
        return code

    def stop(self) -> None:
        for process in psutil.process_iter(["cmdline"]):
            if self._is_ours(process):
                process.kill()
        self.process.wait(10)

    def _is_ours(self, process: psutil.Process) -> bool:
        return str(self.folder) in (process.info["cmdline"] or ())

    @property
    def text(self) -> str:
        return self.errors.read_text(errors="replace")

    def marks(self, name: str) -> int:
        return len(list(self.folder.glob(f"{name}*")))


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> _Run:
    job = _Run(tmp_path, *request.param)
    request.addfinalizer(job.stop)
    return job


def _waits_for_a_rank_that_lives_on(rank: int, world: int) -> float | str:
    mesh = build_mesh(Sizes(pp=1, dp=2, tp=1), torch.device("cpu"))
    guard = FailureGuard()
    guard.start(mesh)
    dist.barrier()
    if rank == 1:
        guard.failed(ValueError("broken"))
        time.sleep(9)  # a long finalizer: its connections stay open
        guard.stop()
        return "done"
    start = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        dist.all_reduce(torch.ones(1))
    waited = time.monotonic() - start
    guard.failed(raised.value)
    guard.stop()
    return waited


def test_a_collective_with_a_failed_rank_returns_though_its_connections_are_open() -> None:
    waited, _ = run_ranks(_waits_for_a_rank_that_lives_on, 2)
    assert waited < 8


def _is_busy_in_python(rank: int, world: int) -> str:
    mesh = build_mesh(Sizes(pp=1, dp=2, tp=1), torch.device("cpu"))
    guard = FailureGuard()
    guard.start(mesh)
    dist.barrier()
    if rank == 1:
        guard.failed(ValueError("broken"))
        time.sleep(7)
        guard.stop()
        return "SiblingFailure"
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            sum(range(100))
    except SiblingFailure as error:
        guard.failed(error)
        guard.stop()
        return str(error)
    return "never stopped"


def test_a_rank_that_is_busy_with_something_else_is_told() -> None:
    first, _ = run_ranks(_is_busy_in_python, 2)
    assert "rank 1 (pp0 dp1 tp0) failed first" in first


WHO = {
    "step": ("rank [23] (pp1", "ValueError: the step is broken"),
    "worker": ("rank 0 (pp0 dp0 tp0) failed first", "ValueError: sample 24 is broken"),
    "start": ("rank 1 (pp0 dp0 tp1) failed first", "ValueError: rank 1 is broken"),
    "exit": ("rank 2 (pp1 dp0 tp0) ended with exit code 3", ""),
    "kill": ("rank 2 (pp1 dp0 tp0) was ended by SIGKILL", ""),
}


@pytest.mark.parametrize(
    "run",
    [
        ("popen", "step"),
        pytest.param(("popen", "worker"), marks=pytest.mark.long),
        pytest.param(("popen", "start"), marks=pytest.mark.long),
        pytest.param(("popen", "exit"), marks=pytest.mark.long),
        ("fork", "exit"),
        ("fork", "kill"),
        pytest.param(("forkserver", "start"), marks=pytest.mark.long),
        pytest.param(("torchrun", "step"), marks=pytest.mark.long),
        ("torchrun", "kill"),
    ],
    indirect=True,
    ids=lambda value: "-".join(value),
)
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_all_ranks_end_when_one_fails(run: _Run, request: pytest.FixtureRequest) -> None:
    start_method, fault = request.node.callspec.params["run"]
    code = run.end(run.wait_for("fault"))
    assert code != 0
    position, error = WHO[fault]
    text = run.text
    if fault == "step":
        assert "rank 2 (pp1 dp0 tp0) failed first" in text or "rank 3 (pp1 dp0 tp1) failed first" in text
    elif start_method == "torchrun":  # it tells the exit status; the others tell who it was
        assert "rank 2 (pp1 dp0 tp0) has ended without a word" in text
    else:
        assert position in text
    assert error in text
    assert text.count("raise ValueError(") == (fault in ("step", "worker", "start")), text
    died = fault in ("exit", "kill")
    scripts = start_method in ("popen", "torchrun")
    assert run.marks("exception") == 4 - died + (not scripts), text
    if scripts:
        assert run.marks("finally") == 4 - died
        assert run.marks("atexit") == 4 - died


@pytest.mark.parametrize(
    ("run", "signum"),
    [
        pytest.param(("popen", "none"), signal.SIGINT, marks=pytest.mark.long),
        (("popen", "none"), signal.SIGKILL),
        (("fork", "none"), signal.SIGINT),
    ],
    indirect=["run"],
)
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_no_process_outlives_the_one_that_was_started(run: _Run, signum: signal.Signals) -> None:
    for rank in range(4):
        run.wait_for(f"pid{rank}")
    run.process.send_signal(signum)
    assert run.end(time.time()) != 0


@pytest.mark.parametrize(
    ("start_method", "place", "signum"),
    [
        ("popen", "import", signal.SIGTERM),
        pytest.param("popen", "meet", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("forkserver", "meet", signal.SIGKILL, marks=pytest.mark.long),
        ("fork", "meet", signal.SIGKILL),
        pytest.param("spawn", "meet", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_no_rank_that_still_starts_outlives_its_launcher(
    start_method: str, place: str, signum: signal.Signals, tmp_path: Path
) -> None:
    run = _Run(tmp_path, start_method, place, "starting_job.py")
    ranks: list[psutil.Process] = []
    try:
        for rank in (0, 1) if place == "meet" else (1,):
            run.wait_for(f"pid{rank}")
            ranks.append(psutil.Process(int(Path(tmp_path, f"pid{rank}").read_text())))
        run.process.send_signal(signum)
        _, left = psutil.wait_procs([it for it in ranks if it.pid != run.process.pid], timeout=LIMIT_S)
        assert not left, run.text
        run.process.wait(LIMIT_S)
    finally:
        for process in ranks:
            if process.is_running():
                process.kill()
        run.stop()
