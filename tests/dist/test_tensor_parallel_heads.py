"""Attention and experts of other kinds than q, k, v side by side: what is cut in them, and that it is exact."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.config import ParallelConfig
from lightning_3d.errors import ConfigError
from lightning_3d.tensor_parallel import Plan, plan
from lightning_3d.tensor_parallel.layers import is_linear
from tests.dist.test_tensor_parallel import compare, cut, mesh_of
from tests.harness import run_ranks

WIDTH, HEADS, VOCABULARY = 16, 4, 64


class OwnLinear(nn.Linear):
    """A linear layer written out."""

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight.T
        return out if self.bias is None else out + self.bias


class ScaledLinear(nn.Linear):
    """No linear layer, though it is called one."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Attention(nn.Module):
    """One packed matrix for q, k, v; scores with a bias of every head, and with one for all heads."""

    def __init__(self, kind: str, first: bool) -> None:
        super().__init__()
        self.kind = kind
        self.num_heads = HEADS
        self.num_kv_heads = 1 if kind == "multi_query" else HEADS
        self.head_dim = WIDTH // HEADS
        self.qkv = OwnLinear(WIDTH, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim)
        self.out = OwnLinear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(HEADS, 1, 1) + 0.5)
        self.bias = nn.Embedding(9, HEADS) if first else None

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = x.shape
        if self.kind == "multi_query":
            heads = x.view(batch, length, self.num_heads + 2, self.head_dim).transpose(1, 2)
            return heads[:, :-2], heads[:, -2:-1], heads[:, -1:]
        heads = x.view(batch, length, self.num_heads, 3, self.head_dim).permute(3, 0, 2, 1, 4)
        return heads[0], heads[1], heads[2]

    def forward(self, x: Tensor, bias: Tensor | None, alibi: Tensor, shared: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = x.shape
        if bias is None:
            assert self.bias is not None
            steps = torch.arange(length)
            bias = self.bias((steps[:, None] - steps[None]).clamp(-4, 4) + 4).permute(2, 0, 1).unsqueeze(0)
        q, k, v = self.split(self.qkv(x))
        scores = q @ k.transpose(-1, -2) * self.scale + bias + shared + alibi.view(batch, self.num_heads, 1, length)
        weights = scores.softmax(-1)
        out = (weights @ v).transpose(1, 2).reshape(batch, length, -1)
        return self.out(out), bias, weights


class Experts(nn.Module):
    """Gate and up of every expert in one stack of matrices, down in another."""

    def __init__(self, count: int = 3, inner: int = 8) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(count, 2 * inner, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(count, WIDTH, inner) / 4)

    def forward(self, x: Tensor, shares: Tensor) -> Tensor:
        gate, up = torch.einsum("bsw,efw->besf", x, self.gate_up).chunk(2, -1)
        out = torch.einsum("besf,ewf->besw", F.silu(gate) * up, self.down)
        return torch.einsum("besw,bse->bsw", out, shares)


class Layer(nn.Module):
    """Returns its bias, for the next layer, and its attention weights, which nobody reads."""

    def __init__(self, kind: str, first: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention(kind, first)
        self.router = nn.Linear(WIDTH, 3)
        self.experts = Experts()

    def forward(self, x: Tensor, bias: Tensor | None, alibi: Tensor, shared: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, bias, weights = self.attention(self.norm(x), bias, alibi, shared)
        x = x + out
        return x + self.experts(x, self.router(x).softmax(-1)), bias, weights


class Model(nn.Module):
    """A bias of every head made in the first layer, alibi, and a learned bias that all heads and layers share."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.shared = nn.Parameter(torch.randn(8, 8) / 4)
        self.blocks = nn.ModuleList([Layer(kind, first=i == 0) for i in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.shape
        x, bias = self.embed(ids), None
        slopes = 2.0 ** -torch.arange(HEADS, dtype=x.dtype, device=x.device)
        alibi = (slopes[:, None] * torch.arange(length, device=x.device)).repeat(batch, 1).unsqueeze(1)
        for layer in self.blocks:
            x, bias, _ = layer(x, bias, alibi, self.shared[None, None, :length, :length])
        return self.head(x)


def _exact(rank: int, world_size: int, kind: str) -> tuple[dict[str, str], list[bool]]:
    mesh = mesh_of(world_size)
    torch.manual_seed(0)
    model = Model(kind).double()
    reference = copy.deepcopy(model)
    applied = cut(kind, model, mesh)
    compare(kind, model, reference, applied, mesh)
    return {layer.name: layer.kind for layer in applied.layers}, [check.passed for check in applied.checks]


@pytest.mark.parametrize("kind", ["interleaved", "multi_query"])
def test_biases_of_heads_and_experts_are_cut_exactly(kind: str) -> None:
    (kinds, passed), _ = run_ranks(_exact, 2, kind)
    for layer in ("blocks.0", "blocks.1"):
        assert kinds[f"{layer}.attention.qkv"].startswith("colwise")
        assert kinds[f"{layer}.attention.out"] == "rowwise"
        assert kinds[f"{layer}.experts"] == "inner features of every expert"
    assert passed == [True, True]


def _plan(model: nn.Module, blocks: list[list[str]], tp: int = 2, **options: Any) -> Plan:
    return plan(model, blocks, ParallelConfig(tensor_parallel=tp, **options), tp)


def test_a_subclass_of_linear_counts_if_it_computes_the_same() -> None:
    assert is_linear(OwnLinear(4, 6)) and is_linear(OwnLinear(4, 6, bias=False))
    assert not is_linear(ScaledLinear(4, 6))


class Pair(nn.Module):
    """Two layers."""

    def __init__(self, width: int = 8, heads: int = 0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)
        if heads:
            self.num_heads = heads

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Attending(Pair):
    """Looks like attention, with numbers of heads."""


class Loss(nn.Module):
    """Computes a loss, which nothing made up runs through."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"net": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))})

    def forward(self, x: Tensor, labels: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.model["net"](x), labels["class"])


def test_a_model_without_repeated_layers_is_planned_inside_of_its_loss() -> None:
    made = _plan(Loss(), [])
    assert [block.names for block in made.blocks] == [("model.net",)]
    assert made.blocks[0].layout([0]).names == {"0", "2"}


def test_layers_of_lists_beside_the_chain_are_planned_too() -> None:
    model = nn.ModuleDict({"encoder": nn.ModuleList([Pair(), Pair()]), "decoder": nn.ModuleList([Pair(16), Pair(16)])})
    made = _plan(model, [["decoder.0", "decoder.1"]])
    assert {block.names: block.layout([0]).names for block in made.blocks} == {
        ("decoder.0", "decoder.1"): {"up", "down"},
        ("encoder.0", "encoder.1"): {"up", "down"},
    }


def test_heads_that_do_not_divide_stop_a_run_only_if_none_do() -> None:
    odd, even = Attending(9, 3), Attending(8, 4)
    assert [bool(block.regions) for block in _plan(nn.Sequential(odd, even), [["0", "1"]]).blocks] == [False, True]
    with pytest.raises(ConfigError, match="3 attention heads"):
        _plan(nn.Sequential(odd), [["0"]])


def test_a_plan_of_the_model_that_cannot_be_followed_gives_way() -> None:
    model: Any = nn.Sequential(Pair(), Pair())
    model._tp_plan = {"*.up": "colwise"}  # and nobody reads the pieces
    made = _plan(model, [["0", "1"]]).blocks[0]
    assert made.layout([0]).names == {"up", "down"}
    assert set(made.sources.values()) == {"derived"}
    assert "the model's own plan cannot be followed" in made.remark
