"""The samples of a replica: over all replicas, batch k is what one process reads as batch k."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_3d.errors import ConfigError
from lightning_3d.mesh import Axis
from lightning_3d.trainer.data.sampler import index_sampler, set_batch_size, shard


def _axis(rank: int, size: int) -> Axis:
    return Axis("dp", size, rank, tuple(range(size)), None)


def _read(loader: DataLoader[Any], replica: int, replicas: int, seed: int = 0) -> list[list[int]]:
    mine = shard(loader, _axis(replica, replicas))
    torch.manual_seed(seed)
    return [batch.tolist() for batch in mine]


def _one_process(loader: DataLoader[Any], seed: int = 0) -> list[list[int]]:
    torch.manual_seed(seed)
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("length", [0, 1, 5, 12, 13])
def test_global_batches_are_those_of_one_process(replicas: int, drop_last: bool, shuffle: bool, length: int) -> None:
    if shuffle and not length:
        pytest.skip("torch refuses to shuffle nothing")
    data = list(range(length))
    whole = _one_process(DataLoader(data, batch_size=2 * replicas, shuffle=shuffle, drop_last=drop_last))
    loader = DataLoader(data, batch_size=2, shuffle=shuffle, drop_last=drop_last)
    parts = [_read(loader, replica, replicas) for replica in range(replicas)]
    for index, expected in enumerate(whole):
        for replica, part in enumerate(parts):
            assert (part[index] if index < len(part) else []) == expected[replica::replicas]
    assert all(len(part) <= len(whole) for part in parts)
    assert {len(shard(loader, _axis(replica, replicas))) for replica in range(replicas)} == {len(whole)}


def test_weighted_order_is_the_users_own() -> None:
    data = list(range(10))
    weights = torch.arange(10, dtype=torch.float64)

    def loader(batch_size: int) -> DataLoader[Any]:
        return DataLoader(data, batch_size=batch_size, sampler=WeightedRandomSampler(weights, 8))

    whole = _one_process(loader(4))
    parts = [_read(loader(2), replica, 2) for replica in range(2)]
    assert [[*a, *b] for a, b in zip(*parts, strict=True)] == [[*w[0::2], *w[1::2]] for w in whole]


def test_a_generator_of_the_user_orders_the_samples() -> None:
    data = list(range(9))
    whole = _one_process(DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(7)))
    parts = [
        _read(DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(7)), replica, 2, 99)
        for replica in range(2)
    ]
    assert parts[0] == [batch[0::2] for batch in whole]


class _Buckets:
    """A batch sampler without any of the usual attributes."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def test_batches_of_a_custom_batch_sampler_go_to_the_replicas_in_turn() -> None:
    batches = [[0, 1], [2], [3, 4, 5], [6], [7, 8]]
    loader = DataLoader(list(range(9)), batch_sampler=_Buckets(batches))  # type: ignore[arg-type]
    assert _read(loader, 0, 2) == batches[0::2]
    assert _read(loader, 1, 2) == batches[1::2]
    mine = shard(loader, _axis(1, 2))
    assert len(mine) == 3
    mine.batch_sampler.set_epoch(4)
    assert loader.batch_sampler.epoch == 4  # type: ignore[union-attr]


def test_single_samples_are_shared_out_without_batches() -> None:
    loader = DataLoader(list(range(5)), batch_size=None)
    assert list(shard(loader, _axis(1, 2))) == [1, 3]
    assert len(shard(loader, _axis(1, 2))) == 3


def test_set_epoch_reaches_the_users_sampler() -> None:
    class Epochs(Sampler[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([(index + self.epoch) % 4 for index in range(4)])

        def __len__(self) -> int:
            return 4

    mine = shard(DataLoader(list(range(4)), sampler=Epochs(), batch_size=1), _axis(0, 2))
    mine.batch_sampler.sampler.set_epoch(1)
    assert [batch.tolist() for batch in mine] == [[1], [3]]


def test_subclasses_with_other_arguments_are_kept() -> None:
    class Mine(DataLoader[Any]):
        def __init__(self, secret: str) -> None:
            super().__init__(list(range(6)), batch_size=1)
            self.secret = secret

    mine = shard(Mine("x"), _axis(1, 2))
    assert isinstance(mine, Mine) and mine.secret == "x"
    assert [batch.tolist() for batch in mine] == [[1], [3], [5]]


def test_iterable_datasets_and_other_iterables_are_left_alone() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    for loader in (DataLoader(Stream(), batch_size=2), [1, 2, 3]):
        assert shard(loader, _axis(1, 2)) is loader


def test_a_distributed_sampler_by_process_becomes_one_by_replica() -> None:
    data = list(range(8))
    by_rank = DistributedSampler(data, num_replicas=8, rank=5, shuffle=False)  # type: ignore[arg-type, var-annotated]
    mine = shard(DataLoader(data, batch_size=2, sampler=by_rank), _axis(1, 2))
    assert [batch.tolist() for batch in mine] == [[1, 3], [5, 7]]
    assert mine.sampler.num_replicas == 2


def test_a_distributed_sampler_of_another_kind_is_refused() -> None:
    class Other(DistributedSampler[Any]):
        pass

    data = list(range(8))
    sampler = Other(data, num_replicas=8, rank=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_replicas=2"):
        shard(DataLoader(data, sampler=sampler), _axis(1, 2))


def test_batches_of_a_kind_of_their_own_over_a_distributed_sampler_are_not_replaced() -> None:
    class Pairs(BatchSampler):
        pass

    data = list(range(8))
    by_rank = DistributedSampler(data, num_replicas=8, rank=5)  # type: ignore[arg-type, var-annotated]
    with pytest.raises(ConfigError, match="DistributedSampler in a Pairs has num_replicas=8, rank=5"):
        shard(DataLoader(data, batch_sampler=Pairs(by_rank, 2, False)), _axis(1, 2))
    by_replica = DistributedSampler(data, num_replicas=2, rank=1)  # type: ignore[arg-type, var-annotated]
    loader = DataLoader(data, batch_sampler=Pairs(by_replica, 2, False))
    assert shard(loader, _axis(1, 2)) is loader


def test_the_batch_size_can_be_set() -> None:
    loader = DataLoader(list(range(10)), batch_size=3, shuffle=True, drop_last=True)
    resized = set_batch_size(loader, 4)
    assert resized.batch_size == 4 and len(resized) == 2
    assert isinstance(resized.sampler, RandomSampler)
    assert loader.batch_size == 3
    part = shard(resized, _axis(0, 2))
    assert len(next(iter(part))) == 4


def test_a_batch_size_that_is_not_the_loaders_is_refused() -> None:
    for loader in (
        DataLoader(list(range(4)), batch_sampler=_Buckets([[0]])),  # type: ignore[arg-type]
        DataLoader(list(range(4)), batch_size=None),
        [1, 2],
    ):
        with pytest.raises(ConfigError, match="global_batch_size"):
            set_batch_size(loader, 2)
    with pytest.raises(ConfigError, match="at least one"):
        set_batch_size(DataLoader([1]), 0)


def test_a_pass_can_begin_later() -> None:
    loader = shard(DataLoader(list(range(12)), batch_size=2, shuffle=True), _axis(0, 2))
    torch.manual_seed(3)
    whole = [batch.tolist() for batch in loader]
    torch.manual_seed(3)
    torch.empty((), dtype=torch.int64).random_()  # what the loader draws for its workers
    sampler = index_sampler(loader)
    assert sampler is not None
    sampler.prepare(1)
    assert [batch.tolist() for batch in loader] == whole[1:]
    assert isinstance(loader.batch_sampler.source, BatchSampler)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 7, 12])
def test_runs_of_samples_joined_are_the_batch(replicas: int, length: int) -> None:
    loader = DataLoader(range(length), batch_size=2)  # type: ignore[arg-type]
    parts = [list(shard(loader, _axis(replica, replicas), runs=True).batch_sampler) for replica in range(replicas)]
    whole = list(BatchSampler(range(length), 2 * replicas, drop_last=False))
    joined = [[index for part in parts for index in (part[k] if k < len(part) else [])] for k in range(len(whole))]
    assert joined == whole
    assert max(map(len, parts)) == len(whole)
