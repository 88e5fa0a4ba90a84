"""On a GPU, gradients are reduced on a stream of their own: whoever reads them afterwards must have waited for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_3d.config import ParallelConfig, Sizes
from lightning_3d.dry_run.world import standing_in
from lightning_3d.sharding import Sharding, build_sharding
from lightning_3d.sharding.zero import Unit


class Stage(nn.Module):
    """As the pipeline's: runs what it is given as the root of the sharding."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, call: Callable[[], Any]) -> Any:
        return call()


def _backward_inside_of_the_step(shards: Sharding, stage: Stage) -> None:
    """As with manual optimization."""
    shards.allow_manual_use()

    def step() -> None:
        loss = stage.module(torch.ones(2, 3)).sum()
        shards.gather()
        shards.prepare_backward(0, last_of_chunk=True, last_of_step=True)
        loss.backward()
        shards.finish()

    shards.prepare_forward()
    stage(step)


def _no_backward(shards: Sharding, stage: Stage) -> None:
    """As with a loss that nothing of this stage is part of."""
    shards.prepare_forward()
    stage(lambda: stage.module(torch.ones(2, 3)))
    shards.prepare_backward(0, last_of_chunk=True, last_of_step=True)
    shards.finish()


@pytest.mark.parametrize("step", [_backward_inside_of_the_step, _no_backward])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("unit_bytes", [0, 2**20], ids=["blocks", "root alone"])
def test_gradients_are_waited_for_wherever_their_reduction_began(
    zero: int, step: Any, unit_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a CPU these give nothing, as there is nothing to wait for.
    monkeypatch.setattr(torch.cpu.Stream, "record_event", lambda stream: torch.cpu.Event())
    with standing_in(Sizes(pp=1, dp=2, tp=1), 0) as mesh:
        stage = Stage(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)))
        blocks = {0: list(stage.module)}
        shards = build_sharding(stage, blocks, mesh, ParallelConfig(zero_stage=zero), unit_bytes=unit_bytes)
        step(shards, stage)
        assert shards.shards is not None
        groups = [group for unit in shards.shards.all_units for group in unit.groups]
        assert groups and not any(group._post_reduce_event for group in groups)
        context = shards.shards.root.state._comm_ctx
        assert not getattr(context, "_last_post_reduce_events", None)
        assert not getattr(context, "reduce_scatter_states", None)


@pytest.mark.parametrize("zero", [1, 3])
def test_a_layer_looks_at_its_own_unit_only(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With manual optimization, layers are called by whoever likes, and in large models there are many of both."""
    with standing_in(Sizes(pp=1, dp=2, tp=1), 0) as mesh:
        stage = Stage(nn.Sequential(*(nn.Linear(3, 3) for _ in range(20))))
        shards = build_sharding(stage, {0: list(stage.module)}, mesh, ParallelConfig(zero_stage=zero), unit_bytes=0)
        shards.allow_manual_use()
        shards.prepare_forward()
        stage(lambda: stage.module(torch.ones(2, 3)))
        looks: list[object] = []
        original = Unit.groups.fget
        monkeypatch.setattr(Unit, "groups", property(lambda unit: (looks.append(unit), original(unit))[1]))
        stage(lambda: stage.module(torch.ones(2, 3)))
        assert len(looks) <= 20
