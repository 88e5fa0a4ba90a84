"""Field cases about what ranks must decide or draw alike, and what not: overflow, dropout masks, initial weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import SGD

from lightning_3d.placeholder import is_placeholder
from lightning_3d.precision import ThreeDPrecision
from lightning_3d.sharding.loss_scale import LossScaler
from lightning_3d.sharding.reducer import local_of
from tests.dist.lightning_modules import Mesh, Tokens, loader, make_trainer, on_ranks, rows, seeded

# --- C22 ------------------------------------------------------------------------------------------------------------


class Overflows(Tokens):
    """The first stage trains nothing; a gradient becomes infinite on one tensor-parallel rank of one replica."""

    def __init__(self, where: tuple[int, int, int]) -> None:
        super().__init__(num_blocks=6)
        self.where = where
        for part in (self.embed, self.blocks[0], self.blocks[1]):
            part.requires_grad_(False)
        self.seen: list[tuple[bool, float, float]] = []

    def on_after_backward(self) -> None:
        at = self.trainer.strategy.topology.coordinates
        if self.trainer.global_step == 1 and len(self.seen) == 1 and (at["pp"], at["dp"], at["tp"]) == self.where:
            gradient = next(p.grad for p in self.parameters() if p.grad is not None)
            local_of(gradient).view(-1)[-1] = float("inf")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        precision = self.trainer.precision_plugin
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append((precision.step_skipped, precision.state_dict()["scale"], rate))

    def configure_optimizers(self) -> Any:
        optimizer = SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def overflow(mesh: Mesh, places: list[tuple[int, int, int]]) -> Any:
    results = []
    for where in places:
        plugin = ThreeDPrecision("16-mixed", LossScaler(64.0))
        trainer = make_trainer(mesh, plugins=[plugin], precision=None)
        module = seeded(Overflows, where)
        trainer.fit(module, loader(rows(12), 4, mesh))
        finite = all(bool(torch.isfinite(local_of(p)).all()) for p in module.parameters() if not is_placeholder(p))
        results.append((module.seen, finite))
    return results


@pytest.mark.parametrize(
    ("mesh", "places"), [((3, 1, 2), [(1, 0, 1), (2, 0, 0)]), ((2, 2, 2), [(1, 1, 1)])], ids=["pp3.tp2", "pp2.dp2.tp2"]
)
def test_c22_an_overflow_on_one_rank_skips_the_step_on_all_and_holds_the_schedule(mesh: Mesh, places: Any) -> None:
    for results in on_ranks(overflow, mesh, places):
        for seen, finite in results:
            assert seen == [(False, 64.0, 0.05), (True, 32.0, 0.05), (False, 32.0, 0.025)]
            assert finite


# --- C23 ------------------------------------------------------------------------------------------------------------


class Masks(nn.Dropout):
    """Remembers which elements it has kept."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(torch.ones_like(x))
        if not is_placeholder(y) and y.device.type != "meta":
            self.kept.append(y.detach() != 0)
        return x * y


class Drops(nn.Module):
    """Dropout on what tensor-parallel ranks replicate (hidden states), and on what they cut (probabilities, MLP)."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.on_weights, self.on_hidden, self.on_inner = Masks(), Masks(), Masks()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q(y), self.k(y), self.v(y))
        )
        weights = self.on_weights((q @ k.transpose(-1, -2) / 2).softmax(-1))
        x = x + self.on_hidden(self.out((weights @ v).transpose(1, 2).flatten(2)))
        return x + self.down(self.on_inner(F.gelu(self.up(x))))


class Dropped(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Drops() for _ in range(2))
        self.on_input = Masks()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.on_input(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def masks(mesh: Mesh, runs: list[dict[str, Any]]) -> Any:
    results = []
    for options in runs:
        module = seeded(Dropped)
        trainer = make_trainer(mesh, options)
        trainer.fit(module, loader(rows(8), 4, mesh))
        at = trainer.strategy.topology.coordinates
        kept = {name: part.kept for name, part in module.named_modules() if isinstance(part, Masks)}
        results.append(((at["dp"], at["tp"]), kept, float(trainer.callback_metrics["train_loss"])))
    return results


SAME_OVER_TP = {"on_input", "blocks.0.on_hidden", "blocks.1.on_hidden"}


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_c23_dropout_masks_are_equal_on_what_ranks_replicate_and_differ_elsewhere() -> None:
    plain: dict[str, Any] = {}
    recompute = {"activation_checkpointing": "full"}
    sequence = {"sequence_parallel": True}
    runs = on_ranks(masks, (1, 2, 2), [plain, plain, recompute, sequence])
    for number in range(4):
        at = {place: kept for place, kept, _ in (ranks[number] for ranks in runs)}
        hidden_is_cut = number == 3
        for name in at[0, 0]:
            same = name in SAME_OVER_TP and not (hidden_is_cut and name.startswith("blocks"))
            for replica in (0, 1):
                assert equal(at[replica, 0][name], at[replica, 1][name]) == same, (number, name)
            for part in (0, 1):
                assert not equal(at[0, part][name], at[1, part][name]), (number, name, "replicas draw their own")
    for ranks in runs:
        (_, first, loss), (_, again, same_loss), (_, twice, checkpointed), _ = ranks
        assert loss == same_loss == pytest.approx(checkpointed, rel=1e-12)
        for name in first:
            assert equal(first[name], again[name]), "the same seed and layout give the same run"
            if name.startswith("blocks"):
                steps = twice[name]
                assert len(steps) == 2 * len(first[name])
                for mask in first[name]:
                    assert sum(torch.equal(mask, other) for other in steps) == 2, "recompute draws the same mask"
            assert not any(torch.equal(a, b) for a, b in zip(first[name], first[name][1:], strict=False))


# --- C24 ------------------------------------------------------------------------------------------------------------


class Unseeded(Tokens):
    """Drawn by every rank from its own seed, buffer included."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.register_buffer("offset", torch.randn(3))
        self.register_buffer("scratch", torch.randn(2), persistent=False)


class Digest(Callback):
    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if not is_placeholder(tensor):
                self.values[name] = local_of(tensor).detach().clone()


def initial(mesh: Mesh) -> Any:
    digest = Digest()
    trainer = make_trainer(mesh, {"zero_stage": 0}, callbacks=[digest])
    trainer.fit(Unseeded(seed=100 + trainer.global_rank), loader(rows(4), 4, mesh))
    at = trainer.strategy.topology.coordinates
    return (at["pp"], at["dp"], at["tp"]), digest.values


@pytest.mark.parametrize("mesh", [(1, 2, 2), (2, 2, 1)])
def test_c24_replicas_start_equal_though_every_rank_has_its_own_seed(mesh: Mesh) -> None:
    at = dict(on_ranks(initial, mesh))
    for (pp, _, tp), values in at.items():
        assert values.keys() == at[pp, 0, tp].keys()
        for name, value in values.items():
            assert torch.equal(value, at[pp, 0, tp][name]), (name, "over replicas")
            if name in ("offset", "scratch") or (name.startswith("norm") and name in at[pp, 0, 0]):
                assert torch.equal(value, at[pp, 0, 0][name]), (name, "over tensor-parallel ranks")
    first = Unseeded(seed=100).double()
    for (pp, _, _), values in at.items():
        assert torch.equal(values["offset"], first.offset), f"stage {pp} has the buffer of rank 0"
        assert torch.equal(values["scratch"], first.scratch)
    if mesh[2] == 1:
        embed = at[0, 1, 0]["embed.weight"]
        assert torch.equal(embed, first.embed.weight)
