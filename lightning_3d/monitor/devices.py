"""What is known of a rank's device without asking it to finish anything."""

from __future__ import annotations

import resource
import sys

import torch

from lightning_3d.errors import ConfigError
from lightning_3d.planner.gpus import gpu


def peak_memory(device: torch.device) -> int:
    """Bytes: most that the allocator of the device has given out, or that the process had resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_flops(device: torch.device, tflops: float | None = None) -> float | None:
    """Dense 16-bit peak of one device, per second; ``None`` where nobody knows it.

    Args:
        device: The device.
        tflops: What the user says it is, TFLOP/s.
    """
    if tflops is not None:
        return tflops * 1e12
    if device.type != "cuda":
        return None
    try:
        return gpu(torch.cuda.get_device_name(device)).tflops * 1e12
    except ConfigError:
        return None


def gpu_uuid(device: torch.device) -> str:
    """As ``nvidia-smi -L`` and dcgm-exporter write it, ``"GPU-..."``; empty on a CPU."""
    if device.type != "cuda":
        return ""
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return uuid if not uuid or uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def memory_size(device: torch.device) -> int | None:
    """Bytes of the device; ``None`` on a CPU, whose memory all ranks share."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
