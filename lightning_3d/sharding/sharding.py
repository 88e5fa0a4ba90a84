"""What the replicas of a stage share out and sum up, behind the four calls that the engine makes in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.collectives import all_reduce
from lightning_3d.config import ParallelConfig
from lightning_3d.events import Phase
from lightning_3d.initialization import materialise
from lightning_3d.mesh import Mesh
from lightning_3d.placeholder import is_placeholder
from lightning_3d.sharding.gradients import OwnedParameter, sum_over_tensor_parallel
from lightning_3d.sharding.manual import ManualUse
from lightning_3d.sharding.reducer import BUCKET_BYTES, BucketReducer, by_chunk
from lightning_3d.sharding.ties import Tie, sum_over_ties
from lightning_3d.sharding.zero import UNIT_BYTES, ZERO_RULES, ZeroRule, ZeroShards, unshardable


class Sharding:
    """Data parallelism of one stage: ZeRO 0 to 3, and the sums of gradients over every axis.

    The gradients of a step arrive as sums over this rank's micro-batches, already scaled such that their *mean* over
    replicas is the gradient of the whole batch; after ``finish(sync=True)`` they are that gradient. A parameter that
    no replica used has no gradient; where only some replicas used it, the others count as zero. At stage 3 every
    replica must call the same blocks, since a block is gathered from all of them when it is called.

    With ``accumulate_grad_batches``, steps before the last call with ``sync=False``. At stages 0 and 1 they send
    nothing and keep whole gradients (and, at stage 1, gathered parameters); at stages 2 and 3 gradients are
    reduce-scattered at every micro-batch, which costs traffic and saves that memory.
    """

    def __init__(
        self,
        rule: ZeroRule,
        mesh: Mesh,
        owned: Sequence[OwnedParameter],
        shards: ZeroShards | None,
        reducer: BucketReducer | None,
        partial: Sequence[nn.Parameter],
        ties: Sequence[Tie],
        note: str,
    ) -> None:
        self.rule = rule
        """The row of :data:`~lightning_3d.sharding.zero.ZERO_RULES` in use."""
        self.owned = list(owned)
        """The parameters of which this rank holds values, in registration order."""
        self.shards = shards
        self.reducer = reducer
        self.parameters_unsharded_note = note
        """Which parameters stay whole although the ZeRO stage shards, and why; empty if none."""
        self._mesh = mesh
        self._partial = list(partial)
        self.ties = list(ties)
        """The weights of this rank that other stages have a copy of."""
        self._manual: ManualUse | None = None

    def allow_manual_use(self) -> None:
        """From now on steps may run several forwards, backwards and optimizer steps, in any order."""
        if self.shards is not None and self._manual is None:
            self._manual = ManualUse(self.shards)

    def gather(self) -> None:
        """In such a step, gather parameters that are not: a graph may have been made before they were freed."""
        if self._manual is not None:
            self._manual.gather()

    def prepare_forward(self) -> None:
        """Before the first forward of a training step or of an evaluation batch."""
        if self.shards is not None:
            self.shards.prepare_forward()

    def prepare_backward(self, chunk: int, last_of_chunk: bool, last_of_step: bool, sync: bool = True) -> None:
        """Before the backward of one micro-batch.

        Args:
            chunk: The chunk that runs.
            last_of_chunk: Whether it is the chunk's last backward in this step.
            last_of_step: Whether it is this rank's last backward in this step.
            sync: Whether the optimizer steps after this step.
        """
        if self.shards is not None:
            self.shards.prepare_backward(chunk, last_of_chunk, last_of_step, sync)
        if self.reducer is not None:
            self.reducer.prepare_backward(chunk, last_of_chunk, last_of_step, sync)

    def finish(self, sync: bool = True) -> None:
        """After the last backward of a step; on ranks without a backward too, since it communicates if ``sync``."""
        if self.shards is not None:
            self.shards.finish(sync)
        if self.reducer is not None and sync:
            self.reducer.flush()
        presence = self._ask_presence() if sync and self._mesh.dp.size > 1 else None
        if self.reducer is not None:
            self.reducer.finish()
        if presence is not None:
            self._drop_absent(*presence)
        if self.shards is not None and sync:
            self.shards.arrived = {}
        if sync:
            sum_over_tensor_parallel(self._partial, self._mesh)
            sum_over_ties(self.ties)

    def release(self) -> None:
        """Free gathered parameters: after an evaluation batch, and before user code reads or changes parameters."""
        if self.shards is not None:
            self.shards.release()

    def _ask_presence(self) -> tuple[list[nn.Parameter], Tensor, Any]:
        """Start to agree with the other replicas on which parameters anyone has a gradient of.

        Only hosts know, and a host message does not make them wait for the device.
        """
        arrived: dict[int, bool] = {}
        if self.shards is not None:
            arrived.update(self.shards.arrived)
        if self.reducer is not None:
            arrived.update(self.reducer.arrived)
        parameters = [item.param for item in self.owned]
        flags = torch.tensor([arrived.get(id(p), p.grad is not None) for p in parameters], dtype=torch.uint8)
        work = None
        if len(parameters):
            work = all_reduce(flags, self._mesh.control_dp, "max", async_op=True)
        return parameters, flags, work

    def _drop_absent(self, parameters: list[nn.Parameter], flags: Tensor, work: Any) -> None:
        if work is None:
            return
        with self._mesh.events.span(Phase.DP, label="presence"):
            work.wait()
        for parameter, flag in zip(parameters, flags.tolist(), strict=True):
            if not flag:
                parameter.grad = None


def build_sharding(
    stage: nn.Module,
    blocks: Mapping[int, Sequence[nn.Module]],
    mesh: Mesh,
    config: ParallelConfig,
    compute_dtype: torch.dtype | None = None,
    partial: frozenset[str] = frozenset(),
    ties: Sequence[Tie] = (),
    unit_bytes: int = UNIT_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
) -> Sharding:
    """Shard ``stage`` over the replicas, in place; sharded parameters become new objects under their names.

    Collective over the dp axis. Parameters that had a recipe instead of memory have their values afterwards. Call it
    after the tensor-parallel plan is applied and the stage is cut, and before :meth:`Cut.install`, whose hooks must run
    before those of FSDP2.

    Args:
        stage: The root; its parameters are named relative to ``stage.module`` if it has one.
        blocks: The blocks of every chunk of this rank.
        mesh: The mesh.
        config: ``zero_stage`` and ``reduce_dtype`` are read.
        compute_dtype: Type in which sharded parameters are gathered (mixed precision); ``None``: their own.
        partial: Names of replicated parameters whose gradients are partial on each tensor-parallel rank.
        ties: Weights with copies on other stages.
        unit_bytes: Blocks are grouped until their parameters have this size.
        bucket_bytes: Size of the all-reduces of parameters that are kept whole.
    """
    module: nn.Module = getattr(stage, "module", stage)
    rule = ZERO_RULES[config.zero_stage if mesh.dp.size > 1 else 0]
    reduce_dtype = getattr(torch, config.reduce_dtype) if config.reduce_dtype else None
    named = {name: p for name, p in module.named_parameters() if not is_placeholder(p)}
    owners = by_chunk(blocks)
    shards, note = None, ""
    whole = list(named.values())
    if rule.is_sharded:
        assert mesh.device_mesh is not None
        reasons = unshardable(stage, blocks, compute_dtype is not None, unit_bytes)
        note = "\n".join(f"{name} stays whole: {reasons[p]}" for name, p in named.items() if p in reasons)
        whole = [parameter for parameter in named.values() if parameter in reasons]
        ignored = {parameter for parameter in stage.parameters() if is_placeholder(parameter)} | set(whole)
        shards = ZeroShards(
            stage,
            blocks,
            rule,
            mesh.device_mesh["dp"],
            compute_dtype,
            _sharded_reduce_dtype(reduce_dtype, named.values()),
            ignored,
            unit_bytes,
            mesh.events,
        )
    materialise(module, mesh.device)
    reducer = None
    if whole and mesh.dp.size > 1:  # alone, gradients are left to autograd
        pairs = [(parameter, owners.get(id(parameter))) for parameter in whole]
        reducer = BucketReducer(pairs, mesh.dp, reduce_dtype, bucket_bytes, overlap=shards is None)
    final = {name: p for name, p in module.named_parameters() if not is_placeholder(p)}
    now = {id(parameter): final[name] for name, parameter in named.items()}
    ties = [replace(tie, param=now[id(tie.param)]) for tie in ties]
    copies = {id(tie.param) for tie in ties if not tie.counted}
    owned = [OwnedParameter(name, parameter, id(parameter) not in copies) for name, parameter in final.items()]
    partials = [parameter for name, parameter in final.items() if name in partial]
    return Sharding(rule, mesh, owned, shards, reducer, partials, ties, note)


def _sharded_reduce_dtype(chosen: torch.dtype | None, parameters: Any) -> torch.dtype | None:
    """Float32 unless chosen otherwise; parameters of float64 keep it."""
    widest = torch.float32
    for parameter in parameters:
        if parameter.dtype.is_floating_point:
            widest = torch.promote_types(widest, parameter.dtype)
    return chosen or widest
