"""Measures what the user's own devices and links reach, for the planner: :meth:`Cluster.from_file` reads the result."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_3d.errors import ConfigError
from lightning_3d.planner.constants import constants
from lightning_3d.planner.gpus import CPU, gpu
from lightning_3d.planner.kernels import filling

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SECONDS = 0.3
"""That a kernel is repeated for."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one rank has measured; every rank of a group measures the same collectives."""

    device: str
    """Name of the device, as the driver tells it."""
    memory_gb: float
    """Its memory, 1e9 bytes."""
    matmul_tflops: float
    """Of a large matrix product."""
    matmul_size: int
    """Side of its matrices."""
    attention_tflops: float
    """Of causal attention forward, counting the causal half."""
    memory_GBps: float
    """Read and written by an addition."""
    bits: int = 16
    """Of the numbers that were multiplied; the planner takes 32 bits to be half as fast as 16."""
    ranks: int = 1
    """Ranks of the collectives; 1: none were measured."""
    ranks_per_node: int = 1
    gather_GBps: float | None = None
    """Bytes that pass each link of a ring in an all-gather of a large tensor, GB/s."""
    latency_us: float | None = None
    """Of one hop, from an all-gather of a few bytes."""


def measure(device: torch.device, size: int | None = None) -> Measurement:
    """Measure a device, and the collectives if a process group is initialised.

    Args:
        device: Where to measure.
        size: Side of the matrices; ``None``: 8192 on a GPU, 1024 on a CPU.
    """
    on_gpu = device.type == "cuda"
    size = size or (8192 if on_gpu else 1024)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = _seconds(lambda: left @ right, device)
    heads = max(1, size // 256)
    query, key, value = (torch.randn(1, heads, size // 2, 128, device=device, dtype=dtype) for _ in range(3))
    attention = _seconds(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True), device)
    # Far larger than any cache.
    vector = torch.zeros(2**28 if on_gpu else 2**24, device=device, dtype=dtype)
    other, out = torch.zeros_like(vector), torch.empty_like(vector)
    addition = _seconds(lambda: torch.add(vector, other, out=out), device)
    if on_gpu:
        name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    else:
        name, memory = "cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = Measurement(
        device=name,
        memory_gb=memory / 1e9,
        matmul_tflops=2.0 * size**3 / product / 1e12,
        matmul_size=size,
        attention_tflops=2.0 * heads * (size // 2) ** 2 * 128 / attention / 1e12,
        bits=16 if on_gpu else 32,
        memory_GBps=3 * vector.numel() * vector.element_size() / addition / 1e9,
    )
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return found
    ranks = dist.get_world_size()
    large = _gather_seconds(2**26 if on_gpu else 2**20, ranks, device)
    small = _gather_seconds(4, ranks, device)
    return dataclasses.replace(
        found,
        ranks=ranks,
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", ranks)),
        gather_GBps=(ranks - 1) * (2**26 if on_gpu else 2**20) * 4 / max(large - small, 1e-9) / 1e9,
        latency_us=small / (ranks - 1) * 1e6,
    )


def as_cluster(found: Measurement) -> dict[str, Any]:
    """The fields of a :class:`~lightning_3d.planner.Cluster`, ready for YAML.

    A GPU of the table keeps its data sheet, and what it reached of it is ``measured``. Any other device has as its
    data sheet what was measured, reached whole.
    """
    try:
        device = gpu(found.device)
    except ConfigError:
        device = gpu(CPU)
    nodes = max(1, found.ranks // found.ranks_per_node)
    # A ring over whole nodes is carried by all network cards of a node.
    cards = found.ranks_per_node if nodes > 1 else 1
    known = device.generation != CPU
    if not known:
        gathered = found.gather_GBps
        device = dataclasses.replace(
            device,
            name=found.device,
            tflops=found.matmul_tflops * found.bits / 16,
            memory_gb=round(found.memory_gb, 1),
            hbm_GBps=found.memory_GBps,
            nvlink_GBps=gathered if gathered and nodes == 1 else device.nvlink_GBps,
            nic_Gbps=gathered * 8 / cards if gathered and nodes > 1 else device.nic_Gbps,
        )
    size = found.matmul_size
    shape = filling(size, size, device.sms) * size / (size + constants(device.generation).gemm_half_size)
    # A fraction above 1 is kept: a device may reach more than its data sheet, and a product less of its waves' loss.
    measured = {
        "gemm": found.matmul_tflops * found.bits / 16 / device.tflops / shape,
        "attention": found.attention_tflops * found.bits / 16 / device.tflops,
        "portable_attention": 1.0,
        "hbm": found.memory_GBps / device.hbm_GBps,
    }
    if found.gather_GBps and found.latency_us:
        if nodes == 1:
            measured["nvlink"] = found.gather_GBps / device.nvlink_GBps
            measured["latency_us"] = found.latency_us
        else:
            measured["network"] = found.gather_GBps / (cards * device.nic_Gbps / 8)
            measured["network_latency_us"] = found.latency_us
    return {
        "gpu": device.name if known else dataclasses.asdict(device),
        "num_nodes": nodes,
        "gpus_per_node": found.ranks_per_node,
        "measured": {name: round(value, 4) for name, value in measured.items()},
    }


def _gather_seconds(elements: int, ranks: int, device: torch.device) -> float:
    piece = torch.zeros(elements, device=device)
    whole = torch.empty(elements * ranks, device=device)
    for _ in range(2):
        _gather(whole, piece)
    best = float("inf")
    for _ in range(5):
        dist.barrier()
        _wait(device)
        start = time.perf_counter()
        _gather(whole, piece)
        _wait(device)
        best = min(best, time.perf_counter() - start)
    # The slowest rank's time is that of the ring.
    slowest = torch.tensor(best, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Time of one call: the fastest of several rounds, each long enough for the clock."""
    for _ in range(2):
        run()
    _wait(device)
    best, spent, count = float("inf"), 0.0, 1
    while spent < _SECONDS:
        start = time.perf_counter()
        for _ in range(count):
            run()
        _wait(device)
        took = time.perf_counter() - start
        spent += took
        best = min(best, took / count)
        count = max(1, min(100, int(0.02 / best)))
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
