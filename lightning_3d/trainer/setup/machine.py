"""The devices of a strategy as the planner sees them, with the memory that they have."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch

from lightning_3d.errors import ConfigError
from lightning_3d.planner import GPU, Cluster, gpu
from lightning_3d.planner.gpus import CPU

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
UNKNOWN = "unknown"
"""Generation of a type of GPU that the planner has no figures of."""


def cluster_here(device: torch.device, num_nodes: int, ranks_per_node: int, forks: bool = False) -> Cluster:
    """This machine, as many times as there are nodes.

    Args:
        device: One of its devices.
        num_nodes: Nodes.
        ranks_per_node: Devices of a node; CPU ranks share its memory.
        forks: Whether this process must not touch CUDA, as its forks could not use it then.
    """
    if device.type == "cuda":
        name, memory = _asked_of_driver() if forks else _asked_of_cuda(device)
        kind = _kind(name, memory)
    else:
        kind, memory = gpu(CPU), host_memory() / ranks_per_node
    return Cluster(gpu=kind, num_nodes=num_nodes, gpus_per_node=ranks_per_node, memory_gb=memory / 1e9)


def host_memory() -> float:
    """Bytes of this machine, or what its container may use of them."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in map(Path, _LIMITS):
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return float(total)


def _asked_of_cuda(device: torch.device) -> tuple[str, float]:
    found = torch.cuda.get_device_properties(device)
    return str(found.name), float(found.total_memory)


def _asked_of_driver() -> tuple[str, float]:
    """Of the first GPU; ``torch.cuda`` would make this process unfit to be forked."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        name, mebibytes = answer.splitlines()[0].rsplit(",", 1)
        return name.strip(), float(mebibytes) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise ConfigError(
            "The type of GPU, by which sizes are chosen, is not known: nvidia-smi gives no answer. Give"
            " tensor_parallel and pipeline_parallel, or use another start_method than 'fork'."
        ) from error


def _kind(name: str, memory: float) -> GPU:
    try:
        return gpu(name)
    except ConfigError:
        return GPU(
            name=name, generation=UNKNOWN, tflops=1.0, memory_gb=memory / 1e9, hbm_GBps=1.0, nvlink_GBps=1.0,
            nic_Gbps=1.0, sms=1,
        )  # fmt: skip
