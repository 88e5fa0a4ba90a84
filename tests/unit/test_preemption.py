"""Signals that ask a run to stop reach the run that goes on, whatever ran in this process before."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_3d.config import Sizes
from lightning_3d.mesh import build_mesh
from lightning_3d.trainer.preemption import STOP, Preemption
from lightning_3d.trainer.processes.failure import FailureGuard

MESH = build_mesh(Sizes(pp=1, dp=1, tp=1), torch.device("cpu"))


@pytest.fixture
def default() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGUSR1, before if before is not None else signal.SIG_DFL)


def trainer() -> Any:
    return SimpleNamespace(
        _signal_connector=SimpleNamespace(),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace()),
        _accelerator_connector=SimpleNamespace(cluster_environment=None),
    )


def test_a_later_trainer_in_the_same_process_hears_of_a_signal(default: None) -> None:
    first, second = (Preemption(FailureGuard(), None) for _ in range(2))
    first.install(trainer(), MESH)
    of_first = signal.getsignal(signal.SIGUSR1)
    first.remove()
    signal.signal(signal.SIGUSR1, of_first)  # as Lightning does, which has found it when the run began
    second.install(trainer(), MESH)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert (first.wish, second.wish) == (0, STOP)
    second.remove()


def test_a_handler_of_the_user_stays(default: None) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda signum, _: seen.append(signum))
    run = Preemption(FailureGuard(), None).install(trainer(), MESH)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert seen == [signal.SIGUSR1] and run.wish == 0
    run.remove()
