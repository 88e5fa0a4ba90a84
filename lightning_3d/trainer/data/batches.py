"""A batch is read once per replica, by one rank, and handed to the ranks that compute with it."""

from __future__ import annotations

import copy
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, IterableDataset

from lightning_3d.collectives import all_gather, all_gather_object, broadcast_object
from lightning_3d.errors import ThreeDError
from lightning_3d.events import Phase
from lightning_3d.mesh import Mesh, where
from lightning_3d.pipeline.micro_batches import batch_size_of
from lightning_3d.trainer.data.host_random import GeneratorStates, HostRandomState, without_drawing
from lightning_3d.trainer.data.ledger import BatchFacts, BatchLedger
from lightning_3d.trainer.data.messages import Channel, NotSent
from lightning_3d.trainer.data.sampler import ReplicaBatchSampler, index_sampler

_BATCH, _END, _ERROR = range(3)
_NEW, _SAME = range(2)


class ReaderError(ThreeDError):
    """The data loader of another rank failed; the message holds its traceback."""


class Resumable(Protocol):
    """A loader that keeps its own place."""

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go there."""


class Epochs(Protocol):
    """What a loader must know of the loop that iterates it."""

    @property
    def current(self) -> int:
        """Number of the epoch that the loop is in, or begins."""

    @property
    def steps(self) -> int:
        """Optimizer steps before the next batch."""

    @property
    def at_end(self) -> bool:
        """Whether the loop has taken the last batch of its epoch and would, resumed from here, begin another."""


class Stopping(Protocol):
    """Somebody who may want the run to end between two batches."""

    wish: int
    """What this rank knows of; 0 is nothing."""

    def ends(self, loader: object, wish: int) -> bool:
        """Whether the run ends before this batch; ``wish`` is what all ranks that read batches know of."""


class SharedLoader:
    """Stands in for a loader: the replica's reader iterates it, the other ranks of the replica receive its batches.

    Replicas go in step: as long as one has a batch, all get one, and those that have run out repeat their last (or
    another replica's) as a filler. Only the reader starts workers. What the reader draws from the random generators
    of the host it passes on, so that they stay equal within a replica, and over all ranks at the start of each pass.

    It can stop and go on in the middle of a pass (``state_dict``), also where a plain ``DataLoader`` cannot: the order
    of the pass is drawn again and what was read is left out.

    Args:
        loader: What this replica reads, see :func:`~lightning_3d.trainer.data.sampler.shard`. Any iterable.
        mesh: The mesh. Collective: all ranks wrap their loaders in the same order.
        ledger: Where the facts of every batch are noted.
        track_indices: Also share which samples a batch holds, for writers of predictions.
        epochs: Of the loop that trains with it. Samplers are told the epoch before they draw an order: Lightning tells
            them after a resumed pass has begun.
        stopping: Asked before each batch.
    """

    _own = frozenset(
        [
            "loader",
            "mesh",
            "ledger",
            "batch_sampler",
            "epochs",
            "stopping",
            "_channel",
            "_length",
            "_live",
            "_resume",
            "_track",
        ]
    )

    def __init__(
        self,
        loader: Any,
        mesh: Mesh,
        ledger: BatchLedger,
        *,
        track_indices: bool = False,
        epochs: Epochs | None = None,
        stopping: Stopping | None = None,
    ) -> None:
        self.loader = loader
        self.mesh = mesh
        self.ledger = ledger
        self.epochs = epochs
        self.stopping = stopping
        self._track = track_indices and index_sampler(loader) is not None
        self.batch_sampler: Any = getattr(loader, "batch_sampler", None)
        if self._track:
            self.batch_sampler = _SeenIndices(self.batch_sampler)
        self._channel = Channel(mesh.control_model, source=0)
        self._length = self._agree_on_length()
        self._live: weakref.ReferenceType[_Pass] | None = None
        self._resume: dict[str, Any] | None = None

    def _agree_on_length(self) -> int | None:
        """The number of batches, where only the replicas together can know it."""
        if isinstance(self.loader, DataLoader) and not isinstance(self.loader.dataset, IterableDataset):
            return None
        lengths = all_gather_object(sized_len(self.loader), self.mesh.control_world)
        return -1 if None in lengths else max(lengths)

    def __len__(self) -> int:
        """Batches per pass, the same on every rank."""
        if self._length == -1:
            raise TypeError(f"The length of this {type(self.loader).__name__} is not known.")
        return len(self.loader) if self._length is None else self._length

    def __iter__(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        running = _Pass(self, resume)
        self._live = weakref.ref(running)
        return running

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self._own:
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning sets `worker_init_fn` and resets `_iterator` on what it takes for a DataLoader.
        if name in self._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self.loader, name, value)

    def state_dict(self) -> dict[str, Any]:
        """Where the current pass stands. Collective when the loader keeps its own place."""
        running = self._live() if self._live is not None else None
        state: dict[str, Any] = {"batches": 0, "random": None, "readers": None}
        state["samples"] = _samples_of(self.loader)
        state["ended"] = self.epochs is not None and self.epochs.at_end
        state["generators"] = GeneratorStates.of(self.loader).get()
        if running is not None and not state["ended"]:
            ahead = 1 if sized_len(self) is None and not running.ended else 0  # Lightning looks one batch ahead
            state |= {"batches": max(0, running.num_batches - ahead), "random": running.started_at}
        if _is_resumable(self.loader):
            readers: Any = None
            if self.mesh.is_replica_reader:
                behind = running.behind if running is not None and not running.ended else None
                readers = all_gather_object(
                    self.loader.state_dict() if behind is None else behind, self.mesh.control_dp
                )
            state["readers"] = broadcast_object(readers, self.mesh.control_model, 0)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass begin where another one stood."""
        self._resume = state_dict


class _Pass:
    """One pass over a :class:`SharedLoader`."""

    def __init__(self, shared: SharedLoader, resume: dict[str, Any] | None) -> None:
        self.shared = shared
        self.num_batches = 0
        self.ended = False
        self.started_at: Any = None
        """The random state from which the order of this pass was drawn; known to the readers."""
        self.behind: Any = None
        """Where a loader that keeps its place stood before the last read, if Lightning looks one batch ahead."""
        self._looks_ahead = _is_resumable(shared.loader) and sized_len(shared) is None
        self._source: Iterator[Any] | None = None
        self._error: BaseException | None = None
        self._last: Any = None
        self._has_last = False
        mesh = shared.mesh
        if mesh.world.size > 1:
            _align(shared)
        self._open(resume)
        if mesh.world.size > 1:
            _align(shared)

    def _open(self, resume: dict[str, Any] | None) -> None:
        shared = self.shared
        ended = resume is not None and resume.get("ended", False)
        if shared.epochs is not None:
            _set_sampler_epoch(shared.loader, shared.epochs.current + ended)
        if ended and resume is not None and resume["readers"] is None:
            GeneratorStates.of(shared.loader).set(resume.get("generators", ()))
            resume = None
        batches = resume["batches"] if resume else 0
        if resume and batches:
            _warn_of_other_batches(resume.get("samples"), _samples_of(shared.loader))
        sampler = index_sampler(shared.loader)
        before = HostRandomState.get()
        if resume and resume["random"] is not None:
            self.started_at = resume["random"]
            HostRandomState.of(self.started_at["host"]).set()
            GeneratorStates.of(shared.loader).set(self.started_at["generators"])
        elif sampler is not None:
            sampler.on_begin = self._note_random
        else:
            self._note_random()
        self.num_batches = batches
        if shared.mesh.is_replica_reader:
            try:
                with shared.mesh.events.span(Phase.LOADER, label="start"):
                    self._source = self._start(batches, resume)
            except Exception as error:  # told to the others at the first batch, where they listen
                self._error = error
        if resume:
            before.set()  # it was restored as of the interruption; the order alone comes from further back
        if shared._track:
            shared.batch_sampler.seen_batch_indices = [[] for _ in range(batches)]

    def _note_random(self) -> None:
        host, generators = HostRandomState.get(), GeneratorStates.of(self.shared.loader)
        self.started_at = {"host": host.state, "generators": generators.get()}

    def _start(self, skip: int, resume: dict[str, Any] | None) -> Iterator[Any]:
        loader = self.shared.loader
        sampler = index_sampler(loader)
        if sampler is not None:
            sampler.forget()
            if self.shared._track:
                sampler.served = deque()
        readers = resume["readers"] if resume else None
        if readers is not None and len(readers) == self.shared.mesh.dp.size:
            loader.load_state_dict(readers[self.shared.mesh.dp.rank])
            return iter(loader)
        if skip and sampler is not None:
            sampler.prepare(skip)
            with without_drawing(loader):  # the seed of its workers: the generator stands after it already
                return iter(loader)
        source = iter(loader)
        for _ in range(skip):
            next(source, None)
        return source

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        if self.ended:
            raise StopIteration
        shared = self.shared
        mesh, events = shared.mesh, shared.mesh.events
        if shared.epochs is not None:
            events.begin_step(shared.epochs.steps)
        before: HostRandomState | None = None
        if not mesh.is_replica_reader:
            with events.span(Phase.LOADER, label="others") as span:
                (content, random), notes = shared._channel.exchange()
                if span is not None:  # before, the reader may have been at work on its last batch
                    span.only_last = notes[6] / 1e6
        else:
            wish = shared.stopping.wish if shared.stopping is not None else 0
            before = HostRandomState.get() if mesh.model.size > 1 or wish else None
            began = time.perf_counter()
            with events.span(Phase.LOADER, label="read"):
                status, content = self._read()
            microseconds = int((time.perf_counter() - began) * 1e6)
            with events.span(Phase.LOADER, label="others") as span:
                content, notes = self._agree(status, content, wish, microseconds)
                if span is not None:
                    span.only_last = (notes[6] - microseconds) / 1e6
            random = None
            if before is not None and (after := HostRandomState.get()) != before:
                random = after
            with events.span(Phase.SYNC, label="batch"):
                self._tell(content, random, notes)
        if notes[0] == _BATCH and shared.stopping is not None and shared.stopping.ends(shared, notes[5]):
            if before is not None:
                before.set()  # of the batch that is read again when the run goes on
            raise SIGTERMException
        return self._deliver(content, random, notes)

    def _tell(self, content: Any, random: HostRandomState | None, notes: tuple[int, ...]) -> None:
        try:
            self.shared._channel.exchange((content, random), notes)
        except NotSent as error:
            text = f"This batch cannot be handed to the other ranks of the replica.\n{traceback.format_exc()}"
            self.shared._channel.exchange((text, None), (_ERROR, 0, 0, self.shared.mesh.rank, 0, 0, 0, 0))
            raise ReaderError(text) from error

    def _read(self) -> tuple[int, Any]:
        """The next batch of this replica, with its indices; or the reason why there is none."""
        if self._source is None and self._error is None:
            return _END, None
        try:
            if self._error is not None:
                raise self._error
            if self._looks_ahead:
                self.behind = copy.deepcopy(self.shared.loader.state_dict())
            batch = next(self._source)  # type: ignore[arg-type]
        except StopIteration:
            self._source = None
            return _END, None
        except Exception as error:
            self._error = error
            return _ERROR, traceback.format_exc()
        sampler = index_sampler(self.shared.loader) if self.shared._track else None
        indices = tuple(sampler.served.popleft()) if sampler is not None and sampler.served else None
        return _BATCH, (batch, indices)

    def _agree(self, status: int, content: Any, wish: int, microseconds: int) -> tuple[Any, tuple[int, ...]]:
        """Settle with the readers of the other replicas what this step is."""
        mesh = self.shared.mesh
        held = self._has_last or status == _BATCH
        size = batch_size_of(content[0] if status == _BATCH else self._last) if held else 0
        rows = _gather_numbers((status, size, int(held), wish, microseconds), mesh)
        wish = min(row[3] for row in rows)  # all have set aside what reading may change
        slowest = max(row[4] for row in rows)
        failed = [replica for replica, row in enumerate(rows) if row[0] == _ERROR]
        if failed:
            text = broadcast_object(content, mesh.control_dp, failed[0])
            return text, (_ERROR, 0, 0, mesh.control_dp.ranks[failed[0]], 0, 0, slowest, 0)
        if all(row[0] == _END for row in rows):
            return None, (_END, 0, 0, 0, 0, 0, slowest, 0)
        global_size = sum(row[1] for row in rows if row[0] == _BATCH)
        smallest = min(row[1] for row in rows if row[1])
        foreign: Any = None
        if not all(row[2] for row in rows):
            owner = next(replica for replica, row in enumerate(rows) if row[0] == _BATCH)
            foreign = broadcast_object(content, mesh.control_dp, owner)
        if status == _BATCH:
            return content, (_BATCH, size, global_size, 0, _NEW, wish, slowest, smallest)
        if self._has_last:
            return None, (_BATCH, size, global_size, 1, _SAME, wish, slowest, smallest)
        return (foreign[0], ()), (_BATCH, batch_size_of(foreign[0]), global_size, 1, _NEW, wish, slowest, smallest)

    def _deliver(self, content: Any, random: HostRandomState | None, notes: tuple[int, ...]) -> Any:
        status, size, global_size, extra, which = notes[:5]
        if random is not None and not self.shared.mesh.is_replica_reader:
            random.set()
        if status == _END:
            self.ended = True
            raise StopIteration
        if status == _ERROR:
            self.ended = True
            if self._error is not None:
                raise self._error
            raise ReaderError(f"The data loader of {where(extra, self.shared.mesh.sizes)} failed:\n\n{content}")
        batch, indices = (self._last, ()) if which == _SAME else content
        filler = bool(extra)
        if filler:
            indices = ()
        self._last, self._has_last = batch, True
        self.num_batches += 1
        if self.shared._track:
            self.shared.batch_sampler.seen_batch_indices.append(list(indices or ()))
        facts = BatchFacts(size, global_size, filler, indices, smallest=notes[7])
        self.shared.ledger.record(batch, facts, self.shared)
        return batch


class _SeenIndices(_IndexBatchSamplerWrapper):
    """Where Lightning's prediction loop looks up the samples of a batch; filled from what the reader tells."""

    def __init__(self, sampler: Any) -> None:
        self.seen_batch_indices: list[list[int]] = []
        self._batch_sampler = sampler
        self._iterator = None


def _samples_of(loader: Any) -> int | None:
    """Samples in a whole batch over all replicas, where a sampler of ours cuts batches for them."""
    sampler = index_sampler(loader)
    return getattr(sampler.source, "batch_size", None) if isinstance(sampler, ReplicaBatchSampler) else None


def _warn_of_other_batches(then: int | None, now: int | None) -> None:
    if then is not None and now is not None and then != now:
        rank_zero_warn(
            f"The checkpoint was saved in mid-epoch by a run with {then} samples per batch over all replicas; now there"
            f" are {now}. As many batches are skipped as were trained on then, so samples of this epoch are repeated or"
            " left out. Keep batch_size x data_parallel the same, or set global_batch_size on the strategy."
        )


def _is_resumable(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _align(shared: SharedLoader) -> None:
    """Give every rank the random state of the first one, and every reader's samplers the generators of the first."""
    axis = shared.mesh.control_world
    generators = GeneratorStates.of(shared.loader)
    host, states = broadcast_object((HostRandomState.get(), generators.get()), axis, 0)
    host.set()
    generators.set(states)


def _gather_numbers(numbers: tuple[int, ...], mesh: Mesh) -> list[list[int]]:
    axis = mesh.control_dp
    if axis.group is None:
        return [list(numbers)]
    return all_gather(torch.tensor([numbers], dtype=torch.int64), axis).tolist()
