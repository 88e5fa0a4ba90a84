"""What steps leave on the module, and return, is there on every rank; counted once, however the batch was cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import MeanMetric

from tests.dist.lightning_modules import Mesh, Tokens, loader, make_trainer, on_ranks, rows, seeded


class Counts(Tokens):
    """Changes itself before and after its layers, in every kind of step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.tokens = torch.zeros(())
        self.samples: list[int] = []
        self.mean = MeanMetric()
        self.facts = {"first": -1}
        self.register_buffer("total", torch.zeros(()))

    def _count(self, batch: Tensor) -> Tensor:
        self.calls += 1
        self.tokens = self.tokens + batch.sum()
        self.total += len(batch)
        loss = self.loss(batch)
        self.samples += batch[:, 0].tolist()
        self.mean.update(batch.float().mean(1))
        self.facts["first"] = int(batch[0, 0])
        return loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self._count(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._count(batch)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        self._count(batch)
        return {"first": batch[:, 0], "logits": self(batch[:, :-1])[:, 0] if batch_idx < 0 else None}

    def state(self) -> Any:
        mean = float(self.mean.compute())
        return self.calls, float(self.tokens), float(self.total), list(self.samples), mean, dict(self.facts)


def count(mesh: Mesh | None, options: dict[str, Any] | None = None) -> Any:
    module = seeded(Counts)
    data = rows(5)
    for index, row in enumerate(data):
        row[0] = index
    trainer = make_trainer(mesh, options, max_epochs=1)
    trainer.fit(module, loader(data, 4, mesh))
    states = [module.state()]
    trainer.validate(module, loader(data, 4, mesh), verbose=False)
    states.append(module.state())
    predicted = trainer.predict(module, loader(data, 4, mesh))
    states.append(module.state())
    return states, [batch["first"].tolist() for batch in predicted]


INTERLEAVED = {"schedule": "interleaved_1f1b", "virtual_stages": 2}


@pytest.mark.parametrize(("mesh", "options"), [((2, 1, 1), {}), ((2, 1, 1), INTERLEAVED), ((1, 1, 2), {})], ids=str)
def test_state_of_the_module_is_that_of_one_process(mesh: Mesh, options: dict[str, Any]) -> None:
    states, predicted = count(None)
    for got_states, got_predicted in on_ranks(count, mesh, options):
        assert got_predicted == predicted
        for number, (got, expected) in enumerate(zip(got_states, states, strict=True), start=1):
            # Steps run once per micro-batch: two for the batch of four, and one for the last sample, each time.
            assert got[0] == (3 * number if mesh[0] > 1 else expected[0])
            assert got[1:4] == expected[1:4]
            assert got[4] == pytest.approx(expected[4])
            assert got[5] == expected[5] or mesh[0] > 1


@pytest.mark.parametrize("mesh", [(2, 2, 1), (1, 2, 1)], ids=str)
def test_what_has_no_samples_leaves_no_trace(mesh: Mesh) -> None:
    (*_, (_, tokens, total, samples, mean, _)), predicted = count(None)
    results = on_ranks(count, mesh)
    for stage in range(mesh[0]):
        ranks = [results[stage * mesh[1] + replica] for replica in range(mesh[1])]
        last = [rank[0][-1] for rank in ranks]
        assert sum(state[1] for state in last) == tokens
        assert sum(state[2] for state in last) == total
        assert sorted(sample for state in last for sample in state[3]) == sorted(samples)
        assert [state[4] for state in last] == [pytest.approx(mean)] * mesh[1]
        assert [rank[1] for rank in ranks] == [predicted] * mesh[1]
