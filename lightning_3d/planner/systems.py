"""How other systems run a layout: settings in which they differ from the strategy, by what a run says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_3d.planner.cluster import Cluster
from lightning_3d.planner.shape import ModelShape

_FIRST_FUSED = 2048
"""Longest sequences whose attention was computed unfused before Hopper."""


def _of_all(cluster: Cluster, given: Mapping[str, Any]) -> dict[str, Any]:
    new = is_new(cluster)
    return {
        "pipeline_split": "uniform",
        "overlap_tensor_parallel": new and given.get("tensor_parallel", 1) > 1,
        "overlap_pipeline": new,
        "scatter_gather": True,
        "reduce_each_micro_batch": given.get("pipeline_parallel", 1) == 1,
    }


def is_new(cluster: Cluster) -> bool:
    """Whether the GPUs came when libraries overlapped communication and fused attention: Hopper and later."""
    return cluster.device.generation not in ("volta", "ampere")


def megatron(shape: ModelShape, cluster: Cluster, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of Megatron-LM, Megatron-DeepSpeed, NeMo and their kin."""
    # Who says how activations are kept, if only that nothing is recomputed, ran before fused attention was a matter of
    # course.
    says, new = "activation_checkpointing" in given, is_new(cluster)
    cuts = new or not says or given["activation_checkpointing"] == "selective"
    return {
        **_of_all(cluster, given),
        "sequence_parallel": given.get("tensor_parallel", 1) > 1 and cuts,
        "flash_attention": new or not says or shape.seq_len > _FIRST_FUSED,
        "native_attention": True,
        "fused_elementwise": True,
        "fused_loss": True,
        "overlap_grad_reduce": new or given.get("zero_stage", 1) >= 2,
    }


def fsdp(shape: ModelShape, cluster: Cluster, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of FSDP as torchtitan and LLM-Foundry have it."""
    return {
        **_of_all(cluster, given),
        "zero_stage": 3,
        "sequence_parallel": given.get("tensor_parallel", 1) > 1,
        "native_attention": False,
        "fused_loss": False,
        "overlap_grad_reduce": True,
    }
