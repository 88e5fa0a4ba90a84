"""Tensors between pipeline ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_3d.collectives import as_bytes
from lightning_3d.config import Sizes
from lightning_3d.events import EventSource, Phase
from lightning_3d.mesh import Mesh, own_group

ACTIVATIONS, GRADIENTS = 0, 1
Lane = tuple[int, int, int]
"""Kind of message, and the pipeline ranks from which and to which it goes."""
_SENT, _RECEIVED = ("activations sent", "gradients sent"), ("activations", "gradients")


@dataclass(frozen=True)
class Fact:
    """What a receiver must know of a tensor before it arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Fact:
        """The facts of ``tensor``."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


class Pending:
    """A message under way; holds its tensors until it is done."""

    def __init__(
        self,
        works: list[Any],
        tensors: list[Tensor],
        device: torch.device,
        events: EventSource | None = None,
        what: tuple[int, int, str] = (-1, -1, ""),
    ) -> None:
        self._works = works
        self._device = device
        self._events = events
        self._what = what
        """Chunk and micro-batch that it belongs to, and what it is, for those who time the wait."""
        self.tensors = tensors

    @property
    def is_done(self) -> bool:
        """Whether the message is known to have arrived; gloo does not know it of what it sends."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> list[Tensor]:
        """Wait for the message (on CUDA: let the current stream wait), and give the tensors."""
        if self._events is not None and self._events.is_recording and self._works:
            with self._events.span(Phase.PP_WAIT, *self._what, sum(tensor.nbytes for tensor in self.tensors)):
                self._wait()
        else:
            self._wait()
        return [tensor if tensor.device == self._device else tensor.to(self._device) for tensor in self.tensors]

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []


class Transport:
    """Point-to-point messages along the ``pp`` axis, as raw bytes, so that every type passes through every backend.

    NCCL matches messages by their order alone, and runs all messages of a group one after another: a send would wait
    behind a receive that was posted ahead, of data that may depend on it. So each way from one rank to another has a
    group of these two for each kind of message (:func:`lanes`). Within it the order of sends equals the order of
    receives, which the schedules guarantee. gloo has tags and needs one group; it sends from host memory only, so with
    it (several ranks on one GPU) the messages of a device pass through the host.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._pp = mesh.pp
        self._control = mesh.control_pp
        self._device = mesh.device
        self._memory = mesh.device
        self._events = mesh.events
        self._group = mesh.pp.group
        """For all messages that have no lane of their own."""
        self._lanes: dict[Lane, ProcessGroup | None] = {}
        if mesh.pp.size > 1 and mesh.device.type == "cuda":
            if dist.get_backend(mesh.pp.group) == "gloo":
                self._memory, self._group = torch.device("cpu"), mesh.control_pp.group
            else:
                self._lanes = _open_lanes(mesh)

    def send(self, tensors: Sequence[Tensor], peer: int, kind: int, chunk: int, micro_batch: int) -> Pending:
        """Send ``tensors`` to pipeline rank ``peer`` without waiting."""
        group = self._lanes.get((kind, self._pp.rank, peer), self._group)
        payload = [as_bytes(tensor.detach()).to(self._memory) for tensor in tensors]
        works = [
            dist.isend(item, self._pp.ranks[peer], group=group, tag=_tag(kind, chunk, micro_batch, i))
            for i, item in enumerate(payload)
            if item.numel()
        ]
        return Pending(works, payload, self._memory, self._events, (chunk, micro_batch, _SENT[kind]))

    def receive(self, facts: Sequence[Fact], peer: int, kind: int, chunk: int, micro_batch: int) -> Pending:
        """Post the receive of tensors with these facts from pipeline rank ``peer``."""
        group = self._lanes.get((kind, peer, self._pp.rank), self._group)
        tensors = [torch.empty(fact.shape, dtype=fact.dtype, device=self._memory) for fact in facts]
        works = [
            dist.irecv(as_bytes(item), self._pp.ranks[peer], group=group, tag=_tag(kind, chunk, micro_batch, i))
            for i, item in enumerate(tensors)
            if item.numel()
        ]
        return Pending(works, tensors, self._device, self._events, (chunk, micro_batch, _RECEIVED[kind]))

    def send_object(self, value: object, peer: int) -> None:
        """Send a small host object to pipeline rank ``peer``; waits until it is taken."""
        dist.send_object_list([value], self._pp.ranks[peer], group=self._control.group, device=torch.device("cpu"))

    def receive_object(self, peer: int) -> Any:
        """The next host object of pipeline rank ``peer``."""
        box: list[Any] = [None]
        dist.recv_object_list(box, self._pp.ranks[peer], group=self._control.group, device=torch.device("cpu"))
        return box[0]

    def announce(self, value: object, rank: int) -> None:
        """Tell all pipeline ranks a small host object; ``rank`` is this one."""
        if self._pp.size > 1:
            group, cpu = self._control.group, torch.device("cpu")
            dist.broadcast_object_list([value], src=self._pp.ranks[rank], group=group, device=cpu)

    def announced(self, rank: int) -> Any:
        """What pipeline rank ``rank`` tells all next."""
        box: list[Any] = [None]
        group, cpu = self._control.group, torch.device("cpu")
        dist.broadcast_object_list(box, src=self._pp.ranks[rank], group=group, device=cpu)
        return box[0]


def _tag(kind: int, chunk: int, micro_batch: int, index: int) -> int:
    return 1 + kind + 2 * (index + 64 * (chunk + 4096 * (micro_batch % 4096)))


def lanes(stages: int) -> list[list[Lane]]:
    """The ways that messages take between neighbouring stages, in rounds in which each stage has one neighbour at most.

    Activations go to the next stage, and from the last to the first one where stages have several chunks; gradients go
    back. Of two stages, each is both the next and the previous one of the other.
    """
    ring = [(stage, (stage + 1) % stages) for stage in range(stages)]
    paired = stages - stages % 2
    rounds = [pairs for pairs in (ring[:paired:2], ring[1:paired:2], ring[paired:]) if pairs]
    forth = [[(ACTIVATIONS, low, high) for low, high in pairs] for pairs in rounds]
    return forth + [[(GRADIENTS, high, low) for low, high in pairs] for pairs in rounds]


def members(parallel: Sequence[Lane], sizes: Sizes) -> list[list[int]]:
    """Global ranks of the groups for one round of lanes: those at both ends of each; every other rank alone.

    Each rank is in one of them, since torch names a group by how many the rank is in.
    """
    columns = sizes.dp * sizes.tp
    pairs = [
        sorted((source * columns + column, target * columns + column))
        for _, source, target in parallel
        for column in range(columns)
    ]
    paired = {rank for pair in pairs for rank in pair}
    return pairs + [[rank] for rank in range(sizes.world) if rank not in paired]


def _open_lanes(mesh: Mesh) -> dict[Lane, ProcessGroup | None]:
    """A group for every lane that begins or ends at this rank. Collective over the world.

    NCCL connects two ranks, one way, in the first message that goes this way, and the host waits for it; done here, no
    schedule does.
    """
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0")  # it says: make such groups
    opened: dict[Lane, ProcessGroup | None] = {}
    token = torch.zeros(1, device=mesh.device)
    for parallel in lanes(mesh.pp.size):
        group = own_group(members(parallel, mesh.sizes), mesh.rank)
        for lane in parallel:
            _, source, target = lane
            if mesh.pp.rank == source:
                dist.send(token, mesh.pp.ranks[target], group=group)
                opened[lane] = group
            elif mesh.pp.rank == target:
                dist.recv(token, mesh.pp.ranks[source], group=group)
                opened[lane] = group
    return opened
