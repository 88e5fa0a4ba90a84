"""The answer of a dry run: plain data, and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_3d.config import Sizes
from lightning_3d.dry_run.record import Record
from lightning_3d.dry_run.recorder import held
from lightning_3d.trainer.setup.layout import Layout

if TYPE_CHECKING:
    from lightning_3d.dry_run.rank import Rank


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """What one rank of a pipeline stage holds, sends and computes in an optimizer step."""

    stage: int
    rank: int
    blocks: tuple[str, ...]
    parameters: int
    """Of this rank when they are gathered: its tensor-parallel part of the stage."""
    kept_parameters: int
    """Of those what this rank keeps between steps: its shard."""
    optimizers: tuple[str, ...]
    record: Record
    alike: tuple[int, ...] = ()
    """Where this stage was not run: the stages alike between which it lies."""

    @classmethod
    def of(cls, rank: Rank, record: Record) -> StageReport:
        """The report of a rank that has run."""
        mesh, stage = rank.mesh, rank.assembly.stage
        owned = [item.param for item in rank.assembly.sharding.owned]
        return cls(
            stage=mesh.pp.rank,
            rank=mesh.rank,
            blocks=rank.assembly.layout.blocks[mesh.pp.rank],
            parameters=sum(_whole(tensor, mesh.tp.size) for tensor in owned),
            kept_parameters=sum(_local(tensor).numel() for tensor in held(stage.module) if tensor.requires_grad),
            optimizers=tuple(type(optimizer).__name__ for optimizer in rank.trainer.optimizers),
            record=record,
        )

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes at the fullest moment, by kind."""
        return self.record.peak.by_kind

    @property
    def peak_bytes(self) -> int:
        """Bytes at the fullest moment."""
        return self.record.peak.total

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Collectives and messages of a step by axis and kind, with how many, of how many bytes in all."""
        counts: Counter[tuple[str, str, int]] = Counter()
        whole: Counter[tuple[str, str, int]] = Counter()
        sent: Counter[tuple[str, str, int]] = Counter()
        for message, count in self.record.work.traffic.items():
            key = (message.axis, message.operation, message.ranks)
            counts[key] += count
            whole[key] += count * message.num_bytes
            sent[key] += count * message.sent_bytes  # type: ignore[assignment]
        return [
            {
                "axis": axis,
                "operation": operation,
                "ranks": ranks,
                "count": counts[axis, operation, ranks],
                "bytes": whole[axis, operation, ranks],
                "sent_bytes": float(sent[axis, operation, ranks]),
            }
            for axis, operation, ranks in sorted(counts)
        ]

    def as_json(self) -> dict[str, Any]:
        """Numbers, strings, lists and dictionaries."""
        record = self.record
        return {
            "stage": self.stage,
            "rank": self.rank,
            "blocks": list(self.blocks),
            "parameters": self.parameters,
            "kept_parameters": self.kept_parameters,
            "optimizers": list(self.optimizers),
            "peak_bytes": self.peak_bytes,
            "peak_when": record.peak.when,
            "memory": dict(self.memory),
            "peak_pipeline": asdict(record.pipeline),
            "peak_outside": asdict(record.outside),
            "timeline": [list(item) for item in record.timeline],
            "flops": record.work.flops,
            "messages": self.messages,
            "micro_batches": record.micro_batches,
            "micro_batches_run": record.micro_batches_run,
            "alike": list(self.alike),
            "values_taken_as_zero": dict(record.reads),
        }


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a job would do."""

    layout: Layout
    sizes: Sizes
    stages: tuple[StageReport, ...]
    samples: int
    """Of a replica's batch."""
    micro_batch: int
    """Samples of a micro-batch."""
    warning: str = ""
    """What the run would warn of."""
    note: str = ""
    """What was left out."""

    @property
    def fullest(self) -> StageReport:
        """The stage that needs the most memory."""
        return max(self.stages, key=lambda stage: stage.peak_bytes)

    def as_json(self) -> dict[str, Any]:
        """Numbers, strings, lists and dictionaries."""
        return {
            "layout": {**asdict(self.layout), "micro_batch_size": self.micro_batch},
            "sizes": asdict(self.sizes),
            "samples_per_replica": self.samples,
            "micro_batch_size": self.micro_batch,
            "warning": self.warning,
            "note": self.note,
            "fullest_stage": self.fullest.stage,
            "stages": [stage.as_json() for stage in self.stages],
        }


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor, tp: int) -> int:
    """Elements of a parameter as this tensor-parallel rank computes with it."""
    if not isinstance(tensor, DTensor):
        return tensor.numel()
    names = tensor.device_mesh.mesh_dim_names or ()
    for name, placement in zip(names, tensor.placements, strict=True):
        if name == "tp" and not placement.is_replicate():
            return -(-tensor.numel() // tp)
    return tensor.numel()
