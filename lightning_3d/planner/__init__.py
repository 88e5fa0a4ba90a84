"""Which layout, what it costs, and whether it fits: models, clusters and layouts as data, costs as pure functions."""

from __future__ import annotations

from lightning_3d.planner.cluster import Cluster
from lightning_3d.planner.estimate import Estimate, estimate
from lightning_3d.planner.gpus import GPU, GPUS, gpu
from lightning_3d.planner.layout import Layout
from lightning_3d.planner.memory import StageMemory
from lightning_3d.planner.presets import PRESETS, preset
from lightning_3d.planner.search import Candidate, Plan, Refusal, plan
from lightning_3d.planner.shape import ModelShape

__all__ = [
    "GPU",
    "GPUS",
    "PRESETS",
    "Candidate",
    "Cluster",
    "Estimate",
    "Layout",
    "ModelShape",
    "Plan",
    "Refusal",
    "StageMemory",
    "estimate",
    "gpu",
    "plan",
    "preset",
]
