"""What every rank takes over from rank 0 before anything else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_3d.trainer.data.host_random import HostRandomState
from lightning_3d.trainer.setup import start


def test_random_numbers_of_a_device_are_those_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    own, of_rank_0 = torch.Generator(), torch.Generator()
    own.seed()
    of_rank_0.manual_seed(5)
    asked: list[torch.device] = []

    def generator_of(device: torch.device) -> torch.Generator:
        asked.append(device)
        return own

    told = HostRandomState.get(), of_rank_0.get_state()
    monkeypatch.setattr(start, "generator_of", generator_of)
    monkeypatch.setattr(start, "broadcast_object", lambda mine, axis, src: told)
    mesh: Any = SimpleNamespace(device=torch.device("cuda", 3), control_world=None)
    start.share_random_state(mesh)
    assert asked == [torch.device("cuda", 3)]
    assert torch.equal(torch.rand(4, generator=own), torch.rand(4, generator=of_rank_0))
