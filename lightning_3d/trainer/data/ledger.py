"""What all ranks know of the batches on their way from the loaders to the steps."""

from __future__ import annotations

import dataclasses
import warnings
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

from lightning_3d.pipeline.micro_batches import PartPath, batch_size_of

_AHEAD = 2  # batches of a loader that are on their way: Lightning may take one before it uses the one before
_DEPTH = 3  # of containers in which the parts of several loaders are looked for


@dataclasses.dataclass(frozen=True)
class BatchFacts:
    """What all ranks know about a batch. Of a batch of several loaders, sizes are those of the first part."""

    size: int
    """Samples of this replica; of a filler, those of the batch that is repeated."""
    global_size: int
    """Samples over all replicas, fillers not counted."""
    filler: bool = False
    """Whether this replica has no batch left and only keeps the others company, with weight zero."""
    indices: tuple[Any, ...] | None = None
    """Dataset indices, when they are followed (predictions)."""
    smallest: int | None = None
    """The fewest samples that any replica has in this batch; ``None`` if they are all alike."""
    parts: tuple[tuple[PartPath, BatchFacts], ...] = dataclasses.field(default=(), compare=False, repr=False)
    """Of a batch of several loaders: where in it the part of each is found, and the facts of that part."""

    @property
    def samples(self) -> int:
        """Samples of this replica that count, of all loaders."""
        if self.parts:
            return sum(part.samples for _, part in self.parts)
        return 0 if self.filler else self.size

    @property
    def global_samples(self) -> int:
        """Samples of all replicas, of all loaders."""
        return sum(part.global_samples for _, part in self.parts) if self.parts else self.global_size

    @property
    def share(self) -> float:
        """This replica's part of the samples."""
        return self.samples / self.global_samples

    @property
    def most_pieces(self) -> int | None:
        """How many pieces every part has a sample for, on every replica; ``None`` for a batch of one loader."""
        return min(part.smallest or part.size for _, part in self.parts) if self.parts else None

    @property
    def is_uneven(self) -> bool:
        """Whether this replica has another share of the samples of one loader than of another's."""
        counted = [facts for _, facts in self.parts]
        return any(a.size * b.global_size != b.size * a.global_size for a, b in pairwise(counted))


_PARTLY_FILLED = (
    "In a batch of several loaders, one of them has fewer samples left than there are replicas, so this replica repeats"
    " samples that it has seen, and they count. Give that loader drop_last=True, or a length that divides."
)


class BatchLedger:
    """Facts about the batches on their way from the loaders to the steps, found by the identity of the batch."""

    def __init__(self, num_replicas: int = 1) -> None:
        self.current = BatchFacts(1, num_replicas)
        """Facts of the batch that was taken last."""
        self._num_replicas = num_replicas
        self._entries: WeakKeyDictionary[Any, deque[tuple[Any, BatchFacts]]] = WeakKeyDictionary()

    def record(self, batch: Any, facts: BatchFacts, loader: object) -> None:
        """Note down a batch that ``loader`` is about to hand out. Older ones that nobody has used are forgotten."""
        self._entries.setdefault(loader, deque(maxlen=_AHEAD)).append((batch, facts))

    def take(self, batch: Any) -> BatchFacts:
        """The facts of a batch which is about to be used; they become :attr:`current`."""
        self.current = self.facts(batch)
        return self.current

    def facts(self, batch: Any) -> BatchFacts:
        """The facts of a batch; if several loaders are combined, those of the first part that counts, and all parts'.

        A batch that no loader here has made is taken to be one of as many equal ones as there are replicas.
        """
        if found := self._find(batch):
            counting = [facts for _, facts in found if not facts.filler]
            if counting and len(counting) < len(found):
                warnings.warn(_PARTLY_FILLED, stacklevel=2)
            first = counting[0] if counting else found[0][1]
            return dataclasses.replace(first, parts=tuple(found)) if len(found) > 1 else first
        size = batch_size_of(batch)
        return BatchFacts(size, size * self._num_replicas)

    def _find(self, batch: Any, path: PartPath = ()) -> list[tuple[PartPath, BatchFacts]]:
        for entries in self._entries.values():
            for index, (entry, facts) in enumerate(entries):
                if entry is batch:
                    del entries[index]  # an object that comes again (a constant batch) comes with new facts
                    return [(path, facts)]
        if len(path) == _DEPTH or not isinstance(batch, (Mapping, list, tuple)):
            return []
        parts = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
        return [item for key, part in parts for item in self._find(part, (*path, key))]
