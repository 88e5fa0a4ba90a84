"""Ordinary model code at any layout: keyword arguments, masks, few heads, bare parameters, odd sizes, uneven stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.errors import ConfigError, PlanError, StageError
from tests.dist.lightning_modules import (
    VOCAB,
    WIDTH,
    Mesh,
    Tokens,
    differences,
    loader,
    make_trainer,
    numbers,
    on_ranks,
    rows,
    seeded,
    whole_weights,
)


class Masked(nn.Module):
    """A block that wants its mask and flags, and returns a tuple with None in it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, scale: float, flag: bool, cache: Any = None
    ) -> tuple[Tensor, Any]:
        if mask is None or not flag:
            raise ValueError("the mask or the flag got lost")
        mixed = torch.einsum("bij,bjc->bic", mask, self.mix(self.norm(x))) * scale
        return x + mixed, cache


class KeywordArguments(Tokens):
    """C17: what is not a positional tensor must reach the blocks too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Masked() for _ in range(4))

    def forward(
        self, ids: Tensor, attention_mask: Tensor | None = None, *, scale: float = 1.0, flag: bool = True
    ) -> dict[str, Any]:
        x = self.embed(ids)
        caches = []
        for block in self.blocks:
            x, cache = block(x, attention_mask, scale=scale, flag=flag)
            caches.append(cache)
        return {"logits": self.head(self.norm(x)), "caches": caches, "hidden": (x, None)}

    def output(self, batch: dict[str, Any]) -> dict[str, Any]:
        assert batch["nothing"] is None
        assert len(batch["names"]) == len(batch["ids"])
        ids = batch["ids"][:, :-1]
        length = ids.size(1)
        seen = (torch.arange(length)[:, None] >= torch.arange(length)) & (ids != 0)[:, None, :]
        mask = seen.to(self.head.weight.dtype)
        return self(ids, attention_mask=mask / mask.sum(-1, keepdim=True).clamp(min=1), scale=0.5)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.output(batch)["logits"].flatten(0, 1), batch["ids"][:, 1:].flatten())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        output = self.output(batch)
        return {"best": output["logits"].argmax(-1), "caches": output["caches"], "names": batch["names"]}


def named_rows(num: int) -> list[dict[str, Any]]:
    return [{"ids": row, "names": f"row {index}"} for index, row in enumerate(rows(num))]


def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "ids": torch.stack([item["ids"] for item in items]),
        "names": [item["names"] for item in items],
        "nothing": None,
    }


class Attention(nn.Module):
    """Grouped-query attention with heads counted in attributes."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int = 4) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.q_proj = nn.Linear(WIDTH, num_heads * head_dim)
        self.k_proj = nn.Linear(WIDTH, num_kv_heads * head_dim)
        self.v_proj = nn.Linear(WIDTH, num_kv_heads * head_dim)
        self.o_proj = nn.Linear(num_heads * head_dim, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.q_proj(x).view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, n, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, n, self.num_kv_heads, self.head_dim).transpose(1, 2)
        k, v = (t.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, n, -1))


class AttentionBlock(nn.Module):
    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention(num_heads, num_kv_heads)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


class Grouped(Tokens):
    """C25: fewer key/value heads than tensor-parallel ranks."""

    def __init__(self, num_heads: int = 4, num_kv_heads: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AttentionBlock(num_heads, num_kv_heads) for _ in range(2))


class BareBlock(nn.Module):
    """C26: a buffer, a bare parameter, a mask made on the spot, attention and einsum on whatever is sharded."""

    bias_table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention(2, 2)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.9))
        self.gate = nn.Parameter(torch.ones(2 * WIDTH))
        self.register_buffer("bias_table", torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x)) * self.scale + self.bias_table
        decay = torch.arange(x.size(1), device=x.device).to(x.dtype)
        x = torch.einsum("bnc,n->bnc", x, 1 / (1 + decay))
        return x + self.down(F.gelu(self.up(x)))


class Bare(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BareBlock() for _ in range(2))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) / self.temperature


class OddVocabulary(Tokens):
    """C27: a vocabulary that does not divide."""

    def __init__(self, tied: bool) -> None:
        super().__init__(num_blocks=2, vocab=1001)
        if tied:
            self.head = nn.Linear(WIDTH, 1001, bias=False)
            self.head.weight = self.embed.weight


class Case(NamedTuple):
    make: Any
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] | None = None
    vocab: int = VOCAB


def train(mesh: Mesh | None, cases: list[Case], predict: bool = False) -> Any:
    found = []
    for case in cases:
        named = case.make is KeywordArguments
        data: Any = named_rows(12) if named else rows(12, vocab=case.vocab)
        extra = {"collate_fn": collate} if named else {}
        module = seeded(case.make, *case.arguments)
        trainer = make_trainer(mesh, dict(case.options or {}), gradient_clip_val=0.5)
        trainer.fit(module, loader(data, 4, mesh, **extra), loader(data, 4, mesh, **extra))
        predicted = trainer.predict(module, loader(data, 4, mesh, **extra)) if predict else None
        found.append((numbers(trainer.callback_metrics), whole_weights(trainer), predicted))
    return found


def agree(mesh: Mesh, *cases: Case, predict: bool = False) -> None:
    """Every case trains at the mesh as in one process."""
    expected = train(None, list(cases), predict)
    for rank, results in enumerate(on_ranks(train, mesh, list(cases), predict)):
        for case, (got_logged, got, got_predicted), (logged, weights, predicted) in zip(
            cases, results, expected, strict=True
        ):
            assert not differences(got_logged, logged), f"rank {rank}, {case}"
            if rank == 0:
                assert got.keys() == weights.keys()
                for name, value in weights.items():
                    torch.testing.assert_close(
                        got[name], value, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
                    )
            if predict:
                for mine, theirs in zip(got_predicted, predicted, strict=True):
                    assert torch.equal(mine.pop("best"), theirs["best"])
                    assert mine == {"caches": [None] * 4, "names": theirs["names"]}


@pytest.mark.parametrize("mesh", [(4, 1, 1), (2, 1, 2)], ids=str)
def test_keyword_arguments_masks_and_none_reach_every_stage(mesh: Mesh) -> None:
    agree(mesh, Case(KeywordArguments), predict=True)


def test_grouped_query_heads_are_shared_or_replicated() -> None:
    agree((1, 1, 4), Case(Grouped, (4, 1)), Case(Grouped, (4, 2)))


def refuse(mesh: Mesh, case: Case) -> str:
    with pytest.raises((ConfigError, PlanError, StageError)) as refused:
        train(mesh, [case])
    return str(refused.value)


def test_heads_that_do_not_divide_are_refused_with_their_names_and_numbers() -> None:
    for message in on_ranks(refuse, (1, 1, 4), Case(Grouped, (6, 6))):
        assert "6" in message
        assert "4" in message
        assert "blocks" in message


@pytest.mark.parametrize("mesh", [(1, 1, 2), (2, 1, 2)], ids=str)
def test_buffers_bare_parameters_and_masks_mix_with_cut_layers(mesh: Mesh) -> None:
    agree(mesh, Case(Bare))


def test_sequence_parallel_is_refused_for_code_that_counts_tokens() -> None:
    for message in on_ranks(refuse, (1, 1, 2), Case(Bare, (), {"sequence_parallel": True})):
        assert "sequence_parallel=False" in message
        assert "blocks.0" in message


@pytest.mark.parametrize("mesh", [(1, 1, 2), (1, 1, 4)], ids=str)
def test_a_vocabulary_that_does_not_divide_keeps_its_rows(mesh: Mesh) -> None:
    cases = [
        Case(OddVocabulary, (tied,), {"loss_parallel": parallel}, 1001)
        for tied, parallel in ((False, False), (True, True), (False, True))
    ]
    agree(mesh, *cases)
    exported = on_ranks(train, mesh, cases[:1])[0][0][1]
    OddVocabulary(False).double().load_state_dict(exported)
    assert exported["embed.weight"].shape == exported["head.weight"].shape == (1001, WIDTH)


def test_stages_may_be_uneven() -> None:
    interleaved = {"schedule": "interleaved_1f1b", "virtual_stages": 2}
    agree(
        (2, 1, 1),
        Case(Tokens, (7,)),
        Case(Tokens, (7,), {"pipeline_split": [3, 4]}),
        Case(Tokens, (7,), {"pipeline_split": "uniform"}),
        Case(Tokens, (7,), {"pipeline_split": "profile"}),
        Case(Tokens, (7,), {"pipeline_split": "parameters", **interleaved}),
        Case(Tokens, (7,), {"pipeline_split": [1, 3, 1, 2], **interleaved}),
    )


def test_a_split_that_does_not_cover_the_blocks_is_refused() -> None:
    for message in on_ranks(refuse, (2, 1, 1), Case(Tokens, (7,), {"pipeline_split": [3, 3]})):
        assert "[3, 3]" in message
        assert "7" in message
