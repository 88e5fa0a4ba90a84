"""By what the losses of micro-batches are multiplied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from lightning_3d.config import ParallelConfig
from lightning_3d.pipeline.micro_batches import MicroBatch
from lightning_3d.trainer.data.ledger import BatchFacts
from lightning_3d.trainer.step.steps import StepRunner, _scaled


def runner(weigh: Any) -> StepRunner:
    """As much of one as weighs."""
    made = StepRunner.__new__(StepRunner)
    parts: dict[str, Any] = {"_module": SimpleNamespace(micro_batch_weight=weigh), "_config": ParallelConfig()}
    alone = SimpleNamespace(size=1, group=None)
    vars(made).update(parts, _mesh=SimpleNamespace(dp=alone, device=torch.device("cpu")))
    return made


def test_a_batch_in_which_no_token_counts_has_gradients_of_zero() -> None:
    targets = [torch.tensor([-100, -100]), torch.tensor([-100])]
    pieces = [MicroBatch(index, target, len(target)) for index, target in enumerate(targets)]
    counts = runner(lambda target: (target != -100).sum())
    _, factors = counts._weigh(pieces, BatchFacts(3, 3))
    values = torch.ones(3, requires_grad=True)
    for piece, part, factor in zip(pieces, values.split([2, 1]), factors, strict=True):
        counted = piece.data != -100
        _scaled((part * counted).sum() / counted.sum().clamp(min=1), factor).backward()
    assert values.grad is not None and torch.equal(values.grad, torch.zeros(3))


def test_what_is_predicted_is_not_weighed_by_the_users_weight() -> None:
    weights, _ = runner(lambda batch: batch["labels"])._weigh(
        [MicroBatch(0, "text", 3)], BatchFacts(3, 3), has_loss=False
    )
    assert weights == [3.0]
