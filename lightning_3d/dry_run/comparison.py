"""A dry run beside the planner's estimate, and beside the memory of the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_3d.dry_run.job import Job
from lightning_3d.dry_run.report import DryRun, StageReport
from lightning_3d.errors import ThreeDError
from lightning_3d.planner import Cluster, Layout, ModelShape, estimate
from lightning_3d.planner.gpus import CPU
from lightning_3d.planner.memory import on_device, stage_memory
from lightning_3d.planner.reading import shape_of_module
from lightning_3d.trainer.setup.choice import planner_layout

GB = 1e9

_SAME = {
    "parameters": ("parameters", "gathered parameters"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations",),
    "logits": ("logits",),
    "buffers": ("communication", "temporary"),
}
"""The planner's kinds of memory, each with those of a dry run."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is said of the same job elsewhere."""

    estimated: tuple[Mapping[str, float], ...] = ()
    """The planner's memory of every reported stage by its kinds, in bytes; empty if it cannot be told."""
    found: tuple[Mapping[str, float], ...] = ()
    """That of the dry run, by the same kinds."""
    note: str = ""
    """Why there is no estimate, or what it rests on."""
    gpu: str = ""
    gpu_bytes: float = 0.0
    needed_bytes: float = 0.0
    """Of the fullest stage, with what CUDA, NCCL and the allocator take besides tensors."""
    step_time_s: float | None = None
    fits: bool | None = None
    """Whether the fullest stage fits; ``None`` where no GPU is known."""
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        """Numbers, strings, lists and dictionaries."""
        return asdict(self)


def compare(job: Job, found: DryRun, cluster: Cluster | None) -> Comparison:
    """Put ``found`` beside the planner's estimate for the same shape and layout, and beside the GPU of ``cluster``."""
    is_mixed = str(job.trainer.precision_plugin.precision).endswith("mixed")
    measured = tuple(_by_planner_kind(stage, is_mixed) for stage in found.stages)
    estimated: tuple[Mapping[str, float], ...] = ()
    note, step_time = "", None
    try:
        shape, layout = shape_of(job), layout_of(job, found)
        memory = stage_memory(shape, layout)
        estimated = tuple({kind: float(getattr(memory[stage.stage], kind)) for kind in _SAME} for stage in found.stages)
        if cluster is not None:
            step_time = estimate(shape, cluster, layout).step_time_s
    except (ThreeDError, ValueError, TypeError, AttributeError, IndexError) as error:
        note = f"the planner has no estimate: {error}"
    if cluster is None:
        return Comparison(estimated=estimated, found=measured, note=note)
    most, room = found.fullest, cluster.gpu_memory_gb * GB
    needed = float(most.peak_bytes) if cluster.device.generation == CPU else on_device(most.peak_bytes)
    fits = needed <= room
    why = "" if fits else (
        f"stage {most.stage} needs {most.peak_bytes / GB:.1f} GB for tensors, about {needed / GB:.1f} GB with what"
        f" CUDA, NCCL and the allocator take, and a {cluster.device.name} has {room / GB:.0f} GB."
        " Use activation_checkpointing, a smaller micro_batch_size, a higher zero_stage, or more ranks per replica."
    )  # fmt: skip
    return Comparison(
        estimated=estimated,
        found=measured,
        note=note,
        gpu=cluster.device.name,
        gpu_bytes=room,
        needed_bytes=needed,
        step_time_s=step_time,
        fits=fits,
        why=why,
    )


def _by_planner_kind(stage: StageReport, is_mixed: bool) -> dict[str, float]:
    kinds = {kind: float(sum(stage.memory.get(name, 0) for name in names)) for kind, names in _SAME.items()}
    if is_mixed and stage.memory.get("gathered parameters"):  # the float32 shards are the optimizer's
        kept = float(stage.memory.get("parameters", 0))
        kinds["parameters"] -= kept
        kinds["optimizer"] += kept
    return kinds


def layout_of(job: Job, found: DryRun) -> Layout:
    """The planner's layout of a job."""
    chunks = tuple(len(chunk) for chunk in found.layout.chunks) or None
    precision = str(job.trainer.precision_plugin.precision)
    samples = found.samples * job.sizes.dp
    return planner_layout(job.config, job.sizes, precision, found.micro_batch, samples, chunks)


def shape_of(job: Job) -> ModelShape:
    """The planner's shape of the model, read off its configuration or layers, with the tokens of the batch."""
    tensors = [leaf for leaf in pytree.tree_leaves(job.batch.example) if isinstance(leaf, Tensor) and leaf.dim() == 2]
    length = getattr(job.module, "sequence_length", None) or (tensors[0].shape[1] if tensors else None)
    return shape_of_module(job.module, length)
