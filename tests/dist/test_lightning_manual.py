"""Manual optimization, several optimizers, and optimizers built in unusual ways."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_3d.errors import ConfigError
from lightning_3d.sharding import build_sharding
from lightning_3d.trainer.setup import assembly
from tests.dist.lightning_modules import (
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


class Gan(LightningModule):
    """Two networks that train against each other, as in Lightning's own examples."""

    def __init__(self, accumulate: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.accumulate = accumulate
        self.generator = nn.ModuleList([Block(), Block()])
        self.discriminator = nn.ModuleList([Block(), Block()])
        self.verdict = nn.Linear(8, 1)

    def generate(self, noise: Tensor) -> Tensor:
        for block in self.generator:
            noise = block(noise)
        return noise

    def judge(self, x: Tensor) -> Tensor:
        for block in self.discriminator:
            x = block(x)
        return self.verdict(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        real, noise = batch.unbind(1)

        self.toggle_optimizer(first)
        loss = F.binary_cross_entropy_with_logits(self.judge(self.generate(noise)), torch.ones(len(batch), 1).to(noise))
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)

        self.toggle_optimizer(second)
        made = self.generate(noise).detach()
        judged = torch.cat([self.judge(real), self.judge(made)])
        wanted = torch.cat([torch.ones(len(batch), 1), torch.zeros(len(batch), 1)]).to(noise)
        loss_d = F.binary_cross_entropy_with_logits(judged, wanted)
        self.manual_backward(loss_d)
        if (batch_idx + 1) % self.accumulate == 0:
            second.step()
            second.zero_grad()
        self.untoggle_optimizer(second)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.log_dict({"g": loss, "d": loss_d}, prog_bar=True, on_epoch=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("rate", optimizer.param_groups[0]["lr"], on_epoch=True)

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.generator.parameters(), lr=0.02)
        second = torch.optim.SGD([*self.discriminator.parameters(), *self.verdict.parameters()], lr=0.1)
        return [first, second], [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (first, second)]


def train_gan(mesh: Mesh | None, options: dict[str, Any] | None = None, accumulate: int = 1) -> Any:
    data = list(torch.randn(16, 2, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64))
    trainer = make_trainer(mesh, options, max_epochs=1)
    trainer.fit(seeded(Gan, accumulate), loader(data, 4, mesh))
    return numbers(trainer.callback_metrics), whole_weights(trainer)


def train_gans(mesh: Mesh, stages: tuple[int, ...], unit_bytes: int) -> Any:
    # Blocks as small as these are gathered with the rest of the module; real ones are gathered each by itself.
    assembly.build_sharding = partial(build_sharding, unit_bytes=unit_bytes)  # type: ignore[attr-defined]
    return [train_gan(mesh, {"zero_stage": stage}, accumulate) for stage in stages for accumulate in (1, 2)]


@pytest.mark.parametrize(
    ("mesh", "stages", "unit_bytes"),
    [((1, 1, 2), (1,), 2**20), ((1, 2, 1), (0, 1, 3), 2**20), ((1, 2, 1), (1, 2, 3), 1)],
    ids=str,
)
def test_c16_two_optimizers_step_by_hand_as_in_one_process(
    mesh: Mesh, stages: tuple[int, ...], unit_bytes: int
) -> None:
    expected = [train_gan(None, accumulate=accumulate) for accumulate in (1, 2)] * len(stages)
    for rank, results in enumerate(on_ranks(train_gans, mesh, stages, unit_bytes)):
        for number, ((got_logged, got), (logged, weights)) in enumerate(zip(results, expected, strict=True)):
            assert got_logged == pytest.approx(logged, rel=1e-6), number
            if rank == 0:
                for name, value in weights.items():
                    torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12, msg=f"{number} {name}")


def refuse(mesh: Mesh) -> str:
    with pytest.raises(ConfigError) as refused:
        train_gan(mesh)
    return str(refused.value)


def test_c16_manual_optimization_is_refused_with_a_pipeline() -> None:
    for message in on_ranks(refuse, (2, 1, 1)):
        assert "automatic_optimization=False" in message
        assert "pipeline_parallel=1" in message


class Signed(torch.optim.Optimizer):
    """An optimizer from user code."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state.setdefault(p, {})
                    mean = state.setdefault("mean", torch.zeros_like(p))
                    mean.mul_(0.9).add_(p.grad)
                    p.add_(torch.tanh(mean * 10), alpha=-group["lr"])
        return loss


class Collected(Tokens):
    """Parameters in a list since ``__init__``, groups by name, a user's optimizer, a schedule that closes over it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.kept = [*self.head.parameters(), *self.norm.parameters()]
        self.early = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9) if kind == "early" else None

    def configure_optimizers(self) -> Any:
        if self.kind == "early":
            return self.early
        if self.kind == "list":
            rest = [p for name, p in self.named_parameters() if not name.startswith(("head", "norm"))]
            return torch.optim.AdamW([{"params": self.kept, "lr": 0.01}, {"params": rest}], lr=0.1)
        if self.kind == "own":
            optimizer = Signed(self.parameters(), lr=0.01)
            closes = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: 1.0 / (1 + len(optimizer.param_groups) * step)
            )
            return [optimizer], [{"scheduler": closes, "interval": "step"}]
        named = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        return torch.optim.AdamW([{"params": named, "weight_decay": 0.1}], lr=0.05)


KINDS = ("early", "list", "own", "named")


def train_collected(mesh: Mesh | None, kinds: tuple[str, ...] = KINDS) -> Any:
    runs = []
    for kind in kinds:
        trainer = make_trainer(mesh, gradient_clip_val=1.0)
        trainer.fit(seeded(Collected, kind), loader(rows(12), 4, mesh))
        runs.append((numbers(trainer.callback_metrics), whole_weights(trainer)))
    return runs


@pytest.mark.parametrize("mesh", [(1, 2, 2), (2, 2, 1)], ids=str)
def test_optimizers_built_in_unusual_ways_work(mesh: Mesh) -> None:
    expected = train_collected(None)
    for rank, results in enumerate(on_ranks(train_collected, mesh)):
        for kind, (got_logged, got), (logged, weights) in zip(KINDS, results, expected, strict=True):
            assert got_logged == pytest.approx(logged, rel=1e-6), kind
            if rank == 0:
                for name, value in weights.items():
                    torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-11, msg=f"{kind} {name}")
