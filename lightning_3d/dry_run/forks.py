"""Work in forks of this process, a few at a time: each changes what it has inherited and hands back an answer."""

from __future__ import annotations

import gc
import multiprocessing
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import TypeVar

import torch

from lightning_3d.errors import ThreeDError

Result = TypeVar("Result")


class ForkError(ThreeDError):
    """A fork that failed in a way of which nothing is known to the user."""


def in_forks(
    works: Sequence[Callable[[], Result]], at_once: int, limit_s: float, name: Callable[[int], str] | None = None
) -> list[Result]:
    """Call every function of ``works`` in a fork of its own; gives the answers in order.

    Args:
        works: They need not be picklable, but their answers have to be.
        at_once: Forks that run at the same time.
        limit_s: Seconds after which all are ended.
        name: What to call the fork of a number; by default the dry run.

    Raises:
        ThreeDError: what the first that failed raised. Of several, one that is no :class:`ForkError`: forks that wait
            for each other fail when one does.
        ForkError: if a fork died, failed otherwise, or did not answer in time.
    """
    name = name or (lambda index: "The dry run")
    context = multiprocessing.get_context("fork")
    answers: dict[int, object] = {}
    running: dict[Connection, int] = {}
    processes = []
    waiting = list(enumerate(works))[::-1]
    end = time.monotonic() + limit_s
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                index, work = waiting.pop()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_answer, args=(work, sender, name(index)), daemon=True)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that threads do not survive a fork: none of them is needed
                    process.start()
                sender.close()
                processes.append(process)
                running[receiver] = index
            ready = wait(list(running), max(0.0, end - time.monotonic()))
            if not ready:
                late = ", ".join(dict.fromkeys(name(index) for index in sorted(running.values())))
                raise ForkError(f"{late} did not answer within {limit_s:.0f} s.")
            failed: list[BaseException] = []
            for pipe in ready:
                assert isinstance(pipe, Connection)
                index = running.pop(pipe)
                try:
                    answers[index] = pipe.recv()
                except EOFError:
                    answers[index] = ForkError(f"{name(index)} died without an answer (out of memory?).")
                if isinstance(found := answers[index], BaseException):
                    failed.append(found)
            if failed:
                raise next((error for error in failed if not isinstance(error, ForkError)), failed[0])
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
    return [answers[index] for index in range(len(works))]  # type: ignore[misc]


def _answer(work: Callable[[], object], sender: Connection, name: str) -> None:
    torch.set_num_threads(1)  # pools of threads are not copied by a fork
    gc.freeze()  # what was inherited need not be searched again and again, nor its pages copied
    answer: object
    try:
        answer = work()
    except ThreeDError as error:
        answer = error
    except Exception as error:
        import traceback

        answer = ForkError(f"{name} failed: {type(error).__name__}: {error}\n{traceback.format_exc()}")
    sender.send(answer)
    sender.close()
