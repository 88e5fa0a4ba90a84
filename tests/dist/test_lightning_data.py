"""The user's own samplers keep their order; replicas share out each batch of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, WeightedRandomSampler

from tests.dist.lightning_modules import Mesh, Tokens, make_trainer, on_ranks, rows, seeded

NUM, BATCH, EPOCHS = 12, 4, 2


class Sees(Tokens):
    """Remembers which samples it was given, by the number in the first place of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        index, tokens = batch
        self.seen.append(index.tolist())
        return self.loss(tokens)


class Pairs:
    """Batches of its own making: unequal in size, and without the attributes that Lightning looks for."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.num).tolist()
        yield from (order[start : start + 3 + start % 2] for start in range(0, self.num, 3))

    def __len__(self) -> int:
        return -(-self.num // 3)


class Backwards(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM - 1, -1, -1))

    def __len__(self) -> int:
        return NUM


def make_loader(kind: str, replicas: int) -> DataLoader[Any]:
    data: Any = list(zip(range(NUM), rows(NUM), strict=True))
    if kind == "weighted":
        sampler = WeightedRandomSampler([1.0 + 3 * (i % 3) for i in range(NUM)], NUM)
        return DataLoader(data, batch_size=BATCH // replicas, sampler=sampler)
    if kind == "backwards":
        return DataLoader(data, batch_size=BATCH // replicas, sampler=Backwards())
    if kind == "batches":
        return DataLoader(data, batch_sampler=Pairs(NUM))  # type: ignore[arg-type]
    return DataLoader(data, batch_size=BATCH // replicas, shuffle=kind == "shuffled")


def see(mesh: Mesh | None, kind: str, distribute: bool = True) -> Any:
    trainer = make_trainer(mesh, use_distributed_sampler=distribute, max_epochs=EPOCHS)
    module = seeded(Sees)
    trainer.fit(module, make_loader(kind, mesh[1] if mesh else 1))
    return module.seen


KINDS = ("weighted", "backwards", "shuffled", "sequential")


def see_all(mesh: Mesh) -> Any:
    return [see(mesh, kind) for kind in KINDS], see(mesh, "batches"), see(mesh, "sequential", distribute=False)


@pytest.fixture(scope="module")
def one_process() -> Any:
    return [see(None, kind) for kind in KINDS], see(None, "batches")


def _by_replica(results: list[Any], mesh: Mesh) -> list[Any]:
    """What each replica saw; all its ranks saw the same."""
    pp, dp, tp = mesh
    replicas = []
    for replica in range(dp):
        ranks = [results[(stage * dp + replica) * tp + t] for stage in range(pp) for t in range(tp)]
        assert all(other == ranks[0] for other in ranks)
        replicas.append(ranks[0])
    return replicas


def test_c34_samplers_of_the_user_are_shared_out_over_replicas(one_process: Any) -> None:
    mesh = (1, 2, 2)
    first, second = _by_replica(on_ranks(see_all, mesh), mesh)
    expected, batches = one_process
    for kind, mine, yours, theirs in zip(KINDS, first[0], second[0], expected, strict=True):
        assert [[*a, *b] for a, b in zip(mine, yours, strict=True)] == [
            [*batch[::2], *batch[1::2]] for batch in theirs
        ], kind
    # A batch sampler's batches go to the replicas in turn, whole.
    assert [batch for pair in zip(first[1], second[1], strict=True) for batch in pair] == batches
    # Every replica reads everything if the user says so; at half the batch size, so twice as often.
    everything = [[index, index + 1] for index in range(0, NUM, 2)] * EPOCHS
    assert first[2] == second[2] == everything


def test_a_pipeline_reads_the_order_of_one_process(one_process: Any) -> None:
    seen, _, _ = on_ranks(see_all, (2, 1, 1))[0]
    for kind, got, expected in zip(KINDS, seen, one_process[0], strict=True):
        joined = [[*a, *b] for a, b in zip(got[::2], got[1::2], strict=True)]  # two micro-batches each
        assert joined == expected, kind
