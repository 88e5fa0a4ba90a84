"""The cut and the engine on real ranks: an unmodified model, any schedule, the numbers of the uncut model."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.config import Sizes
from lightning_3d.mesh import build_mesh
from lightning_3d.pipeline.blocks import find_block_lists, share_out
from lightning_3d.pipeline.cut import Cut
from lightning_3d.pipeline.engine import Engine, Step
from lightning_3d.pipeline.micro_batches import MicroBatch, cut, piece_sizes
from lightning_3d.pipeline.observe import call_order
from lightning_3d.pipeline.stage import Stage
from lightning_3d.placeholder import is_placeholder
from tests.harness import RankFailure, run_ranks

CPU = torch.device("cpu")
VOCAB, WIDTH, SAMPLES = 17, 8, 4


class Token:
    """Lives as long as the graph of one forward."""


class Track(torch.autograd.Function):
    """Passes its input on; the token shows how long the graph behind it lives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, live: list[weakref.ref[Token]]) -> Tensor:
        ctx.token = Token()
        live.append(weakref.ref(ctx.token))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Block(nn.Module):
    """Takes a mask, a flag, a ``None`` and a tuple, and gives a dict back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.live: list[weakref.ref[Token]] = []

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, scale: float, extra: tuple[Tensor, None]
    ) -> dict[str, Any]:
        y = Track.apply(torch.tanh(self.inner(x)) * scale, self.live)
        if mask is not None:
            y = y * mask[..., None]
        return {"x": y + 0.1 * extra[0], "none": None}


class Model(nn.Module):
    """A residual in the parent, a table that every block needs, and a mask made from the batch."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.register_buffer("table", torch.arange(64.0).view(64, 1) / 64)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        context = x.mean(1, keepdim=True) + self.table[: ids.size(1)]
        for layer in self.layers:
            x = x + layer(x, mask, scale=0.5, extra=(context, None))["x"]
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class NoSharding:
    def prepare_backward(self, chunk: int, *, last_of_chunk: bool, last_of_step: bool, sync: bool) -> None:
        """Nothing is sharded here."""


def batches(lengths: Sequence[int], masked: bool = True) -> list[dict[str, Tensor | None]]:
    generator = torch.Generator().manual_seed(3)
    out: list[dict[str, Tensor | None]] = []
    for length in lengths:
        ids = torch.randint(VOCAB, (SAMPLES, length), generator=generator)
        mask = (
            (torch.rand(SAMPLES, length, generator=generator) > 0.3).to(torch.get_default_dtype()) if masked else None
        )
        out.append({"ids": ids, "mask": mask})
    return out


def build(
    model: nn.Module, rank: int, world: int, schedule: str, virtual: int, split: Any = "uniform"
) -> tuple[Engine, Stage]:
    mesh = build_mesh(Sizes(pp=world, dp=1, tp=1), CPU)
    chunks = share_out(model, find_block_lists(model), world * virtual, split, call_order(model))
    stage_cut = Cut(model, chunks, [c for c in range(world * virtual) if c % world == rank], CPU)
    stage = Stage(model, stage_cut)
    stage_cut.install()
    return Engine(stage, mesh, schedule, virtual, NoSharding()), stage


def step(model: nn.Module, pieces: Sequence[MicroBatch], training: bool = True) -> Step:
    def backward(loss: Tensor, piece: MicroBatch) -> None:
        (loss * piece.size / SAMPLES).backward()

    return Step(
        pieces=pieces,
        call=lambda piece: model(**piece.data),
        backward=backward if training else None,
        mode="train" if training else "validation",
    )


def same_as_uncut(rank: int, world: int, schedule: str, virtual: int, count: int, lengths: Sequence[int]) -> int:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    whole = Model()
    engine, _ = build(model := copy.deepcopy(whole), rank, world, schedule, virtual)
    owned = 0
    for batch in batches(lengths):
        whole.zero_grad(set_to_none=True)
        for parameter in model.parameters():
            parameter.grad = None
        pieces = cut(batch, piece_sizes(SAMPLES, count))
        expected = []
        for piece in pieces:
            loss = whole(**piece.data)
            (loss * piece.size / SAMPLES).backward()
            expected.append(loss.detach())
        with torch.no_grad():
            scores = engine.run(step(model, pieces, training=False))
        losses = engine.run(step(model, pieces))
        assert bool(losses) == (rank == world - 1)
        for got in (losses, scores):
            torch.testing.assert_close(got, expected if got else [], rtol=0, atol=1e-13)
        reference = dict(whole.named_parameters())
        owned = 0
        for name, parameter in model.named_parameters():
            if is_placeholder(parameter):
                assert parameter.grad is None
                continue
            owned += 1
            torch.testing.assert_close(parameter.grad, reference[name].grad, rtol=0, atol=1e-13, msg=name)
    return owned


@pytest.mark.parametrize(
    ("world", "schedule", "virtual", "count"),
    [
        (2, "gpipe", 1, 3),
        (2, "1f1b", 1, 4),
        (2, "interleaved_1f1b", 2, 4),
        (2, "interleaved_1f1b", 2, 3),
        (4, "1f1b", 1, 2),
        (4, "1f1b", 1, 4),
    ],
)
def test_losses_and_gradients_equal_the_uncut_model_for_changing_lengths(
    world: int, schedule: str, virtual: int, count: int
) -> None:
    owned = run_ranks(same_as_uncut, world, schedule, virtual, count, [5, 9, 3, 9])
    assert sum(owned) == len(list(Model().parameters()))


def peak_live(rank: int, world: int, schedule: str, count: int) -> tuple[int, int]:
    engine, stage = build(model := Model(), rank, world, schedule, 1)
    block = next(iter(stage.blocks[rank]))
    peak = 0

    def count_live(piece: MicroBatch) -> Tensor:
        nonlocal peak
        peak = max(peak, 1 + sum(ref() is not None for ref in block.live))
        out: Tensor = model(**piece.data)
        return out

    def backward(loss: Tensor, piece: MicroBatch) -> None:
        loss.backward()

    batch = {"ids": torch.zeros(count, 3, dtype=torch.long), "mask": None}
    pieces = cut(batch, [1] * count)
    for _ in range(2):
        block.live.clear()
        peak = 0
        engine.run(Step(pieces=pieces, call=count_live, backward=backward))
    left = sum(ref() is not None for ref in block.live)
    return peak, left


@pytest.mark.parametrize("count", [2, 4, 12])
def test_live_activations_are_bounded_by_the_stage_not_by_the_micro_batches(count: int) -> None:
    got = run_ranks(peak_live, 4, "1f1b", count)
    assert [peak for peak, _ in got] == [min(count, 4 - stage) for stage in range(4)]
    assert [left for _, left in got] == [0] * 4, "nothing survives the step"
    assert run_ranks(peak_live, 2, "gpipe", count)[0][0] == count


def frozen_below(rank: int, world: int) -> list[str]:
    model = Model()
    model.embed.requires_grad_(False)
    for layer in model.layers[:3]:
        layer.requires_grad_(False)
    engine, _ = build(model, rank, world, "1f1b", 1)
    engine.run(step(model, cut(batches([5])[0], [2, 2])))
    return [name for name, parameter in model.named_parameters() if parameter.grad is not None]


def test_no_gradient_is_computed_or_sent_below_the_first_trainable_layer() -> None:
    got = run_ranks(frozen_below, 4)
    assert got[:3] == [[], [], []]
    assert got[3] == ["layers.3.inner.weight", "layers.3.inner.bias", "head.weight", "head.bias"]


def thaws(rank: int, world: int) -> int:
    model = Model()
    model.embed.requires_grad_(False)
    model.layers.requires_grad_(False)
    engine, _ = build(model, rank, world, "1f1b", 1)
    pieces = cut(batches([5])[0], [2, 2])
    engine.run(step(model, pieces))
    model.requires_grad_(True)
    engine.run(step(model, pieces))
    return sum(parameter.grad is not None for parameter in model.parameters())


def test_layers_may_be_unfrozen_in_mid_run() -> None:
    assert sum(run_ranks(thaws, 2)) == len(list(Model().parameters()))


class ReadsActivation(Model):
    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            if x.abs().max() > 100:
                x = x / 2
            x = layer(x, mask, scale=1.0, extra=(x, None))["x"]
        return self.head(x).sum()


class CallsTwice(Model):
    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(ids, mask) + super().forward(ids, mask)


class SkipsBlocks(Model):
    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.head(self.embed(ids)).sum()


def refused(rank: int, world: int, kind: Callable[[], nn.Module]) -> None:
    model = kind()
    engine, _ = build(model, rank, world, "1f1b", 1)
    engine.run(step(model, cut(batches([5])[0], [2, 2])))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            ReadsActivation,
            ["test_pipeline.py:", "x.abs().max() > 100", "another pipeline stage", "pipeline_parallel=1"],
        ),
        (CallsTwice, ["called again", "layers.0", "pipeline_parallel=1"]),
        (SkipsBlocks, ["returned while it ran chunk 0 of 2"]),
    ],
)
def test_steps_that_cannot_be_cut_are_refused_with_the_reason(kind: type[nn.Module], words: list[str]) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(refused, 2, kind, timeout=30)
    for word in words:
        assert word in str(caught.value)
