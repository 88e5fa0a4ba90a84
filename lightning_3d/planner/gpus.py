"""GPU types: dense peak speed, memory, links; found by the names that people write."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lightning_3d.errors import ConfigError

CPU = "cpu"
"""Name and generation of processes on a CPU, which trials run on: they have no context of CUDA and NCCL."""


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One type of GPU. Peak speeds are dense, never those with sparsity."""

    name: str
    """Name in the table."""
    generation: str
    """Key of the constants that were fitted for it."""
    tflops: float
    """Peak of 16-bit matrix products, TFLOP/s."""
    fp8_tflops: float | None = None
    """Peak of 8-bit matrix products; ``None`` if it has none."""
    memory_gb: float
    """Memory in 1e9 bytes."""
    hbm_GBps: float
    """Bandwidth of its memory, GB/s."""
    nvlink_GBps: float
    """Bandwidth to the other GPUs of its node, GB/s in one direction."""
    nic_Gbps: float
    """Usual network of a node per GPU, Gbit/s in one direction."""
    sms: int
    """Streaming multiprocessors, which take the tiles of a matrix product in waves."""
    gpus_per_node: int = 8
    """Usual number in a node."""
    nvlink_domain: int | None = None
    """GPUs that NVLink connects; ``None``: those of a node."""


def _gpu(name: str, generation: str, tflops: float, fp8: float | None, memory: float, hbm: float, nvlink: float,
         nic: float, sms: int, gpus: int = 8, domain: int | None = None) -> tuple[str, GPU]:  # fmt: skip
    return name, GPU(
        name=name, generation=generation, tflops=tflops, fp8_tflops=fp8, memory_gb=memory, hbm_GBps=hbm,
        nvlink_GBps=nvlink, nic_Gbps=nic, sms=sms, gpus_per_node=gpus, nvlink_domain=domain,
    )  # fmt: skip


GPUS: Mapping[str, GPU] = MappingProxyType(
    dict(
        (
            _gpu("v100-16g", "volta", 125, None, 16, 900, 150, 25, 80),
            _gpu("v100-32g", "volta", 125, None, 32, 900, 150, 25, 80),
            _gpu("a100-40g", "ampere", 312, None, 40, 1555, 300, 200, 108),
            _gpu("a100-80g", "ampere", 312, None, 80, 2039, 300, 200, 108),
            _gpu("a100-80g-pcie", "ampere", 312, None, 80, 1935, 32, 100, 108),
            _gpu("a800-80g", "ampere", 312, None, 80, 2039, 200, 200, 108),
            _gpu("h100-80g", "hopper", 989, 1979, 80, 3350, 450, 400, 132),
            _gpu("h100-80g-pcie", "hopper", 756, 1513, 80, 2039, 64, 200, 114),
            _gpu("h100-96g-hbm2e", "hopper-500w", 989, 1979, 96, 2400, 450, 400, 132),
            _gpu("h100-94g-nvl", "hopper", 835, 1671, 94, 3900, 300, 400, 132),
            _gpu("h800-80g", "hopper", 989, 1979, 80, 3350, 200, 400, 132),
            _gpu("h200-141g", "hopper", 989, 1979, 141, 4800, 450, 400, 132),
            _gpu("b200-180g", "blackwell", 2250, 4500, 180, 8000, 900, 400, 148),
            _gpu("b300-288g", "blackwell-ultra", 2250, 4500, 288, 8000, 900, 800, 148),
            _gpu("gb200-186g", "blackwell", 2500, 5000, 186, 8000, 900, 400, 152, 4, 72),
            _gpu("cpu", CPU, 0.2, None, 8, 20, 4, 10, 1),  # two cores: for trials, not predictions
            _gpu("gb300-288g", "blackwell-ultra", 2500, 5000, 288, 8000, 900, 800, 152, 4, 72),
        )
    )
)
"""Spec sheets and MLCommons system files, as collected in stas00/ml-engineering and cli99/llm-analysis."""

_FAMILY = re.compile(r"gb\d{3}|[vahb]\d{2,3}")
_MEMORY = re.compile(r"(\d{2,3})\s*gi?b?\b")


def gpu(name: str) -> GPU:
    """Find a type by its name as people write it: ``"a100-80g"``, ``"A100-80GB-SXM"``, ``"NVIDIA H100 80GB HBM3"``.

    Raises:
        ConfigError: If no type fits.
    """
    text = name.lower()
    if text in GPUS:
        return GPUS[text]
    family = _FAMILY.search(text)
    known = [GPUS[key] for key in GPUS if family and key.split("-")[0] == family[0]]
    if not known:
        raise ConfigError(f"gpu={name!r} is not known. Use one of {', '.join(GPUS)}, or give a GPU with its figures.")
    memory = _MEMORY.search(text)
    gigabytes = float(memory[1]) if memory else None

    def fit(candidate: GPU) -> tuple[bool, bool, bool, float, float]:
        form = candidate.name.split("-")[2:]
        return (
            ("pcie" in text) != ("pcie" in form),
            ("hbm2e" in text and candidate.name.startswith("h100")) != ("hbm2e" in form),
            "nvl" in form and "nvl" not in text.replace("nvlink", ""),
            abs(candidate.memory_gb - gigabytes) if gigabytes else 0.0,
            -candidate.memory_gb if not form else 0.0,
        )

    return min(known, key=fit)
