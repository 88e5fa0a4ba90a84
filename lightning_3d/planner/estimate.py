"""What a layout costs: memory, time and where it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_3d.errors import ConfigError
from lightning_3d.planner.cluster import Cluster
from lightning_3d.planner.communication import Group, Links
from lightning_3d.planner.compute import LayerModel, PartTime
from lightning_3d.planner.constants import Constants, constants
from lightning_3d.planner.flops import hardware_flops_per_token, model_flops_per_token
from lightning_3d.planner.gpus import CPU
from lightning_3d.planner.kernels import Kernels
from lightning_3d.planner.layout import Layout
from lightning_3d.planner.memory import GB, StageMemory, chunk_parameters, stage_memory
from lightning_3d.planner.pipeline import chunk_ranks, pipeline_time
from lightning_3d.planner.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One optimizer step of a layout. Seconds, unless the name says otherwise."""

    step_time_s: float
    """Wall time of the step."""
    tokens_per_s_per_gpu: float
    """Tokens trained per second, divided by all GPUs."""
    memory_gb: float
    """Peak of the tensors on the fullest rank, as ``torch.cuda.max_memory_allocated`` has it, in 1e9 bytes."""
    device_memory_gb: float
    """The same as ``nvidia-smi`` shows it: with CUDA's context, NCCL and the allocator's fragments."""
    memory: tuple[StageMemory, ...]
    """Memory of a rank of every pipeline stage by kind, in bytes."""
    fits: bool
    """Whether the fullest rank fits into its GPU."""
    bubble_fraction: float
    """Idle time of the pipeline as a fraction of the *total* step time, mean over stages."""
    mfu: float
    """Model-FLOPs utilisation: operations that training needs (full attention), of the dense 16-bit or 8-bit peak."""
    hfu: float
    """Hardware-FLOPs utilisation: with what is recomputed; about 4/3 of ``mfu`` under full recomputation."""
    model_tflops_per_gpu: float
    """Operations that training needs, in 1e12 per second and GPU."""
    compute_s: float
    """Kernels of the busiest stage."""
    tp_s: float
    """Collectives inside layers that the busiest stage waits for: tensor, context and expert parallel."""
    pp_s: float
    """Waiting of the busiest stage for other stages: the bubble and messages."""
    dp_s: float
    """All collectives over replicas, hidden or not."""
    exposed_dp_s: float
    """Those of them that the step waits for."""
    optimizer_s: float
    """The optimizer's own step."""
    time_share: Mapping[str, float]
    """Fractions of the step: ``compute``, ``tp``, ``pp`` (bubble and messages), ``dp``, ``other``; they add up to 1."""
    chunk_s: tuple[tuple[float, float, float], ...]
    """Of every chunk and one micro-batch: forward, whole backward, the part of it for weights."""
    message_s: float
    """A message between two stages."""

    @property
    def exposed_communication_s(self) -> float:
        """Communication that the step waits for, the bubble left out."""
        return self.tp_s + self.exposed_dp_s


def estimate(
    shape: ModelShape, cluster: Cluster, layout: Layout, constants_of: Mapping[str, Constants] | None = None
) -> Estimate:
    """Predict a step of ``shape`` on ``cluster`` under ``layout``.

    Args:
        shape: The model.
        cluster: GPUs and links.
        layout: Sizes of the axes and settings of the run.
        constants_of: Constants by GPU generation instead of the fitted ones (for fits and experiments).

    Raises:
        ConfigError: If the layout cannot run on the cluster or cut the model.
    """
    _check(shape, cluster, layout)
    device = cluster.device
    if constants_of is None:
        known = constants(device.generation, cluster.own_constants)
    else:
        known = constants_of[device.generation]
    kernels = Kernels(device, known, fp8=layout.precision == "fp8", bits=8 * layout.element_bytes)
    links = Links(cluster, known)
    model = LayerModel(shape, layout, kernels, links)
    chunks, layer = layout.chunk_layers(shape), model.layer()
    parts = _parts(model, layer, chunks)
    p, m = layout.pipeline_parallel, layout.micro_batches
    owners = chunk_ranks(layout.schedule_name, p, layout.virtual_stages)
    worst = _most_parameters(shape, layout, chunks, owners)
    replicas = Group(layout.data_parallel * layout.context_parallel, layout.tensor_parallel)
    sharded = _sharded_slowdown(layer, worst, shape, layout, links, replicas)
    forward = [part.forward + part.forward_tp + n * sharded.forward for part, n in zip(parts, chunks, strict=True)]
    backward = [part.backward + part.backward_tp + n * sharded.backward for part, n in zip(parts, chunks, strict=True)]
    message = model.tokens * shape.hidden * layout.element_bytes / layout.message_cut
    send = links.send(message, cluster.world_size // p) if p > 1 else 0.0
    if not layout.overlap_pipeline and p > 1:
        forward, backward = [f + send for f in forward], [b + send for b in backward]
    pipeline = pipeline_time(
        layout.schedule_name, p, layout.virtual_stages, m, forward, backward, [part.weight for part in parts],
        send if layout.overlap_pipeline else 0.0,
    )  # fmt: skip
    busiest = max(range(p), key=lambda rank: pipeline.busy[rank])
    mine = [part for part, owner in zip(parts, owners, strict=True) if owner == busiest]
    compute = m * sum(part.forward + part.backward for part in mine)
    tp = m * sum(part.forward_tp + part.backward_tp for part in mine)
    layer_runs = m * sum(n for n, owner in zip(chunks, owners, strict=True) if owner == busiest)
    sharded_total = layer_runs * (sharded.forward + sharded.backward)
    own_forward, own_backward = (
        sum(time for time, owner in zip(times, owners, strict=True) if owner == busiest)
        for times in (forward, backward)
    )
    dp_total, exposed = _data_parallel(worst, layout, links, replicas, own_forward, own_backward)
    dp_total, exposed = dp_total + layer_runs * sharded.collectives, exposed + sharded_total
    optimizer = kernels.moving(worst / (replicas.size if layout.zero_stage else 1) * 32, 4)
    step = (pipeline.total + exposed - sharded_total + optimizer) * (1 + known.step_overhead)
    rate = layout.samples * shape.seq_len / step / cluster.world_size
    memory = stage_memory(shape, layout)
    fullest = max(stage.total for stage in memory) / GB
    on_device = fullest if device.generation == CPU else max(stage.on_device for stage in memory) / GB
    waiting = max(0.0, pipeline.total - compute - tp - sharded_total)
    shares = {"compute": compute, "tp": tp, "pp": waiting, "dp": exposed}
    share = {name: seconds / step for name, seconds in shares.items()}
    share["other"] = max(0.0, 1.0 - sum(share.values()))
    return Estimate(
        step_time_s=step,
        tokens_per_s_per_gpu=rate,
        memory_gb=fullest,
        device_memory_gb=on_device,
        memory=memory,
        fits=on_device <= cluster.gpu_memory_gb,
        bubble_fraction=pipeline.bubble_fraction * pipeline.total / step,
        mfu=rate * model_flops_per_token(shape) / kernels.peak,
        hfu=rate * hardware_flops_per_token(shape, layout.activation_checkpointing) / kernels.peak,
        model_tflops_per_gpu=rate * model_flops_per_token(shape) / 1e12,
        compute_s=compute,
        tp_s=tp,
        pp_s=waiting,
        dp_s=dp_total,
        exposed_dp_s=exposed,
        optimizer_s=optimizer,
        time_share=share,
        chunk_s=tuple(zip(forward, backward, (part.weight for part in parts), strict=True)),
        message_s=send,
    )


def _check(shape: ModelShape, cluster: Cluster, layout: Layout) -> None:
    if layout.world_size != cluster.world_size:
        raise ConfigError(
            f"tensor_parallel x pipeline_parallel x data_parallel x context_parallel = {layout.tensor_parallel} x"
            f" {layout.pipeline_parallel} x {layout.data_parallel} x {layout.context_parallel} = {layout.world_size},"
            f" but the cluster {cluster} has {cluster.world_size} GPUs. Change a size so that they are equal."
        )
    if shape.heads % layout.tensor_parallel:
        raise ConfigError(
            f"tensor_parallel={layout.tensor_parallel} does not divide heads={shape.heads}. Use a divisor."
        )


def _parts(model: LayerModel, layer: PartTime, chunks: Sequence[int]) -> list[PartTime]:
    """Times of every chunk, of which the first has the embedding and the last the head."""
    head, embedding, last = model.head(), model.embedding(), len(chunks) - 1
    return [_chunk(layer, n, embedding if c == 0 else None, head if c == last else None) for c, n in enumerate(chunks)]


def _most_parameters(shape: ModelShape, layout: Layout, chunks: Sequence[int], owners: Sequence[int]) -> float:
    """Parameters that a rank of the fullest stage computes with."""
    held = [0.0] * layout.pipeline_parallel
    for chunk, (layers, owner) in enumerate(zip(chunks, owners, strict=True)):
        held[owner] += chunk_parameters(shape, layers, chunk == 0, chunk == len(chunks) - 1, layout)
    return max(held)


def _chunk(layer: PartTime, layers: int, before: PartTime | None, after: PartTime | None) -> PartTime:
    ends = [part for part in (before, after) if part is not None]
    return PartTime(
        *(
            layers * getattr(layer, name) + sum(getattr(part, name) for part in ends)
            for name in PartTime.__dataclass_fields__
        )
    )


@dataclass(frozen=True)
class _Sharded:
    """What gathering parameters and reducing gradients in every micro-batch adds to a layer. Seconds."""

    forward: float = 0.0
    backward: float = 0.0
    collectives: float = 0.0
    """All of them, also what hides."""


def _sharded_slowdown(
    layer: PartTime, held: float, shape: ModelShape, layout: Layout, links: Links, replicas: Group
) -> _Sharded:
    if not layout.communicates_each_micro_batch or replicas.size == 1:
        return _Sharded()
    parameters = held * layout.pipeline_parallel / shape.layers
    gather = links.gather(layout.element_bytes * parameters, replicas) if layout.zero_stage == 3 else 0.0
    reduce = links.gather(layout.reduce_bytes * parameters, replicas)

    def added(compute: float, communication: float) -> float:
        return max(0.0, communication - compute) + links.constants.overlap_cost * min(compute, communication)

    return _Sharded(
        forward=added(layer.forward + layer.forward_tp, gather),
        backward=added(layer.backward + layer.backward_tp, gather + reduce),
        collectives=2 * gather + reduce,
    )


def _data_parallel(
    held: float, layout: Layout, links: Links, replicas: Group, forward: float, backward: float
) -> tuple[float, float]:
    """Seconds of the collectives over replicas once a step, and those that nothing hides."""
    if replicas.size == 1:
        return 0.0, 0.0
    reduce = links.gather(layout.reduce_bytes * held, replicas)
    gather = links.gather(layout.element_bytes * held, replicas) if layout.zero_stage else 0.0
    if layout.communicates_each_micro_batch:
        return (gather, gather) if layout.zero_stage == 2 else (0.0, 0.0)
    if not layout.overlap_grad_reduce or not layout.zero_stage:
        # Every replica gets all sums. So it does, whatever it needs, in systems that do not overlap.
        reduce *= 2
    total = reduce + gather
    if not layout.overlap_grad_reduce:
        return total, total
    # Reduced behind the last backward, gathered behind the first forward; what hides still costs a little. Of several
    # chunks, one is done with its last micro-batch a round of p micro-batches before the next.
    v, round_size = layout.virtual_stages, min(layout.pipeline_parallel, layout.micro_batches)
    rounds = (1 + (v - 1) * round_size) / v
    hidden = min(reduce, rounds * backward) + min(gather, rounds * forward)
    return total, total - hidden * (1 - links.constants.overlap_cost)
