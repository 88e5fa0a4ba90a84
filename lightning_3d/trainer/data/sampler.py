"""Which samples a replica reads: its share of the user's own order, nothing repeated and nothing left out."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from lightning_3d.errors import ConfigError
from lightning_3d.mesh import Axis


class ReplicaSampler:
    """Every n-th item of a sampler's order, starting at this replica's place.

    For loaders without batches of their own making: a sampler of single indices (``batch_size=None``), or a custom
    batch sampler, whose batches then go to the replicas in turn.

    Args:
        source: The user's sampler or batch sampler. Attributes are looked up there (``set_epoch``, ``sampler``, ...).
        axis: The data-parallel axis.
    """

    def __init__(self, source: Any, axis: Axis) -> None:
        self.source = source
        self.axis = axis
        self.served: deque[Any] | None = None
        """What was handed out and not yet taken back, oldest first, once somebody asks for it."""
        self.on_begin: Callable[[], None] | None = None
        """Called just before a pass draws its order."""
        self._prepared: Iterator[Any] | None = None

    def share(self) -> Iterator[Any]:
        """This replica's items, in order."""
        return islice(iter(self.source), self.axis.rank, None, self.axis.size)

    def prepare(self, skip: int) -> None:
        """Start the next pass now and leave out its first ``skip`` items."""
        self._prepared = self.share()
        for _ in islice(self._prepared, skip):
            pass

    def forget(self) -> None:
        """Undo :meth:`prepare`, if no pass has begun since: a resumed epoch may turn out to have ended."""
        self._prepared = None

    def __iter__(self) -> Iterator[Any]:
        # A generator: samplers draw their seed at the first item, in one process as on a replica. And a loader with
        # workers asks twice for an iterator before it takes the first item.
        prepared, self._prepared = self._prepared, None
        if self.served is not None:
            self.served.clear()
        if prepared is None and self.on_begin is not None:
            self.on_begin()
        for item in self.share() if prepared is None else prepared:
            if self.served is not None:
                self.served.append(item)
            yield item

    def __len__(self) -> int:
        """Rounds over the replicas: the same on all of them. The last one may leave some without an item."""
        return -(-len(self.source) // self.axis.size)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)


class ReplicaBatchSampler(ReplicaSampler):
    """This replica's part of every global batch: samples ``r, r + n, r + 2n, ...`` of replica r among n.

    Args:
        source: Yields the batches that one process would see, all replicas' samples together.
        axis: The data-parallel axis.
        runs: Give every replica as many samples that follow each other instead: joined, they are the batch.
    """

    def __init__(self, source: Any, axis: Axis, runs: bool = False) -> None:
        super().__init__(source, axis)
        self.runs = runs

    @override
    def share(self) -> Iterator[list[int]]:
        parts = (self._part(batch) for batch in self.source)
        return (part for part in parts if len(part))  # only a last, short batch can leave a replica without samples

    def _part(self, batch: list[int]) -> list[int]:
        replica, replicas = self.axis.rank, self.axis.size
        if not self.runs:
            return batch[replica::replicas]
        size, more = divmod(len(batch), replicas)
        start = replica * size + min(replica, more)
        return batch[start : start + size + (replica < more)]

    @override
    def __len__(self) -> int:
        return len(self.source)


def take_over_sampling(trainer: Trainer) -> bool:
    """Keep Lightning from injecting its own sampler.

    It would shard by global rank, shuffle loaders that are sequential, and repeat samples until they divide.

    Returns:
        Whether loaders are to be sharded: what the user gave as ``Trainer(use_distributed_sampler=...)``.
    """
    connector = trainer._accelerator_connector
    # Remembered there, because a Trainer asks again in each run.
    wanted = vars(connector).setdefault("wants_sharded_loaders", bool(connector.use_distributed_sampler))
    connector.use_distributed_sampler = False
    return bool(wanted)


def shard(loader: Any, axis: Axis, whole: int | None = None, runs: bool = False) -> Any:
    """The loader of one replica: over all replicas, batch k holds what one process reads as its batch k.

    ``loader.batch_size`` counts samples per replica, so one process would read ``axis.size`` times as many.

    Args:
        loader: What the user gave, possibly re-created by Lightning to follow the indices of predictions. Anything
            but a ``DataLoader`` over a map-style dataset comes back as it is: it decides itself what a replica reads.
        axis: The data-parallel axis.
        whole: Samples in a batch over all replicas, where they do not divide evenly.
        runs: Give a replica samples that follow each other in the batch.

    Raises:
        ConfigError: for a ``DistributedSampler`` set up for other replicas than there are, or with uneven batches.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    sampler = loader.batch_sampler
    if isinstance(sampler, _IndexBatchSamplerWrapper):  # Lightning's notebook of indices: ours is in batches.py
        sampler = sampler._batch_sampler
    own = getattr(sampler, "sampler", loader.sampler)
    if isinstance(own, DistributedSampler):
        if whole is not None:
            raise ConfigError(
                f"A batch of {whole} samples over all replicas does not divide by {axis.size}, and a DistributedSampler"
                " gives all replicas as many. Leave the sampler out: batches are shared out without it."
            )
        return _with_own_sharding(loader, own, axis)
    if sampler is None:
        return _replace(loader, sampler=ReplicaSampler(loader.sampler, axis))
    if type(sampler) is BatchSampler:
        batches = BatchSampler(sampler.sampler, whole or sampler.batch_size * axis.size, sampler.drop_last)
        return _replace(loader, batch_sampler=ReplicaBatchSampler(batches, axis, runs))
    return _replace(loader, batch_sampler=ReplicaSampler(sampler, axis))


def set_batch_size(loader: Any, batch_size: int) -> Any:
    """The same loader with ``batch_size`` samples per batch.

    Args:
        loader: A ``DataLoader`` which makes its own batches.
        batch_size: Samples per batch and replica.

    Raises:
        ConfigError: when the batches are not the loader's to make (a custom batch sampler, ``batch_size=None``, or
            not a ``DataLoader``).
    """
    if batch_size < 1:
        raise ConfigError(f"A batch of {batch_size} samples cannot be read. Give at least one sample per replica.")
    sampler = loader.batch_sampler if isinstance(loader, DataLoader) else None
    if type(sampler) is not BatchSampler:
        what = type(loader).__name__ if sampler is None else type(sampler).__name__
        raise ConfigError(
            f"global_batch_size={batch_size} per replica cannot be set on a loader whose batches come from"
            f" `{what}`. Leave global_batch_size out and set the batch size there, or use DataLoader(batch_size=...)."
        )
    resized = BatchSampler(sampler.sampler, batch_size, sampler.drop_last)
    return _replace(loader, batch_sampler=resized, batch_size=batch_size)


def reads_everything(loader: Any) -> bool:
    """Whether every replica reads all samples of a dataset, because the user does not want them shared out."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    own = getattr(loader.batch_sampler, "sampler", loader.sampler)
    return index_sampler(loader) is None and not isinstance(own, DistributedSampler)


def index_sampler(loader: Any) -> ReplicaSampler | None:
    """Our sampler in a loader that :func:`shard` made."""
    for name in ("batch_sampler", "sampler"):
        if isinstance(found := getattr(loader, name, None), ReplicaSampler):
            return found
    return None


def _with_own_sharding(loader: DataLoader[Any], sampler: DistributedSampler[Any], axis: Axis) -> DataLoader[Any]:
    """A loader whose user shards it himself: by replica, not by process, because a replica is many processes."""
    if (sampler.num_replicas, sampler.rank) == (axis.size, axis.rank):
        return loader
    if type(sampler) is not DistributedSampler or type(loader.batch_sampler) is not BatchSampler:
        batches = type(loader.batch_sampler)
        within = "" if batches in (BatchSampler, type(None)) else f" in a {batches.__name__}"
        raise ConfigError(
            f"The loader's {type(sampler).__name__}{within} has num_replicas={sampler.num_replicas},"
            f" rank={sampler.rank}, but this is replica {axis.rank} of {axis.size}: the processes of one replica share"
            f" its batches. Give it num_replicas={axis.size} and the replica's rank, or leave the sampler out."
        )
    sharded: DistributedSampler[Any] = DistributedSampler(
        sampler.dataset, axis.size, axis.rank, sampler.shuffle, seed=sampler.seed, drop_last=sampler.drop_last
    )
    own = BatchSampler(sharded, loader.batch_sampler.batch_size, loader.batch_sampler.drop_last)
    return _replace(loader, sampler=sharded, batch_sampler=own)


def _replace(loader: DataLoader[Any], **attributes: Any) -> Any:
    """A copy of the loader with other samplers.

    A copy rather than a new object: subclasses take other arguments than ``DataLoader`` does, and keep state of their
    own. ``DataLoader`` forbids to set these attributes because a running iterator would not notice; a copy has none.
    """
    clone = copy.copy(loader)
    clone.__dict__.update(attributes, _iterator=None)
    return clone
