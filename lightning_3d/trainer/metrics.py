"""Torchmetrics objects of a module: synchronised over replicas, never over the ranks of one replica."""

from __future__ import annotations

from lightning.pytorch import LightningModule
from torchmetrics import Metric

from lightning_3d.mesh import Mesh


def _never() -> bool:
    return False


def bind_metrics(module: LightningModule, mesh: Mesh) -> None:
    """Let the metrics of a module gather their states over the data-parallel axis.

    By default they gather over all ranks and would count every sample once per stage and tensor-parallel rank.

    Args:
        module: The LightningModule. Metrics for which the user chose a process group keep it.
        mesh: The mesh.
    """
    if mesh.world.size == 1:
        return
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.process_group is None:
            metric.process_group = mesh.dp.group
            if mesh.dp.size == 1:
                metric.distributed_available_fn = _never
