"""The groups of a mesh: who is in them, and how long they wait."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_3d.collectives import all_reduce
from lightning_3d.config import Sizes
from lightning_3d.mesh import Axis, build_mesh, own_group, side_mesh
from tests.harness import run_ranks

AXES = ("pp", "dp", "tp", "model", "control_pp", "control_dp", "control_world")


def _limit(axis: Axis) -> float | None:
    """Seconds that a collective over the axis may take."""
    if axis.group is None:
        return None
    backend: Any = axis.group._get_backend(torch.device("cpu"))
    return float(backend.options._timeout.total_seconds())


def _meet(rank: int, world: int) -> tuple[dict[str, float | None], bool]:
    sizes = Sizes(pp=2, dp=1, tp=2)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=33))
    mesh = build_mesh(sizes, torch.device("cpu"), timedelta(seconds=77))
    sided = side_mesh(mesh, timedelta(seconds=55))
    right = True
    for axis in [getattr(mesh, name) for name in AXES] + [sided.control_world, sided.control_pp]:
        right &= all_reduce(torch.tensor([rank]), axis).item() == (sum(axis.ranks) if axis.group else rank)
    for rows in ([[0, 1], [2, 3]], [[0, 3], [1, 2]], [[0, 1], [2, 3]]):
        found = torch.tensor([rank])
        dist.all_reduce(found, group=own_group(rows, rank))
        right &= found.item() == sum(next(row for row in rows if rank in row))
    limits = {name: _limit(getattr(mesh, name)) for name in AXES}
    return limits | {"side": _limit(sided.control_world)}, right


def _meet_after_the_user(rank: int, world: int) -> list[float]:
    dist.new_group([0, 1])  # torch names a group by how many this rank is in, where its members alone make it
    mesh = build_mesh(Sizes(pp=2, dp=1, tp=2), torch.device("cpu"), timedelta(seconds=20))
    found = [torch.tensor([rank]) for _ in range(2)]
    dist.all_reduce(found[0], group=own_group([[0, 3], [1, 2]], rank, timeout=timedelta(seconds=20)))
    return [all_reduce(found[1], mesh.control_world).item(), found[0].item()]


def _meet_again_and_again(rank: int, world: int) -> list[float]:
    found = []
    for _ in range(3):
        mesh = build_mesh(Sizes(pp=2, dp=1, tp=2), torch.device("cpu"), timedelta(seconds=20))
        group = own_group([[0, 3], [1, 2]], rank, timeout=timedelta(seconds=20))
        found.append(all_reduce(torch.tensor([rank]), mesh.control_world).item())
        dist.all_reduce(here := torch.tensor([rank]), group=group)
        found.append(here.item())
        for made in [made for made in dist.distributed_c10d._world.pg_map if made is not dist.group.WORLD]:
            dist.destroy_process_group(made)
    return found


def test_groups_are_made_anew_where_others_were_destroyed() -> None:
    assert run_ranks(_meet_again_and_again, 4) == [[6, 3] * 3] * 4


def test_groups_of_the_users_own_for_some_ranks_are_no_hindrance() -> None:
    assert run_ranks(_meet_after_the_user, 4) == [[6, 3]] * 4


def test_groups_hold_their_ranks_and_wait_as_long_as_was_asked() -> None:
    for limits, right in run_ranks(_meet, 4):
        assert right
        assert {name: limits[name] for name in ("pp", "tp", "control_pp")} == {"pp": 33, "tp": 33, "control_pp": 33}
        assert limits["dp"] is None and limits["control_world"] == 77 and limits["side"] == 55
