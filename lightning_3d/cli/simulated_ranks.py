"""Running something on several ranks without a cluster: as forks of this process, which hold the model already."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_3d.config import Sizes
from lightning_3d.errors import ThreeDError
from lightning_3d.mesh import Mesh, build_mesh

Result = TypeVar("Result")


class RankError(ThreeDError):
    """A simulated rank that did not answer."""


def on_tensor_parallel_ranks(count: int, work: Callable[[Mesh], Result], limit_s: float = 120.0) -> Result:
    """Run ``work`` on ``count`` tensor-parallel ranks on the CPU, and give the answer of the first.

    Args:
        count: Ranks; they are forks, so ``work`` need not be picklable, but what it returns has to be.
        work: Called on every rank with its mesh.
        limit_s: Seconds after which the ranks are ended.

    Raises:
        ThreeDError: what ``work`` raised on a rank.
        RankError: if a rank died or did not answer in time.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that threads do not survive a fork: none of them is needed
            for rank in range(count):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_rank, args=(rank, count, Path(folder), work, sender), daemon=True)
                process.start()
                sender.close()
                pipes.append(receiver)
                processes.append(process)
        try:
            answers = _collect(pipes, limit_s)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
    failed = [answer for answer in answers.values() if isinstance(answer, BaseException)]
    if failed:
        # A rank that loses another one fails too: what the other said comes first.
        raise next((error for error in failed if not isinstance(error, RankError)), failed[0])
    return answers[0]  # type: ignore[return-value]


def _collect(pipes: list[Connection], limit_s: float) -> dict[int, object]:
    answers: dict[int, object] = {}
    waiting: dict[Connection, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    end = time.monotonic() + limit_s
    while waiting:
        ready = wait(list(waiting), max(0.0, end - time.monotonic()))
        if not ready:
            raise RankError(f"Simulated ranks {sorted(waiting.values())} did not answer within {limit_s:.0f} s.")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                answers[rank] = pipe.recv()
            except EOFError:
                raise RankError(f"Simulated rank {rank} died without an answer (out of memory?).") from None
        if any(isinstance(answer, BaseException) for answer in answers.values()):
            break  # the others may wait for it for ever
    return answers


def _rank(rank: int, count: int, folder: Path, work: Callable[[Mesh], object], sender: Connection) -> None:
    torch.set_num_threads(1)  # pools of threads are not copied by a fork
    answer: object
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=count)
        answer = work(build_mesh(Sizes(pp=1, dp=1, tp=count), torch.device("cpu")))
    except ThreeDError as error:
        answer = error
    except Exception as error:
        answer = RankError(f"Simulated rank {rank} failed: {type(error).__name__}: {error}")
    sender.send(answer)
    sender.close()
