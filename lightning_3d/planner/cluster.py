"""A cluster: GPUs, nodes, and the links between them."""

from __future__ import annotations

import dataclasses
import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_3d.errors import ConfigError
from lightning_3d.planner import checks
from lightning_3d.planner.gpus import GPU, gpu

_SIZES = re.compile(r"(\d+)(?:\s*[xX×*]\s*(\d+))?")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal GPUs. What is ``None`` is as usual for the type of GPU; see :attr:`device`."""

    gpu: str | GPU
    """Type of GPU, by name or with its figures."""
    num_nodes: int = 1
    """Nodes."""
    gpus_per_node: int | None = None
    """GPUs of a node."""
    intra_node_GBps: float | None = None
    """NVLink bandwidth of a GPU, GB/s in one direction."""
    inter_node_Gbps: float | None = None
    """Network bandwidth per GPU, Gbit/s in one direction."""
    intra_node_latency_us: float | None = None
    """Time of a hop over NVLink, µs; ``None``: as fitted, or measured."""
    inter_node_latency_us: float | None = None
    """Time of a hop between nodes, µs; ``None``: as fitted, or measured."""
    memory_gb: float | None = None
    """Memory of a GPU in 1e9 bytes."""
    nvlink_domain: int | None = None
    """GPUs that NVLink connects; ``None``: those of a node, more where the type says so."""
    measured: tuple[tuple[str, float], ...] = ()
    """Constants that ``lightning-3d calibrate`` has measured here, by name; they go before the fitted ones."""

    def __post_init__(self) -> None:
        device = self.device  # an unknown name is refused here
        checks.positive("num_nodes", self.num_nodes)
        if self.gpus_per_node is None:
            object.__setattr__(self, "gpus_per_node", device.gpus_per_node)
        checks.positive("gpus_per_node", self.gpus_per_node)
        for name in (
            "intra_node_GBps", "inter_node_Gbps", "intra_node_latency_us", "inter_node_latency_us", "memory_gb",
        ):  # fmt: skip
            if getattr(self, name) is not None:
                checks.positive_number(name, getattr(self, name))
        if self.nvlink_domain is not None:
            checks.positive("nvlink_domain", self.nvlink_domain)

    @property
    def device(self) -> GPU:
        """The type of GPU with its figures."""
        return gpu(self.gpu) if isinstance(self.gpu, str) else self.gpu

    @property
    def world_size(self) -> int:
        """GPUs in all."""
        return self.num_nodes * self.ranks_per_node

    @property
    def ranks_per_node(self) -> int:
        """GPUs of a node."""
        return self.gpus_per_node or self.device.gpus_per_node

    @property
    def domain(self) -> int:
        """GPUs that NVLink connects."""
        return min(self.world_size, self.nvlink_domain or self.device.nvlink_domain or self.ranks_per_node)

    @property
    def nvlink_bandwidth(self) -> float:
        """Bytes per second of a GPU to others of its NVLink domain, one direction, as in the data sheet."""
        return (self.intra_node_GBps or self.device.nvlink_GBps) * 1e9

    @property
    def network_bandwidth(self) -> float:
        """Bytes per second of a GPU to other nodes, one direction, as in the data sheet."""
        return (self.inter_node_Gbps or self.device.nic_Gbps) * 1e9 / 8

    @property
    def gpu_memory_gb(self) -> float:
        """Memory of a GPU in 1e9 bytes."""
        return self.memory_gb or self.device.memory_gb

    @property
    def own_constants(self) -> tuple[tuple[str, float], ...]:
        """Constants of the cost model that are known of this cluster, by name: those measured, then those given."""
        given = {"latency_us": self.intra_node_latency_us, "network_latency_us": self.inter_node_latency_us}
        return (*self.measured, *((name, value) for name, value in given.items() if value is not None))

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read ``"a100-80g:128x8"`` (nodes x GPUs), ``"a100-80g:1024"`` (GPUs in all), or the name of a YAML file.

        Raises:
            ConfigError: If it is neither.
        """
        if text.endswith((".yaml", ".yml")):
            return cls.from_file(text)
        name, _, sizes = text.partition(":")
        if not sizes:
            return cls(gpu=name)
        found = _SIZES.fullmatch(sizes.strip())
        if not found:
            raise ConfigError(
                f"cluster={text!r} is not understood. Write GPU:NODESxGPUS such as 'a100-80g:128x8', GPU:GPUS such as"
                " 'a100-80g:1024', or the name of a YAML file."
            )
        if found[2]:
            return cls(gpu=name, num_nodes=int(found[1]), gpus_per_node=int(found[2]))
        return cls.of_gpus(name, int(found[1]))

    @classmethod
    def of_gpus(cls, name: str, count: int, gpus_per_node: int | None = None, **others: Any) -> Cluster:
        """A cluster of ``count`` GPUs in all, in nodes of the usual size; a smaller count is one node.

        Raises:
            ConfigError: If they do not fill whole nodes.
        """
        size = min(count, gpus_per_node or gpu(name).gpus_per_node)
        if count < 1 or count % size:
            raise ConfigError(
                f"{count} GPUs do not fill whole nodes of {size}. Use a multiple, or write NODESxGPUS such as '3x4'."
            )
        return cls(gpu=name, num_nodes=count // size, gpus_per_node=size, **others)

    @classmethod
    def from_file(cls, path: str | Path) -> Cluster:
        """Read a YAML file with the fields of this class, as ``lightning-3d calibrate`` writes it.

        ``gpu`` may be a name, or a mapping with the fields of :class:`GPU`; ``measured`` is a mapping.

        Raises:
            ConfigError: If the file is missing, is not YAML, or has other fields.
        """
        try:
            content = yaml.safe_load(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"cluster={str(path)!r} cannot be read: {error.strerror}.") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"cluster={str(path)!r} is not YAML: {error}") from error
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(content, dict) or "gpu" not in content or not content.keys() <= names:
            raise ConfigError(_misread(path, content, names))
        if isinstance(content["gpu"], dict):
            try:
                content["gpu"] = GPU(**content["gpu"])
            except TypeError as error:
                raise ConfigError(f"cluster={str(path)!r}: gpu must have the fields of GPU: {error}.") from error
        if content.get("measured"):
            content["measured"] = tuple(sorted((str(k), float(v)) for k, v in content["measured"].items()))
        return cls(**content)

    def __str__(self) -> str:
        return f"{self.device.name}:{self.num_nodes}x{self.ranks_per_node}"


def _misread(path: str | Path, content: object, names: set[str]) -> str:
    """What a file of a cluster lacks, or has too much."""
    text = f"cluster={str(path)!r} must be a mapping with 'gpu' and any of {', '.join(sorted(names - {'gpu'}))}"
    if not isinstance(content, dict):
        return text + "."
    lower = {name.lower(): name for name in names}
    extra = sorted(str(key) for key in content.keys() - names)
    faults = [f"it has {', '.join(extra)}"] if extra else []
    faults += [
        f"did you mean {lower[near[0]]!r}"
        for key in extra
        if (near := difflib.get_close_matches(key.lower(), lower, n=1))
    ]
    if "gpu" not in content:
        faults.append("'gpu' is missing")
    return f"{text}; {'; '.join(faults)}."
