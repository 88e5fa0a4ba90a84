"""Plans by hand: right ones train exactly, wrong ones are refused with the layer's name before anything trains."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_3d.config import ParallelConfig, Sizes
from lightning_3d.errors import ConfigError, PlanError
from lightning_3d.mesh import build_mesh
from lightning_3d.tensor_parallel import apply, plan
from tests.dist import tensor_parallel_models as models
from tests.dist.test_tensor_parallel import compare, cut, loss_of, mesh_of
from tests.harness import run_ranks

ATTENTION = {"*.attn.c_attn": "colwise:3", "*.attn.c_proj": "rowwise"}
MLP = {"*.mlp.fc1": "colwise", "*.mlp.fc2": "rowwise"}


def _by_hand(rank: int, world_size: int, name: str, patterns: dict[str, str], cuts: int) -> None:
    mesh = mesh_of(world_size)
    model = models.build(name)
    reference = copy.deepcopy(model)
    applied = cut(name, model, mesh, tp_plan=patterns)
    sharded = [key for key, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    assert len(sharded) == cuts, sharded
    assert {layer.source for layer in applied.layers} <= {"user", "replicated"}
    compare(name, model, reference, applied, mesh)


@pytest.mark.parametrize(
    ("patterns", "cuts"),
    [
        (MLP, 6),
        (ATTENTION, 6),
        ({**ATTENTION, **MLP, "embed": "vocab", "head": "colwise"}, 14),
        ({"*.fc?": "colwise", "*.fc2": "rowwise", "blocks.0.*": "replicate"}, 3),  # later patterns win
        ({"head": "rowwise"}, 1),
        ({}, 0),
    ],
    ids=["mlp", "attention", "all", "one block", "head", "nothing"],
)
def test_a_right_plan_by_hand_is_exact(patterns: dict[str, str], cuts: int) -> None:
    run_ranks(_by_hand, 2, "nanogpt", patterns, cuts)


def _refused(rank: int, world_size: int, name: str, patterns: Any, kind: type[Exception], words: list[str]) -> str:
    model = models.build(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(kind) as error:
        cut(name, model, mesh_of(world_size), tp_plan=patterns)
    for word in words:
        assert word in str(error.value), str(error.value)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "patterns", "words"),
    [
        ("nanogpt", {"*.mlp.fc1": "colwise"}, ["blocks.0.mlp.fc2", "blocks.0.mlp.fc1"]),
        ("nanogpt", {"*.mlp.fc2": "rowwise"}, ["blocks.0.mlp.fc2", "blocks.0.mlp.fc1"]),
        ("nanogpt", {"*.attn.c_attn": "colwise", "*.attn.c_proj": "rowwise"}, ["blocks.0.attn.c_attn", "colwise:3"]),
        ("fused", {"*.attn.qkv": "colwise", "*.attn.proj": "rowwise"}, ["blocks.0.attn", "colwise:3"]),
        ("fused", {"*.gate_up": "colwise:4", "*.down": "rowwise"}, ["blocks.0.mlp", "changes its numbers"]),
        ("grouped", {"*.wq": "colwise", "*.wv": "colwise", "*.wo": "rowwise"}, ["blocks.0.attn.wk"]),
        ("batchnorm", {"*.fc1": "colwise", "*.fc2": "rowwise"}, ["blocks.0.mlp.fc1", "BatchNorm" if False else "fc2"]),
    ],
)
def test_a_wrong_plan_is_refused(name: str, patterns: dict[str, str], words: list[str]) -> None:
    messages = run_ranks(_refused, 2, name, patterns, PlanError, words)
    assert messages[0] == messages[1]


def _plan(name: str, tp: int, **options: Any) -> Any:
    model = models.build(name)
    return plan(model, models.blocks_of(name, model), ParallelConfig(tensor_parallel=tp, **options), tp)


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        ({"*.fc1": "columnwise"}, ["'columnwise'", "'colwise'", "'rowwise'", "'vocab'", "'replicate'"]),
        ({"*.fc1": "colwise:x"}, ["'colwise:x'", "packed"]),
        ({"*.fc1": "rowwise:2"}, ["'rowwise:2'"]),
        ({"*.mlp.fc3": "colwise"}, ["'*.mlp.fc3'", "blocks.*.mlp.fc1"]),
        ({"*.ln_1": "colwise"}, ["blocks.0.ln_1", "LayerNorm"]),
        ({"embed": "colwise"}, ["embed", "Embedding"]),
        ({"head": "vocab"}, ["head", "Linear"]),
        ("megatron", ["'megatron'", "'auto'"]),
    ],
)
def test_unknown_values_and_names_are_refused_before_any_process(patterns: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        _plan("nanogpt", 2, tp_plan=patterns)
    for word in words:
        assert word in str(error.value), str(error.value)


@pytest.mark.parametrize(
    ("name", "tp", "words"),
    [
        ("nanogpt", 3, ["blocks.0.attn", "4 attention heads", "tensor_parallel=3", "[1, 2, 4]"]),
        ("torch", 8, ["encoder.layers.0.self_attn", "4 attention heads", "tensor_parallel=8"]),
        ("llama", 8, ["model.model.layers.0.self_attn", "4 attention heads"]),
        ("six_heads", 4, ["blocks.0.attn", "6 attention heads", "[1, 2, 3, 6]"]),
        ("three_kv_heads", 2, ["blocks.0.attn", "3 key/value heads", "[1, 3]"]),
    ],
)
def test_heads_that_do_not_divide_are_refused_before_any_process(name: str, tp: int, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        _plan(name, tp)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_features_that_do_not_divide_stay_whole_and_are_listed() -> None:
    made = _plan("odd_inner", 4)
    notes = made.blocks[0].notes
    assert "50" in notes["mlp.fc1"]
    assert "tensor_parallel=4" in notes["mlp.fc2"]
    with pytest.raises(ConfigError, match="50"):
        _plan("odd_inner", 4, tp_plan=MLP)


def _dropout_masks(rank: int, world_size: int, sequence: bool) -> list[Tensor]:
    mesh = mesh_of(world_size)
    torch.manual_seed(0)
    model = models._decoder(lambda w: models.Block(w, models.CausalSelfAttention(w, 4, 0.5), models.MLP(w, 64, 0.5)))
    cut("nanogpt", model, mesh, sequence_parallel=sequence)
    masks: list[Tensor] = []
    block = model.blocks[0]
    assert isinstance(block, models.Block)
    assert isinstance(block.mlp, models.MLP)
    for dropout in (block.mlp.inner_dropout, block.mlp.dropout):
        dropout.register_forward_hook(lambda _, args, output: masks.append((output == 0).float()))
    kept = F.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        ones = torch.eye(q.shape[-2]).expand(*q.shape[:-1], -1)
        masks.append(F.dropout(ones, options["dropout_p"]).sum(-1))
        return kept(q, k, v, **options)

    F.scaled_dot_product_attention = spy  # type: ignore[assignment]
    torch.manual_seed(1)
    for _ in range(2):
        loss_of(model, torch.zeros(2, 8, dtype=torch.long)).backward()
    masks.append(torch.rand(4))
    return masks


def test_dropout_differs_on_pieces_and_agrees_on_replicas() -> None:
    first, second = run_ranks(_dropout_masks, 2, False)
    kinds = ("attention", "inner", "outer", "other attention") * 2
    for kind, mine, theirs in zip(kinds, first, second, strict=False):
        assert torch.equal(mine, theirs) == (kind == "outer"), kind
    assert torch.equal(first[-1], second[-1])
    assert not torch.equal(first[0], first[4]), "every step draws anew"


def _sharded(rank: int, world_size: int) -> None:
    mesh = build_mesh(Sizes(pp=1, dp=2, tp=2), torch.device("cpu"))
    assert mesh.device_mesh is not None
    for name in ("nanogpt_1001_tied", "grouped_one"):
        model = models.build(name)
        reference = copy.deepcopy(model)
        made = plan(model, models.blocks_of(name, model), ParallelConfig(tensor_parallel=2), 2)
        applied = apply(model, made, mesh, lambda _: True)
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh.device_mesh["dp"])
        fully_shard(model, mesh=mesh.device_mesh["dp"])
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, 60, (4, 8), generator=generator)
        loss_of(reference, ids).backward()
        for _ in range(2):
            model.zero_grad()
            loss_of(model, ids.chunk(2)[mesh.dp.rank]).backward()
        for key, parameter in model.named_parameters():
            grad = parameter.grad
            assert isinstance(grad, DTensor), key
            local = torch.cat([torch.zeros(0), grad._local_tensor.flatten().float()])
            expected = reference.get_parameter(key).grad
            assert expected is not None
            cutting = applied.cuts.get(key)
            mine = expected if cutting is None else cutting.take(expected, mesh.tp.rank)
            if key in applied.partial:
                continue
            rows = mine.chunk(2)
            piece = rows[mesh.dp.rank] if mesh.dp.rank < len(rows) else mine[:0]
            torch.testing.assert_close(grad._local_tensor, piece, rtol=1e-9, atol=1e-12, msg=key)
            assert local.numel() == piece.numel()


def test_fsdp_shards_what_is_cut() -> None:
    run_ranks(_sharded, 4)


class _Kept(nn.Module):
    """Keeps its parameters in a list and a dict, has hooks and attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = models.build("nanogpt")
        self.mine = [self.body.head.weight, {"w": self.body.embed.weight}]  # type: ignore[union-attr]
        self._hidden = (self.body.head.weight,)  # type: ignore[union-attr]

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(ids)  # type: ignore[no-any-return]


def _in_place(rank: int, world_size: int) -> None:
    mesh = mesh_of(world_size)
    model = _Kept()
    block = model.body.blocks[0]  # type: ignore[union-attr, index]
    fc1, calls = block.mlp.fc1, []  # type: ignore[union-attr]
    fc1.note = "kept"  # type: ignore[union-attr, assignment]
    fc1.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr, operator]
    names = list(dict(model.named_parameters()))
    made = plan(model, [["body.blocks.0", "body.blocks.1"]], ParallelConfig(tensor_parallel=2), 2)
    apply(model, made, mesh, lambda _: True)
    assert block.mlp.fc1 is fc1  # type: ignore[union-attr]
    assert isinstance(fc1, nn.Linear)
    assert fc1.note == "kept"
    assert fc1.in_features == 32 and fc1.out_features == 128
    assert isinstance(fc1.weight, nn.Parameter) and isinstance(fc1.weight, DTensor)
    assert fc1.weight.shape == (128, 32) and fc1.weight.to_local().shape == (64, 32)
    assert names == list(dict(model.named_parameters()))
    assert model.mine[0] is model.body.head.weight  # type: ignore[union-attr]
    assert model._hidden[0] is model.body.head.weight  # type: ignore[union-attr]
    assert model.mine[1]["w"] is model.body.embed.weight  # type: ignore[union-attr, index, call-overload]
    model(torch.zeros(1, 8, dtype=torch.long))
    assert calls == [1]


def test_modules_names_and_references_stay() -> None:
    run_ranks(_in_place, 2)


def _ragged_sequence(rank: int, world_size: int) -> None:
    model = models.build("nanogpt")
    cut("nanogpt", model, mesh_of(world_size), sequence_parallel=True)
    with pytest.raises(ConfigError) as error:
        model(torch.zeros(2, 7, dtype=torch.long))
    for word in ("blocks.0", "sequence of 7", "2 tensor-parallel ranks", "multiple of 2"):
        assert word in str(error.value)


def test_a_sequence_that_does_not_divide_is_refused_with_numbers() -> None:
    run_ranks(_ragged_sequence, 2)
