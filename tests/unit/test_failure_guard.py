"""The guard of one rank: what ends it, and what does not."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_3d.config import Sizes
from lightning_3d.trainer.processes import failure
from lightning_3d.trainer.processes.failure import FailureGuard
from lightning_3d.trainer.processes.rank_errors import ending, rank_error


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailureGuard]:
    """One that notes when it would end the process."""
    monkeypatch.setattr(failure, "GRACE_S", 0.3)
    made = FailureGuard()
    made.ended = []  # type: ignore[attr-defined]
    monkeypatch.setattr(made, "_end", lambda: made.ended.append(True))  # type: ignore[attr-defined]
    yield made
    made._armed = False
    made._set_wake_up(on=False)


def test_a_rank_that_does_not_leave_the_trainer_is_ended(guard: Any) -> None:
    guard._begin()
    guard._arm()
    guard.failed(ValueError("broken"))
    time.sleep(0.8)
    assert guard.ended


def test_a_run_that_follows_a_failed_one_is_not_ended_for_it(guard: Any) -> None:
    guard._begin()
    guard._arm()
    guard.failed(ValueError("the user catches this, and fits again"))
    guard.stop()
    guard._begin()
    guard._arm()
    time.sleep(0.8)
    assert not guard.ended


def test_of_thousands_of_ranks_not_all_ask_the_store_in_each_period(
    guard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"here": 0, "store": 0}

    def count(what: str) -> None:
        asked[what] += 1

    monkeypatch.setattr(failure, "_PERIOD_S", 0.01)
    monkeypatch.setattr(guard, "_found_here", lambda: count("here"))
    monkeypatch.setattr(guard, "_told_by_others", lambda: count("store"))
    guard._ask_every = -(-8192 // failure._ASK_EACH)
    guard._begin()
    guard._arm()
    time.sleep(0.6)
    guard.stop()
    assert asked["here"] > 10 and 1 <= asked["store"] <= asked["here"] / guard._ask_every + 1


def test_what_is_told_while_a_run_starts_is_not_forgotten(guard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def a_process_dies_meanwhile(told: Any, axis: Any) -> list[Any]:
        guard.trip("rank 1 has ended", announce=True)
        return [told]

    guard._store = SimpleNamespace(compare_set=lambda *_: b"", check=lambda _: False)
    monkeypatch.setattr(failure, "all_gather_object", a_process_dies_meanwhile)
    monkeypatch.setattr(failure, "_abort_communicators", lambda: None)
    axis = SimpleNamespace(size=2, group=None)
    guard.start(SimpleNamespace(world=axis, control_world=axis, where="rank 0", sizes=Sizes(pp=2, dp=1, tp=1), rank=0))
    assert guard.has_failed
    time.sleep(0.8)
    assert guard.ended


def _killed_by(signum: int) -> None:
    os.kill(os.getpid(), signum)


def test_a_signal_without_a_name_ends_a_process_too(tmp_path: Any) -> None:
    nameless = signal.SIGRTMIN + 3
    process = multiprocessing.get_context("fork").Process(target=_killed_by, args=(nameless,))
    process.start()
    process.join()
    assert process.exitcode == -nameless
    error = rank_error(0, [process], [str(tmp_path / "none")], lambda rank: f"rank {rank}")
    assert f"rank 0 was ended by signal {nameless}" in str(error) == f"rank 0 {ending(-nameless)}"
    assert ending(-9) == "was ended by SIGKILL" and ending(3) == "ended with exit code 3"


def test_a_rank_hears_of_signals_until_its_run_ends(guard: Any) -> None:
    guard._begin()
    guard._arm()
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert guard._signals() == {signal.SIGUSR2}
        guard.stop()
        assert guard._wake_up is None and guard._signals() == set()
    finally:
        signal.signal(signal.SIGUSR2, before)
