"""What the fullest rank of a layout holds, counted from a module's parameters, before anything is laid out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from lightning_3d import tensor_parallel
from lightning_3d.config import ParallelConfig, Sizes
from lightning_3d.pipeline.blocks import find_block_lists, share_out
from lightning_3d.pipeline.observe import call_order
from lightning_3d.planner import Layout, StageMemory
from lightning_3d.planner.memory import state_bytes


def fullest_rank(
    module: nn.Module,
    config: ParallelConfig,
    sizes: Sizes,
    precision: str,
    trains: bool = True,
    order: Sequence[str] | None = None,
) -> StageMemory:
    """Weights, gradients and Adam's states of the rank that holds most, in bytes; no activations.

    Args:
        module: The whole module; parameters may have no memory.
        config: The options of the strategy.
        sizes: Ranks along every axis.
        precision: Of the Trainer.
        trains: Whether there are gradients and an optimizer; frozen parameters have none.
        order: Names of modules in the order of their calls, empty if unknown; for a pipeline it is looked for.

    Raises:
        ConfigError, PlanError, StageError: if the module cannot be cut so.
    """
    held, trained = max(
        (tuple(map(sum, zip(*stage, strict=True))) for stage in _by_stage(module, config, sizes, order)),
        default=(0.0, 0.0),
    )
    reduce = 8 if precision == "64-true" and config.reduce_dtype is None else 4
    each = state_bytes(Layout(precision=precision).precision, config.zero_stage, reduce)
    updated = trained if trains else 0.0
    return StageMemory(
        parameters=held * (each.parameters + each.parameters_shared / sizes.dp),
        gradients=updated * (each.gradients + each.gradients_shared / sizes.dp),
        optimizer=updated * (each.optimizer + each.optimizer_shared / sizes.dp),
        activations=0.0,
        logits=0.0,
        buffers=0.0,
    )


def _by_stage(
    module: nn.Module, config: ParallelConfig, sizes: Sizes, order: Sequence[str] | None
) -> Iterable[list[tuple[float, float]]]:
    """For every stage, of every parameter on it: elements that one rank holds, and how many of them are trained."""
    parts = cut_parameters(module, config, sizes.tp)
    names = dict(module.named_parameters())

    def counts(chosen: Iterable[str]) -> list[tuple[float, float]]:
        found = [(0.0, 0.0)]
        for name in chosen:
            elements = names[name].numel() / (sizes.tp if name in parts else 1)
            found.append((elements, elements * names[name].requires_grad))
        return found

    if sizes.pp == 1:
        return [counts(names)]
    num_chunks = sizes.pp * config.virtual_stages
    order = (call_order(module) or ()) if order is None else order
    lists = find_block_lists(module, config.pipeline_blocks, num_chunks, order)
    split, virtual = config.pipeline_split, config.virtual_stages
    chunks = share_out(module, lists, num_chunks, split, order or None, virtual_stages=virtual)
    stages: list[set[str]] = [set() for _ in range(sizes.pp)]
    for name in names:
        for chunk in chunks.chunks_of(name.rpartition(".")[0]):
            stages[chunk % sizes.pp].add(name)
    return [counts(stage) for stage in stages]


def cut_parameters(module: nn.Module, config: ParallelConfig, tp: int) -> set[str]:
    """Names of the parameters that tensor parallelism cuts: the matrices of cut layers.

    Raises:
        ConfigError, PlanError: if the module cannot be cut so.
    """
    if tp == 1:
        return set()
    lists = find_block_lists(module, config.pipeline_blocks)
    plan = tensor_parallel.plan(module, [item.blocks for item in lists], config, tp)
    layers = {cut.name for cut in plan.outside}
    cut: set[str] = set()
    for block in plan.blocks:
        layout = block.layout([0] * len(block.regions))
        whole = {column.name for region in layout.regions for column in region.columns if column.shared_heads}
        for name in block.names:
            layers |= {f"{name}.{layer}" for layer in layout.names - whole}
            cut |= {
                ".".join(filter(None, (name, region.row, weight.name)))
                for region in layout.regions
                for weight in region.weights
            }
    held: Mapping[str, nn.Parameter] = dict(module.named_parameters())
    inside = {
        name
        for name, value in held.items()
        if value.ndim > 1 and any(_within(name, layer) for layer in _around(name, layers))
    }
    return inside | (cut & held.keys())


def _around(name: str, layers: set[str]) -> list[str]:
    pieces = name.split(".")
    return [prefix for end in range(1, len(pieces)) if (prefix := ".".join(pieces[:end])) in layers]


def _within(name: str, layer: str) -> bool:
    return name.startswith(layer + ".")
