"""What a rank sends: every collective and message as one row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "receive",
    "barrier": "barrier",
}


@dataclass(frozen=True)
class Message:
    """One call of a collective, or one message between two ranks."""

    axis: str
    """``"tp"``, ``"pp"``, ``"dp"``, ``"model"`` or ``"world"``."""
    operation: str
    num_bytes: int
    """Bytes of the whole: what is reduced, what is gathered from all or scattered to all, what is sent."""
    ranks: int

    @property
    def sent_bytes(self) -> float:
        """Bytes that this rank sends when the ranks form a ring (Thakur et al. 2005)."""
        share = (self.ranks - 1) / self.ranks
        factors = {"all_reduce": 2 * share, "receive": 0.0, "barrier": 0.0, "send": 1.0, "broadcast": 1.0}
        return self.num_bytes * factors.get(self.operation, share)


Traffic = Counter[Message]
"""How often which message was sent."""


def message_of(func: Any, args: Any, kwargs: Mapping[str, Any], axes: Mapping[str, str]) -> Message | None:
    """The message that a call of an operation of ``c10d`` sends; ``None`` for a group that is none of an axis."""
    name = func.overloadpacket.__name__
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    group = next((found for leaf in leaves if (found := _group(leaf)) is not None), None)
    if group is None:
        return None
    operation = _NAMES.get(name, name)
    # Of a pair of tensors the first is the output: the whole of a gather, a part of a scatter.
    whole = args[1] if operation in ("reduce_scatter",) else args[0]
    count = sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(whole) if isinstance(leaf, Tensor))
    return Message(axes.get(group.group_name, "other"), operation, count, group.size())


def _group(leaf: Any) -> dist.ProcessGroup | None:
    if isinstance(leaf, dist.ProcessGroup):
        return leaf
    if not isinstance(leaf, torch.ScriptObject):
        return None
    try:
        return dist.ProcessGroup.unbox(leaf)
    except (RuntimeError, TypeError):
        return None
