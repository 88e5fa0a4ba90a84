"""Rules of thumb, as warnings with the numbers of the case: they hold whatever a cost model says."""

from __future__ import annotations

from lightning_3d.config import MICRO_BATCHES_PER_STAGE
from lightning_3d.planner.cluster import Cluster
from lightning_3d.planner.estimate import Estimate
from lightning_3d.planner.explain import MEMORY_ERROR
from lightning_3d.planner.gpus import CPU
from lightning_3d.planner.layout import Layout
from lightning_3d.planner.memory import chunk_parameters
from lightning_3d.planner.pipeline import pipeline_time
from lightning_3d.planner.shape import ModelShape

TILE = 128
"""Sides of matrices that are multiples of it fill the tiles of matrix products."""
_EXPOSED = 0.1


def warnings(
    shape: ModelShape, cluster: Cluster, layout: Layout, estimate: Estimate, usable_gb: float
) -> tuple[str, ...]:
    """What an experienced person would say to this layout; one sentence each, empty if nothing."""
    found = (
        _tensor_parallel_across_nodes(cluster, layout, estimate),
        _few_micro_batches(layout),
        _many_replicas(shape, layout, estimate),
        _sharding_in_every_micro_batch(shape, layout),
        _tight_memory(estimate, usable_gb),
        _vocabulary(shape, layout),
        _heads(shape, layout),
        _uneven_stages(shape, layout),
        _precision(cluster, layout),
    )
    return tuple(text for text in found if text)


def _tensor_parallel_across_nodes(cluster: Cluster, layout: Layout, estimate: Estimate) -> str | None:
    if layout.tensor_parallel <= cluster.domain:
        return None
    inside, outside = cluster.nvlink_bandwidth / 1e9, cluster.network_bandwidth / 1e9
    return (
        f"tensor_parallel={layout.tensor_parallel} is wider than the {cluster.domain} GPUs that NVLink connects: every"
        f" layer waits for links of {outside:.0f} GB/s instead of {inside:.0f} GB/s ({estimate.time_share['tp']:.0%} of"
        f" the step). Use {cluster.domain} or less."
    )


def _few_micro_batches(layout: Layout) -> str | None:
    stages, count = layout.pipeline_parallel, layout.micro_batches
    enough = MICRO_BATCHES_PER_STAGE * stages
    if stages == 1 or count >= enough:
        return None
    here, there = (_schedule_bubble(layout, number) for number in (count, enough))
    return (
        f"{count} micro-batches for {stages} stages: {layout.schedule_name} leaves {here:.0%} of the step"
        f" idle. With {enough}, 4 per stage, it would be {there:.0%}: a global batch of"
        f" {enough * layout.micro_batch_size * layout.data_parallel}, smaller micro-batches, or fewer stages."
    )


def _schedule_bubble(layout: Layout, micro_batches: int) -> float:
    """Idle fraction of the total time if all chunks took the same time."""
    equal = [1.0] * layout.num_chunks
    stages, chunks = layout.pipeline_parallel, layout.virtual_stages
    twice = [2.0] * layout.num_chunks
    return pipeline_time(layout.schedule_name, stages, chunks, micro_batches, equal, twice, equal).bubble_fraction


def _many_replicas(shape: ModelShape, layout: Layout, estimate: Estimate) -> str | None:
    exposed, replicas = estimate.time_share["dp"], layout.data_parallel
    if replicas == 1 or exposed < _EXPOSED:
        return None
    tokens = layout.micro_batches * layout.micro_batch_size * shape.seq_len
    return (
        f"data_parallel={replicas} leaves each replica {layout.micro_batches} micro-batches ({tokens:,} tokens) per"
        f" step: {exposed:.0%} of the step waits for gradients and parameters on their way between replicas. A larger"
        " global batch would hide more of it."
    )


def _sharding_in_every_micro_batch(shape: ModelShape, layout: Layout) -> str | None:
    replicas, count = layout.data_parallel * layout.context_parallel, layout.micro_batches
    if layout.zero_stage < 2 or layout.pipeline_parallel == 1 or count == 1 or replicas == 1:
        return None
    held = chunk_parameters(shape, shape.layers // layout.pipeline_parallel, True, False, layout)
    once = held * (layout.reduce_bytes + 2)
    each = held * (layout.reduce_bytes * count + (4 * count if layout.zero_stage == 3 else 2))
    return (
        f"zero_stage={layout.zero_stage} under a pipeline communicates in each of {count} micro-batches:"
        f" {each / 1e9:.0f} GB per rank and step, where zero_stage=1 sends {once / 1e9:.0f} GB."
    )


def _tight_memory(estimate: Estimate, usable_gb: float) -> str | None:
    spare = usable_gb - estimate.device_memory_gb
    if spare < 0 or spare > MEMORY_ERROR * usable_gb:
        return None
    return (
        f"Memory is tight: {spare:.1f} GB of {usable_gb:.1f} GB are left on the fullest rank, less than the error of"
        " the prediction. Try it with `lightning-3d dry-run` first."
    )


def _vocabulary(shape: ModelShape, layout: Layout) -> str | None:
    unit = layout.tensor_parallel * (TILE if layout.tensor_parallel == 1 else TILE // 2)
    if shape.vocab % unit == 0:
        return None
    padded = -(-shape.vocab // unit) * unit
    what = "ranks hold unequal parts and " if shape.vocab % layout.tensor_parallel else ""
    return (
        f"A vocabulary of {shape.vocab:,} is no multiple of {unit}: {what}the head's matrix products leave tiles half"
        f" filled. Pad it to {padded:,}."
    )


def _heads(shape: ModelShape, layout: Layout) -> str | None:
    kv_heads = shape.kv_heads or shape.heads
    if kv_heads < layout.tensor_parallel:
        return (
            f"tensor_parallel={layout.tensor_parallel} exceeds kv_heads={kv_heads}: each head of keys and values is"
            f" kept and computed by {layout.tensor_parallel // kv_heads} ranks."
        )
    if shape.head_width % 64:
        return f"Heads of width {shape.head_width} are no multiple of 64, which attention kernels want: expect less."
    return None


def _uneven_stages(shape: ModelShape, layout: Layout) -> str | None:
    chunks = layout.chunk_layers(shape)
    if max(chunks) == min(chunks) or layout.pipeline_split != "uniform":
        return None
    lost = max(chunks) * len(chunks) / shape.layers - 1
    return (
        f"{shape.layers} layers over {len(chunks)} chunks: the longest has {max(chunks)}, the shortest {min(chunks)};"
        f" all wait for the longest ({lost:.0%})."
    )


def _precision(cluster: Cluster, layout: Layout) -> str | None:
    generation = cluster.device.generation
    if generation == "volta" and layout.precision.startswith("bf16"):
        return (
            f"A {cluster.device.name} has no bfloat16 arithmetic, which is many times slower there than predicted. Use"
            " precision='16-mixed'."
        )
    if generation == CPU:
        return None
    if layout.precision == "64-true":
        return "precision='64-true' is timed at a quarter of the 16-bit peak, which few GPUs reach."
    if layout.precision == "32-true":
        return (
            "precision='32-true' is timed as if products ran on tensor cores: set"
            " torch.set_float32_matmul_precision('high'). Full float32, PyTorch's default, takes several times as long."
        )
    return None
