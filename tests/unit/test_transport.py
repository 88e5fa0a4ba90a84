"""Which process groups carry the messages of a pipeline on GPUs, and that none waits behind another in a circle."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_3d import mesh as mesh_module
from lightning_3d.config import Sizes
from lightning_3d.mesh import coordinates
from lightning_3d.pipeline import transport
from lightning_3d.pipeline.transport import ACTIVATIONS, GRADIENTS, Lane, lanes, members
from lightning_3d.schedules import ENGINE_SCHEDULES, SCHEDULES, Action, Kind, Schedule, build

CASES = [
    (name, stages, virtual_stages, micro_batches)
    for name in ENGINE_SCHEDULES
    for stages, virtual_stages, micro_batches in itertools.product((2, 3, 4, 5), (1, 2, 3), (1, 2, 3, 4, 7, 8))
    if SCHEDULES[name].virtual_stages in (None, virtual_stages)
]


def _lane(rank: int, action: Action) -> Lane:
    kind = ACTIVATIONS if action.kind in (Kind.SEND_F, Kind.RECV_F) else GRADIENTS
    return (kind, rank, action.peer) if action.kind.is_send else (kind, action.peer, rank)


def _ends(schedule: Schedule, group: Callable[[Lane], Hashable]) -> bool:
    """Whether a step ends where each rank has one stream for computing and one for each group, as with NCCL.

    What is asked of a stream runs in that order. A message begins when both its ends have come to it, an end after all
    that was to be computed when it was asked for; a forward or backward begins when what it needs has come.
    """
    before: dict[Hashable, set[Hashable]] = defaultdict(set)
    for rank, actions in enumerate(schedule.actions):
        last: dict[Hashable, Hashable] = {}
        for action in actions:
            kind, chunk, micro_batch, _ = action
            if kind.is_compute:
                node: Hashable = (kind, chunk, micro_batch)
                stream: Hashable = "compute"
                arrival = (Kind.F if kind is Kind.F else Kind.B, "to", chunk, micro_batch)
                if any(a[:3] == (Kind.RECV_F if kind is Kind.F else Kind.RECV_B, chunk, micro_batch) for a in actions):
                    before[node].add(arrival)
            else:
                forward = kind in (Kind.SEND_F, Kind.RECV_F)
                target = chunk + (1 if forward else -1) if kind.is_send else chunk
                node, stream = (Kind.F if forward else Kind.B, "to", target, micro_batch), group(_lane(rank, action))
            before[node].update({last[s] for s in {stream, "compute"} & last.keys()})
            last[stream] = node
    done: set[Hashable] = set()
    while ready := [node for node, needs in before.items() if node not in done and needs <= done]:
        done.update(ready)
    return len(done) == len(before)


@pytest.mark.parametrize("forward_only", [False, True])
def test_no_schedule_waits_in_a_circle_where_each_lane_is_a_group(forward_only: bool) -> None:
    for name, stages, virtual_stages, micro_batches in CASES:
        schedule = build(name, stages, virtual_stages, micro_batches, forward_only)
        used = {_lane(r, a) for r, actions in enumerate(schedule.actions) for a in actions if not a.kind.is_compute}
        assert used <= {lane for parallel in lanes(stages) for lane in parallel}
        assert _ends(schedule, lambda lane: lane), (name, stages, virtual_stages, micro_batches)


def test_one_group_per_direction_would_hang() -> None:
    """A receive that was posted ahead stands before the send that its data depends on."""
    schedule = build("interleaved_1f1b", 3, 2, 1)
    assert _ends(schedule, lambda lane: lane)
    assert not _ends(schedule, lambda lane: (lane[0], lane[2] > lane[1]))


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 16])
def test_few_rounds_of_groups_hold_every_lane_and_every_rank_once(stages: int) -> None:
    rounds = lanes(stages)
    assert len(rounds) <= 6
    ring = [(stage, (stage + 1) % stages) for stage in range(stages)]
    expected = [(ACTIVATIONS, low, high) for low, high in ring] + [(GRADIENTS, high, low) for low, high in ring]
    assert sorted(lane for parallel in rounds for lane in parallel) == sorted(expected)
    sizes = Sizes(pp=stages, dp=2, tp=2)
    for parallel in rounds:
        rows = members(parallel, sizes)
        assert sorted(rank for row in rows for rank in row) == list(range(sizes.world))
        for row in rows:
            places = [coordinates(rank, sizes) for rank in row]
            assert len({place[1:] for place in places}) == 1  # one column of the mesh
            if len(row) == 2:
                assert {place[0] for place in places} in [{source, target} for _, source, target in parallel]


@pytest.mark.parametrize("splits", [True, False])
def test_ranks_make_the_same_groups_and_meet_in_the_first_message(
    splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = Sizes(pp=3, dp=2, tp=1)
    log: list[tuple[Any, ...]] = []
    rank = 0

    def make(row: list[int], use_local_synchronization: bool, **_: Any) -> Any:
        assert use_local_synchronization and rank in row
        log.append(("group", *row))
        return SimpleNamespace(row=tuple(row))

    def split(parent: Any, rows: list[list[int]], timeout: Any) -> Any:
        assert timeout == 5
        log.append(("split", str(rows)))
        return SimpleNamespace(row=next(tuple(row) for row in rows if rank in row))

    def send(token: torch.Tensor, peer: int, group: Any) -> None:
        log.append(("message", rank, peer, group.row))

    def receive(token: torch.Tensor, peer: int, group: Any) -> None:
        log.append(("message", peer, rank, group.row))

    backend = SimpleNamespace(supports_splitting=splits, options=SimpleNamespace(_timeout=5))
    world = SimpleNamespace(bound_device_id="cuda:0", _device_types=["cuda"], _get_backend=lambda device: backend)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: world)
    monkeypatch.setattr(mesh_module, "_names_are_fresh", lambda world: True)
    for name, function in (("new_group", make), ("split_group", split), ("send", send), ("recv", receive)):
        monkeypatch.setattr(dist, name, function)
    monkeypatch.setenv("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "1")
    logs, opened = [], []
    for rank in range(sizes.world):
        pp, dp, _ = coordinates(rank, sizes)
        axis = SimpleNamespace(size=sizes.pp, rank=pp, ranks=tuple(stage * sizes.dp + dp for stage in range(sizes.pp)))
        mesh: Any = SimpleNamespace(pp=axis, rank=rank, sizes=sizes, device=torch.device("cpu"))
        log = []
        opened.append(transport._open_lanes(mesh))
        logs.append(log)
    made = [[entry for entry in log if entry[0] == "split"] for log in logs]
    assert all(entries == made[0] and bool(entries) == splits for entries in made)
    for a, b in itertools.combinations(range(sizes.world), 2):
        here, there = ([entry for entry in logs[own] if set(entry[1:3]) == {a, b}] for own in (a, b))
        assert here == there
        for _, source, target, row in (entry for entry in here if entry[0] == "message"):
            assert set(row) == {source, target}
    for rank in range(sizes.world):
        stage = coordinates(rank, sizes)[0]
        assert set(opened[rank]) == {lane for parallel in lanes(3) for lane in parallel if stage in lane[1:]}
