"""What Lightning asks a strategy about "all ranks": where one process would be meant, these are the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available, _distributed_is_initialized
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from typing_extensions import override

from lightning_3d.collectives import all_reduce, timed
from lightning_3d.errors import ConfigError
from lightning_3d.events import Phase
from lightning_3d.mesh import Axis, Mesh
from lightning_3d.waiting import waiting

_REDUCTIONS: dict[str, Literal["sum", "max", "min", "avg"]] = {
    "mean": "avg",
    "avg": "avg",
    "sum": "sum",
    "max": "max",
    "min": "min",
}


class ReplicaStrategy(ParallelStrategy):
    """A strategy whose reductions and gathers run over replicas, and whose decisions are those of all ranks."""

    _mesh: Mesh | None = None
    rank_in_step: int | None = None
    """Within a step of a pipeline: the rank that this one passes for, so that rank 0 is where the loss is."""

    @property
    @override
    def global_rank(self) -> int:
        return super().global_rank if self.rank_in_step is None else self.rank_in_step

    @property
    def _everyone(self) -> Sequence[Axis]:
        """Over which "all ranks" meet. In a step only a stage can: the others are elsewhere in theirs."""
        mesh = self.topology
        return (mesh.control_world,) if self.rank_in_step is None else (mesh.control_dp, mesh.control_tp)

    @property
    def topology(self) -> Mesh:
        """Where this rank stands on the mesh, and the ranks that it meets along every axis.

        Raises:
            ConfigError: Before the ``setup`` hook, where there is no mesh.
        """
        if self._mesh is None:
            raise ConfigError("The mesh exists once the processes have started: from the `setup` hook on.")
        return self._mesh

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not _distributed_is_initialized():
            return obj
        box = [obj]
        for axis in self._everyone:
            if axis.group is not None:
                first = src if self.rank_in_step is None else axis.ranks[0]
                with self.topology.events.span(Phase.SYNC, label="broadcast"):
                    dist.broadcast_object_list(box, first, group=axis.group, device=torch.device("cpu"))
        return box[0]

    @override
    def barrier(self, name: str | None = None) -> None:
        if _distributed_is_initialized():
            span = self.topology.events.span(Phase.SYNC, label="barrier")
            with span, waiting(self.topology, f"Barrier ({name or 'of all ranks'})"):
                for axis in self._everyone:
                    if axis.group is not None:
                        dist.barrier(group=axis.group)

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        if not isinstance(tensor, Tensor) or self.topology.dp.size == 1:
            return tensor
        name = str(reduce_op or "sum").lower().rsplit(".", 1)[-1]
        op = _REDUCTIONS.get(name)
        if op is None:
            raise ConfigError(f"reduce_op={reduce_op!r} is not known. Use one of {', '.join(map(repr, _REDUCTIONS))}.")
        value = tensor.to(self.root_device).clone()
        if op == "avg" and not value.is_floating_point():
            value = value.to(torch.get_default_dtype())
        return all_reduce(value, self.topology.dp, op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        if self.topology.dp.size == 1:
            return tensor
        with timed(self.topology.dp, "all_gather", tensor):
            return _all_gather_ddp_if_available(tensor, group=self.topology.dp.group, sync_grads=sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self.topology.world.size == 1:
            return decision
        value = torch.tensor(int(decision))
        with self.topology.events.span(Phase.SYNC, label="decision"):
            for axis in self._everyone:
                value = all_reduce(value, axis, "min" if all else "max")
            return bool(value)
