"""Plays many cases in one set of ranks, one after another, and keeps what each rank saw."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import pickle
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from tests.conformance.case import Case, Scene
from tests.conformance.record import Happened, Recorder, files_below, listening
from tests.dist.lightning_modules import Mesh
from tests.harness import RankFailure, run_trainer

LIMIT_S = 60
"""What a case may take on busy cores; a rank that takes longer shows where it stands, and ends."""


def play(case: Case, mesh: Mesh | None, folder: Path) -> Happened:
    """Play a case in this process: as a whole under the stock Trainer, or this rank's part of it."""
    recorder = Recorder()
    happened = recorder.happened
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with listening(happened), _nothing_left_behind():
        try:
            case.play(Scene(mesh, folder, recorder), **case.options)
        except BaseException as error:
            happened.error = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    happened.messages = [message.replace(str(folder), "FOLDER") for message in happened.messages]
    happened.seconds = time.monotonic() - began
    return happened


@contextlib.contextmanager
def _nothing_left_behind() -> Iterator[None]:
    """Put back what a Trainer sets for the whole process."""
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, interrupt)
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False
        torch.autograd.set_detect_anomaly(False)
        _leave_groups()


def _leave_groups() -> None:
    """Every Trainer makes process groups of its own, with threads; the default group stays."""
    if dist.is_initialized():
        world = dist.distributed_c10d._world
        for group in [group for group in world.pg_map if group is not dist.group.WORLD]:
            dist.destroy_process_group(group)


def play_here(case: Case, folder: Path) -> Happened:
    """What one process does, with the files that it writes."""
    happened = play(case, None, folder)
    return dataclasses.replace(happened, files=files_below(folder))


def play_on_ranks(cases: Sequence[Case], mesh: Mesh, folder: Path) -> dict[str, list[Happened] | str]:
    """By case what every rank saw; or, where a case brought the ranks down, how."""
    played: dict[str, list[Happened] | str] = {}
    world = mesh[0] * mesh[1] * mesh[2]
    left = list(cases)
    while left:
        failure = ""
        try:
            run_trainer(world, _play_all, left, mesh, folder, timeout=30 + LIMIT_S * len(left))
        except RankFailure as error:
            failure = str(error)
        for case in list(left):
            seen = [_result(folder, case, rank) for rank in range(world)]
            if not all(path.exists() for path in seen):
                break
            files = files_below(folder / case.name)
            played[case.name] = [dataclasses.replace(pickle.loads(p.read_bytes()), files=files) for p in seen]
            left.remove(case)
        else:
            break
        if failure:
            played[left.pop(0).name] = failure
    return played


def _result(folder: Path, case: Case, rank: int) -> Path:
    return folder / "seen" / f"{case.name}.{rank}"


def _play_all(rank: int, world: int, cases: Sequence[Case], mesh: Mesh, folder: Path) -> None:
    (folder / "seen").mkdir(exist_ok=True)
    for case in cases:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=sys.__stderr__)
        happened = play(case, mesh, folder / case.name)
        faulthandler.cancel_dump_traceback_later()
        result = _result(folder, case, rank)
        part = result.with_name(f"{result.name}.part")
        part.write_bytes(pickle.dumps(happened))
        part.rename(result)
        if happened.error:
            return  # ranks whose Trainer has raised take each other down: new ones go on
