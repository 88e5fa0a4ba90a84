"""What user code hangs on parameters, and what blocks do to their buffers, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lightning_3d.errors import ConfigError
from tests.dist.lightning_modules import (
    WIDTH,
    Block,
    Mesh,
    Tokens,
    loader,
    make_trainer,
    on_ranks,
    rows,
    seeded,
    whole_weights,
)

BATCH = 4


def close(got: dict[str, Tensor], wanted: dict[str, Tensor], what: Any) -> None:
    assert got.keys() == wanted.keys(), what
    for name, value in wanted.items():
        assert torch.allclose(got[name], value, rtol=1e-10, atol=1e-10), (what, name)


# --- attributes, ids and hooks ----------------------------------------------------------------------------------------


class Marked(Tokens):
    """Attributes read in ``configure_optimizers``, in the step and by the optimizer; parameters known by ``id``."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.weight.lr_scale = 0.25
            block.down.bias._no_weight_decay = True
        self.embed.weight.weight_of_loss = 0.125
        self.slow = {id(p) for p in self.norm.parameters()}
        self.rates = {id(self.head.weight): 0.01, "rest": [id(self.blocks[0].up.bias), id(self.blocks[3].down.weight)]}
        self.by_id = {id(p): (p, 0.5) for p in self.blocks[1].norm.parameters()}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch) * (1 + self.embed.weight.weight_of_loss)

    def configure_optimizers(self) -> Any:
        groups = []
        for parameter in self.parameters():
            rate = 0.05 * getattr(parameter, "lr_scale", 1.0)
            rate = 0.02 if id(parameter) in self.slow else self.rates.get(id(parameter), rate)
            rate = 0.0 if id(parameter) in self.rates["rest"] else rate
            if id(parameter) in self.by_id:
                assert self.by_id[id(parameter)][0] is parameter
                rate *= self.by_id[id(parameter)][1]
            decay = 0.0 if getattr(parameter, "_no_weight_decay", False) else 0.1
            groups.append({"params": [parameter], "lr": rate, "weight_decay": decay})
        return Reads(groups, lr=0.05)


class Reads(torch.optim.SGD):
    """Reads attributes of what it steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(getattr(parameter, "lr_scale", 1.0) ** 0.1)
        return loss


class Hooked(Marked):
    """Hooks of both kinds, put on where the class says."""

    kind = "register_hook"

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            self.put_on(block.up.weight)

    def put_on(self, parameter: nn.Parameter) -> None:
        if self.kind == "register_hook":
            parameter.register_hook(lambda gradient: gradient * 0.5)
        else:
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 0.5))


class Accumulated(Hooked):
    kind = "post"


class Late(Marked):
    def on_train_start(self) -> None:
        self.blocks[0].up.weight.register_hook(lambda gradient: gradient * 0.5)


def fit(mesh: Mesh | None, cases: list[tuple[type[LightningModule], dict[str, Any], str]], **trainer: Any) -> list[Any]:
    results: list[Any] = []
    for kind, options, complaint in cases:
        made = make_trainer(mesh, options if mesh else None, **trainer)
        module = seeded(kind)
        if mesh is not None and complaint:
            with pytest.raises(ConfigError, match=complaint):
                made.fit(module, loader(rows(BATCH), BATCH, mesh))
            results.append(None)
            continue
        made.fit(module, loader(rows(2 * BATCH), BATCH, mesh))
        results.append(whole_weights(made))
    return results


@pytest.mark.parametrize("mesh", [(1, 1, 2), (1, 2, 1), (2, 1, 1)], ids=["tp2", "dp2", "pp2"])
def test_attributes_ids_and_hooks_of_parameters_are_carried_over_or_refused(mesh: Mesh) -> None:
    cases: list[tuple[type[LightningModule], dict[str, Any], str]]
    if mesh[2] > 1:
        cut = r"blocks\.0\.up\.weight.*on_after_backward"
        cases = [(Marked, {}, ""), (Hooked, {}, cut), (Accumulated, {}, cut)]
    elif mesh[1] > 1:
        sharded = r"register_post_accumulate_grad_hook\): blocks\.0\.up\.weight"
        cases = [(Marked, {"zero_stage": 1}, ""), (Marked, {"zero_stage": 3}, ""), (Hooked, {"zero_stage": 3}, "")]
        cases += [(Accumulated, {"zero_stage": 1}, sharded), (Late, {"zero_stage": 1}, r"blocks\.0\.up\.weight")]
    else:
        cases = [(Marked, {}, ""), (Hooked, {}, "")]
    expected = fit(None, cases)
    got = on_ranks(fit, mesh, cases)[0]
    for (kind, options, complaint), weights, wanted in zip(cases, got, expected, strict=True):
        if not complaint:
            close(weights, wanted, (kind.__name__, options))


# --- buffers of blocks that run twice ---------------------------------------------------------------------------------


class Remembers(Block):
    """Computes with a running mean that its forward updates, in place and by another, and with a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("run", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("constant", torch.ones(WIDTH))
        self.inner = nn.BatchNorm1d(WIDTH)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.run.lerp_(x.mean((0, 1)), 0.1)
            self.calls = self.calls + 1
            self.count += 1
        x = x + self.inner(x.flatten(0, 1)).view_as(x) * self.constant
        return super().forward(x - self.run.clone() * (1 + 0.1 * self.calls)) * (1 + 0.01 * self.count)


class Running(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Remembers() for _ in range(4))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def accumulate(mesh: Mesh | None, pieces: int) -> Any:
    options = {"num_micro_batches": pieces, "activation_checkpointing": "full"}
    by_hand = mesh is None and pieces > 1
    trainer = make_trainer(mesh, options, accumulate_grad_batches=pieces if by_hand else 1)
    module = seeded(Running)
    trainer.fit(module, loader(rows(3 * BATCH), BATCH // (pieces if by_hand else 1), mesh))
    return whole_weights(trainer), [block.count for block in module.blocks]


def accumulate_both(mesh: Mesh) -> list[Any]:
    return [accumulate(mesh, pieces) for pieces in (1, 2)]


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 1, 2)], ids=["pp2", "tp2"])
def test_blocks_that_are_recomputed_change_their_buffers_once(mesh: Mesh) -> None:
    results = on_ranks(accumulate_both, mesh)
    for index, pieces in enumerate((1, 2)):
        wanted, counts = accumulate(None, pieces)
        close(results[0][index][0], wanted, pieces)
        for rank, result in enumerate(results):
            held = slice(2 * rank, 2 * rank + 2) if mesh[0] > 1 else slice(None)
            assert result[index][1][held] == counts[held]


# --- weights that are computed from others ----------------------------------------------------------------------------


class Spectral(Tokens):
    """Spectral norm inside of blocks, in the first and in the last layer."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            spectral_norm(block.up)
        spectral_norm(self.embed)
        spectral_norm(self.head)


def fit_spectral(mesh: Mesh | None) -> Any:
    return fit(mesh, [(Spectral, {"num_micro_batches": 1}, "")])[0]


def test_spectral_norm_over_stages() -> None:
    close(on_ranks(fit_spectral, (2, 1, 1))[0], fit_spectral(None), "spectral norm")
