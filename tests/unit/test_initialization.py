"""Tensors that are recorded instead of made have the values that they would have had."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_3d.errors import ConfigError
from lightning_3d.initialization import (
    LARGE,
    Recipes,
    deferring,
    following,
    is_deferred,
    materialise,
    missing_values,
    rebuild,
    value_of,
)

SIZE = 140
assert SIZE * SIZE > LARGE


def parameter(fill: Callable[[Tensor], Any], dtype: torch.dtype = torch.float32) -> nn.Parameter:
    made = nn.Parameter(torch.empty(SIZE, SIZE, dtype=dtype))
    with torch.no_grad():
        fill(made)
    return made


class Odd(nn.Module):
    """What people do to their weights."""

    def __init__(self) -> None:
        super().__init__()
        self._hidden = torch.arange(SIZE * SIZE) * 2
        self.drawn = nn.Parameter(torch.randn(SIZE, SIZE) * 0.02)
        self.truncated = parameter(lambda w: nn.init.trunc_normal_(w, std=0.8))
        self.orthogonal = parameter(nn.init.orthogonal_)
        self.eye = parameter(nn.init.eye_)
        self.sparse = parameter(lambda w: nn.init.sparse_(w, 0.1))
        self.low = parameter(lambda w: w.normal_(), torch.bfloat16)
        self.exponential = parameter(lambda w: w.exponential_())
        self.dropped = nn.Parameter(nn.functional.dropout(torch.ones(SIZE, SIZE), 0.3))
        self.joined = nn.Parameter(torch.cat([torch.randn(SIZE, SIZE), torch.zeros(3, SIZE)]))
        self.assigned = parameter(lambda w: None)
        self.assigned.data = torch.randn(SIZE, SIZE).T
        self.through_data = parameter(lambda w: w.data.normal_().clamp_(-1, 1))
        self.from_numpy = parameter(lambda w: w.copy_(torch.from_numpy(np.arange(SIZE * SIZE).reshape(SIZE, SIZE))))
        self.given = parameter(lambda w: None)
        self.given.data = torch.from_numpy(np.ones((SIZE, SIZE), dtype=np.float32))
        generator = torch.Generator().manual_seed(5)
        self.own = parameter(lambda w: w.normal_(generator=generator))
        self.own_again = nn.Parameter(torch.randn(SIZE, SIZE, generator=generator))
        self.pieces = nn.Parameter(torch.zeros(SIZE, SIZE))
        with torch.no_grad():
            self.pieces[:, :5].normal_()
            self.pieces[3].fill_(2.0)
            self.pieces.mul_(float(self.pieces.std()))  # reads a value
        self.register_buffer("mask", torch.tril(torch.ones(SIZE, SIZE)), persistent=False)
        self.register_buffer("inverse", 1.0 / (1e4 ** (torch.arange(0, 64, 2).float() / 64)), persistent=False)
        self.table = torch.arange(SIZE * SIZE).view(SIZE, SIZE).float().sin()
        self.angles = torch.polar(torch.ones(SIZE, SIZE), self.table)
        self.rates = torch.linspace(0, 0.1, 5).tolist()
        self.order = torch.randperm(LARGE).tolist()[:5]


def everything() -> nn.Module:
    torch.manual_seed(3)
    module = nn.ModuleDict(
        {
            "linear": nn.Linear(SIZE, SIZE),
            "embedding": nn.Embedding(SIZE, SIZE, padding_idx=3),
            "attention": nn.MultiheadAttention(128, 4),
            "lstm": nn.LSTM(128, 128),
            "norm": nn.BatchNorm1d(LARGE),
            "encoder": nn.TransformerEncoder(
                nn.TransformerEncoderLayer(128, 4, 256), 2, enable_nested_tensor=False
            ),  # copies its layer
            "odd": Odd(),
            "normed": torch.nn.utils.parametrizations.weight_norm(nn.Linear(SIZE, SIZE)),
            "turned": torch.nn.utils.parametrizations.orthogonal(nn.Linear(SIZE, SIZE)),
            "head": nn.Linear(SIZE, SIZE, bias=False),
        }
    )
    module["head"].weight = module["embedding"].weight
    nn.init.xavier_uniform_(module["linear"].weight)
    module["copy"] = copy.deepcopy(module["odd"])
    module.register_parameter("last", nn.Parameter(torch.randn(5)))
    return module


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_everything_has_the_values_that_it_would_have_had(device: str) -> None:
    expected = everything()
    after = torch.get_rng_state()
    with deferring(), torch.device(device):
        module = everything()
    assert torch.equal(torch.get_rng_state(), after)
    assert sum(is_deferred(p) for p in module.parameters()) > 0.6 * len(list(module.parameters()))
    objects = {name: id(tensor) for name, tensor in module.named_parameters(remove_duplicate=False)}
    materialise(module, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), after)
    assert {name: id(tensor) for name, tensor in module.named_parameters(remove_duplicate=False)} == objects
    for kind in ("named_parameters", "named_buffers"):
        for (name, value), (_, right) in zip(getattr(module, kind)(), getattr(expected, kind)(), strict=True):
            assert torch.equal(value, right) and value.stride() == right.stride(), name
            assert value.requires_grad == right.requires_grad and type(value) is type(right), name
    for odd in ("odd", "copy"):
        for name in ("table", "angles", "_hidden"):
            assert torch.equal(getattr(module[odd], name), getattr(expected[odd], name)), name
        assert (module[odd].rates, module[odd].order) == (expected[odd].rates, expected[odd].order)


def test_a_piece_is_computed_without_its_neighbours() -> None:
    torch.manual_seed(1)
    whole = torch.randn(SIZE, SIZE)
    torch.manual_seed(1)
    with deferring():
        layer = nn.Module()
        layer.weight = nn.Parameter(torch.randn(SIZE, SIZE))
    with following():
        layer.weight = nn.Parameter(layer.weight.detach().narrow(0, 10, 20).clone())
    assert is_deferred(layer.weight)
    materialise(layer, torch.device("cpu"))
    assert torch.equal(layer.weight, whole[10:30])
    assert layer.weight.untyped_storage().nbytes() == 20 * SIZE * 4


def test_a_constant_that_changes_afterwards_is_refused() -> None:
    data = torch.ones(400, 400)
    with deferring():
        weight = torch.empty(400, 400).copy_(data)
    assert torch.equal(value_of(weight), data)
    data.add_(1)
    with pytest.raises(ConfigError, match="changed in place"):
        value_of(weight)


def test_code_sees_the_device_that_was_meant() -> None:
    with deferring(), torch.device("meta"):
        weight = torch.zeros(SIZE, SIZE)
        assert weight.device == torch.device("cpu") and not weight.is_meta
        assert "0." in repr(weight) and weight.numpy().sum() == 0
        assert torch.tensor([1.0, 2.0]).tolist() == [1.0, 2.0]


def test_recipes_of_another_seed_are_taken_over() -> None:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        with deferring():
            return nn.Sequential(nn.Linear(SIZE, SIZE), Odd())

    one, other = build(1), build(2)
    mine, theirs = Recipes(one), Recipes(other)
    assert mine.structure() == theirs.structure() and mine.digest() != theirs.digest()
    theirs.take_over(mine.values())
    assert mine.digest() == theirs.digest()
    for module in (one, other):
        materialise(module, torch.device("cpu"))
    assert torch.equal(one[0].weight, other[0].weight) and torch.equal(one[1].sparse, other[1].sparse)
    assert Recipes(build(1)).structure() != Recipes(nn.Sequential(nn.Linear(SIZE, SIZE))).structure()


class Drawn(nn.Module):
    """Large, and no reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))


class Table(nn.Module):
    """Its constructor alone knows the values."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4), persistent=False)


def plain() -> nn.Module:
    norm = nn.BatchNorm2d(4)
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Embedding(5, 6, padding_idx=2), nn.MultiheadAttention(8, 2))


@pytest.mark.parametrize("build", [plain, lambda: nn.LSTM(10, 20, 2)])
def test_what_was_born_on_the_meta_device_is_initialised_as_ever(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(4)
    expected = build()
    with torch.device("meta"):
        module = build()
    torch.manual_seed(4)
    assert rebuild(module) == "" and missing_values(module) == ""
    materialise(module, torch.device("cpu"))
    for name, value in expected.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


def tied() -> nn.Module:
    module = nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 5))
    module[1].weight = module[0].weight
    return module


def initialised() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3))
    nn.init.zeros_(module[0].bias)
    return module


@pytest.mark.parametrize(
    ("build", "message"), [(Drawn, "which values they have: weight"), (tied, "0.weight"), (initialised, "0.bias")]
)
def test_what_is_lost_on_the_meta_device_is_named(build: Callable[[], nn.Module], message: str) -> None:
    with torch.device("meta"):
        module = build()
    assert message in rebuild(module)


def test_a_table_on_the_meta_device_that_no_checkpoint_holds_is_refused() -> None:
    with torch.device("meta"):
        module = Table()
    with pytest.raises(ConfigError, match="table"):
        rebuild(module)
    with deferring(), torch.device("meta"):
        module = Table()
    materialise(module, torch.device("cpu"))
    assert torch.equal(module.table, torch.ones(4))


def test_parameters_that_nothing_fills_are_named() -> None:
    with deferring():
        module = nn.Module()
        module.junk = nn.Parameter(torch.empty(SIZE, SIZE))
        module.filled = nn.Parameter(torch.empty(SIZE, SIZE).zero_())
    assert "junk" in missing_values(module) and "filled" not in missing_values(module)
