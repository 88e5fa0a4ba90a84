"""Run a function on many ranks of this machine, with a hard time limit and nothing left behind.

``run_ranks(fn, world_size, *args)`` calls the module-level function ``fn(rank, world_size, *args)`` in ``world_size``
fresh processes that share a gloo process group and returns the results in rank order. ``run_trainer`` does the same for
functions that build a Lightning ``Trainer``: the ranks look as if torchrun had started them.

The processes are forked from a server that has imported torch, Lightning and the test modules once, so eight ranks
start in a fraction of a second. A rank that raises, dies or does not finish in time fails the call with
``RankFailure``, which holds its traceback (or the stacks of all ranks) and what it printed.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import itertools
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, ForkServerProcess

    from torch.distributed import TCPStore

_PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch.nn.parallel",
    "torchmetrics",
    "lightning.pytorch",
    "lightning.pytorch.demos.boring_classes",
    "pytest",
    "lightning_3d",
    "tests.harness",
)
_STACK_SIGNAL = signal.SIGUSR1
_LAST_LINES = 60
_GRACE_S = 0.5  # how long ranks that fail together get to report, once one has failed


class RankFailure(AssertionError):
    """A rank raised, died or ran out of time. ``rank`` is the first one, None when the time limit struck."""

    def __init__(self, message: str, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What one rank needs to know; crosses the process border pickled."""

    rank: int
    world_size: int
    call: bytes  # the pickled (fn, args), so that an import error is the rank's own, with its traceback
    environment: dict[str, str]
    store: tuple[str, int, str] | None  # host, port and key prefix of the store to meet at; None: do not initialise
    backend: str
    timeout: float
    folder: str

    @property
    def output(self) -> Path:
        return Path(self.folder, f"output{self.rank}")

    @property
    def stacks(self) -> Path:
        return Path(self.folder, f"stacks{self.rank}")


@dataclass(frozen=True, kw_only=True)
class _Report:
    """What one rank says when it is done."""

    when: float
    result: bytes = b""
    error: str = ""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    init: bool = True,
    backend: str = "gloo",
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on every rank.

    Args:
        fn: a module-level function of an importable module. What it returns must pickle: plain tensors, no DTensors.
        world_size: number of processes.
        args: passed on; must pickle.
        timeout: seconds for the whole call. On expiry the stacks of all ranks are reported and all processes killed.
        env: environment variables for the ranks, on top of those of this process.
        init: initialise the default process group before ``fn`` is called.
        backend: of that group.

    Returns:
        the results in rank order.

    Raises:
        RankFailure: (an AssertionError) with the traceback of the first rank that failed, or all stacks on expiry.
    """
    store = (*_store_address(), f"run{next(_run_numbers)}") if init else None
    return _run(fn, world_size, args, timeout, [dict(env or {})] * world_size, store, backend)


def run_trainer(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 90.0,
    env: Mapping[str, str] | None = None,
    num_nodes: int = 1,
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)``, which builds a Lightning Trainer, on ranks as torchrun starts them.

    Inside, ``Trainer(accelerator="cpu", devices=world_size // num_nodes, num_nodes=num_nodes, strategy=...)`` joins
    these processes and starts none. The process group is left to the strategy. A reference Trainer of one process runs
    in the test's own process. ``num_nodes`` splits the ranks into pretended nodes; the rest is as for ``run_ranks``.
    """
    per_node, rest = divmod(world_size, num_nodes)
    if rest:
        raise ValueError(f"{world_size} ranks do not divide into {num_nodes} nodes.")
    port = free_port()
    environments = [
        {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(per_node),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % per_node),
            "GROUP_RANK": str(rank // per_node),
            "TORCHELASTIC_RUN_ID": "tests",
            **(env or {}),
        }
        for rank in range(world_size)
    ]
    return _run(fn, world_size, args, timeout, environments, None, "gloo")


def free_port() -> int:
    """A port to meet at, which nothing takes before it is used.

    Ports that the kernel chooses it gives to others as well once they are released, and tests run side by side. These
    lie below its range, and every process of tests begins somewhere else.
    """
    for number in _port_numbers:
        port = 12_000 + number % 20_000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("the numbers never end")


_run_numbers = iter(range(sys.maxsize))
_port_numbers = itertools.count(os.getpid() * 211)


@functools.lru_cache(maxsize=1)
def _context() -> ForkServerContext:
    # The test modules are collected by now: importing them in the server spares every rank the imports that they need.
    collected = sorted(name for name in sys.modules if name.startswith(("tests.", "lightning_3d.")))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD, *collected, "tests.rank_server"])
    # It answers when all is imported, which no rank's time limit is for.
    first = context.Process(target=os.getpid)
    first.start()
    first.join()
    return context


@functools.lru_cache(maxsize=1)
def _store() -> TCPStore:
    from torch.distributed import TCPStore

    # Held by this process, on a port of its own choice: no race for a port, and no rank that ends takes it away.
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _store_address() -> tuple[str, int]:
    return "127.0.0.1", _store().port


def _run(
    fn: Callable[..., Any],
    world_size: int,
    args: Sequence[Any],
    timeout: float,
    environments: Sequence[dict[str, str]],
    store: tuple[str, int, str] | None,
    backend: str,
) -> list[Any]:
    context = _context()
    deadline = time.monotonic() + timeout
    call = pickle.dumps((fn, tuple(args)))
    processes: list[ForkServerProcess] = []
    connections: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        jobs = [
            _Job(
                rank=rank,
                world_size=world_size,
                call=call,
                environment={**os.environ, "OMP_NUM_THREADS": "1", **environments[rank]},
                store=store,
                backend=backend,
                timeout=timeout,
                folder=folder,
            )
            for rank in range(world_size)
        ]
        try:
            for job in jobs:
                here, there = context.Pipe()
                process = context.Process(target=_rank_main, args=(job, there), name=f"rank {job.rank}")
                process.start()
                there.close()
                processes.append(process)
                connections.append(here)
            reports, dead = _collect(connections, deadline)
            failed = bool(dead) or any(report.error for report in reports.values())
            if not failed and len(reports) < world_size:
                raise RankFailure(_timeout_message(fn, timeout, jobs, processes, reports), rank=None)
            if failed:
                raise _failure(fn, jobs, processes, reports, dead)
            for here in connections:
                with contextlib.suppress(OSError):  # a rank that has been ended meanwhile has reported all the same
                    here.send_bytes(b"done")
            for process in processes:
                process.join(5.0)
        finally:
            with _uninterrupted():
                for process in processes:
                    _kill(process)
                for here in connections:
                    here.close()
        for job in jobs:
            if printed := job.output.read_text(errors="replace"):
                print(f"--- rank {job.rank} printed:\n{printed}", end="")
    return [pickle.loads(reports[rank].result) for rank in range(world_size)]


def _collect(connections: Sequence[Connection], deadline: float) -> tuple[dict[int, _Report], list[int]]:
    """Wait for all ranks, or the first failure and a short while, or the deadline: (reports, ranks that just died)."""
    waiting = {connection: rank for rank, connection in enumerate(connections)}
    reports: dict[int, _Report] = {}
    dead: list[int] = []
    while waiting and (left := deadline - time.monotonic()) > 0:
        for ready in wait(list(waiting), timeout=left):
            rank = waiting.pop(ready)  # type: ignore[call-overload]
            try:
                reports[rank] = pickle.loads(ready.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, OSError):
                dead.append(rank)
            if rank in dead or reports[rank].error:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    return reports, dead


def _failure(
    fn: Callable[..., Any],
    jobs: Sequence[_Job],
    processes: Sequence[ForkServerProcess],
    reports: Mapping[int, _Report],
    dead: Sequence[int],
) -> RankFailure:
    # A rank that died without a word comes first: what the others then report is the broken connection to it.
    failed = [rank for rank, _ in sorted(reports.items(), key=lambda item: item[1].when) if reports[rank].error]
    first, *others = [*dead, *failed]
    where = f"rank {first} of {len(jobs)} in {fn.__module__}.{fn.__qualname__}"
    if first in dead:
        processes[first].join(5.0)
        stacks = jobs[first].stacks
        text = f"{where} died, exit code {processes[first].exitcode}\n"
        text += stacks.read_text(errors="replace") if stacks.exists() else "It had not started yet.\n"
    else:
        error = reports[first].error
        text = f"{where}: {error.strip().splitlines()[-1]}\n\n{error}"
    text += _printed(jobs[first])
    for rank in others:
        what = "died" if rank in dead else reports[rank].error.strip().splitlines()[-1]
        text += f"\nrank {rank} then failed as well: {what}"
    return RankFailure(text, rank=first)


def _timeout_message(
    fn: Callable[..., Any],
    timeout: float,
    jobs: Sequence[_Job],
    processes: Sequence[ForkServerProcess],
    reports: Mapping[int, _Report],
) -> str:
    late = [job for job in jobs if job.rank not in reports]
    for job in late:
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[job.rank].pid or 0, _STACK_SIGNAL)
    time.sleep(0.5)  # the signal handler writes within milliseconds, unless the machine is busy
    ranks = ", ".join(str(job.rank) for job in late)
    text = f"{fn.__module__}.{fn.__qualname__} ran longer than {timeout:g} s on rank {ranks} of {len(jobs)}\n"
    for job in late:
        stacks = job.stacks.read_text(errors="replace") if job.stacks.exists() else "(still starting)\n"
        text += f"\n--- rank {job.rank} stands at (innermost call first):\n{stacks}{_printed(job)}"
    return text


def _printed(job: _Job) -> str:
    lines = job.output.read_text(errors="replace").splitlines()[-_LAST_LINES:] if job.output.exists() else []
    return "\n".join([f"\n--- rank {job.rank} printed (last lines):", *lines, ""]) if lines else ""


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C: cut short, the cleaning up would leave ranks that the interpreter waits for at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _kill(process: ForkServerProcess) -> None:
    """End a rank and all that it started, whether it still runs or not."""
    pid = process.pid
    if pid is None:
        return
    if process.is_alive():
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    process.kill()  # in case it has not come to set up its own group
    process.join(5.0)
    process.close()


def _rank_main(job: _Job, parent: Connection) -> None:
    os.setsid()  # a group of its own, so that all it starts can be ended with it
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed test run takes its ranks along
    output = os.open(job.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    stacks = os.fdopen(os.open(job.stacks, os.O_WRONLY | os.O_CREAT, 0o600), "w")
    faulthandler.enable(stacks)
    faulthandler.register(_STACK_SIGNAL, stacks)
    try:
        os.environ.clear()
        os.environ.update(job.environment)
        fn, args = pickle.loads(job.call)
        _join_group(job)
        report = _Report(when=time.monotonic(), result=pickle.dumps(fn(job.rank, job.world_size, *args)))
    except BaseException:
        report = _Report(when=time.monotonic(), error=traceback.format_exc())
    with contextlib.suppress(OSError, EOFError):
        parent.send_bytes(pickle.dumps(report))
        parent.recv_bytes()  # stay until all are done: a rank that leaves early would break what the others still do
    # Not a normal exit: exit handlers of a broken process group may hang, and the parent ends what is left.
    os._exit(0)


def _join_group(job: _Job) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if job.store is None:
        return
    host, port, prefix = job.store
    # Longer than the limit of the whole call, so that this one strikes first and shows where every rank stands.
    patience = timedelta(seconds=job.timeout + 30)
    store = dist.PrefixStore(prefix, dist.TCPStore(host, port, is_master=False, timeout=patience))
    dist.init_process_group(job.backend, store=store, rank=job.rank, world_size=job.world_size, timeout=patience)
