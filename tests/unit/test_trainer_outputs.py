"""Outputs of micro-batches, combined to what one step on the whole batch would return."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from lightning_3d.trainer.data.outputs import combine


def test_losses_become_their_weighted_mean() -> None:
    losses = [torch.tensor(1.0), torch.tensor(4.0)]
    assert combine(losses, [3, 1], [3, 1]).item() == 1.75
    assert combine(losses, [torch.tensor(3.0), torch.tensor(1.0)], [3, 1]).item() == 1.75
    assert combine([1.0, 4.0], [3, 1], [3, 1]) == 1.75


def test_the_type_of_a_value_is_kept() -> None:
    mean = combine([torch.tensor(1.0, dtype=torch.bfloat16)] * 2, [torch.tensor(2.0), 1], [2, 1])
    assert mean.dtype == torch.bfloat16


def test_predictions_are_joined() -> None:
    parts = [torch.zeros(3, 2), torch.ones(1, 2)]
    assert torch.equal(combine(parts, [3, 1], [3, 1]), torch.cat(parts))
    assert combine([["a", "b"], ["c"]], [2, 1], [2, 1]) == ["a", "b", "c"]


class _Pair(NamedTuple):
    loss: Any
    name: str


@dataclass(frozen=True)
class _Output:
    loss: torch.Tensor
    logits: torch.Tensor | None


def test_containers_are_combined_part_by_part() -> None:
    weights, sizes = [1, 1], [2, 2]
    logits = torch.zeros(2, 3)
    whole = combine([{"loss": torch.tensor(float(i)), "logits": logits, "n": 4} for i in range(2)], weights, sizes)
    assert whole["loss"].item() == 0.5 and whole["logits"].shape == (4, 3) and whole["n"] == 4
    pair = combine([_Pair(torch.tensor(float(i)), "x") for i in range(2)], weights, sizes)
    assert isinstance(pair, _Pair) and pair.loss.item() == 0.5 and pair.name == "x"
    output = combine([_Output(torch.tensor(float(i)), None) for i in range(2)], weights, sizes)
    assert isinstance(output, _Output) and output.loss.item() == 0.5 and output.logits is None
    ordered = combine([OrderedDict(a=1.0), OrderedDict(a=3.0)], weights, sizes)
    assert isinstance(ordered, OrderedDict) and ordered["a"] == 2.0
    assert combine([(1.0, logits)] * 2, weights, sizes)[1].shape == (4, 3)


def test_what_cannot_be_combined_is_listed() -> None:
    assert combine(["a", "b"], [1, 1], [1, 1]) == ["a", "b"]
    assert combine([{"a": 1.0}, {"b": 1.0}], [1, 1], [1, 1]) == [{"a": 1.0}, {"b": 1.0}]
    different = [torch.zeros(2, 3), torch.zeros(2, 4)]
    assert combine(different, [1, 1], [2, 2]) == different


def test_shapes_that_differ_are_listed() -> None:
    shapes = [torch.zeros(2, 3).shape, torch.zeros(1, 3).shape]
    assert combine(shapes, [2, 1], [2, 1]) == shapes
    assert combine(shapes[:1] * 2, [1, 1], [2, 2]) == torch.Size([2, 3])


@pytest.mark.parametrize("value", [None, "same", 3, 0.1])
def test_equal_values_stay(value: Any) -> None:
    assert combine([value] * 3, [1, 1, 1], [1, 1, 1]) == value


def test_one_micro_batch_returns_its_own_output() -> None:
    output = object()
    assert combine([output], [1], [1]) is output


def test_gradients_flow_through_the_mean() -> None:
    losses = [torch.tensor(2.0, requires_grad=True), torch.tensor(1.0, requires_grad=True)]
    combine(losses, [3, 1], [3, 1]).backward()
    assert losses[0].grad is not None and losses[0].grad.item() == 0.75
