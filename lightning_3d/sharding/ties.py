"""Weights that several pipeline stages use: a copy on each; gradients are summed, so that all take the same step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from lightning_3d.collectives import timed
from lightning_3d.mesh import Axis, Mesh, own_group
from lightning_3d.placeholder import is_placeholder
from lightning_3d.sharding.gradients import sum_together


@dataclass(frozen=True, eq=False)
class Tie:
    """A weight that several pipeline stages use, as one of them sees it."""

    name: str
    """The name that all the stages know it by."""
    param: nn.Parameter
    """This rank's copy."""
    axis: Axis
    """The pipeline ranks that have a copy."""
    control: Axis
    """The same ranks, with a group for messages of the hosts."""
    counted: bool
    """Whether this rank's copy is the one that counts in norms; true on the first of them."""


def make_ties(shared: Iterable[tuple[Sequence[str], Sequence[int]]], module: nn.Module, mesh: Mesh) -> list[Tie]:
    """The ties of this rank, with the process groups they need.

    Collective over the world: every rank makes the groups of every tie, in the same order.

    Args:
        shared: For each shared weight, all its names and the pipeline ranks that keep a copy, ascending. The same on
            all ranks. Weights of one stage only are no ties.
        module: The LightningModule, cut: what other stages own is a placeholder.
        mesh: The mesh.
    """
    spread = [(tuple(names), tuple(stages)) for names, stages in shared if len(stages) > 1]
    axes = {stages: _axes(stages, mesh) for stages in dict.fromkeys(stages for _, stages in spread)}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return [
        Tie(names[0], _own_copy(names, parameters), *axes[stages], counted=mesh.pp.rank == stages[0])
        for names, stages in spread
        if mesh.pp.rank in stages
    ]


def sum_over_ties(ties: Sequence[Tie]) -> None:
    """Sum the gradients of tied copies over the stages that hold them.

    A tied weight that no stage used has no gradient afterwards, as in one process.
    """
    by_ranks: dict[tuple[int, ...], list[Tie]] = {}
    for tie in ties:
        if tie.axis.size > 1 and tie.param.requires_grad:
            by_ranks.setdefault(tie.axis.ranks, []).append(tie)
    # One order of groups for all ranks: a rank in two of them could otherwise wait in one for a rank that waits in the
    # other.
    for ranks in sorted(by_ranks):
        members = sorted(by_ranks[ranks], key=lambda tie: tie.name)
        # Only the hosts know who has a gradient, and asking each other does not make them wait for the device.
        used = torch.tensor([tie.param.grad is not None for tie in members], dtype=torch.uint8)
        asked = dist.all_reduce(used, dist.ReduceOp.MAX, group=members[0].control.group, async_op=True)
        sum_together([tie.param for tie in members], members[0].axis, fill=True)
        with timed(members[0].axis, "presence", used):
            asked.wait()
        for tie, is_used in zip(members, used.tolist(), strict=True):
            if not is_used:
                tie.param.grad = None


def _own_copy(names: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> nn.Parameter:
    return next(parameters[name] for name in names if name in parameters and not is_placeholder(parameters[name]))


def _axes(stages: tuple[int, ...], mesh: Mesh) -> tuple[Axis, Axis]:
    """The ranks of these stages in this rank's column, with a group for gradients and one for the hosts."""
    if len(stages) == mesh.pp.size:
        return mesh.pp, mesh.control_pp
    sizes = mesh.sizes
    columns = torch.arange(sizes.world).view(sizes.pp, -1).t()
    others = tuple(stage for stage in range(sizes.pp) if stage not in stages)
    # The ranks of other stages take part with groups that nobody uses, since every rank must be in one.
    rows = [column[list(part)].tolist() for column in columns for part in (stages, others)]
    is_member = mesh.pp.rank in stages
    mine = tuple(mesh.pp.ranks[stage] for stage in stages)
    rank = stages.index(mesh.pp.rank) if is_member else -1
    backends = (None,) if mesh.device.type == "cpu" else (None, "gloo")
    made = []
    for backend in backends:
        group = own_group(rows, mesh.rank, backend)
        made.append(Axis("tie", len(stages), rank, mine, group if is_member else None, mesh.events))
    return made[0], made[-1]
