"""What the process that has started ranks as functions raises when one of them has failed."""

from __future__ import annotations

import contextlib
import pickle
import signal
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch.multiprocessing as mp

from lightning_3d.errors import ThreeDError


class PrintedError(ThreeDError):
    """Takes the place of an error whose traceback a rank has printed, on its way to the process that waits."""

    @classmethod
    def of(cls, error: BaseException) -> PrintedError:
        """With the name and text of ``error``, and nothing of where it comes from."""
        return cls("".join(traceback.format_exception_only(type(error), error)).strip())


_PRINTED = f"\n{PrintedError.__module__}.{PrintedError.__qualname__}: "


def ending(code: int) -> str:
    """How a process with this exit code has ended, for a sentence."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by {_signal_of(code) or f'signal {-code}'}"


def _signal_of(code: int) -> str | None:
    """Name of the signal that has ended a process; not all have one."""
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return None


def rank_error(
    rank: int, processes: Sequence[Any], error_files: Sequence[str], where: Callable[[int], str]
) -> Exception:
    """The error to raise.

    Args:
        rank: The one that has ended first.
        processes: Those of all ranks, ended.
        error_files: Where torch lets each leave its traceback.
        where: Names a rank.
    """
    # A rank that stops because of another may be gone first; the one whose traceback was printed is the one to name.
    traces = {other: trace for other in range(len(processes)) if (trace := _trace(error_files[other]))}
    for other, trace in traces.items():
        _, printed, text = trace.partition(_PRINTED)
        if printed:
            message = f"{where(other)} failed, with the traceback above: {text.strip()}"
            return mp.ProcessRaisedException(message, other, processes[other].pid)
    process = processes[rank]
    if rank in traces:
        return mp.ProcessRaisedException(f"\n\n-- Rank {rank} failed:\n{traces[rank]}", rank, process.pid)
    return mp.ProcessExitedException(
        f"rank {rank} {ending(process.exitcode)}",
        error_index=rank,
        error_pid=process.pid,
        exit_code=process.exitcode,
        signal_name=_signal_of(process.exitcode),
    )


def _trace(file: str) -> str | None:
    with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError), open(file, "rb") as stream:
        return str(pickle.load(stream))
    return None
