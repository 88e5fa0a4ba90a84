"""Settling what passes the cuts, while the first batch of a structure goes through the chunks one after another.

The rank whose chunk runs leads; all others of the pipeline follow what it tells them, so every rank knows every
:class:`~lightning_3d.pipeline.links.Link`. A value that is found to be needed is carried from the last chunk that has
it through those between, whose backward then adds up its gradients as those of any input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_3d.errors import StageError
from lightning_3d.pipeline.links import Flight, Link, as_input
from lightning_3d.pipeline.transport import ACTIVATIONS, Fact, Transport
from lightning_3d.placeholder import Placeholder
from lightning_3d.provenance import Root

_VALUES_AT_MOST = 64


@dataclass(frozen=True)
class _Entry:
    """The leading chunk has reached its first block, which needs these of its arguments."""

    positions: list[int]
    roots: list[Root | None]


class Settling:
    """One micro-batch on its way through all chunks; the :class:`~lightning_3d.pipeline.needs.Exchange` of each."""

    modules = None

    def __init__(
        self,
        transport: Transport,
        rank: int,
        num_stages: int,
        micro_batch: int,
        links: dict[int, Link],
        flights: Mapping[int, Flight],
    ) -> None:
        """Prepare.

        Args:
            transport: Between the ranks of the pipeline.
            rank: This rank of it.
            num_stages: Its ranks.
            micro_batch: Index of the micro-batch.
            links: The link before every chunk; filled.
            flights: The micro-batch on every chunk of this rank.
        """
        self._transport = transport
        self._rank = rank
        self._num_stages = num_stages
        self._micro_batch = micro_batch
        self._links = links
        self._flights = flights
        self._chunk = 0

    # --- the leader ------------------------------------------------------------------------------------------------

    def lead(self, chunk: int) -> None:
        """This rank runs ``chunk`` from here on."""
        self._chunk = chunk

    def end(self) -> None:
        """The chunk that this rank leads is done."""
        self._tell(None)

    def enter(self, positions: list[int], placeholders: list[Placeholder], roots: Mapping[Root, Placeholder]) -> None:
        """See :class:`~lightning_3d.pipeline.needs.Exchange`."""
        sources = [item.source if isinstance(item.source, Root) and not item.changed else None for item in placeholders]
        self._tell(_Entry(positions, sources))
        link = self._links[self._chunk]
        for root in link.carried:
            if root not in roots:
                raise not_in_interface(root.module, self._chunk)
        wanted = [*placeholders, *(roots[root] for root in link.carried)]
        for placeholder, tensor in zip(wanted, self._flights[self._chunk].inputs, strict=True):
            _bind(placeholder, tensor, self._chunk)

    def fetch(self, root: Root, placeholder: Placeholder) -> None:
        """See :class:`~lightning_3d.pipeline.needs.Exchange`."""
        if not self._links[self._chunk].has(root):
            self._tell(root)
        _bind(placeholder, self._flights[self._chunk].value_of(root, self._chunk), self._chunk)

    def keep(self, root: Root, value: Tensor) -> None:
        """See :class:`~lightning_3d.pipeline.needs.Exchange`."""
        self._flights[self._chunk].keep(root, value)

    def _tell(self, message: _Entry | Root | None) -> None:
        self._transport.announce(message, self._rank)
        self._act(message)

    # --- everyone --------------------------------------------------------------------------------------------------

    def follow(self, chunk: int) -> None:
        """Do what the rank that runs ``chunk`` asks for, until it is done."""
        self._chunk = chunk
        while (message := self._transport.announced(self._rank_of(chunk))) is not None:
            self._act(message)

    def _act(self, message: _Entry | Root | None) -> None:
        chunk = self._chunk
        if isinstance(message, _Entry):
            link = self._links.get(chunk)
            if link is None:
                link = self._links[chunk] = Link(message.positions, message.roots)
            elif link.positions != message.positions:
                raise other_positions(chunk, message.positions, link.positions)
            self._hop(chunk, None)
        elif isinstance(message, Root):
            first = max((c for c in range(1, chunk) if self._links[c].has(message)), default=message.chunk)
            for target in range(first + 1, chunk + 1):
                self._links[target].carried.append(message)
                self._hop(target, message)

    def _hop(self, target: int, root: Root | None) -> None:
        """Pass ``root``, or all that the link before ``target`` holds, to ``target`` from the chunk before it."""
        source, link = target - 1, self._links[target]
        tensors: list[Tensor] = []
        if self._rank_of(source) == self._rank:
            tensors = self._flights[source].values(link, root, source)
            self._flights[source].outputs += tensors
        here, there = self._rank_of(target), self._rank_of(source)
        if self._rank not in (here, there):
            return
        facts = [Fact.of(tensor) for tensor in tensors]
        arrived = [tensor.detach() for tensor in tensors]
        if here != there and there == self._rank:
            self._transport.send_object(facts, here)
            self._transport.send(tensors, here, ACTIVATIONS, target, self._micro_batch).wait()
        elif here != there:
            facts = self._transport.receive_object(there)
            arrived = self._transport.receive(facts, there, ACTIVATIONS, target, self._micro_batch).wait()
        if root is None:
            link.dtypes, link.needs_grad = [], []
        link.dtypes += [fact.dtype for fact in facts]
        link.needs_grad += [fact.requires_grad for fact in facts]
        if here != self._rank:
            return
        if len(link.dtypes) > _VALUES_AT_MOST:
            raise StageError(
                f"{len(link.dtypes)} values pass into chunk {target} of the pipeline; {_VALUES_AT_MOST} can. Use fewer"
                " stages, or join values into one tensor."
            )
        leaves = [as_input(tensor, fact.requires_grad) for tensor, fact in zip(arrived, facts, strict=True)]
        self._flights[target].arrived(link.known_roots if root is None else [root], leaves)

    def _rank_of(self, chunk: int) -> int:
        return chunk % self._num_stages


def bind_all(placeholders: Sequence[Placeholder], tensors: Sequence[Tensor]) -> None:
    """Bind every placeholder to its tensor."""
    for placeholder, tensor in zip(placeholders, tensors, strict=True):
        placeholder.bind(tensor)


def _bind(placeholder: Placeholder, tensor: Tensor, chunk: int) -> None:
    if placeholder.shape != tensor.shape:
        raise StageError(
            f"Chunk {chunk} expects a tensor of shape {tuple(placeholder.shape)} from {placeholder.origin!r}, but the"
            f" stage before sends one of shape {tuple(tensor.shape)}. A module gives other shapes for real tensors than"
            " for meta tensors; use pipeline_parallel=1 or change it."
        )
    placeholder.bind(tensor)


def other_positions(chunk: int, found: list[int], before: list[int]) -> StageError:
    """The error for a chunk whose first block needs other arguments than for earlier batches."""
    return StageError(
        f"The first block of chunk {chunk} needs the values at positions {found} of its arguments from earlier stages,"
        f" but needed {before} for a batch of the same structure before. The step must not pass other things to its"
        " blocks from one batch to the next, unless the structure or a flag of the batch says so."
    )


def not_in_interface(module: str, chunk: int) -> StageError:
    """The error for a chunk that needs other values of earlier chunks than for earlier batches."""
    return StageError(
        f"Chunk {chunk} needs another output of {module!r} from earlier stages than for a batch of the same structure"
        " before. The step must not use other values of its modules from one batch to the next, unless the structure or"
        " a flag of the batch says so."
    )
