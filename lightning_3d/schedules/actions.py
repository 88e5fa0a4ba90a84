"""What a pipeline schedule is made of: actions, and one list of them per pipeline rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What an action does. F, B and W compute; the others move tensors between neighbouring chunks."""

    F = "F"
    """Forward of a chunk on a micro-batch."""
    B = "B"
    """Backward: gradients of the chunk's inputs, and of its weights too unless the schedule has a W for it."""
    W = "W"
    """Gradients of the weights only, put off by the zero-bubble schedules."""
    SEND_F = "SF"
    """Send the chunk's outputs to the rank of the next chunk."""
    RECV_F = "RF"
    """Post (never wait for) the receive of the chunk's inputs from the rank of the previous chunk."""
    SEND_B = "SB"
    """Send the gradients of the chunk's inputs to the rank of the previous chunk."""
    RECV_B = "RB"
    """Post (never wait for) the receive of the gradients of the chunk's outputs from the rank of the next chunk."""

    # Members are singletons; the engine and the simulation look them up for every action.
    __hash__ = object.__hash__

    @property
    def is_compute(self) -> bool:
        """True for F, B and W."""
        return self in _COMPUTE

    @property
    def is_send(self) -> bool:
        """True for SEND_F and SEND_B."""
        return self is Kind.SEND_F or self is Kind.SEND_B

    @property
    def is_receive(self) -> bool:
        """True for RECV_F and RECV_B."""
        return self is Kind.RECV_F or self is Kind.RECV_B


_COMPUTE = frozenset((Kind.F, Kind.B, Kind.W))


class Action(NamedTuple):
    """One step of one pipeline rank; ``str`` gives ``F0.3`` (chunk 0, micro-batch 3) or ``SF0.3>1`` (to rank 1).

    Attributes:
        kind: What is done.
        chunk: Index in the whole pipeline, ``0 .. stages * virtual_stages - 1``, in the order of the forward.
        micro_batch: Index of the micro-batch.
        peer: Pipeline rank at the other end of a send or receive; -1 for compute actions.
    """

    kind: Kind
    chunk: int
    micro_batch: int
    peer: int = -1

    def __str__(self) -> str:
        where = f">{self.peer}" if self.kind.is_send else f"<{self.peer}" if self.kind.is_receive else ""
        return f"{self.kind.value}{self.chunk}.{self.micro_batch}{where}"


@dataclass(frozen=True)
class Schedule:
    """One training or evaluation step of the whole pipeline as data.

    What holds for every schedule, and is tested: each action stands once; F before B (before W); a RECV stands before
    the action that needs it; messages with the same (kind, source, destination) are sent and received in one order;
    and it runs to the end even when every send blocks until its receive is posted.
    """

    name: str
    """Name under which it was built."""
    stages: int
    """Number of pipeline ranks."""
    virtual_stages: int
    """Chunks per pipeline rank."""
    micro_batches: int
    """Micro-batches in the step."""
    forward_only: bool
    """True for evaluation: no backward."""
    placement: tuple[int, ...]
    """Pipeline rank of each chunk."""
    actions: tuple[tuple[Action, ...], ...]
    """For each pipeline rank what it does, in order."""

    @property
    def num_chunks(self) -> int:
        """Chunks of the whole pipeline, ``stages * virtual_stages``."""
        return len(self.placement)

    def chunk_rank(self, chunk: int) -> int:
        """Pipeline rank that holds ``chunk``."""
        return self.placement[chunk]

    def rank_chunks(self, rank: int) -> tuple[int, ...]:
        """Chunks that pipeline rank ``rank`` holds, in the order of the forward."""
        return tuple(chunk for chunk, owner in enumerate(self.placement) if owner == rank)

    def compute(self, rank: int) -> tuple[Action, ...]:
        """The compute actions of pipeline rank ``rank``, in order."""
        return tuple(action for action in self.actions[rank] if action.kind.is_compute)

    def __str__(self) -> str:
        kind = "forward only" if self.forward_only else "training"
        size = f"{self.stages} stages × {self.virtual_stages} chunks, {self.micro_batches} micro-batches"
        lines = [f"rank {rank}: " + " ".join(map(str, actions)) for rank, actions in enumerate(self.actions)]
        return "\n".join([f"{self.name} ({kind}): {size}", *lines])
