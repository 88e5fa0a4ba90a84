"""Blocks of one class and one shape that compute differently are planned and checked apart."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.config import ParallelConfig
from lightning_3d.tensor_parallel import apply, plan
from tests.dist.test_tensor_parallel import compare, mesh_of
from tests.harness import run_ranks

COUNT, ODD = 4, 2
NAMES = [f"blocks.{index}" for index in range(COUNT)]


class _Block(nn.Module):
    def __init__(self, index: int, kind: str) -> None:
        super().__init__()
        odd = index == ODD
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.index = index if kind == "index" else -1
        self.normalizes = odd and kind == "boolean"
        self.activation: Any = nn.Softmax(-1) if odd and kind == "module" else nn.GELU()
        if kind == "function":
            del self.activation
            self.activation = (lambda x: x.softmax(-1)) if odd else F.gelu
        self.settings = {"softmax": odd and kind == "dict"}
        self.factor = 0.5 if odd and kind == "factor" else 1.5
        self.register_buffer("flag", torch.tensor(odd and kind == "buffer"))

    def forward(self, x: Tensor, normalized: bool = False) -> Tensor:
        hidden = self.up(self.norm(x))
        softmax = self.index == ODD or self.normalizes or self.settings["softmax"] or normalized or bool(self.flag)
        hidden = hidden.softmax(-1) if softmax else self.activation(hidden)
        return x + self.factor * self.down(hidden)


def _bound(self: _Block, x: Tensor, normalized: bool = False) -> Tensor:
    return x + self.down(self.up(x).softmax(-1))


class _Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(64, 8)
        self.blocks = nn.ModuleList(_Block(index, kind) for index in range(COUNT))
        self.head = nn.Linear(8, 64)
        odd: Any = self.blocks[ODD]
        if kind == "bound forward":
            odd.forward = types.MethodType(_bound, odd)
        if kind == "wrapped forward":
            inner = odd.forward
            odd.forward = lambda x, normalized=False: inner(x, True)
        if kind == "wrapped layer":
            layer = odd.up.forward
            odd.up.forward = lambda x: layer(x).softmax(-1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for index, block in enumerate(self.blocks):
            x = block(x, normalized=self.kind == "call" and index == ODD)
        return self.head(x)


KINDS = [
    *("index", "boolean", "module", "function", "dict", "factor", "buffer", "call"),
    *("bound forward", "wrapped forward", "wrapped layer"),
]


def _build(kind: str) -> _Model:
    torch.manual_seed(0)
    return _Model(kind).double()


def _groups(model: nn.Module, names: list[str] = NAMES) -> list[tuple[str, ...]]:
    return [block.names for block in plan(model, [names], ParallelConfig(), 2).blocks]


@pytest.mark.parametrize("kind", KINDS)
def test_an_odd_block_is_a_kind_of_its_own(kind: str) -> None:
    assert sorted(_groups(_build(kind))) == [("blocks.0", "blocks.1", "blocks.3"), ("blocks.2",)]


def test_blocks_that_differ_in_values_alone_are_one_kind() -> None:
    model = _build("none")
    for index, block in enumerate(model.blocks):
        block.number = index  # not used
    assert _groups(model) == [tuple(NAMES)]


class _Looking(nn.Module):
    """Cannot run without values."""

    def __init__(self, odd: bool) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.odd = odd

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden = hidden.softmax(-1) if self.odd else hidden.relu()
        hidden = torch.from_numpy(hidden.detach().numpy()) * 0 + hidden
        return x + self.down(hidden)


def test_blocks_that_need_values_are_told_apart() -> None:
    model = nn.Sequential(*(_Looking(index == ODD) for index in range(COUNT)))
    assert sorted(_groups(model, ["0", "1", "2", "3"])) == [("0", "1", "3"), ("2",)]


def _equal(rank: int, world_size: int) -> None:
    mesh = mesh_of(world_size)
    for kind in KINDS:
        model = _build(kind)
        reference = copy.deepcopy(model) if "wrapped" not in kind else _build(kind)
        applied = apply(model, plan(model, [NAMES], ParallelConfig(), world_size), mesh, lambda _: True)
        try:
            compare(kind, model, reference, applied, mesh)
        except AssertionError as error:
            raise AssertionError(f"{kind}\n{applied}") from error
        assert any(name.startswith("blocks.0.up") for name in applied.cuts)


def test_odd_blocks_compute_what_they_compute_in_one_process() -> None:
    run_ranks(_equal, 2)
