"""The grid of ranks: axes ``pp`` (outermost), ``dp`` and ``tp`` (innermost), built once and passed down."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.config import Sizes
from lightning_3d.events import EventSource

AXES = ("pp", "dp", "tp")


@dataclass(frozen=True)
class Axis:
    """The ranks that this rank meets along one axis, and its place among them."""

    name: str
    size: int
    """Ranks along the axis."""
    rank: int
    """This rank's index along the axis."""
    ranks: tuple[int, ...]
    """Global ranks along the axis, in order."""
    group: ProcessGroup | None = field(compare=False)
    """Their process group; ``None`` when the size is 1, where nothing is sent."""
    events: EventSource = field(default_factory=EventSource, compare=False, repr=False)
    """Told of the collectives over this axis."""

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first along the axis."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank is the last along the axis."""
        return self.rank == self.size - 1


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands and whom it talks to.

    Rank = (pp * DP + dp) * TP + tp, so that tensor-parallel ranks are neighbours (inside a node) and pipeline stages
    are furthest apart. The ``control_*`` axes hold the same ranks with groups for messages in host memory (gloo);
    on CPU their groups are those of the others, except for ``control_world`` where it has a time limit of its own.
    Nobody is told of their collectives: sites that wait in them say themselves what for.
    """

    device: torch.device
    device_mesh: DeviceMesh | None = field(compare=False)
    """Mesh with the axes ``"pp"``, ``"dp"``, ``"tp"`` for DTensor and FSDP2; ``None`` in a world of one."""
    pp: Axis
    dp: Axis
    tp: Axis
    model: Axis
    """The ``pp`` x ``tp`` ranks of this replica, stage by stage."""
    world: Axis
    control_pp: Axis
    control_dp: Axis
    control_tp: Axis
    control_model: Axis
    control_world: Axis

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.world.rank

    @property
    def events(self) -> EventSource:
        """Where this rank tells when it does what."""
        return self.world.events

    @property
    def sizes(self) -> Sizes:
        """Ranks along every axis."""
        return Sizes(pp=self.pp.size, dp=self.dp.size, tp=self.tp.size)

    @property
    def is_replica_reader(self) -> bool:
        """Whether this rank reads the batches of its replica."""
        return self.model.rank == 0

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's index along every axis."""
        return {"pp": self.pp.rank, "dp": self.dp.rank, "tp": self.tp.rank}

    @property
    def where(self) -> str:
        """This rank for messages, such as ``rank 5 (pp1 dp0 tp1)``."""
        return where(self.rank, self.sizes)


def coordinates(rank: int, sizes: Sizes) -> tuple[int, int, int]:
    """Index of ``rank`` along ``pp``, ``dp`` and ``tp``."""
    return rank // (sizes.dp * sizes.tp), rank // sizes.tp % sizes.dp, rank % sizes.tp


def where(rank: int, sizes: Sizes) -> str:
    """``rank`` with its place on the mesh, for messages."""
    pp, dp, tp = coordinates(rank, sizes)
    return f"rank {rank} (pp{pp} dp{dp} tp{tp})"


@dataclass(frozen=True)
class Where:
    """Names a rank of this node; picklable, for processes that are started as functions."""

    first: int
    """The node's first global rank."""
    sizes: Sizes

    def __call__(self, local_rank: int) -> str:
        """The rank with that index on the node."""
        return where(self.first + local_rank, self.sizes)


def build_mesh(
    sizes: Sizes,
    device: torch.device,
    control_timeout: timedelta | None = None,
    events: EventSource | None = None,
) -> Mesh:
    """The mesh of the initialised default process group, whose time limit its groups have.

    Collective: every rank makes its groups in the same order.

    Args:
        sizes: Ranks along every axis; they multiply to the world size.
        device: This rank's device.
        control_timeout: How long ranks wait for each other in ``control_world`` (on a GPU: in all control groups),
            where one may work alone for long; by default as long as in any other group.
        events: Where this rank tells when it does what; by default nobody can listen.
    """
    events = events or EventSource()
    if sizes.world == 1:
        alone = {name: Axis(name, 1, 0, (0,), None) for name in (*AXES, "model", "world")}
        return _mesh(device, None, alone, alone, events)
    rank = dist.get_rank()
    grid = torch.arange(sizes.world).view(sizes.pp, sizes.dp, sizes.tp)
    device_mesh = DeviceMesh(device.type, grid, mesh_dim_names=AXES)
    axes = {name: _from_device_mesh(device_mesh, name, rank) for name in AXES}
    axes["model"] = _axis("model", grid.permute(1, 0, 2).reshape(sizes.dp, -1), rank, None, shared=axes)
    timeout = _world_timeout()
    for axis in axes.values():
        if timeout is not None and axis.group is not None:  # a DeviceMesh leaves its groups the limits of torch
            for backend in _backends(axis.group):
                backend._set_default_timeout(timeout)
    axes["world"] = Axis("world", sizes.world, rank, tuple(range(sizes.world)), dist.group.WORLD)
    control = axes
    if device.type != "cpu":
        rows = {
            "pp": grid.permute(1, 2, 0).reshape(-1, sizes.pp),
            "dp": grid.permute(0, 2, 1).reshape(-1, sizes.dp),
            "tp": grid.reshape(-1, sizes.tp),
            "model": grid.permute(1, 0, 2).reshape(sizes.dp, -1),
            "world": grid.reshape(1, -1),
        }
        control = {name: _axis(name, ranks, rank, "gloo", timeout=control_timeout) for name, ranks in rows.items()}
    elif control_timeout is not None:
        control = {**axes, "world": _axis("world", grid.reshape(1, -1), rank, "gloo", timeout=control_timeout)}
    return _mesh(device, device_mesh, axes, control, events)


def side_mesh(mesh: Mesh, timeout: timedelta | None = None) -> Mesh:
    """``mesh`` with process groups of its own in ``control_world`` and ``control_pp``, for another thread.

    Collective.

    Args:
        mesh: This rank's place.
        timeout: How long ranks wait for each other in these groups.
    """
    if mesh.world.size == 1:
        return mesh
    sizes = mesh.sizes
    grid = torch.arange(sizes.world).view(sizes.pp, sizes.dp, sizes.tp)
    return replace(
        mesh,
        control_world=_axis("world", grid.reshape(1, -1), mesh.rank, "gloo", timeout=timeout),
        control_pp=_axis("pp", grid.permute(1, 2, 0).reshape(-1, sizes.pp), mesh.rank, "gloo", timeout=timeout),
    )


def _mesh(
    device: torch.device,
    device_mesh: DeviceMesh | None,
    axes: dict[str, Axis],
    control: dict[str, Axis],
    events: EventSource,
) -> Mesh:
    axes = {name: replace(axis, events=events) for name, axis in axes.items()}
    control = {name: replace(axis, events=EventSource()) for name, axis in control.items()}
    return Mesh(
        device=device,
        device_mesh=device_mesh,
        pp=axes["pp"],
        dp=axes["dp"],
        tp=axes["tp"],
        model=axes["model"],
        world=axes["world"],
        control_pp=control["pp"],
        control_dp=control["dp"],
        control_tp=control["tp"],
        control_model=control["model"],
        control_world=control["world"],
    )


def _from_device_mesh(device_mesh: DeviceMesh, name: str, rank: int) -> Axis:
    sub = device_mesh[name]
    size = sub.size()
    group = sub.get_group() if size > 1 else None
    return Axis(name, size, sub.get_local_rank(), tuple(int(r) for r in sub.mesh.flatten().tolist()), group)


def _axis(
    name: str,
    rows: torch.Tensor,
    rank: int,
    backend: str | None,
    shared: dict[str, Axis] | None = None,
    timeout: timedelta | None = None,
) -> Axis:
    """The row of ``rows`` that holds ``rank``, with a new group unless one of ``shared`` has just these ranks."""
    mine = next(tuple(row) for row in rows.tolist() if rank in row)
    size = len(mine)
    group = next((axis.group for axis in (shared or {}).values() if axis.ranks == mine), None)
    if size == dist.get_world_size() and backend is None:
        group = dist.group.WORLD
    elif size > 1 and group is None:
        group = own_group(rows.tolist(), rank, backend, timeout)
    return Axis(name, size, mine.index(rank), mine, group)


def own_group(
    rows: Sequence[Sequence[int]], rank: int, backend: str | None = None, timeout: timedelta | None = None
) -> ProcessGroup | None:
    """This rank's process group of those with these global ranks. Collective.

    Made by their members alone, or all at once: one after another, those of thousands of ranks would take minutes.

    Args:
        rows: Every rank of the world is in one of them.
        rank: This rank.
        backend: By default that of the default process group.
        timeout: How long a collective may take; by default as long as in the default process group.
    """
    world = dist.distributed_c10d._get_default_group()
    timeout = timeout or _world_timeout()
    device = getattr(world, "bound_device_id", None)
    if backend is None and device is not None and world._get_backend(device).supports_splitting:
        return dist.split_group(world, [list(row) for row in rows], timeout=timeout)
    if _names_are_fresh(world):
        mine = next(list(row) for row in rows if rank in row)
        return dist.new_group(mine, backend=backend, timeout=timeout, use_local_synchronization=True)
    made = [(row, dist.new_group(list(row), backend=backend, timeout=timeout)) for row in rows]
    return next(group for row, group in made if rank in row)


_named_at: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
"""By default process group: in how many groups this rank was at most when a group was made by its members alone."""


def _names_are_fresh(world: ProcessGroup) -> bool:
    """Whether the members of a group can make it by themselves: torch names it by in how many groups a rank is.

    All ranks must be in as many, and some may be in groups of the user's own. And none may have been in as many before:
    if groups were destroyed since, the name would lead to what these have left in the store, and a wait without end.
    """
    count = len(dist.distributed_c10d._world.pg_names)
    is_new = count > _named_at.get(world, 0)
    _named_at[world] = max(count, _named_at.get(world, 0))
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    seen = torch.tensor([count, -count, int(not is_new)], device=device)
    dist.all_reduce(seen, dist.ReduceOp.MAX)
    most, least, is_old = seen.tolist()
    return bool(most == -least and not is_old)


def _world_timeout() -> timedelta | None:
    """How long a collective of the default process group may take; ``None`` where its backend does not say."""
    for backend in _backends(dist.distributed_c10d._get_default_group()):
        with contextlib.suppress(AttributeError, RuntimeError):
            limit: timedelta = backend.options._timeout
            return limit
    return None


def _backends(group: ProcessGroup) -> list[Any]:
    """What sends for a group, without what ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` wraps around it."""
    found = [group._get_backend(device) for device in group._device_types]
    return [getattr(backend, "wrapped_pg", backend) for backend in found]
