"""Values that are needed stages away from where they are made, without a word from the user: they come along.

Field cases C35 (encoder-decoder, skip connections) and C17 (what is not handed to a block).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.config import Sizes
from lightning_3d.mesh import Mesh, build_mesh
from lightning_3d.pipeline.blocks import find_block_lists, share_out
from lightning_3d.pipeline.cut import Cut
from lightning_3d.pipeline.engine import Engine, Step
from lightning_3d.pipeline.foreign import refuse_foreign
from lightning_3d.pipeline.micro_batches import MicroBatch, cut, piece_sizes
from lightning_3d.pipeline.observe import call_order
from lightning_3d.pipeline.stage import Stage
from lightning_3d.placeholder import is_placeholder
from tests.harness import RankFailure, run_ranks

CPU = torch.device("cpu")
WIDTH, SAMPLES = 6, 4


class UNet(nn.Module):
    """Skips in a list, joined in the parent's forward; four levels down, four up."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(2 * WIDTH, 3)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = stem = self.stem(x)
        skips = []
        for layer in self.down:
            x = self.act(layer(x))
            skips.append(x.clone())
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, skips.pop()], dim=-1)))
        return self.head(torch.cat([x, stem], dim=-1)).square().mean()


class CrossBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + torch.tanh(self.own(x))
        if memory is not None:
            x = x + torch.softmax(self.query(x) @ memory.transpose(1, 2), -1) @ memory
        return x


class Decoder(nn.Module):
    """Has the encoder's states as an attribute, so no block is handed them before it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CrossBlock() for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, memory if index % 2 else None)
        return x


class Seq2Seq(nn.Module):
    """Every second decoder block reads the encoder's states; the target is embedded before the encoder runs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.encoder = nn.ModuleList(CrossBlock() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.decoder = Decoder()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        target = self.embed(x.flip(1))
        x = self.embed(x)
        for layer in self.encoder:
            x = layer(x)
        x = self.decoder(target, memory=self.norm(x))
        return self.head(x).square().mean()


class Derived(nn.Module):
    """Computes with early values in the parent: a gate for the middle, chunks of it, a term of the loss, a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.drop = nn.Dropout(0.5)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        early = self.stem(x) * self.scale
        gate, shift = torch.sigmoid(early).chunk(2, dim=-1)
        gate = torch.cat([gate, shift], dim=-1) + 1
        with torch.no_grad():
            level = early.mean()
        x = self.drop.eval()(early)
        hidden = []
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * (gate if index == 2 else 1.0)
            hidden.append(x)
        loss = x.square().mean() + level * hidden[0].mean()
        return loss + 0.1 * torch.stack(hidden).mean() if level.item() < 100 else loss


class Loops(nn.Module):
    """Runs through its layers twice, and adds what came out of the first run at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CrossBlock() for _ in range(2))
        self.between = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        runs = []
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
            runs.append(self.between(x))
        return (runs[0] * runs[1]).square().mean()


class Rectified(nn.Module):
    """Blocks that change what they are given, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LeakyReLU(0.1, inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Asked(nn.Module):
    """Its later layers are only asked, without a graph; what they were given has one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CrossBlock() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = layer(x)
        y = x
        with torch.no_grad():
            for layer in self.layers[2:]:
                y = layer(y)
        return (self.head(x).square() * y.square().mean()).mean()


class NoSharding:
    def prepare_backward(self, chunk: int, *, last_of_chunk: bool, last_of_step: bool, sync: bool) -> None:
        """Nothing is sharded here."""


def build(model: nn.Module, mesh: Mesh, schedule: str, virtual: int) -> Engine:
    world, rank = mesh.pp.size, mesh.pp.rank
    model.example_input_array = torch.zeros(1, 5, WIDTH)  # type: ignore[assignment]
    count, order = world * virtual, call_order(model)
    chunks = share_out(model, find_block_lists(model, "auto", count, order), count, "uniform", order)
    stage_cut = Cut(model, chunks, [c for c in range(world * virtual) if c % world == rank], CPU)
    stage = Stage(model, stage_cut)
    stage_cut.install()
    return Engine(stage, mesh, schedule, virtual, NoSharding())


def backward(loss: Tensor, piece: MicroBatch) -> None:
    refuse_foreign(loss, "The loss")
    (loss * piece.size / SAMPLES).backward()


def same_as_uncut(rank: int, world: int, schedule: str, virtual: int, kinds: list[type[nn.Module]]) -> None:
    torch.set_default_dtype(torch.float64)
    mesh = build_mesh(Sizes(pp=world, dp=1, tp=1), CPU)
    for kind in kinds:
        torch.manual_seed(0)
        whole = kind()
        model = copy.deepcopy(whole)
        engine = build(model, mesh, schedule, virtual)
        for length in (5, 7, 5):
            x = torch.randn(SAMPLES, length, WIDTH, generator=torch.Generator().manual_seed(length))
            whole.zero_grad()
            for parameter in model.parameters():
                parameter.grad = None
            pieces = cut({"x": x}, piece_sizes(SAMPLES, 3))
            losses = [whole(**piece.data) for piece in pieces]
            for loss, piece in zip(losses, pieces, strict=True):
                backward(loss, piece)

            def call(piece: MicroBatch, model: nn.Module = model) -> Tensor:
                loss: Tensor = model(**piece.data)
                return loss

            with torch.no_grad():
                scores = engine.run(Step(pieces=pieces, call=call, mode="validation"))
            found = engine.run(Step(pieces=pieces, call=call, backward=backward))
            for got in (found, scores):
                torch.testing.assert_close(got, [loss.detach() for loss in losses] if got else [], rtol=0, atol=1e-13)
            assert bool(found) == (rank == world - 1)
            held = {name: p.grad for name, p in model.named_parameters() if not is_placeholder(p)}
            for name, parameter in whole.named_parameters():
                owners = engine._stage.cut.chunks.chunks_of(name.rpartition(".")[0])
                gradient = held.get(name)
                if len(owners) == 1 and gradient is not None:
                    torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=1e-13, msg=f"{kind} {name}")
            # What several stages hold is theirs together.
            for name, parameter in whole.named_parameters():
                if len({c % world for c in engine._stage.cut.chunks.chunks_of(name.rpartition(".")[0])}) > 1:
                    part = held.get(name)
                    total = torch.zeros_like(parameter) if part is None else part.clone()
                    torch.distributed.all_reduce(total)
                    wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    torch.testing.assert_close(total, wanted, rtol=0, atol=1e-13, msg=f"{kind} {name}")


@pytest.mark.parametrize(("world", "schedule", "virtual"), [(2, "1f1b", 1), (4, "1f1b", 1), (2, "interleaved_1f1b", 2)])
def test_values_needed_stages_away_come_along_with_their_gradients(world: int, schedule: str, virtual: int) -> None:
    kinds = [UNet, Seq2Seq, Derived, Rectified, Asked, *([] if virtual > 1 else [Loops])]
    run_ranks(same_as_uncut, world, schedule, virtual, kinds)


class Random(Derived):
    """Its skip is drawn by a function outside of any module."""

    def forward(self, x: Tensor) -> Tensor:
        skip = F.dropout(self.stem(x), 0.5)
        x = skip
        for layer in self.layers:
            x = layer(x)
        return (x + skip).mean()


class InPlace(Derived):
    """Adds to its skip after it was made."""

    def forward(self, x: Tensor) -> Tensor:
        skip = self.stem(x)
        x = self.layers[0](skip)
        skip += x
        for layer in self.layers[1:]:
            x = layer(x)
        return (x + skip).mean()


class Varies(Derived):
    """Uses another value from the second batch on."""

    steps = 0  # one of them in the search for the order of calls

    def forward(self, x: Tensor) -> Tensor:
        skip = self.stem(x)
        first = x = self.layers[0](skip)
        for layer in self.layers[1:]:
            x = layer(x)
        self.steps += 1
        return (x + (skip if self.steps <= 3 else first)).mean()


class Thaws(Derived):
    """Runs its layers under no_grad for some batches."""

    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        with torch.set_grad_enabled(self.steps > 3):
            for layer in self.layers:
                x = layer(x)
        return (self.stem(x) * self.scale).mean()


def refused(rank: int, world: int, kind: type[nn.Module]) -> None:
    model = kind()
    engine = build(model, build_mesh(Sizes(pp=world, dp=1, tp=1), CPU), "1f1b", 1)

    def call(piece: MicroBatch) -> Any:
        return model(**piece.data)

    for _ in range(2):
        pieces = cut({"x": torch.zeros(SAMPLES, 5, WIDTH)}, [2, 2])
        engine.run(Step(pieces=pieces, call=call, backward=backward))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Random, ["test_pipeline_far_values.py:", "'stem'", "dropout", "random"]),
        (InPlace, ["test_pipeline_far_values.py:", "changed in place", "x = x + y"]),
        (Thaws, ["hands on torch.float32 with gradient, but", "without gradient", "requires_grad_(False)"]),
        (Varies, ["The loss needs", "'layers.0'", "the same values in every batch"]),
    ],
)
def test_values_that_cannot_come_along_are_refused_with_the_reason(kind: type[nn.Module], words: list[str]) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(refused, 2, kind, timeout=30)
    for word in words:
        assert word in str(caught.value)
