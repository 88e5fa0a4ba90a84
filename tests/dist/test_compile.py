"""Compiled blocks: ``compile=``, the user's own ``torch.compile`` and checkpoint wrappers, and names in checkpoints."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_3d.checkpoint import consolidate, to_lightning
from lightning_3d.sharding import build_sharding
from lightning_3d.trainer.setup import assembly
from tests.dist.lightning_modules import (
    VOCAB,
    WIDTH,
    Block,
    Mesh,
    Tokens,
    loader,
    make_trainer,
    numbers,
    on_ranks,
    rows,
    seeded,
    whole_weights,
)

TOLERANCE = {"rtol": 1e-9, "atol": 1e-10}
FULL = {"compile": "aot_eager", "activation_checkpointing": "full"}


class AttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(x)))


class Attending(Tokens):
    def __init__(self) -> None:
        super().__init__(num_blocks=0)
        self.blocks = nn.ModuleList(AttentionBlock() for _ in range(4))


class DroppingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.up(self.norm(x))), 0.2, self.training)
        return x + F.dropout(self.down(hidden), 0.2, self.training)


class Dropping(Tokens):
    def __init__(self) -> None:
        super().__init__(num_blocks=0)
        self.blocks = nn.ModuleList(DroppingBlock() for _ in range(4))


@torch.compile(backend="eager")
def centred(x: Tensor) -> Tensor:
    """What a user compiles besides the model; with a pipeline it is called on values of other stages too."""
    return x - x.mean(-1, keepdim=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = centred(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return centred(self.head(x))


class Wrapped(Tokens):
    """C53: a net that its user compiled, with blocks in checkpoint wrappers."""

    def __init__(self, how: str = "") -> None:
        super().__init__(num_blocks=0)
        del self.embed, self.blocks, self.norm, self.head
        self.net: Any = Net()
        if "checkpoint" in how:
            self.net.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in self.net.blocks)
        if "net" in how:
            self.net = torch.compile(self.net, backend="eager")
        if "in place" in how:
            self.net.compile(backend="eager")

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)


class Case(NamedTuple):
    make: Any
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012
    lengths: bool = False
    """Whether every batch has another length."""
    whole: bool = False
    """Whether the Trainer gets what ``torch.compile`` makes of the LightningModule."""
    graphs: bool = True
    """Whether anything is compiled."""
    epochs: int = 1
    resume: Path | None = None
    save: Path | None = None


class Result(NamedTuple):
    logged: dict[str, float]
    weights: dict[str, Tensor]
    graphs: int


def shortened(items: list[Tensor]) -> Tensor:
    return torch.stack(items)[:, : 7 - int(items[0].sum()) % 3]


def train(mesh: Mesh | None, cases: list[Case]) -> list[Result]:
    found = []
    # Blocks of a test are small, and would share one FSDP2 unit with the root.
    sharding = functools.partial(build_sharding, unit_bytes=1)
    with mock.patch.object(assembly, "build_sharding", sharding):
        for case in cases:
            counters.clear()
            torch._dynamo.reset()
            module = seeded(case.make, *case.arguments)
            given = torch.compile(module, backend="aot_eager") if case.whole and mesh else module
            trainer = make_trainer(mesh, case.options, max_epochs=2 if case.resume else case.epochs)
            extra = {"collate_fn": shortened} if case.lengths else {}
            evaluated = loader(rows(4), 4, mesh) if case.whole else None
            data = loader(rows(16 if case.lengths else 8), 4, mesh, **extra)
            trainer.fit(given, data, evaluated, ckpt_path=case.resume)
            if case.save is not None:
                trainer.save_checkpoint(case.save)
            graphs = counters["stats"]["unique_graphs"]
            found.append(Result(numbers(trainer.callback_metrics), whole_weights(trainer), graphs))
    return found


def plain(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): value for name, value in weights.items()}


def eager(case: Case) -> Case:
    options = {key: value for key, value in case.options.items() if key != "compile"}
    return case._replace(options=options, graphs=False)


def compare(case: Case, got: Result, expected: Result) -> None:
    torch.testing.assert_close(got.logged, expected.logged, **TOLERANCE, msg=lambda m: f"{case}: {m}")
    assert (got.graphs > 0) == case.graphs, f"{case}: {got.graphs} graphs"
    torch.testing.assert_close(got.weights, plain(expected.weights), **TOLERANCE)
    assert list(got.weights) == list(plain(expected.weights))


def agree(mesh: Mesh, *cases: Case) -> None:
    """Every case trains at the mesh as in one process without the strategy's compile."""
    expected = train(None, [eager(case) for case in cases])
    results = train(mesh, list(cases)) if mesh == (1, 1, 1) else on_ranks(train, mesh, list(cases))[0]
    for case, got, one in zip(cases, results, expected, strict=True):
        compare(case, got, one)


def test_c54_compiled_blocks_with_recomputation_and_tensor_parallelism() -> None:
    agree(
        (1, 1, 2),
        Case(Attending, options=FULL),
        Case(Wrapped, ("checkpoint net",)),
        Case(Tokens, whole=True),
    )


def test_c54_compiled_blocks_with_recomputation_and_a_pipeline() -> None:
    agree(
        (2, 1, 1),
        Case(Attending, options={**FULL, "schedule": "interleaved_1f1b", "virtual_stages": 2}),
        Case(Tokens, options=FULL, lengths=True),
        Case(Wrapped, ("checkpoint net",)),
    )


def test_c54_compiled_blocks_with_recomputation_and_zero() -> None:
    agree((1, 2, 1), *(Case(Tokens, options={**FULL, "zero_stage": stage}) for stage in (1, 3)))


def test_compiled_blocks_draw_the_random_numbers_of_eager_ones() -> None:
    case = Case(Dropping, options={**FULL, "sequence_parallel": True})
    compare(case, *on_ranks(train, (1, 1, 2), [case, eager(case)])[0])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ on a CPU")
def test_inductor() -> None:
    agree((1, 1, 1), Case(Tokens, options={"compile": True}))


def test_c53_names_in_checkpoints_are_those_of_the_plain_module(tmp_path: Path) -> None:
    """Saved wrapped and resumed plain, and the reverse, at tp2 and dp2; files of the stock Trainer too."""
    bare, wrapped = Case(Wrapped, graphs=False), Case(Wrapped, ("checkpoint net",))
    stock, stock_wrapped, tp, dp = (tmp_path / f"{name}.ckpt" for name in ("stock", "stock_wrapped", "tp", "dp"))
    first, _ = train(None, [bare._replace(save=stock), wrapped._replace(save=stock_wrapped)])
    assert any("_orig_mod" in name for name in torch.load(stock_wrapped)["state_dict"])
    # Not resumed: the stock Trainer loads values of float64 into a module that is still one of float32.
    (expected,) = train(None, [bare._replace(epochs=2)])
    at_tp = [wrapped._replace(save=tp), wrapped._replace(resume=stock), bare._replace(resume=stock_wrapped)]
    at_dp = [wrapped._replace(save=dp), bare._replace(resume=tp), wrapped._replace(resume=dp)]
    for cases, mesh in ((at_tp, (1, 1, 2)), (at_dp, (1, 2, 1))):
        _, *resumed = on_ranks(train, mesh, cases)[0]
        for result in resumed:
            torch.testing.assert_close(result.weights, expected.weights, **TOLERANCE)
    for saved in (tp, dp):
        assert list(consolidate(saved)) == list(first.weights) == list(to_lightning(saved)["state_dict"])
        Wrapped().double().load_state_dict(consolidate(saved))
