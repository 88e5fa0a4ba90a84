"""Counters of a host's GPUs through NVIDIA's management library, for hosts without DCGM."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from lightning_3d.errors import ConfigError

REASONS: Mapping[str, int] = {
    "sw_power_cap": 0x04,
    "hw_slowdown": 0x08,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
}
"""Bits of ``nvmlClocksThrottleReason*``: why clocks are below what was asked for. Idling is none of them."""

Counters = dict[str, float | dict[str, float]]
"""Names of :mod:`lightning_3d.monitor.metrics`, with their values, or values by the reason of throttling."""


class GpuCounters:
    """Reads what the driver knows about GPUs. No call waits for what runs on them.

    Args:
        library: ``pynvml``, or what stands for it.

    Raises:
        ConfigError: nvidia-ml-py is not installed, or there is no driver.
    """

    def __init__(self, library: ModuleType | Any | None = None) -> None:
        try:
            self._nvml: Any = library or importlib.import_module("pynvml")
        except ModuleNotFoundError as error:
            raise ConfigError(
                "gpu_counters=True needs nvidia-ml-py, which is not installed. pip install 'lightning-3d[monitor]', or"
                " leave the option out and run dcgm-exporter."
            ) from error
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise ConfigError(
                f"gpu_counters=True: NVIDIA's management library does not start ({error}). Leave the option out on"
                " hosts without NVIDIA's driver."
            ) from error
        self._handles: dict[str, Any] = {}

    def read(self, uuid: str) -> Counters:
        """Counters of one GPU; those that it does not have are left out.

        Args:
            uuid: As ``nvidia-smi -L`` shows it: ``"GPU-..."``.
        """
        nvml = self._nvml
        try:
            if uuid not in self._handles:
                self._handles[uuid] = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError:
            return {}
        handle = self._handles[uuid]
        found: Counters = {}

        def keep(name: str, value: Callable[[], float | dict[str, float]]) -> None:
            with contextlib.suppress(nvml.NVMLError):  # cards differ in what they tell
                found[name] = value()

        keep("gpu_utilization_ratio", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        keep("gpu_memory_used_bytes", lambda: float(nvml.nvmlDeviceGetMemoryInfo(handle).used))
        keep("gpu_memory_size_bytes", lambda: float(nvml.nvmlDeviceGetMemoryInfo(handle).total))
        keep("gpu_power_watts", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3)
        keep("gpu_energy_joules_total", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)
        keep(
            "gpu_temperature_celsius",
            lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        )
        keep("gpu_sm_clock_hertz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6)
        keep("gpu_throttled", lambda: _reasons(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
        return found

    def close(self) -> None:
        """Let go of the library."""
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


def _reasons(bits: int) -> dict[str, float]:
    return {name: float(bool(bits & bit)) for name, bit in REASONS.items()}
