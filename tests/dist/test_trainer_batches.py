"""Batches are read once per replica; replicas go in step; nobody waits for ever."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_3d.config import Sizes
from lightning_3d.mesh import Mesh, build_mesh
from lightning_3d.trainer.data.batches import BatchLedger, ReaderError, SharedLoader
from lightning_3d.trainer.data.sampler import shard
from tests.harness import run_ranks


def _mesh(pp: int, dp: int, tp: int) -> Mesh:
    return build_mesh(Sizes(pp=pp, dp=dp, tp=tp), torch.device("cpu"))


def _shared(loader: Any, mesh: Mesh, **options: Any) -> tuple[SharedLoader, BatchLedger]:
    ledger = BatchLedger(mesh.dp.size)
    return SharedLoader(shard(loader, mesh.dp), mesh, ledger, **options), ledger


def _indices(rank: int, world: int, sizes: tuple[int, int, int], length: int, shuffle: bool, passes: int) -> Any:
    mesh = _mesh(*sizes)
    torch.manual_seed(11)
    loader, ledger = _shared(DataLoader(list(range(length)), batch_size=2, shuffle=shuffle), mesh)
    seen = []
    for _ in range(passes):
        for batch in loader:
            facts = ledger.take(batch)
            seen.append(([] if facts.filler else batch.tolist(), facts.size, facts.global_size, facts.filler))
    return mesh.coordinates, seen, torch.get_rng_state()


@pytest.mark.parametrize("shuffle", [False, True])
def test_replicas_read_disjoint_parts_and_their_ranks_the_same(shuffle: bool) -> None:
    results = run_ranks(_indices, 8, (2, 2, 2), 13, shuffle, 2)
    torch.manual_seed(11)
    one = DataLoader(list(range(13)), batch_size=4, shuffle=shuffle)
    expected = [batch.tolist() for _ in range(2) for batch in one]
    replicas: dict[int, Any] = {}
    for where, seen, _ in results:
        assert replicas.setdefault(where["dp"], seen) == seen
    for index, whole in enumerate(expected):
        for replica in range(2):
            samples, size, global_size, filler = replicas[replica][index]
            assert samples == whole[replica::2]
            assert global_size == len(whole)
            assert filler == (not whole[replica::2])
            assert filler or size == len(samples)
    assert all(torch.equal(results[0][2], state) for _, _, state in results)


def test_a_replica_without_any_sample_gets_a_filler_of_another() -> None:
    results = run_ranks(_indices, 3, (1, 3, 1), 2, False, 1)
    assert [seen for _, seen, _ in results] == [[([0], 1, 2, False)], [([1], 1, 2, False)], [([], 1, 2, True)]]


class _Stream(IterableDataset[Any]):
    def __init__(self, length: int, sized: bool) -> None:
        self.length = length
        if sized:
            type(self).__len__ = lambda self: self.length  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def _uneven(rank: int, world: int, sized: bool) -> Any:
    mesh = _mesh(2, 2, 1)

    class Stream(_Stream):
        pass

    loader, ledger = _shared(DataLoader(Stream((5, 7)[mesh.dp.rank], sized), batch_size=None), mesh)
    facts = [ledger.take(batch) for batch in loader]
    try:
        length: int | None = len(loader)
    except TypeError:
        length = None
    return [fact.filler for fact in facts], [fact.global_size for fact in facts], length


@pytest.mark.parametrize("sized", [False, True])
def test_streams_of_different_length_end_together(sized: bool) -> None:
    results = run_ranks(_uneven, 4, sized)
    for rank, (fillers, sizes, length) in enumerate(results):
        short = rank in (0, 2)
        assert fillers == [False] * 5 + [short] * 2
        assert sizes == [2] * 5 + [1] * 2
        assert length == (7 if sized else None)


@dataclass
class _Example:
    tokens: torch.Tensor
    name: str


class _Pair(NamedTuple):
    first: Any
    second: Any


def _structures(rank: int, world: int) -> Any:
    mesh = _mesh(2, 1, 2)
    batches = [
        {"x": torch.arange(6, dtype=torch.bfloat16).view(2, 3), "names": ["a", "b"], "none": None},
        {"x": torch.arange(6, dtype=torch.bfloat16).view(2, 3) + 1, "names": ["a", "b"], "none": None},
        _Pair(torch.tensor([True, False]), (torch.empty(0, 3), 3.5)),
        _Example(torch.arange(40_000).view(2, -1), "large"),
        torch.ones(4, 2).t(),
        torch.zeros(2, dtype=torch.complex64),
        np.arange(3),
    ]
    loader, _ = _shared(batches, mesh)
    return list(loader)


def test_any_structure_arrives_as_it_was() -> None:
    first, *others = run_ranks(_structures, 4)
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert type(a) is type(b)
        assert torch.equal(other[0]["x"], first[0]["x"]) and other[0]["names"] == ["a", "b"]
        assert torch.equal(other[1]["x"], first[1]["x"]) and other[1]["x"].dtype == torch.bfloat16
        assert torch.equal(other[2].first, first[2].first) and other[2].second[0].shape == (0, 3)
        assert torch.equal(other[3].tokens, first[3].tokens) and other[3].name == "large"
        assert torch.equal(other[4], first[4]) and torch.equal(other[5], first[5])
        assert (other[6] == first[6]).all()


class _Faulty(Dataset[int]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise ValueError("sample 5 is broken")
        return index


def _reads_faulty(rank: int, world: int, workers: int) -> Any:
    mesh = _mesh(2, 2, 1)
    loader, _ = _shared(DataLoader(_Faulty(), batch_size=2, num_workers=workers), mesh)
    try:
        return len(list(loader))
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_loader_reaches_every_rank(workers: int) -> None:
    results = run_ranks(_reads_faulty, 4, workers)
    for rank, (kind, text) in enumerate(results):
        assert "sample 5 is broken" in text
        assert kind == ("ValueError" if rank == 1 else ReaderError.__name__)
        if rank != 1:
            assert "rank 1 (pp0 dp1 tp0)" in text


class _Unsendable:
    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


def _reads_unsendable(rank: int, world: int) -> Any:
    loader, _ = _shared([torch.ones(2), _Unsendable()], _mesh(2, 1, 1))
    try:
        return len(list(loader))
    except ReaderError as error:
        return str(error)


def test_a_batch_that_does_not_pickle_is_an_error_on_all_ranks() -> None:
    for text in run_ranks(_reads_unsendable, 2):
        assert "cannot be handed to the other ranks" in text and "not to be pickled" in text


def _workers(rank: int, world: int) -> Any:
    mesh = _mesh(2, 1, 2)
    loader, _ = _shared(DataLoader(list(range(8)), batch_size=2, num_workers=2, persistent_workers=True), mesh)
    counts, rows = [], []
    for _ in range(2):
        for batch in loader:
            counts.append(len(multiprocessing.active_children()))
            rows.append(batch.tolist())
    if loader._iterator is not None:
        loader._iterator._shutdown_workers()
    loader._iterator = None
    return max(counts), rows


def test_only_the_reader_starts_workers() -> None:
    (most, rows), *others = run_ranks(_workers, 4)
    assert most == 2
    assert all(other == (0, rows) for other in others)


class _Noisy(Dataset[Any]):
    """Draws from all three generators of the host, as augmentations do."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return torch.rand(2), np.random.rand(), random.random()


def _draws(rank: int, world: int) -> Any:
    mesh = _mesh(2, 1, 1)
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    loader, _ = _shared(DataLoader(_Noisy(), batch_size=2), mesh)
    values = []
    for batch in loader:
        values.append([part.tolist() for part in batch])
        values.append([torch.rand(1).item(), np.random.rand(), random.random()])
    return values


def test_the_random_state_is_equal_within_a_replica() -> None:
    first, second = run_ranks(_draws, 2)
    assert first == second


def _resumes(rank: int, world: int, sizes: tuple[int, int, int], batch_size: int, workers: int, state: Any) -> Any:
    mesh = _mesh(*sizes)
    torch.manual_seed(5)
    data = DataLoader(list(range(17)), batch_size=batch_size, shuffle=True, num_workers=workers)
    loader, ledger = _shared(data, mesh)
    if state is not None:
        torch.manual_seed(77)  # the order of the interrupted pass must not depend on it
        loader.load_state_dict(state)
        before = torch.get_rng_state()
        rest = [batch for batch in loader if not ledger.take(batch).filler]
        return [batch.tolist() for batch in rest], torch.equal(before, torch.get_rng_state())
    read, halfway = [], None
    for index, batch in enumerate(loader):
        if not ledger.take(batch).filler:
            read.append(batch.tolist())
        if index == 1:
            halfway = loader.state_dict()
    return read, halfway


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_goes_on_where_it_was_interrupted_at_any_layout(workers: int) -> None:
    whole = run_ranks(_resumes, 2, (1, 2, 1), 2, workers, None)
    state = whole[0][1]
    again = run_ranks(_resumes, 2, (1, 2, 1), 2, workers, state)
    for (read, _), (rest, untouched) in zip(whole, again, strict=True):
        assert read[2:] == rest
        assert untouched
    (alone, _), _ = run_ranks(_resumes, 2, (2, 1, 1), 4, workers, state)
    merged = [sorted(a + b) for a, b in zip(whole[0][0][2:], [*whole[1][0][2:], []], strict=False)]
    assert [sorted(batch) for batch in alone] == merged


def _predicts(rank: int, world: int) -> Any:
    from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
    from torch.utils.data import BatchSampler, SequentialSampler

    mesh = _mesh(2, 2, 1)
    data = list(range(7))
    sampler = _IndexBatchSamplerWrapper(BatchSampler(SequentialSampler(data), 2, drop_last=False))
    loader, _ = _shared(DataLoader(data, batch_sampler=sampler), mesh, track_indices=True)  # type: ignore[arg-type]
    assert isinstance(loader.batch_sampler, _IndexBatchSamplerWrapper)
    batches = [batch.tolist() for batch in loader]
    return mesh.dp.rank, batches, loader.batch_sampler.seen_batch_indices


def test_every_rank_knows_the_indices_of_its_batches() -> None:
    for replica, batches, indices in run_ranks(_predicts, 4):
        assert indices == ([[0, 2], [4, 6]] if replica == 0 else [[1, 3], [5]])
        assert indices == batches
