"""Batches are cut along dim 0, whatever holds the tensors, and weights follow the samples."""

from __future__ import annotations

import math
from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d.errors import ConfigError
from lightning_3d.pipeline.micro_batches import (
    Part,
    batch_size_of,
    cut,
    cut_parts,
    find_parts,
    in_proportion,
    loss_weights,
    part_sizes,
    piece_sizes,
)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Item:
    x: Tensor
    name: str


@given(st.integers(1, 40), st.integers(1, 40))
def test_piece_sizes_cover_the_batch_as_evenly_as_can_be(batch: int, count: int) -> None:
    sizes = piece_sizes(batch, count)
    assert len(sizes) == count
    assert sum(sizes) == batch
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 40), st.integers(1, 9))
def test_pieces_of_a_given_size_are_full_but_the_last(batch: int, piece: int) -> None:
    sizes = piece_sizes(batch, -(-batch // piece), piece)
    assert sum(sizes) == batch
    assert all(size == piece for size in sizes[:-1])


def test_every_container_is_cut_and_the_rest_goes_into_every_piece() -> None:
    x = torch.arange(10.0).view(5, 2)
    batch = {
        "tuple": (x, x[:, 0]),
        "named": Pair(x, x),
        "data": Item(x, "name"),
        "user": UserDict(x=x),
        "texts": list("abcde"),
        "table": torch.eye(3),
        "scalar": torch.tensor(2.0),
        "none": None,
        "flag": True,
    }
    pieces = cut(batch, [3, 2])
    assert [piece.size for piece in pieces] == [3, 2]
    second = pieces[1].data
    assert torch.equal(second["tuple"][1], torch.tensor([6.0, 8.0]))
    assert isinstance(second["named"], Pair)
    assert torch.equal(second["named"].y, x[3:])
    assert torch.equal(second["data"].x, x[3:])
    assert second["data"].name == "name"
    assert torch.equal(second["user"]["x"], x[3:])
    assert second["texts"] == ["d", "e"]
    assert torch.equal(second["table"], torch.eye(3))
    assert second["scalar"] == 2
    assert second["none"] is None
    assert second["flag"] is True


def test_a_piece_without_samples_repeats_the_first_one_and_weighs_nothing() -> None:
    pieces = cut({"x": torch.arange(2)}, [1, 1, 0])
    assert pieces[2].data["x"].tolist() == [0]
    assert loss_weights(pieces, None, torch.device("cpu")) == [1.0, 1.0, 0.0]
    weights = loss_weights(pieces, lambda batch: 7 * (batch["x"] + 1).sum(), torch.device("cpu"))
    assert [float(w) for w in weights] == [7.0, 14.0, 0.0]


def test_the_users_hook_cuts_and_must_give_as_many_pieces() -> None:
    pieces = cut([3, 4], [1, 1], split_hook=lambda batch, num: [torch.zeros(n) for n in batch])
    assert [piece.size for piece in pieces] == [3, 4]
    with pytest.raises(ConfigError, match="returned 1 pieces"):
        cut([3, 4], [1, 1], split_hook=lambda batch, num: [batch])


def test_batch_size_is_that_of_the_first_tensor_with_dimensions() -> None:
    assert batch_size_of({"step": torch.tensor(3), "x": torch.zeros(7, 2), "y": torch.zeros(5)}) == 7
    assert batch_size_of(["a", "b"]) == 2
    assert batch_size_of(3) == 1


@given(st.lists(st.integers(1, 40), min_size=2, max_size=4), st.integers(1, 12))
def test_parts_are_cut_in_proportion_where_that_is_possible(totals: list[int], count: int) -> None:
    count = min(count, *totals)
    sizes = part_sizes(totals, count)
    assert [sum(own) for own in sizes] == totals
    assert all(len(own) == count and min(own) >= 1 for own in sizes)
    assert in_proportion(sizes) or math.gcd(*totals) < count
    assert not in_proportion([[2, 1], [1, 1]])


def test_a_batch_of_several_loaders_is_cut_part_by_part() -> None:
    a, b, table = torch.arange(5), torch.arange(3) + 10, torch.eye(3)
    batch = {"a": [a, table], "b": Pair(b, b), "note": "same"}
    paths = [("a", 0), ("b",)]
    parts = find_parts(batch, paths)
    assert parts == [Part(("a", 0), 5), Part(("b",), 3)]
    assert find_parts([a], paths) is None
    pieces = cut_parts(batch, parts, part_sizes([5, 3], 2))
    assert [(piece.size, piece.others) for piece in pieces] == [(3, 2), (2, 1)]
    assert loss_weights(pieces, None, torch.device("cpu")) == [5.0, 3.0]
    assert torch.equal(torch.cat([piece.data["a"][0] for piece in pieces]), a)
    assert torch.equal(torch.cat([piece.data["b"].y for piece in pieces]), b)
    assert isinstance(pieces[1].data["b"], Pair)
    assert pieces[1].data["note"] == "same" and torch.equal(pieces[1].data["a"][1], table)
    assert batch["b"].x is b


class Copies(TorchDispatchMode):
    """Sees copies between devices, which make the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            self.found.append((kwargs or {}).get("non_blocking", False))
        return func(*args, **(kwargs or {}))


def test_weights_reach_the_device_without_a_wait() -> None:
    pieces = cut(torch.arange(3), [2, 1, 0])
    device = torch.device("meta")  # any but the host's
    with Copies() as copies:
        weights: list[Any] = [*loss_weights(pieces, lambda piece: 2.5, device)]
        assert copies.found == []
        weights += loss_weights(pieces, lambda piece: torch.tensor(3), device)
        assert copies.found and all(copies.found)
    assert all(w.device == device and w.dtype is torch.float64 and w.shape == () for w in weights)
    assert [float(w) for w in loss_weights(pieces, lambda piece: torch.tensor(3), torch.device("cpu"))] == [3, 3, 0]
    assert [float(w) for w in loss_weights(pieces, len, torch.device("cpu"))] == [2, 1, 0]
