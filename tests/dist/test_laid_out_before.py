"""Several Trainers for one module: each goes on with the parts that the first has laid out, on its groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.lightning_modules import Mesh, Tokens, loader, make_trainer, on_ranks, rows, seeded, whole_weights


def three_trainers(mesh: Mesh | None) -> tuple[Any, ...]:
    """Train, evaluate and train on, each under a Trainer of its own; what came of it, and groups that were added."""
    module, data = seeded(Tokens), loader(rows(16), 8, mesh)
    make_trainer(mesh, max_steps=2).fit(module, data)
    groups = len(dist.distributed_c10d._world.pg_names)
    options = {"num_micro_batches": 2, "nonfinite": "skip"} if mesh else None
    loss = make_trainer(mesh, options).test(module, data, verbose=False)[0]["test_loss"]
    last = make_trainer(mesh, max_steps=2)
    last.fit(module, data)
    return loss, whole_weights(last), len(dist.distributed_c10d._world.pg_names) - groups


def test_later_trainers_go_on_with_the_parts_of_the_first() -> None:
    loss, weights, _ = three_trainers(None)
    for rank, (found, whole, more) in enumerate(on_ranks(three_trainers, (2, 2, 1))):
        assert found == pytest.approx(loss, rel=1e-10) and more == 0
        for name, value in weights.items() if rank == 0 else ():
            torch.testing.assert_close(whole[name], value, rtol=1e-9, atol=1e-11, msg=name)
