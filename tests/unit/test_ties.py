"""Ties at the start of a run of many ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_3d.config import Sizes
from lightning_3d.dry_run.world import standing_in
from lightning_3d.sharding import make_ties


@pytest.mark.parametrize(("rank", "ties"), [(0, 2), (3 * 1024 + 5, 2), (1024, 0)])
def test_a_rank_makes_its_own_groups_only(rank: int, ties: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all 1,024 columns, one after another, would take minutes."""
    made: list[list[int]] = []
    module = nn.Linear(2, 2)
    with standing_in(Sizes(pp=4, dp=128, tp=8), rank) as mesh:
        original = dist.new_group
        monkeypatch.setattr(
            dist, "new_group", lambda ranks, **options: (made.append(ranks), original(ranks, **options))[1]
        )
        shared: list[Any] = [(("weight",), (0, 3)), (("bias",), (0, 3))]
        found = make_ties(shared, module, mesh)
        assert len(made) == 1 and rank in made[0] and len(made[0]) == 2
        assert len(found) == ties
        for tie in found:
            assert tie.axis.ranks == tuple(made[0]) and tie.axis.group is not None
            assert torch.equal(tie.param, getattr(module, tie.name)) and tie.counted == (rank == 0)
