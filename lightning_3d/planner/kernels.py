"""How long kernels take on a GPU: matrix products, attention, and what only moves memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_3d.planner.constants import Constants
from lightning_3d.planner.gpus import GPU

_TILES = ((256, 128), (128, 128), (128, 64))
"""Tiles of a matrix product that libraries choose from, large ones first."""
_TILE_SPEED = (1.0, 0.95, 0.8)
"""Speed of a tile, which reads its operands less often the larger it is."""


@dataclass(frozen=True)
class Kernels:
    """Times of kernels, in seconds."""

    device: GPU
    constants: Constants
    fp8: bool = False
    """Whether matrix products run in 8 bits where the device can."""
    bits: int = 16
    """Of other matrix products and activations."""

    @property
    def peak(self) -> float:
        """Peak FLOP/s of matrix products in the chosen precision, dense."""
        if self.fp8 and self.device.fp8_tflops:
            return self.device.fp8_tflops * 1e12
        return self.device.tflops * 1e12 * min(1.0, 16 / self.bits)

    @property
    def _memory_speed(self) -> float:
        return self.device.hbm_GBps * 1e9 * self.constants.hbm

    def matmul(self, m: float, n: float, k: float, count: int = 1, batched: bool = False) -> float:
        """``count`` products of (m x k) with (k x n) matrices; ``batched``: of many small ones in a larger tensor."""
        if self.fp8 and self.device.fp8_tflops:
            speed, width = self.device.fp8_tflops * 1e12 * self.constants.gemm_fp8, 1
        else:
            speed, width = self.device.tflops * 1e12 * self.constants.gemm * min(1.0, 16 / self.bits), self.bits // 8
        shape = filling(m, n, self.device.sms) * _falloff(min(m, n, k), self.constants.gemm_half_size)
        if not batched and any(side % 64 for side in (n, k)):
            shape *= self.constants.misaligned
        compute = 2.0 * m * n * k / (speed * shape)
        memory = (width * (m * k + k * n) + 2 * m * n) / self._memory_speed
        return count * max(compute, memory, self.constants.launch_us * 1e-6)

    def attention(self, flops: float, native: bool) -> float:
        """Fused attention that does ``flops`` operations, by a kernel written for this generation or an older one."""
        speed = self.constants.attention * (1.0 if native else self.constants.portable_attention)
        return flops / (self.device.tflops * 1e12 * speed * min(1.0, 16 / self.bits))

    def moving(self, num_bytes: float, kernels: int = 1) -> float:
        """Work that only reads and writes ``num_bytes`` in all."""
        return max(num_bytes / self._memory_speed, kernels * self.constants.launch_us * 1e-6)


def filling(m: float, n: float, sms: int) -> float:
    """Speed of a matrix product for how its result fills tiles, and how these fill waves over ``sms`` processors."""
    best = 0.0
    for (rows, columns), speed in zip(_TILES, _TILE_SPEED, strict=True):
        for high, wide in ((rows, columns), (columns, rows)):
            tiles = math.ceil(m / high) * math.ceil(n / wide)
            waves = math.ceil(tiles / sms)
            best = max(best, speed * m * n / (waves * sms * high * wide))
    return best


def _falloff(shortest: float, half_size: float) -> float:
    return shortest / (shortest + half_size)
