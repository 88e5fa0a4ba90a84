"""What a watchdog makes of the answers of all ranks, and of a GPU that is still at work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_3d import collectives
from lightning_3d.config import Sizes
from lightning_3d.pipeline import transport
from lightning_3d.progress import Progress
from lightning_3d.trainer.data import messages
from lightning_3d.trainer.processes import watchdog
from lightning_3d.trainer.processes.failure import FailureGuard
from lightning_3d.trainer.processes.watchdog import Standing, Watchdog, is_at_work, report

WAITS = Standing("training batch", 60.0, True, "  File x.py\n    all_reduce()\n")
BUSY = Standing("training batch", 60.0, False, "  File y.py\n    sleep()\n")


def told(found: dict[int, Standing], dp: int = 4) -> str:
    mesh: Any = SimpleNamespace(sizes=Sizes(pp=2, dp=dp, tp=1), device=torch.device("cpu"))
    return report(found, mesh, 60.0)


def test_the_one_that_is_busy_is_named_with_its_stack() -> None:
    text = told({rank: BUSY if rank == 5 else WAITS for rank in range(8)})
    assert "rank 5 (pp1 dp1 tp0), stage 1, hangs: training batch, for 60 s" in text and "sleep()" in text
    others = ", ".join(f"rank {rank} (pp{rank // 4} dp{rank % 4} tp0)" for rank in range(8) if rank != 5)
    assert text.endswith(f"held up by it: {others}")


def test_of_thousands_of_ranks_a_message_names_some() -> None:
    world = range(8192)
    for found in (
        dict.fromkeys(world, WAITS),
        dict.fromkeys(world, BUSY),
        dict.fromkeys(world[:10], WAITS),
        {rank: BUSY if rank == 77 else WAITS for rank in world},
    ):
        text = told(found, dp=4096)
        assert len(text) < 4000 and " more" in text
    assert "rank 77 (pp0 dp77 tp0), stage 0, hangs" in text
    assert "does not answer" in told(dict.fromkeys(world[:10], WAITS), dp=4096)


@pytest.mark.parametrize("module", [collectives, transport, messages])
def test_places_that_wait_for_other_ranks_are_known(module: Any) -> None:
    assert any(place in module.__file__ for place in watchdog._WAITING)


def test_a_rank_whose_gpu_is_at_work_may_wait_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    dog = Watchdog(FailureGuard(), Progress(), 60.0)
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert not dog._standing(1.0, cpu).waiting  # this test is busy
    for done in (True, False):
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device, done=done: SimpleNamespace(query=lambda: done))
        assert is_at_work(gpu) is not done and dog._standing(1.0, gpu).waiting is not done
        assert not is_at_work(cpu)
