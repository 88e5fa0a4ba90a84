"""Ranks that silently drift apart are found by name: weights, tied copies, batches, gradients."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_3d import ThreeDStrategy
from lightning_3d.errors import ConfigError, SanityError
from lightning_3d.fingerprint import fingerprint
from tests.dist.lightning_modules import Mesh, Tokens, loader, make_trainer, on_ranks, rows, seeded


class Tied(Tokens):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Fault(Callback):
    """Plants a fault on one rank before a batch."""

    def __init__(self, kind: str, rank: int, at: int) -> None:
        self.kind, self.rank, self.at = kind, rank, at

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Tensor, batch_idx: int) -> None:
        if trainer.global_rank != self.rank or batch_idx != self.at:
            return
        if self.kind == "batch":
            batch[0, 0] = (batch[0, 0] + 1) % 12
            return
        weight: Any = pl_module.get_parameter(self.kind).data
        (weight.to_local() if hasattr(weight, "to_local") else weight).view(-1)[0] += 1e-9


def _run(mesh: Mesh, faults: list[tuple[str, int, int]], every: int | None, zero: int) -> list[str]:
    """What every fault is answered with."""
    found = []
    for kind, rank, at in faults:
        options = {"sanity_checks": every, "zero_stage": zero}
        trainer = make_trainer(mesh, options, callbacks=[Fault(kind, rank, at)], max_steps=3)
        try:
            trainer.fit(seeded(Tied), loader(rows(24), 8, mesh))
            found.append("")
        except SanityError as error:
            found.append(f"{trainer.global_step} {error}")
    return found


def test_what_differs_between_ranks_is_named_on_all_of_them() -> None:
    faults = [
        ("", -1, 0),
        ("blocks.0.norm.weight", 1, 0),  # tp1 of the first stage
        ("embed.weight", 6, 0),  # the copy that the last stage of one replica has
        ("blocks.3.down.weight", 6, 0),  # a shard over tp, equal over replicas
        ("batch", 7, 0),
    ]
    faults[0] = ("blocks.0.norm.weight", -1, 0)
    for answers in on_ranks(_run, (2, 2, 2), faults, None, 0, timeout=120):
        fine, norm, tied, shard, batch = answers
        assert fine == ""
        assert norm.startswith("0 ") and "blocks.0.norm.weight (the copies over tp)" in norm and "rank 1 (pp0" in norm
        assert "embed.weight (the tied copies over stages)" in tied and "rank 6 (pp1 dp1 tp0)" in tied
        assert "blocks.3.down.weight (the copies over dp)" in shard and "the copies over tp" not in shard
        assert "tensor 0 of the batch (what the ranks of a replica read)" in batch and "rank 7" in batch
        assert "sanity_checks=" in batch


def test_checks_come_before_the_first_step_and_as_often_as_asked() -> None:
    late = [("blocks.0.norm.weight", 1, 1)]
    assert on_ranks(_run, (1, 1, 2), late, None, 1)[0] == [""]  # the fault comes after the only check
    for answers in on_ranks(_run, (1, 1, 2), late, 1, 1):
        assert answers[0].startswith("1 ")
    assert on_ranks(_run, (1, 1, 2), [("blocks.0.norm.weight", 1, 0)], 0, 1)[0] == [""]


class Broken(Tokens):
    """One weight of the first stage gets a gradient that is NaN."""

    def on_after_backward(self) -> None:
        weight = self.embed.weight
        if weight.grad is not None:
            weight.grad.view(-1)[:1].fill_(float("nan")) if not hasattr(weight.grad, "to_local") else (
                weight.grad.to_local().view(-1)[:1].fill_(float("nan"))
            )


def _gradients(mesh: Mesh, nonfinite: str) -> str:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer = make_trainer(mesh, {"nonfinite": nonfinite}, max_steps=1)
        try:
            trainer.fit(seeded(Broken), loader(rows(8), 8, mesh))
        except FloatingPointError as error:
            return str(error)
    return " ".join(str(item.message) for item in seen if "NaN" in str(item.message))


def test_gradients_that_are_not_finite_are_named() -> None:
    warned, silent = on_ranks(_gradients, (2, 1, 1), "continue")
    assert "embed.weight (rank 0 (pp0 dp0 tp0))" in warned and "nonfinite='skip'" in warned and silent == ""
    for raised in on_ranks(_gradients, (2, 1, 1), "raise"):
        assert "embed.weight (rank 0 (pp0 dp0 tp0))" in raised and "nonfinite='raise'" in raised


def test_a_fingerprint_shows_every_bit() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool):
        values = torch.arange(1, 12).to(dtype)
        same = values.clone()
        assert fingerprint(values) == fingerprint(same)
        assert fingerprint(values.view(1, -1).t()) == fingerprint(same)
        if dtype is not torch.bool:
            assert fingerprint(values) != fingerprint(values.flip(0))
            same[-1] = 0
            assert fingerprint(values) != fingerprint(same)
    assert fingerprint(torch.zeros(0)) != fingerprint(torch.zeros(1))
    part = torch.arange(12, dtype=torch.bfloat16)[1:]  # begins within a word
    assert fingerprint(part) == fingerprint(part.clone())


def test_a_number_of_steps_that_is_none_is_refused() -> None:
    for wrong in (-1, 1.5, True):
        with pytest.raises(ConfigError, match="sanity_checks"):
            ThreeDStrategy(sanity_checks=wrong)  # type: ignore[arg-type]
