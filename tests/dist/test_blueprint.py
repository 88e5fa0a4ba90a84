"""How a module is cut is decided once: rank 0 tells the others, and what cannot be told every rank finds by itself."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_3d.config import ParallelConfig, Sizes
from lightning_3d.errors import PlanError
from lightning_3d.mesh import build_mesh
from lightning_3d.models import GPT
from lightning_3d.pipeline.wrappers import Wishes
from lightning_3d.trainer.setup.blueprint import draw, tell_all
from tests.harness import run_ranks


class Deciding:
    """Decides, and remembers how often it was asked."""

    def __init__(self, found: Any) -> None:
        self.found = found
        self.asked = 0

    def __call__(self) -> Any:
        self.asked += 1
        torch.rand(3), np.random.rand(3), random.random()
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def decide(rank: int, world: int) -> dict[str, Any]:
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    mesh = build_mesh(Sizes(pp=1, dp=1, tp=world), torch.device("cpu"))
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    seen: dict[str, Any] = {}
    for name, found in {
        "plain": {"of": rank},
        "parts": (module[0], module[1].running_mean, module[0].weight, torch.ones(2, 3, device="meta")),
        "not sent": lambda: None,
        "refused": PlanError(f"by rank {rank}"),
    }.items():
        make = Deciding(found)
        try:
            told = tell_all(module, mesh, make)
        except PlanError as error:
            told = str(error)
        seen[name] = make.asked
        if name == "plain":
            seen["value"] = told
        if name == "parts":
            layer, mean, weight, meta = told
            seen["are mine"] = layer is module[0] and mean is module[1].running_mean and weight is module[0].weight
            seen["meta"] = (meta.device.type, tuple(meta.shape))
        if name == "refused":
            seen["error"] = told
    seen["random"] = (torch.rand(1).item(), np.random.rand(), random.random())
    return seen


def test_rank_zero_decides_and_tells() -> None:
    first, second = run_ranks(decide, 2)
    assert first["value"] == second["value"] == {"of": 0}
    assert first["are mine"] and second["are mine"]
    assert second["meta"] == ("meta", (2, 3))
    assert (first["plain"], first["parts"], first["not sent"], first["refused"]) == (1, 1, 1, 1)
    assert (second["plain"], second["parts"], second["not sent"], second["refused"]) == (0, 0, 1, 1)
    assert (first["error"], second["error"]) == ("by rank 0", "by rank 1")
    assert first["random"] == second["random"]


def blocks_cut(rank: int, world: int) -> tuple[Any, Any]:
    mesh = build_mesh(Sizes(pp=2, dp=1, tp=2), torch.device("cpu"))
    module = GPT(num_layers=4, width=16, num_heads=2, sequence_length=8, vocab_size=16)
    config = ParallelConfig(pipeline_parallel=2, tensor_parallel=2)
    mine = draw(module, config, mesh.sizes, Wishes())
    told = draw(module, config, mesh.sizes, Wishes(), decide=partial(tell_all, module, mesh))
    assert told.chunks == mine.chunks
    layouts = [[block.layout([0] * len(block.regions)) for block in found.plan.blocks] for found in (mine, told)]
    assert layouts[0] == layouts[1]
    return told.chunks, layouts[1]


def test_a_plan_survives_the_way() -> None:
    found = run_ranks(blocks_cut, 4)
    assert all(other == found[0] for other in found) and found[0][1]
