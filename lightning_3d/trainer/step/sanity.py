"""Checks in training that ranks which should hold the same still do; a silent fault becomes an error with names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.collectives import all_gather_object, all_reduce
from lightning_3d.errors import SanityError
from lightning_3d.fingerprint import fingerprints
from lightning_3d.mesh import Axis, Mesh, where
from lightning_3d.placeholder import is_placeholder, leaves_of
from lightning_3d.sharding import Sharding, sharded_axes
from lightning_3d.sharding.reducer import local_of

Found = dict[str, dict[int, int]]
"""What differs -> rank -> the fingerprint it has of it."""
_NAMED = 8
"""Ranks that a message names of those that hold the same."""


class SanityChecks:
    """Compares what should be equal over an axis: weights, tied copies, batches.

    Args:
        module: The LightningModule, laid out.
        sharding: Of this rank.
        mesh: The mesh.
        every: Optimizer steps between two checks; ``None`` checks before the first step of a run, fresh or resumed;
            0 never checks.
    """

    def __init__(self, module: nn.Module, sharding: Sharding, mesh: Mesh, every: int | None) -> None:
        self._module = module
        self._sharding = sharding
        self._mesh = mesh
        self._every = every
        self._last: int | None = None

    def due(self, step: int) -> bool:
        """Whether the batch of optimizer step ``step`` is to be looked at; true once for every step."""
        if self._mesh.world.size == 1 or self._every == 0 or step == self._last:
            return False
        first, self._last = self._last is None, step
        return first or (self._every is not None and step % self._every == 0)

    def check(self, batch: Any) -> None:
        """Compare weights over replicas, over tensor-parallel ranks and over ties, and the batch within a replica.

        Collective over the world.

        Raises:
            SanityError: on all ranks, with what differs and the ranks that have it otherwise than the first.
        """
        mesh, found = self._mesh, Found()
        self._sharding.release()
        held = {name: p for name, p in self._module.named_parameters() if not is_placeholder(p)}
        for axis, control in ((mesh.dp, mesh.control_dp), (mesh.tp, mesh.control_tp)):
            alike = {name: p for name, p in held.items() if axis.name not in sharded_axes(p)}
            found |= _compare(alike, control, f"the copies over {axis.name}")
        by_ranks: dict[tuple[int, ...], list[Any]] = {}
        for tie in self._sharding.ties:
            by_ranks.setdefault(tie.axis.ranks, []).append(tie)
        for ranks in sorted(by_ranks):
            ties = sorted(by_ranks[ranks], key=lambda tie: tie.name)
            found |= _compare({tie.name: tie.param for tie in ties}, ties[0].control, "the tied copies over stages")
        tensors = [leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor)]
        parts = {f"tensor {i} of the batch": tensor for i, tensor in enumerate(tensors)}
        found |= _compare(parts, mesh.control_model, "what the ranks of a replica read")
        self._agree(found)

    def _agree(self, found: Found) -> None:
        if all_reduce(torch.tensor(bool(found)), self._mesh.control_world, "max"):
            everyone: Found = {}
            for others in all_gather_object(found, self._mesh.control_world):
                everyone.update(others)
            sizes = self._mesh.sizes
            lines = [f"  {what}: {_ranks(values, sizes)}" for what, values in list(everyone.items())[:20]]
            more = f"\n  and {len(everyone) - 20} more" if len(everyone) > 20 else ""
            raise SanityError(
                "Ranks that must hold the same do not:\n" + "\n".join(lines) + more + "\nSomething changed them on some"
                " ranks only: code that runs on one rank (if self.global_rank == 0) and touches weights or batches, a"
                " random transform on the device, a custom optimizer, or a faulty device. sanity_checks=N repeats this"
                " check every N steps, to find when it began; sanity_checks=0 turns it off."
            )


def _compare(tensors: Mapping[str, Tensor], axis: Axis, what: str) -> Found:
    """What differs over the axis; the same answer on all its ranks."""
    if axis.size == 1:
        return {}
    names = list(tensors)
    values = fingerprints([local_of(tensors[name]) for name in names], torch.device("cpu")).tolist()
    if _is_alike((names, values), axis):
        return {}
    rows = all_gather_object((names, values), axis)
    every = list(dict.fromkeys(name for row_names, _ in rows for name in row_names))
    tables = [dict(zip(*row, strict=True)) for row in rows]
    return {
        f"{name} ({what})": {rank: table.get(name, 0) for rank, table in zip(axis.ranks, tables, strict=True)}
        for name in every
        if len({table.get(name) for table in tables}) > 1
    }


def _is_alike(held: object, axis: Axis) -> bool:
    """Whether all ranks hold the same, told by one number of each: names and values of thousands are much to send."""
    digest = int.from_bytes(hashlib.blake2b(repr(held).encode(), digest_size=7).digest(), "big")
    most, least = all_reduce(torch.tensor([digest, -digest]), axis, "max").tolist()
    return bool(most == -least)


def _ranks(values: Mapping[int, int], sizes: Any) -> str:
    """Ranks by what they hold, those that agree together."""
    groups: dict[int, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return " differ from ".join(_listed(ranks, sizes) for ranks in sorted(groups.values(), key=len))


def _listed(ranks: Sequence[int], sizes: Any) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return ", ".join(where(rank, sizes) for rank in ranks[:_NAMED]) + more
