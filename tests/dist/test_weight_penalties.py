"""Terms of the loss that are computed from parameters, where ranks hold a part of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.lightning_modules import Mesh, Tokens, loader, make_trainer, on_ranks, rows, seeded, whole_weights
from tests.harness import RankFailure

BATCH = 4


class Penalized(Tokens):
    """Adds about every kind of term that people write."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        loss = loss + 1e-2 * sum(p.pow(2).sum() for p in self.parameters())
        loss = loss + 1e-2 * sum(p.abs().sum() for name, p in self.named_parameters() if "bias" not in name)
        norms = torch.stack([p.norm() for p in self.blocks[1].parameters()])
        weight = self.blocks[0].up.weight
        loss = loss + 1e-2 * norms.sum() + 1e-2 * (weight @ weight.T - torch.eye(len(weight))).square().sum()
        self.log("norms", norms.sum())
        return loss + 1e-2 * (self.embed.weight[1] * self.head.weight[2]).sum()


def run(mesh: Mesh | None, options: dict[str, Any]) -> Any:
    trainer = make_trainer(mesh, options, max_epochs=1)
    module = seeded(Penalized)
    trainer.fit(module, loader(rows(3 * BATCH), BATCH, mesh))
    return {key: float(value) for key, value in trainer.callback_metrics.items()}, whole_weights(trainer)


@pytest.mark.parametrize(
    "mesh, options",
    [
        ((1, 1, 2), {}),
        ((1, 1, 2), {"sequence_parallel": True, "num_micro_batches": 2}),
        ((1, 2, 2), {"zero_stage": 1}),
        ((1, 2, 2), {"zero_stage": 3}),
    ],
)
def test_penalties_on_weights_are_those_of_one_process(mesh: Mesh, options: dict[str, Any]) -> None:
    metrics, weights = run(None, {})
    for rank, (found, values) in enumerate(on_ranks(run, mesh, options)):
        assert found == pytest.approx(metrics, rel=1e-9), rank
        for name, value in (values or {}).items():
            assert torch.allclose(value, weights[name], rtol=1e-9, atol=1e-10), name


def test_with_compile_they_are_refused_with_file_and_line() -> None:
    with pytest.raises(
        RankFailure, match=r"PlanError: .*test_weight_penalties.py:\d+: the step computes with parameters"
    ):
        on_ranks(run, (1, 1, 2), {"compile": "eager"})
