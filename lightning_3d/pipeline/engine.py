"""The engine: runs a schedule's list of actions for one pipeline rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_3d.errors import StageError
from lightning_3d.events import Phase
from lightning_3d.mesh import Mesh
from lightning_3d.pipeline.links import Flight, Link, as_input
from lightning_3d.pipeline.micro_batches import MicroBatch
from lightning_3d.pipeline.needs import Exchange
from lightning_3d.pipeline.settling import Settling, bind_all, not_in_interface, other_positions
from lightning_3d.pipeline.stage import Stage
from lightning_3d.pipeline.transport import ACTIVATIONS, GRADIENTS, Fact, Pending, Transport
from lightning_3d.placeholder import Placeholder
from lightning_3d.progress import Progress
from lightning_3d.provenance import Root
from lightning_3d.schedules import Action, Kind, build


class Sharding(Protocol):
    """What the engine asks of the sharded parameters (see ``lightning_3d.sharding``)."""

    def prepare_backward(self, chunk: int, *, last_of_chunk: bool, last_of_step: bool, sync: bool) -> None:
        """Called before every backward."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What the engine runs: one batch, cut into micro-batches."""

    pieces: Sequence[MicroBatch]
    """The micro-batches; every rank of the replica holds the same."""
    call: Callable[[MicroBatch], Any]
    """The user's step on one micro-batch."""
    backward: Callable[[Any, MicroBatch], None] | None = None
    """Backward from what ``call`` returned on the last chunk; ``None`` for evaluation."""
    sync: bool = True
    """Whether the gradients are complete after this step, and so are reduced over the replicas."""
    mode: str = "train"
    """Name of the loop; steps of different loops may cut the model at different values."""


_IDLE = Step(pieces=(), call=lambda piece: None)
"""Between steps, where nothing of the last batch is held."""


class Engine:
    """Runs steps on one pipeline rank.

    Sends never block the rank and receives are posted before the compute that precedes their use. Where a batch has a
    structure not met before, the micro-batches go through the stages one after another, while these settle which values
    pass between them (see :mod:`~lightning_3d.pipeline.settling`); afterwards only tensors travel. A shape not met
    before costs nothing but a receive that is posted when its stage begins, since every stage knows the shapes from
    running what precedes it on meta tensors.
    """

    def __init__(self, stage: Stage, mesh: Mesh, schedule: str, virtual_stages: int, sharding: Sharding) -> None:
        self._stage = stage
        self._rank = mesh.pp.rank
        self._num_stages = mesh.pp.size
        self._schedule = schedule
        self._virtual_stages = virtual_stages
        self._sharding = sharding
        self._transport = Transport(mesh)
        self._last_chunk = mesh.pp.size * virtual_stages - 1
        self._parameters = [part._parameters for part in stage.module.modules() if part._parameters]
        self._numbers: dict[Any, int] = {}
        """Structures of batches met so far, without and with shapes, in short."""
        self._links: dict[int, dict[int, Link]] = {}
        """The link before every chunk, for every structure of batch."""
        self._shapes: dict[tuple[int, int], list[Fact]] = {}
        self._sent: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        self._settled: set[int] = set()
        self._reset()
        self._outputs: list[Any] = []
        self._events = mesh.events
        self.progress = Progress()

    def _reset(self) -> None:
        self._step = _IDLE
        self._flights: dict[tuple[int, int], Flight] = {}
        self._arriving: dict[tuple[Kind, int, int], Pending] = {}
        self._handed_over: dict[tuple[Kind, int, int], list[Any]] = {}
        self._leaving: deque[Pending] = deque()
        self._put_off: dict[int, set[tuple[int, int]]] = {}

    def know(self, links: Mapping[int, Link]) -> None:
        """Take what passes the cuts (the link before every chunk) as settled, for batches of the structure met next."""
        number = len(self._numbers)
        self._links[number] = dict(links)
        self._settled.add(number)

    @property
    def links(self) -> Mapping[int, Link]:
        """What passes the cuts, for batches of the structure that was met last; empty before the first."""
        return self._links[max(self._links)] if self._links else {}

    def run(self, step: Step) -> list[Any]:
        """Run one batch through the pipeline, forward and (for training) backward.

        Returns:
            What the user's step returned for every micro-batch on the rank of the last chunk, an empty list elsewhere.
        """
        self._reset()
        self._step = step
        frozen = self._frozen()
        self._keys = [self._structure(piece, frozen) for piece in step.pieces]
        self._outputs = [None] * len(step.pieces)
        self._done: dict[int, int] = dict.fromkeys(self._stage.cut.owned, 0)
        with self._events.span(Phase.PIPELINE, label=step.mode):
            self._run_all(step)
        owns_last = self._last_chunk in self._stage.cut.owned
        outputs, self._outputs = self._outputs, []
        self._reset()
        return outputs if owns_last else []

    def _run_all(self, step: Step) -> None:
        if all(key in self._settled for key, _ in self._keys):
            self._execute(self._actions(len(step.pieces)), step.pieces)
        else:
            forward = (Kind.RECV_F, Kind.F, Kind.SEND_F)
            backward = [action for action in self._actions(1) if action.kind not in forward]
            for piece in step.pieces:
                self._settle(piece)
                self._execute(backward, [piece])
            self._settled.update(key for key, _ in self._keys)
        while self._leaving:
            self._leaving.popleft().wait()

    def _actions(self, count: int) -> Sequence[Action]:
        forward_only = self._step.backward is None
        return build(self._schedule, self._num_stages, self._virtual_stages, count, forward_only).actions[self._rank]

    def _execute(self, actions: Sequence[Action], pieces: Sequence[MicroBatch]) -> None:
        for action in actions:
            self.progress.act(action)
            self._HANDLERS[action.kind](self, action, pieces[action.micro_batch])

    # --- forward ---------------------------------------------------------------------------------------------------

    def _post_forward_receive(self, action: Action, piece: MicroBatch) -> None:
        facts = self._shapes.get((action.chunk, self._keys[piece.index][1]))
        channel = self._put_off.setdefault(action.peer, set())
        if facts is None or channel or self._keys[piece.index][0] not in self._settled:
            # Posted when it is used; what comes later on the same channel must not overtake it.
            channel.add((action.chunk, piece.index))
        else:
            pending = self._transport.receive(facts, action.peer, ACTIVATIONS, action.chunk, piece.index)
            self._arriving[Kind.RECV_F, action.chunk, piece.index] = pending

    def _settle(self, piece: MicroBatch) -> None:
        """The forward of all chunks, one after another, in which the pipeline finds out what passes between them."""
        flights = {chunk: Flight() for chunk in self._stage.cut.owned}
        links = self._links.setdefault(self._keys[piece.index][0], {})
        settling = Settling(self._transport, self._rank, self._num_stages, piece.index, links, flights)
        for chunk in range(self._last_chunk + 1):
            if self._rank_of(chunk) == self._rank:
                settling.lead(chunk)
                self.progress.act(Action(Kind.F, chunk, piece.index))
                with self._events.span(Phase.FORWARD, chunk, piece.index):
                    self._run_chunk(chunk, piece, settling, flights[chunk])
                    settling.end()
            else:
                with self._events.span(Phase.PP_WAIT, chunk, piece.index, "settle"):
                    settling.follow(chunk)
        for chunk, flight in flights.items():
            flight.hand_over()
            if self._step.backward is not None:
                self._flights[chunk, piece.index] = flight

    def _forward(self, action: Action, piece: MicroBatch) -> None:
        chunk = action.chunk
        flight = Flight()
        with self._events.span(Phase.FORWARD, chunk, piece.index):
            self._run_chunk(chunk, piece, _Settled(self, chunk, piece, flight), flight)
        if self._step.backward is not None or chunk != self._last_chunk:
            self._flights[chunk, piece.index] = flight

    def _run_chunk(self, chunk: int, piece: MicroBatch, exchange: Exchange, flight: Flight) -> None:
        is_last, result = self._stage(lambda: self._step.call(piece), chunk, exchange)
        flight.inputs = []
        if is_last != (chunk == self._last_chunk):
            self._refuse_end(chunk, is_last)
        if not is_last:
            flight.leaves = result
            return
        self._outputs[piece.index] = _detach(result)
        flight.result = result if self._step.backward is not None else None

    def _receive_inputs(self, chunk: int, piece: MicroBatch, placeholders: Sequence[Placeholder]) -> list[Tensor]:
        link = self._links[self._keys[piece.index][0]][chunk]
        source = self._rank_of(chunk - 1)
        if source == self._rank:
            outputs = self._hand_on(chunk - 1, piece)
            return [as_input(tensor.detach(), tensor.requires_grad) for tensor in outputs]
        pending = self._arriving.pop((Kind.RECV_F, chunk, piece.index), None)
        if pending is None:
            facts = link.facts([tuple(placeholder.shape) for placeholder in placeholders])
            self._shapes[chunk, self._keys[piece.index][1]] = facts
            pending = self._transport.receive(facts, source, ACTIVATIONS, chunk, piece.index)
            self._put_off.get(source, set()).discard((chunk, piece.index))
        return [as_input(t, grad) for t, grad in zip(pending.wait(), link.needs_grad, strict=True)]

    def _send_forward(self, action: Action, piece: MicroBatch) -> None:
        chunk = action.chunk
        tensors = self._hand_on(chunk, piece)
        self._links[self._keys[piece.index][0]][chunk + 1].refuse_others(tensors, chunk)
        shapes = [tuple(tensor.shape) for tensor in tensors]
        before = self._sent.setdefault((chunk + 1, self._keys[piece.index][1]), shapes)
        if before != shapes:  # the next stage has posted receives of the shapes that it knows
            raise StageError(
                f"Chunk {chunk} hands on tensors of shapes {shapes}, but of {before} for a batch of the same shapes"
                " before. The step cuts or pads by the values of the batch, which a pipeline cannot follow: do that in"
                " the collate function or in on_before_batch_transfer, so that the shapes of the batch tell, or use"
                " pipeline_parallel=1."
            )
        self._leave(self._transport.send(tensors, action.peer, ACTIVATIONS, chunk + 1, piece.index))

    def _hand_on(self, chunk: int, piece: MicroBatch) -> list[Tensor]:
        """What passes to the next chunk; until the backward this one keeps nothing of it."""
        flight = self._flights[chunk, piece.index]
        flight.outputs = flight.values(self._links[self._keys[piece.index][0]][chunk + 1], None, chunk)
        if self._step.backward is None:
            del self._flights[chunk, piece.index]
        return flight.hand_over()

    # --- backward --------------------------------------------------------------------------------------------------

    def _post_backward_receive(self, action: Action, piece: MicroBatch) -> None:
        facts = self._flights[action.chunk, piece.index].awaited
        pending = self._transport.receive(facts, action.peer, GRADIENTS, action.chunk, piece.index)
        self._arriving[Kind.RECV_B, action.chunk, piece.index] = pending

    def _backward(self, action: Action, piece: MicroBatch) -> None:
        with self._events.span(Phase.BACKWARD, action.chunk, piece.index):
            self._run_backward(action.chunk, piece)

    def _run_backward(self, chunk: int, piece: MicroBatch) -> None:
        flight = self._flights.pop((chunk, piece.index))
        self._done[chunk] += 1
        total = len(self._step.pieces)
        self._sharding.prepare_backward(
            chunk,
            last_of_chunk=self._done[chunk] == total,
            last_of_step=all(done == total for done in self._done.values()),
            sync=self._step.sync,
        )
        if chunk == self._last_chunk:
            assert self._step.backward is not None
            self._step.backward(flight.result, piece)
        else:
            if self._rank_of(chunk + 1) == self._rank:
                gradients = self._handed_over.pop((Kind.B, chunk, piece.index))
            else:
                gradients = self._arriving.pop((Kind.RECV_B, chunk, piece.index)).wait()
            if flight.edges:
                torch.autograd.backward(flight.edges, gradients)
        if chunk > 0:
            self._handed_over[Kind.B, chunk - 1, piece.index] = flight.input_gradients()

    def _send_backward(self, action: Action, piece: MicroBatch) -> None:
        gradients = self._handed_over.pop((Kind.B, action.chunk - 1, piece.index))
        self._leave(self._transport.send(gradients, action.peer, GRADIENTS, action.chunk - 1, piece.index))

    # --- bookkeeping -----------------------------------------------------------------------------------------------

    def _leave(self, sent: Pending) -> None:
        """Keep a message until it is done, and at most one per stage: memory must not grow with the micro-batches."""
        self._leaving.append(sent)
        while len(self._leaving) > self._num_stages or (self._leaving and self._leaving[0].is_done):
            self._leaving.popleft().wait()

    def _rank_of(self, chunk: int) -> int:
        return chunk % self._num_stages

    def _frozen(self) -> int:
        """Which parameters of the whole model need a gradient."""
        with torch._C.DisableTorchFunctionSubclass():  # placeholders answer for themselves
            return hash(tuple(p.requires_grad for part in self._parameters for p in part.values() if p is not None))

    def _structure(self, piece: MicroBatch, frozen: int) -> tuple[int, int]:
        """Numbers of what settles the interface of a cut, and of that with the shapes, which settles the messages."""
        leaves, spec = pytree.tree_flatten(piece.data)
        kinds: list[Any] = []
        shapes: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                kinds.append((leaf.dtype, leaf.dim()))
                shapes.append(tuple(leaf.shape))
            else:
                kinds.append(leaf if leaf is None or isinstance(leaf, bool) else type(leaf).__name__)
        module = self._stage.module
        structure = (self._step.mode, module.training, torch.is_grad_enabled(), frozen, str(spec), tuple(kinds))
        number = self._numbers.setdefault(structure, len(self._numbers))
        shaped = (number, tuple(shapes))
        return number, self._numbers.setdefault(shaped, len(self._numbers))

    def _refuse_end(self, chunk: int, is_last: bool) -> None:
        what = "returned" if is_last else "went on to a further block"
        raise StageError(
            f"The step {what} while it ran chunk {chunk} of {self._last_chunk + 1}, before it had called the blocks of"
            " that chunk and the next. Every step must run the whole chain of blocks once. To skip a batch, leave it"
            " out in the loader or the collate function, or return None after the blocks; use pipeline_parallel=1 for"
            " steps that use only a part of the model."
        )

    _HANDLERS: ClassVar[Mapping[Kind, Callable[[Engine, Action, MicroBatch], None]]] = {
        Kind.RECV_F: _post_forward_receive,
        Kind.F: _forward,
        Kind.SEND_F: _send_forward,
        Kind.RECV_B: _post_backward_receive,
        Kind.B: _backward,
        Kind.SEND_B: _send_backward,
    }


def _detach(result: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach(), result)


class _Settled:
    """The :class:`~lightning_3d.pipeline.needs.Exchange` of a chunk when it is settled what passes the cuts."""

    def __init__(self, engine: Engine, chunk: int, piece: MicroBatch, flight: Flight) -> None:
        links = engine._links[engine._keys[piece.index][0]]
        self._engine, self._chunk, self._piece, self._flight = engine, chunk, piece, flight
        self._link = links.get(chunk)
        carried_on = links[chunk + 1].carried if chunk + 1 in links else []
        self._wanted = {root for root in carried_on if root.chunk == chunk}
        self.modules = {root.module for root in (*(self._link.carried if self._link else []), *self._wanted)}
        self._known = bool(carried_on)

    def enter(self, positions: list[int], placeholders: list[Placeholder], roots: Mapping[Root, Placeholder]) -> None:
        link = self._link
        assert link is not None
        if link.positions != positions:
            raise other_positions(self._chunk, positions, link.positions)
        for root in link.carried:
            if root not in roots:
                raise not_in_interface(root.module, self._chunk)
        expected = [*placeholders, *(roots[root] for root in link.carried)]
        tensors = self._engine._receive_inputs(self._chunk, self._piece, expected)
        self._flight.arrived(link.known_roots if self._known else [None] * len(tensors), tensors)
        bind_all(expected, tensors)

    def fetch(self, root: Root, placeholder: Placeholder) -> None:
        raise not_in_interface(root.module, self._chunk)

    def keep(self, root: Root, value: Tensor) -> None:
        if root in self._wanted:
            self._flight.keep(root, value)
