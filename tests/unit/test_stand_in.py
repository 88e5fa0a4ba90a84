"""What stands for a block of another stage: what it remembers of stores of keys and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache

from lightning_3d.pipeline.stand_in import _MOST_ANSWERS, StandIn
from lightning_3d.placeholder import Placeholder, is_placeholder, placeholder_parameter

HOST = torch.device("cpu")


class Block(nn.Module):
    """Appends to the store of its layer, and answers with something as long as another layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, past_key_values: Any) -> tuple[Tensor, Any]:
        self.calls += 1
        store = past_key_values
        if isinstance(store, EncoderDecoderCache):
            store.is_updated[1] = True
            store = store.self_attention_cache
        keys, _ = store.update(x, x, 1)
        return keys.sum() + x.new_zeros(store.get_seq_length(0)), past_key_values


def filled(length: int) -> DynamicCache:
    cache = DynamicCache()
    if length:
        cache.update(torch.ones(2, 1, length, 4), torch.ones(2, 1, length, 4), 0)
    return cache


def ask(stand_in: StandIn, cache: Any) -> tuple[Tensor, Any]:
    x = Placeholder.of((2, 1, 3, 4), torch.float32, HOST, requires_grad=True)
    answer: tuple[Tensor, Any] = stand_in(x, past_key_values=cache)
    return answer


@pytest.mark.parametrize("nested", [False, True])
def test_a_store_is_filled_from_memory(nested: bool) -> None:
    block = Block()
    stand_in = StandIn(block, "block")
    for call in range(3):
        cache = EncoderDecoderCache(filled(2), filled(0)) if nested else filled(2)
        own = cache.self_attention_cache if nested else cache
        kept = own.layers
        length, returned = ask(stand_in, cache)
        assert block.calls == 1, f"computed anew in call {call}"
        assert length.shape == (2,) and is_placeholder(length)
        assert returned is cache and own.layers is kept and type(kept) is list
        assert [layer.get_seq_length() for layer in kept] == [2, 3]
        assert is_placeholder(kept[1].keys) and torch.equal(kept[0].keys, torch.ones(2, 1, 2, 4))
        assert not nested or cache.is_updated == {1: True}


def test_a_layer_that_the_block_reads_counts() -> None:
    block = Block()
    stand_in = StandIn(block, "block")
    assert [len(ask(stand_in, filled(length))[0]) for length in (2, 5, 2, 5)] == [2, 5, 2, 5]
    assert block.calls == 2
    longer = filled(2)
    longer.update(torch.ones(2, 1, 4, 4), torch.ones(2, 1, 4, 4), 1)
    ask(stand_in, longer)
    assert longer.get_seq_length(1) == 7
    assert block.calls == 3


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + 1


def test_answers_for_the_latest_shapes_are_remembered_and_no_more() -> None:
    """Lengths may differ in every batch of a long run."""
    block = Counted()
    stand_in = StandIn(block, "block")
    lengths = [*range(1, 2 * _MOST_ANSWERS), 1, 1]
    for length in lengths:
        assert stand_in(Placeholder.of((2, length), torch.float32, HOST)).shape == (2, length)
    assert block.calls == len(lengths) - 1
    assert len(stand_in._memory) == _MOST_ANSWERS


def test_an_answer_has_the_type_of_the_autocast_around_the_call() -> None:
    layer = nn.Linear(4, 4)
    for key, parameter in list(layer._parameters.items()):
        assert parameter is not None
        layer._parameters[key] = placeholder_parameter(parameter, HOST, key)
    stand_in = StandIn(layer, "head")
    x = Placeholder.of((2, 4), torch.float32, HOST)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert stand_in(x).dtype is torch.bfloat16
        assert stand_in(x).dtype is torch.float32
