"""Tensors between pipeline ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_3d.collectives import as_bytes
from lightning_3d.events import EventSource, Phase
from lightning_3d.mesh import Mesh

ACTIVATIONS, GRADIENTS = 0, 1
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

    NCCL matches messages of a pair of ranks by their order alone and runs both directions of a group on one stream.
    So each direction of travel and each kind of message gets a group of its own: within one of them the order of
    sends equals the order of receives, which the schedules guarantee. gloo has tags and needs one group; it sends from
    host memory only, so with it (several ranks on one GPU) the messages of a device pass through the host.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._pp = mesh.pp
        self._control = mesh.control_pp
        self._device = mesh.device
        self._memory = mesh.device
        self._events = mesh.events
        self._groups: list[ProcessGroup | None] = [mesh.pp.group] * 4
        if mesh.pp.size > 1 and mesh.device.type == "cuda":
            if dist.get_backend(mesh.pp.group) == "gloo":
                self._memory, self._groups = torch.device("cpu"), [mesh.control_pp.group] * 4
            else:
                self._groups = _make_groups(mesh)

    def send(self, tensors: Sequence[Tensor], peer: int, kind: int, chunk: int, micro_batch: int) -> Pending:
        """Send ``tensors`` to pipeline rank ``peer`` without waiting."""
        group = self._group(kind, upward=peer > self._pp.rank)
        payload = [as_bytes(tensor.detach()).to(self._memory) for tensor in tensors]
        works = [
            dist.isend(item, self._pp.ranks[peer], group=group, tag=_tag(kind, chunk, micro_batch, i))
            for i, item in enumerate(payload)
            if item.numel()
        ]
        return Pending(works, payload, self._memory, self._events, (chunk, micro_batch, _SENT[kind]))

    def receive(self, facts: Sequence[Fact], peer: int, kind: int, chunk: int, micro_batch: int) -> Pending:
        """Post the receive of tensors with these facts from pipeline rank ``peer``."""
        group = self._group(kind, upward=peer < self._pp.rank)
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

    def _group(self, kind: int, upward: bool) -> ProcessGroup | None:
        return self._groups[2 * kind + upward]


def _tag(kind: int, chunk: int, micro_batch: int, index: int) -> int:
    return 1 + kind + 2 * (index + 64 * (chunk + 4096 * (micro_batch % 4096)))


def _make_groups(mesh: Mesh) -> list[ProcessGroup | None]:
    """Four groups over the pipeline ranks of every column, made by all ranks in one order, and opened.

    NCCL opens a connection in the first message of a pair; done here, no schedule waits for it.
    """
    sizes = mesh.sizes
    groups: list[ProcessGroup | None] = []
    for _ in range(4):
        mine = None
        for column in range(sizes.dp * sizes.tp):
            ranks = [stage * sizes.dp * sizes.tp + column for stage in range(sizes.pp)]
            group = dist.new_group(ranks, backend="nccl")
            if mesh.rank in ranks:
                mine = group
        groups.append(mine)
    token = torch.zeros(1, device=mesh.device)
    for group in groups:
        dist.all_reduce(token, group=group)
        for low in range(sizes.pp):
            high = (low + 1) % sizes.pp
            pair = {min(low, high), max(low, high)}
            if mesh.pp.rank in pair and len(pair) == 2:
                other = (pair - {mesh.pp.rank}).pop()
                if mesh.pp.rank == min(pair):
                    dist.send(token, mesh.pp.ranks[other], group=group)
                else:
                    dist.recv(token, mesh.pp.ranks[other], group=group)
    return groups
