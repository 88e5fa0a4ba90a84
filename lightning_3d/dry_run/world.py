"""A world of any number of ranks in one process: every rank is there by name, and only one of them computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_3d.config import Sizes
from lightning_3d.mesh import AXES, Axis, Mesh, build_mesh, coordinates


@contextmanager
def standing_in(sizes: Sizes, rank: int) -> Iterator[Mesh]:
    """Be ``rank`` of a world of ``sizes`` in which nobody else is; gives its mesh.

    Collectives of torch's ``"fake"`` backend return at once. The ``control_*`` axes have no group, so that messages
    between hosts come back as they were sent: every rank is taken to say what this one says, which is right for all
    that ranks agree on. What other pipeline stages say is found by :mod:`~lightning_3d.dry_run.survey` beforehand.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=sizes.world)
    try:
        yield _mesh(sizes, rank)
    finally:
        dist.destroy_process_group()


def group_names(mesh: Mesh) -> Mapping[str, str]:
    """The axis of every process group of ``mesh``, by the group's name."""
    found: dict[str, str] = {}
    for axis in (mesh.world, mesh.model, mesh.pp, mesh.dp, mesh.tp):
        if axis.group is not None:
            found[axis.group.group_name] = axis.name
    return found


def _mesh(sizes: Sizes, rank: int) -> Mesh:
    device = torch.device("cpu")
    if sizes.world == 1:
        return build_mesh(sizes, device)
    # Only the groups of this rank: making those of thousands of others takes minutes, and nobody would use them.
    grid = torch.arange(sizes.world).view(sizes.pp, sizes.dp, sizes.tp)
    pp, dp, tp = coordinates(rank, sizes)
    rows = {"pp": grid[:, dp, tp], "dp": grid[pp, :, tp], "tp": grid[pp, dp, :]}
    ranks = {name: tuple(int(member) for member in row) for name, row in rows.items()}
    ranks["model"] = tuple(int(member) for member in grid[:, dp, :].flatten())
    ranks["world"] = tuple(range(sizes.world))
    groups: dict[tuple[int, ...], ProcessGroup] = {ranks["world"]: dist.group.WORLD}  # type: ignore[dict-item]
    for members in ranks.values():
        if members not in groups:
            groups[members] = dist.new_group(list(members))
    axes = {
        name: Axis(name, len(members), members.index(rank), members, groups[members] if len(members) > 1 else None)
        for name, members in ranks.items()
    }
    device_mesh = DeviceMesh.from_group(
        [groups[ranks[name]] for name in AXES], device.type, mesh=grid.int(), mesh_dim_names=AXES
    )
    control = {name: replace(axis, group=None) for name, axis in axes.items()}
    return Mesh(
        device=device,
        device_mesh=device_mesh,
        **axes,
        **{f"control_{name}": axis for name, axis in control.items()},
    )
