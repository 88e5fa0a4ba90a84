"""What blocks cost: counted, measured or estimated; and that the split of the pipeline follows it."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lightning_3d.config import ParallelConfig, Sizes
from lightning_3d.errors import ConfigError
from lightning_3d.partition import balance, balance_ranks
from lightning_3d.pipeline.blocks import find_block_lists, share_out
from lightning_3d.pipeline.costs import Costs, flop_costs, parameter_costs, recomputed_share
from lightning_3d.pipeline.flops import FlopCounter, count_flops
from lightning_3d.pipeline.recurrent import FewSteps
from lightning_3d.pipeline.timing import time_costs
from lightning_3d.trainer.setup.assembly import describe
from lightning_3d.trainer.setup.blueprint import chunk_map

VOCABULARY, WIDTH, LENGTH = 1000, 16, 64


class Linears(nn.Module):
    """Nothing but products of matrices, so that counts are exact."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.example_input_array = torch.zeros(2, 5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self, layers: int = 12, vocabulary: int = VOCABULARY, length: int = LENGTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(layers))
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.example_input_array = torch.zeros(2, length, dtype=torch.long)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def names(model: nn.Module) -> list[str]:
    return [name for item in find_block_lists(model) for name in item.blocks]


def test_a_linear_layer_costs_two_per_weight_and_token_three_times() -> None:
    model = Linears()
    counted = count_flops(model, names(model))
    assert counted is not None and counted.inputs == "2 x 5 x 16"
    tokens, weights = 10, WIDTH * WIDTH
    total = 2 * tokens * weights * 3
    # The input of the first needs no gradient; the sum after the head counts one.
    assert counted.blocks[:3] == (total * 2 / 3, total, total)
    assert counted.blocks[3] == pytest.approx(total + 3 * total, abs=2)
    with FlopCounterMode(display=False) as torchs:
        model(model.example_input_array.requires_grad_()).backward()
    assert sum(counted.blocks) + 2 * tokens * weights == pytest.approx(torchs.get_total_flops(), abs=2)


def test_frozen_weights_cost_no_gradient_and_nothing_before_them_either() -> None:
    model = Linears()
    for layer in (model.layers[0], model.layers[2]):
        layer.requires_grad_(False)
    counted = count_flops(model, names(model))
    assert counted is not None
    product = 2 * 10 * WIDTH * WIDTH
    assert counted.blocks[:3] == (product, 2 * product, 2 * product)


def test_recomputation_runs_the_forward_of_blocks_again_and_not_that_of_the_head() -> None:
    model = Linears()
    plain, recomputed = count_flops(model, names(model)), count_flops(model, names(model), recomputed_share("full"))
    assert plain is not None and recomputed is not None
    product = 2 * 10 * WIDTH * WIDTH
    assert [b - a for a, b in zip(plain.blocks, recomputed.blocks, strict=True)] == [product] * 4
    assert recomputed_share(4) == 0.25 and recomputed_share(None) == 0


def test_attention_counts_with_the_length_of_the_example() -> None:
    short, long = Decoder(2, length=64), Decoder(2, length=256)
    counts = [count_flops(model, names(model)) for model in (short, long)]
    products = [
        3 * 2 * (2 * length) * 4 * WIDTH * WIDTH + 3 * 2 * 2 * length * length * WIDTH * 2 for length in (64, 256)
    ]
    for counted, product in zip(counts, products, strict=True):
        assert counted is not None
        assert counted.blocks[0] == pytest.approx(product, rel=0.35), "besides products there is one per element"
        assert counted.blocks[0] > product


def test_counting_changes_nothing() -> None:
    model = Decoder(2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    hooks: list[str] = []
    model.head.register_forward_hook(lambda *_: hooks.append("called"))
    count_flops(model, names(model))
    assert torch.equal(state, torch.get_rng_state()) and not hooks and model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and not p.is_meta for p in model.parameters())


class Recurrent(nn.Module):
    """Recurrent layers of every kind; a block each, with a residual."""

    def __init__(self, layers: list[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.mix = nn.ModuleList(nn.LazyLinear(WIDTH) for _ in layers)
        self.example_input_array = torch.zeros(9, 11, dtype=torch.long)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer, mix in zip(self.layers, self.mix, strict=True):
            x = x + mix(layer(x)[0])
        return x.sum()


def test_recurrent_layers_are_counted_in_a_few_steps_as_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    first: Any = {"batch_first": True}
    model = Recurrent(
        [
            nn.LSTM(WIDTH, WIDTH, **first),
            nn.LSTM(WIDTH, 2 * WIDTH, num_layers=2, bidirectional=True, proj_size=8, bias=False),
            nn.GRU(WIDTH, WIDTH, num_layers=2, bidirectional=True, **first),
            nn.RNN(WIDTH, WIDTH, nonlinearity="tanh"),
            nn.RNN(WIDTH, WIDTH, nonlinearity="relu", **first),
        ]
    )
    with torch.no_grad():
        model(model.example_input_array)
    model.layers[3].requires_grad_(False)
    blocks = [f"layers.{index}" for index in range(len(model.layers))]
    few = count_flops(model, blocks)
    monkeypatch.setattr("lightning_3d.pipeline.recurrent._LAYERS", ())
    every = count_flops(model, blocks)
    assert few is not None and few == every


def test_counting_a_long_recurrent_layer_runs_few_operations() -> None:
    model = Recurrent([nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(3)])
    model.example_input_array = torch.zeros(1, 4096, dtype=torch.long)
    with torch.no_grad():
        model(model.example_input_array[:, :2])
    counter = FlopCounter(3, most=1000)
    with FewSteps(counter), counter:
        model.to("meta")(model.example_input_array.to("meta"))
    assert counter.left > 0


def test_what_no_made_up_input_runs_through_is_estimated_and_the_layout_says_so() -> None:
    class Odd(Decoder):
        def forward(self, ids: Tensor) -> Tensor:
            raise ValueError("needs something else")

    model = Odd()
    assert count_flops(model, names(model)) is None
    chunks = chunk_map(model, find_block_lists(model), ParallelConfig(), 2)
    assert chunks.costs is not None
    assert chunks.costs.blocks[:11] == (4 * WIDTH * WIDTH,) * 11
    assert chunks.costs.blocks[11] == 4 * WIDTH * WIDTH + VOCABULARY * WIDTH
    layout = describe(model, chunks, ParallelConfig(), Sizes(pp=2, dp=1, tp=1))
    assert "estimated from the sizes of matrices" in str(layout) and "example_input_array" in str(layout)


def llama(vocabulary: int, layers: int = 32) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=vocabulary,
        max_position_embeddings=131072,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("split", ["flops", "parameters"])
def test_a_vocabulary_of_128k_does_not_overload_the_last_stage(split: str) -> None:
    model = llama(128_256)
    config = ParallelConfig(pipeline_split=split)
    chunks = chunk_map(model, find_block_lists(model), config, 4)
    sizes = [len(chunks.blocks_of(chunk)) for chunk in range(4)]
    assert sizes[3] < min(sizes[1:3]) and sum(sizes) == 32
    layout = describe(model, chunks, config, Sizes(pp=4, dp=1, tp=1))
    assert chunks.costs is not None
    every = itertools.combinations(range(1, 32), 3)
    best = min(max(chunks.costs.of_chunks((0, *cuts, 32))) for cuts in every) / sum(chunks.costs.blocks)
    assert max(layout.shares) == pytest.approx(best)
    assert max(layout.shares) < 0.27
    assert f"the most loaded stage has {best:.1%}, even is 25.0%" in str(layout)
    if split == "flops":
        assert "counted on inputs of 1 x 4096" in str(layout)
        block, head = 2 * 4096 * 3 * 60_817_408, 2 * 4096 * 3 * 2048 * 128_256
        attention = 2 * 2 * 4096 * 4096 * 2048 * 3
        assert chunks.costs.blocks[1] == pytest.approx(block + attention, rel=0.02)
        assert chunks.costs.blocks[31] == pytest.approx(block + attention + head, rel=0.02)


def test_a_small_vocabulary_leaves_the_stages_alike() -> None:
    model = llama(1000, 8)
    chunks = chunk_map(model, find_block_lists(model), ParallelConfig(), 4)
    assert [len(chunks.blocks_of(chunk)) for chunk in range(4)] == [2, 2, 2, 2]


def test_measured_times_make_the_stage_with_the_head_smaller() -> None:
    model = Decoder(6, vocabulary=20_000)
    blocks = names(model)
    outside = {"embed": frozenset({0}), "head": frozenset({5})}
    state = torch.get_rng_state()
    costs = time_costs(model, blocks, outside, torch.device("cpu"))
    assert torch.equal(state, torch.get_rng_state()), "ranks that do not measure draw the same numbers afterwards"
    assert costs is not None and costs.unit == "seconds" and "2 x 64 x 16" in costs.source
    assert costs.blocks[1] == costs.blocks[4], "blocks of one kind are measured once"
    assert 0 < costs.blocks[1] < costs.blocks[5]
    assert all(p.grad is None for p in model.parameters())
    chunks = share_out(model, find_block_lists(model), 2, "profile", None, lambda blocks, outside: costs)
    assert len(chunks.blocks_of(1)) < len(chunks.blocks_of(0))


def test_profile_without_a_call_of_the_blocks_measures_nothing() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Bilinear(2, 3, 4) for _ in range(2))

    model = Odd()
    assert time_costs(model, names(model), {}, torch.device("cpu")) is None


def loads(costs: list[int], sizes: list[int], ranks: int) -> list[int]:
    ends = [0, *itertools.accumulate(sizes)]
    chunks = [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
    return [sum(chunks[rank::ranks]) for rank in range(ranks)]


def least(costs: list[int], ranks: int, chunks: int) -> int:
    cuts = itertools.combinations(range(1, len(costs)), chunks - 1)
    ways = ([b - a for a, b in itertools.pairwise((0, *cut, len(costs)))] for cut in cuts)
    return min(max(loads(costs, sizes, ranks)) for sizes in ways)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=4, max_size=10), st.sampled_from([(2, 2), (3, 2), (2, 3)]))
def test_interleaved_chunks_balance_what_a_rank_runs_in_all(costs: list[int], shape: tuple[int, int]) -> None:
    ranks, virtual = shape
    if len(costs) < ranks * virtual:
        with pytest.raises(ConfigError, match="More stages than blocks"):
            balance_ranks(costs, ranks, virtual)
        return
    sizes = balance_ranks(costs, ranks, virtual)
    assert sum(sizes) == len(costs) and min(sizes) >= 1
    assert max(loads(costs, sizes, ranks)) == least(costs, ranks, ranks * virtual)


def test_many_interleaved_blocks_with_heavy_ends_are_split_as_well_as_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_3d.partition._FEW_SPLITS", 0)
    draw = random.Random(0)
    for ranks, virtual in [(2, 2), (4, 2), (2, 3), (3, 2)] * 4:
        count = draw.randint(ranks * virtual, 11)
        costs = [draw.choice([2, 3, 5])] * count
        costs[0] += draw.randint(0, 12)
        costs[-1] += draw.randint(0, 30)
        sizes = balance_ranks(costs, ranks, virtual)
        assert max(loads(costs, sizes, ranks)) == least(costs, ranks, ranks * virtual)


def test_one_chunk_per_rank_is_the_optimum_of_balance() -> None:
    assert balance_ranks([3.0, 1.0, 4.0, 1.0, 5.0], 2) == balance([3.0, 1.0, 4.0, 1.0, 5.0], 2)


def test_costs_of_what_stands_between_two_lists_are_in_the_block_before() -> None:
    model = Decoder(3)
    costs = parameter_costs(model, names(model), {"head": frozenset({1}), "embed": frozenset({0, 2})})
    block = sum(p.numel() for p in model.layers[0].parameters())
    table = VOCABULARY * WIDTH
    assert costs == Costs((block + table, block + table, block + table), "parameters", "by parameters")
    assert costs.of_chunks((0, 1, 3)) == (block + table, 2 * (block + table))
    assert flop_costs(model, names(model), {}).source == "by flops, counted on inputs of 2 x 64"


class TestC28UnevenSplits:
    """Field case C28: layers that do not divide by the stages."""

    @pytest.mark.parametrize("split", ["uniform", "parameters", "flops"])
    def test_seven_layers_on_two_stages(self, split: str) -> None:
        chunks = chunk_map(Decoder(7), find_block_lists(Decoder(7)), ParallelConfig(pipeline_split=split), 2)
        sizes = [len(chunks.blocks_of(chunk)) for chunk in range(2)]
        assert sum(sizes) == 7 and sizes[0] >= sizes[1], "the head and the loss are on the last"

    def test_a_list_by_hand_and_per_chunk_in_interleaved_mode(self) -> None:
        model = Decoder(7)
        by_hand = ParallelConfig(pipeline_split=[3, 4])
        chunks = chunk_map(model, find_block_lists(model), by_hand, 2)
        assert [len(chunks.blocks_of(chunk)) for chunk in range(2)] == [3, 4]
        config = ParallelConfig(pipeline_split=[1, 3, 1, 2], virtual_stages=2, schedule="interleaved_1f1b")
        chunks = chunk_map(model, find_block_lists(model), config, 2)
        layout = describe(model, chunks, config, Sizes(pp=2, dp=1, tp=1))
        assert [len(names) for names in layout.chunks] == [1, 3, 1, 2]
        assert sum(layout.shares) == pytest.approx(1.0) and layout.shares[1] > 0.5
        assert "stage 1 chunk 3: head, 2 blocks layers.5 .. layers.6" in str(layout)

    @pytest.mark.parametrize("split", [[3, 3], [3, 4, 1], [7, 0]])
    def test_coverage_is_checked(self, split: list[int]) -> None:
        with pytest.raises(ConfigError, match="pipeline_split"):
            chunk_map(Decoder(7), find_block_lists(Decoder(7)), ParallelConfig(pipeline_split=split), 2)
