"""Which layouts a model can be given on a cluster at all, and why not the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_3d.planner.cluster import Cluster
from lightning_3d.planner.layout import Layout
from lightning_3d.planner.shape import ModelShape
from lightning_3d.planner.split import balanced_split
from lightning_3d.schedules import ENGINE_SCHEDULES, SCHEDULES

MOST_CHUNKS = 8
"""Chunks of a pipeline rank at most: each more saves less of the bubble and sends as many messages."""
LARGEST_MICRO_BATCH = 32
RECOMPUTATIONS: tuple[str | int | None, ...] = (None, 4, 2, "full")
"""From none to all: every 4th block, every 2nd, every one. Each keeps less than the one before and takes longer."""

SEARCHED = (
    "tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel", "schedule", "virtual_stages",
    "micro_batch_size", "zero_stage", "activation_checkpointing",
)  # fmt: skip
"""Fields of a layout that may be given several values to choose from; any other has one."""


@dataclass(frozen=True)
class Sizes:
    """Ranks along the axes of one layout."""

    tp: int
    pp: int
    dp: int
    cp: int = 1

    def __str__(self) -> str:
        return f"tp{self.tp} pp{self.pp} dp{self.dp}" + (f" cp{self.cp}" if self.cp > 1 else "")


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]


def values(fixed: Mapping[str, Any], name: str, otherwise: Any) -> tuple[Any, ...]:
    """What the caller allows for an option: one value, several, or what is tried ``otherwise``."""
    given = fixed.get(name, otherwise)
    return tuple(given) if isinstance(given, list | tuple | range) else (given,)


def tensor_parallel_fault(shape: ModelShape, cluster: Cluster, size: int, across_nodes: bool) -> str | None:
    """Why layers cannot be cut over ``size`` ranks; ``None`` if they can."""
    kv_heads = shape.kv_heads or shape.heads
    if not across_nodes and (size > cluster.domain or cluster.domain % size):
        return f"does not divide the {cluster.domain} GPUs of a node, so layers would wait for the network"
    if shape.heads % size:
        return f"does not divide the {shape.heads} heads"
    if kv_heads % size and size % kv_heads:
        return f"neither divides the {kv_heads} heads of keys and values nor is a multiple of them"
    width = shape.expert_width if shape.experts else shape.ffn_width
    if width % size:
        return f"does not divide the MLP's width of {width}"
    return None


def all_sizes(
    shape: ModelShape, cluster: Cluster, global_batch: int, fixed: Mapping[str, Any], across_nodes: bool
) -> tuple[list[Sizes], dict[str, str]]:
    """The sizes that can work, and a reason for each size of an axis that cannot."""
    world, refused = cluster.world_size, dict[str, str]()
    found = []
    most = cluster.domain if not across_nodes else min(world, shape.heads)
    for tp in values(fixed, "tensor_parallel", [size for size in divisors(world) if size <= most]):
        if fault := tensor_parallel_fault(shape, cluster, tp, across_nodes):
            refused[f"tp{tp}"] = fault
            continue
        for cp in values(fixed, "context_parallel", 1):
            if world % (tp * cp):
                refused[f"tp{tp} cp{cp}"] = f"does not divide the {world} GPUs"
                continue
            for pp in values(fixed, "pipeline_parallel", divisors(world // (tp * cp))):
                if pp > shape.layers:
                    refused[f"pp{shape.layers + 1} and more"] = f"more stages than the {shape.layers} layers"
                    continue
                if world % (tp * cp * pp):
                    refused[f"tp{tp} pp{pp}"] = f"does not divide the {world} GPUs"
                    continue
                dp = world // (tp * cp * pp)
                if dp not in values(fixed, "data_parallel", dp):
                    continue
                if global_batch % dp:
                    refused[f"dp{dp}"] = f"does not divide the global batch of {global_batch}"
                    continue
                found.append(Sizes(tp, pp, dp, cp))
    return found, refused


def micro_batch_sizes(samples: int, fixed: Mapping[str, Any]) -> list[int]:
    """Samples of a micro-batch for a replica's batch of ``samples``, ascending."""
    wanted = values(fixed, "micro_batch_size", [size for size in divisors(samples) if size <= LARGEST_MICRO_BATCH])
    return sorted(size for size in wanted if samples % size == 0)


def pipelines(
    shape: ModelShape, stages: int, micro_batches: int, fixed: Mapping[str, Any], all_schedules: bool
) -> Iterator[tuple[str, int]]:
    """Schedules and chunks per rank that fit; gpipe only where it is asked for, as it keeps more and saves nothing."""
    known = [name for name in (SCHEDULES if all_schedules else ENGINE_SCHEDULES) if name != "gpipe"]
    for name in values(fixed, "schedule", known):
        rule = SCHEDULES.get(name)
        if stages == 1 and name != "1f1b":
            continue
        own = rule.virtual_stages if rule is not None else 1
        for v in values(fixed, "virtual_stages", _chunks(shape.layers, stages) if own is None else own):
            if v * stages > shape.layers or own not in (None, v):
                continue
            if own is None and (v == 1 or micro_batches % stages):
                continue  # every round of an interleaved schedule takes as many micro-batches as there are stages
            yield name, v


def one_sized(name: str) -> bool:
    """Whether a schedule has its own number of chunks per stage."""
    return name not in SCHEDULES or SCHEDULES[name].virtual_stages is not None


def pipeline_fault(shape: ModelShape, sizes: Sizes, global_batch: int, fixed: Mapping[str, Any]) -> str:
    """Why no schedule or micro-batch that was asked for can run on ``sizes``."""
    samples = global_batch // sizes.dp
    if not micro_batch_sizes(samples, fixed):
        wanted = " or ".join(map(str, values(fixed, "micro_batch_size", None)))
        return f"micro-batches of {wanted} do not divide the {samples} samples of a replica"
    chunks, most = values(fixed, "virtual_stages", 1), shape.layers // sizes.pp
    if min(chunks) > most:
        return f"{min(chunks)} chunks per stage, but {shape.layers} layers make at most {most}"
    names = values(fixed, "schedule", tuple(ENGINE_SCHEDULES))
    if sizes.pp == 1 and "1f1b" not in names:
        return f"{', '.join(names)} needs stages"
    if min(chunks) > 1 and (sizes.pp == 1 or all(one_sized(name) for name in names)):
        what = "one stage" if sizes.pp == 1 else ", ".join(names)
        return f"{what} cannot have {min(chunks)} chunks per stage (interleaved_1f1b on several stages can)"
    return f"an interleaved schedule needs a multiple of {sizes.pp} micro-batches and two chunks per stage at least"


def _chunks(layers: int, stages: int) -> list[int]:
    """Chunks per rank worth trying: those that make equal ones, or a few if none does."""
    most = min(MOST_CHUNKS, layers // stages)
    equal = [v for v in range(2, most + 1) if layers % (stages * v) == 0]
    return equal or [v for v in (2, 3, 4, 6, 8) if v <= most]


def layouts(
    shape: ModelShape, sizes: Sizes, micro_batch: int, pipeline: tuple[str, int], global_batch: int,
    fixed: Mapping[str, Any],
) -> Iterator[list[Layout]]:  # fmt: skip
    """For each ZeRO stage the layouts from no recomputation to recomputing all."""
    name, v = pipeline
    replicas = sizes.dp * sizes.cp
    # BLOOM's blocks hand on a bias per head and token (alibi), which the strategy does not cut along the sequence.
    cuttable = shape.seq_len % (sizes.tp * sizes.cp) == 0 and not shape.embedding_norm
    sequence_parallel = sizes.tp > 1 and cuttable
    rest = {name: value for name, value in fixed.items() if name not in SEARCHED}
    if sizes.pp > 1 and SCHEDULES.get(name) is not None:
        rest.setdefault("pipeline_split", balanced_split(shape, sizes.pp, v))
    rest.setdefault("sequence_parallel", sequence_parallel)
    rest.setdefault("loss_parallel", sizes.tp > 1)
    for zero_stage in values(fixed, "zero_stage", (1, 2, 3) if replicas > 1 else 1):
        yield [
            Layout(
                tensor_parallel=sizes.tp, pipeline_parallel=sizes.pp, data_parallel=sizes.dp,
                context_parallel=sizes.cp, schedule=name, virtual_stages=v, micro_batch_size=micro_batch,
                global_batch_size=global_batch, zero_stage=zero_stage, activation_checkpointing=recomputed, **rest,
            )
            for recomputed in values(fixed, "activation_checkpointing", RECOMPUTATIONS)
        ]  # fmt: skip
