"""How a module is cut, decided before anything of it is: by rank 0, and the same for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_3d import tensor_parallel
from lightning_3d.config import ParallelConfig, Sizes
from lightning_3d.mesh import Mesh
from lightning_3d.pipeline.blocks import BlockList, ChunkMap, find_block_lists, share_out
from lightning_3d.pipeline.costs import Costing, Costs, Positions, flop_costs, recomputed_share
from lightning_3d.pipeline.observe import call_order
from lightning_3d.pipeline.timing import time_costs
from lightning_3d.pipeline.wrappers import Wishes
from lightning_3d.precision import ThreeDPrecision
from lightning_3d.trainer.data.host_random import HostRandomState
from lightning_3d.trainer.data.messages import Channel, NotSent

T = TypeVar("T")


class Decide(Protocol):
    """Comes to one decision for all who need it."""

    def __call__(self, make: Callable[[], T], /) -> T:
        """What ``make`` returns where it is called."""


@dataclass(frozen=True)
class Blueprint:
    """How a module is cut."""

    wishes: Wishes
    """What wrappers that the module came with had asked for."""
    plan: tensor_parallel.Plan
    chunks: ChunkMap


def alone(make: Callable[[], T], /) -> T:
    """Decide without asking anybody."""
    return make()


def draw(
    module: nn.Module,
    config: ParallelConfig,
    sizes: Sizes,
    wishes: Wishes,
    profile: Costing | None = None,
    decide: Decide = alone,
) -> Blueprint:
    """Decide how ``module``, freed of wrappers, is cut; its buffers have values.

    Raises:
        ConfigError, PlanError, StageError: if it cannot be cut as asked.
    """
    lists = find_block_lists(module, config.pipeline_blocks)  # a plan does not depend on the pipeline
    blocks = [item.blocks for item in lists]
    plan = decide(partial(tensor_parallel.plan, module, blocks, config, sizes.tp))
    count = sizes.pp * config.virtual_stages

    def share() -> ChunkMap:
        order = (call_order(module) or ()) if count > 1 else ()
        lists = find_block_lists(module, config.pipeline_blocks, count, order)
        return chunk_map(module, lists, config, sizes.pp, profile, order)

    return Blueprint(wishes, plan, decide(share))


def tell_all(module: nn.Module, mesh: Mesh, make: Callable[[], T], /) -> T:
    """Let rank 0 decide something about ``module`` and tell the others, who have the same module. Collective.

    Running a model on made-up inputs takes longer than anything else in the set-up; done once, it cannot come out
    differently either. Where ``make`` raises on rank 0, or what it returns does not pickle, every rank does it by
    itself.
    """
    random = HostRandomState.get()
    try:
        return _told(module, mesh, make)
    finally:
        random.set()  # not every rank has drawn from it


def _told(module: nn.Module, mesh: Mesh, make: Callable[[], T]) -> T:
    channel = Channel(mesh.control_world, source=0)
    named: dict[str, Any] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
        **dict(module.named_modules(remove_duplicate=False)),
    }
    if not channel.is_source:
        told, _ = channel.exchange(named=named)
        return make() if told is None else told[0]
    try:
        made = make()
    except Exception:
        channel.exchange(None)
        raise
    try:
        channel.exchange((made,), names={id(part): name for name, part in named.items()})
    except NotSent:
        channel.exchange(None)
    return made


def chunk_map(
    module: nn.Module,
    lists: Sequence[BlockList],
    config: ParallelConfig,
    stages: int,
    profile: Costing | None = None,
    order: Sequence[str] | None = None,
) -> ChunkMap:
    """Which chunk owns what.

    Args:
        module: The whole model.
        lists: Its block lists, as a chain.
        config: The options of the pipeline.
        stages: Pipeline ranks.
        profile: Measures the blocks, for ``pipeline_split="profile"``; without it they are counted.
        order: Names of modules in the order of their calls, empty if unknown; for a pipeline it is looked for.
    """
    count = stages * config.virtual_stages
    if order is None and count > 1:
        order = call_order(module)
    recomputed = recomputed_share(config.activation_checkpointing)

    def count_costs(blocks: Sequence[str], outside: Positions) -> Costs:
        return flop_costs(module, blocks, outside, recomputed)

    costing = profile if profile is not None and config.pipeline_split == "profile" else count_costs
    return share_out(module, lists, count, config.pipeline_split, order or None, costing, config.virtual_stages)


def profiler(module: nn.Module, config: ParallelConfig, device: torch.device, precision: ThreeDPrecision) -> Costing:
    """Measures blocks on ``device``; counts them if that fails."""
    recomputed = recomputed_share(config.activation_checkpointing)

    def measure(blocks: Sequence[str], outside: Positions) -> Costs:
        costs: Costs | None = None
        try:
            costs = time_costs(module, blocks, outside, device, precision.forward_context, recomputed)
        except Exception as error:
            rank_zero_warn(f"The blocks could not be measured on {device}: {type(error).__name__}: {error}")
        return costs or flop_costs(module, blocks, outside, recomputed)

    return measure
