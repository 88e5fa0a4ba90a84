"""The constants of the cost model: few, with a physical meaning, fitted once on published runs (docs/planner.md)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from lightning_3d.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What a type of GPU and its links reach in practice."""

    gemm: float = 0.80
    """Fraction of the 16-bit peak that a large, well-shaped matrix product reaches."""
    gemm_fp8: float = 0.65
    """The same for 8 bits, of the 8-bit peak."""
    gemm_half_size: float = 250.0
    """Size of the shortest side of a matrix product at which it has lost half of its speed."""
    misaligned: float = 0.8
    """Speed of a matrix product with a side that is no multiple of 64 elements, beside an aligned one."""
    attention: float = 0.45
    """Fraction of the 16-bit peak that fused attention reaches, by the best kernel for the generation."""
    portable_attention: float = 1.0
    """Speed of FlashAttention-2, written for A100, beside that kernel."""
    hbm: float = 0.80
    """Fraction of the memory bandwidth that elementwise kernels reach."""
    elementwise: float = 1.0
    """Memory traffic of norms, activations and residuals where they are fused, beside reading and writing each once."""
    elementwise_eager: float = 1.6
    """The same where every operation is a kernel of its own."""
    nvlink: float = 0.75
    """Fraction of the NVLink bandwidth that a collective reaches."""
    network: float = 0.75
    """Fraction of the network bandwidth that a collective reaches."""
    latency_us: float = 2.0
    """Of one hop inside an NVLink domain."""
    network_latency_us: float = 8.0
    """Of one hop between nodes."""
    launch_us: float = 5.0
    """Time that a kernel takes at least."""
    overlap_cost: float = 0.1
    """Part of a hidden collective's time by which it slows down what it hides behind."""
    step_overhead: float = 0.01
    """Fraction of a step for what is not modelled: data, logging, stragglers."""


def constants(generation: str, measured: tuple[tuple[str, float], ...] = ()) -> Constants:
    """Those of a generation, with what was measured on the user's own devices put in.

    Raises:
        ConfigError: If a measured name is not a constant.
    """
    from lightning_3d.planner.fitted import FITTED

    found = FITTED.get(generation, FITTED["hopper"])
    names = {field.name for field in dataclasses.fields(Constants)}
    for name, _ in measured:
        if name not in names:
            raise ConfigError(f"measured={name!r} is not a constant of the planner. Known: {', '.join(sorted(names))}.")
    return dataclasses.replace(found, **dict(measured))
