"""What the strategy would do with a model, found in one process: its blocks, cut, plan and ties, as plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_3d import tensor_parallel
from lightning_3d.config import ParallelConfig, Sizes
from lightning_3d.dry_run.simulated_ranks import on_tensor_parallel_ranks
from lightning_3d.errors import ConfigError, ThreeDError
from lightning_3d.mesh import Mesh
from lightning_3d.pipeline.blocks import BlockList, ChunkMap, find_block_lists
from lightning_3d.pipeline.ties import find_shared
from lightning_3d.tensor_parallel import AppliedPlan, LayerPlan
from lightning_3d.trainer.setup.assembly import describe
from lightning_3d.trainer.setup.blueprint import chunk_map
from lightning_3d.trainer.setup.layout import Layout
from lightning_3d.trainer.setup.preflight import check_steps


@dataclass(frozen=True)
class Blocks:
    """A list of repeated layers."""

    name: str
    kind: str
    """Class of its layers."""
    count: int
    parameters: int
    """Of all its layers together."""


@dataclass(frozen=True)
class ChunkFacts:
    """What one chunk of the pipeline holds."""

    chunk: int
    stage: int
    blocks: tuple[str, ...]
    outside: tuple[str, ...]
    """Modules outside the blocks that run with it."""
    parameters: int
    share: float
    """Of the cost of the model."""


@dataclass(frozen=True)
class Tie:
    """A parameter with several names, or on several stages."""

    names: tuple[str, ...]
    stages: tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """What would be refused."""

    part: str
    """``"steps"``, ``"cut"`` or ``"tensor parallelism"``."""
    kind: str
    """Class of the error."""
    message: str


@dataclass
class Examination:
    """Everything that the doctor says of a model."""

    model: str
    parameters: int
    sizes: dict[str, int]
    blocks: list[Blocks] = field(default_factory=list)
    chunks: list[ChunkFacts] = field(default_factory=list)
    everywhere: list[str] = field(default_factory=list)
    """Modules whose own parameters every chunk keeps."""
    cost_source: str = ""
    layers: list[LayerPlan] = field(default_factory=list)
    """Layers with matrices, and what tensor parallelism makes of each."""
    checks: list[dict[str, Any]] = field(default_factory=list)
    """Results of the comparison of cut blocks with whole ones, one for every kind."""
    ties: list[Tie] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    layout: Layout | None = None

    @property
    def is_input_wrong(self) -> bool:
        """Whether sizes or options do not fit the model: all that is wrong with a cut is what was asked for."""
        return any(problem.part == "cut" or problem.kind == ConfigError.__name__ for problem in self.problems)

    def as_json(self) -> dict[str, Any]:
        """The same as dictionaries, lists, numbers and strings."""
        found = dataclasses.asdict(self)
        del found["layout"]
        return {**found, "ok": not self.problems}


def examine(module: nn.Module, title: str, config: ParallelConfig, sizes: Sizes) -> Examination:
    """Find out what the strategy would do with ``module``; whatever it refuses is among the problems.

    Args:
        module: The whole model; its parameters may be on the meta device.
        title: What to call it.
        config: The options of the strategy.
        sizes: Ranks along every axis.
    """
    made = Examination(
        title,
        sum(parameter.numel() for parameter in module.parameters()),
        {"pipeline_parallel": sizes.pp, "data_parallel": sizes.dp, "tensor_parallel": sizes.tp},
    )
    lists: list[BlockList] = []
    try:
        lists = find_block_lists(module, config.pipeline_blocks)
        made.blocks = [_describe_list(module, item) for item in lists]
        chunks = chunk_map(module, lists, config, sizes.pp)
        _describe_cut(made, module, chunks, config, sizes)
    except ThreeDError as error:
        made.problems.append(Problem("cut", type(error).__name__, str(error)))
    if isinstance(module, pl.LightningModule):
        try:
            check_steps(module, config, sizes.pp)
        except ThreeDError as error:
            made.problems.append(Problem("steps", type(error).__name__, str(error)))
    if sizes.tp > 1:
        try:
            plan = tensor_parallel.plan(module, [item.blocks for item in lists], config, sizes.tp)
            applied = on_tensor_parallel_ranks(sizes.tp, lambda mesh: _apply(module, plan, mesh))
            made.layers = applied.layers
            made.checks = [dataclasses.asdict(check) for check in applied.checks]
        except ThreeDError as error:
            made.problems.append(Problem("tensor parallelism", type(error).__name__, str(error)))
    return made


def _apply(module: nn.Module, plan: tensor_parallel.Plan, mesh: Mesh) -> AppliedPlan:
    """Check ``plan`` and say what it does, without doing it: this rank owns nothing."""
    return tensor_parallel.apply(module, plan, mesh, lambda name: False)


def _describe_list(module: nn.Module, item: BlockList) -> Blocks:
    blocks = [module.get_submodule(name) for name in item.blocks]
    kinds = dict.fromkeys(type(block).__name__ for block in blocks)
    parameters = sum(p.numel() for block in blocks for p in block.parameters())
    return Blocks(item.name, " and ".join(kinds), len(blocks), parameters)


def _describe_cut(made: Examination, module: nn.Module, chunks: ChunkMap, config: ParallelConfig, sizes: Sizes) -> None:
    layout = describe(module, chunks, config, sizes)
    total = sum(layout.costs) or 1.0
    made.layout, made.cost_source = layout, layout.cost_source
    made.everywhere = [
        name or "the model itself" for name, owners in chunks.outside.items() if len(owners) == chunks.num_chunks > 1
    ]
    made.chunks = [
        ChunkFacts(
            chunk,
            chunk % sizes.pp,
            layout.chunks[chunk],
            tuple(name for name, owners in chunks.outside.items() if chunk in owners and name not in made.everywhere),
            layout.parameters[chunk],
            layout.costs[chunk] / total if layout.costs else 1.0,
        )
        for chunk in range(chunks.num_chunks)
    ]
    made.ties = [Tie(item.names, item.stages) for item in find_shared(module, chunks, sizes.pp)]
