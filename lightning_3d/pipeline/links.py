"""What passes the cuts between chunks, and what a chunk keeps of a micro-batch until its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_3d.errors import StageError
from lightning_3d.pipeline.transport import Fact, Pending
from lightning_3d.placeholder import is_placeholder
from lightning_3d.provenance import Root, refuse_changed, version_of


@dataclass
class Link:
    """The interface between a chunk and the one before it: settled once, the same for every shape."""

    positions: list[int]
    """Which of the flattened arguments of the chunk's first block come from earlier chunks."""
    roots: list[Root | None]
    """What those are, where they are the outputs of modules as they came."""
    carried: list[Root] = field(default_factory=list)
    """What passes besides, for use within this chunk or on the way to later ones."""
    dtypes: list[torch.dtype] = field(default_factory=list)
    """Types of all of them at the sender, known at the receiver: under mixed precision, shards of its parameters are
    gathered in another type than the parameters have that stand for them elsewhere."""
    needs_grad: list[bool] = field(default_factory=list)
    """Which of those have a gradient at the sender."""

    def has(self, root: Root) -> bool:
        """Whether ``root`` passes here."""
        return root in self.carried or root in self.roots

    @property
    def known_roots(self) -> list[Root | None]:
        """The root of every value that passes, where there is one."""
        return [*self.roots, *self.carried]

    def facts(self, shapes: Sequence[Sequence[int]]) -> list[Fact]:
        """What the receiver must know of all values, which have these shapes."""
        return [
            Fact(tuple(shape), dtype, grad)
            for shape, dtype, grad in zip(shapes, self.dtypes, self.needs_grad, strict=True)
        ]


@dataclass
class Flight:
    """A micro-batch between its forward and its backward on one chunk."""

    inputs: list[Tensor] = field(default_factory=list)
    """What arrived, in the order of the link."""
    outputs: list[Tensor] = field(default_factory=list)
    """What was handed on, in the order of the next link."""
    leaves: list[Any] = field(default_factory=list)
    """Until then: the flattened arguments of the first block of the next chunk,"""
    known: dict[Root, tuple[Tensor, int]] = field(default_factory=dict)
    """and what later chunks may need, with how often it had been changed."""
    result: Any = None
    sent: Pending | None = None

    def keep(self, root: Root, value: Tensor) -> None:
        """Hold a value that later chunks may need."""
        self.known[root] = (value, version_of(value))

    def arrived(self, roots: Sequence[Root | None], tensors: Sequence[Tensor]) -> None:
        """Take what came, with what it is where that is known."""
        self.inputs += tensors
        for root, tensor in zip(roots, tensors, strict=True):
            if root is not None:
                self.keep(root, tensor)

    def values(self, link: Link, root: Root | None, chunk: int) -> list[Tensor]:
        """What passes ``link`` to the next chunk: ``root``, or all of it.

        Raises:
            StageError: if this chunk does not have it.
        """
        if root is not None:
            return [self.value_of(root, chunk)]
        arguments = [_held(self.leaves[position], chunk) for position in link.positions]
        return arguments + [self.value_of(root, chunk) for root in link.carried]

    def value_of(self, root: Root, chunk: int) -> Tensor:
        """A value that later chunks need, as it was when it was made or came.

        Raises:
            StageError: if this chunk does not have it, or has changed it.
        """
        value, version = self.known.get(root, (None, 0))
        if value is None:
            raise StageError(
                f"A later chunk needs what {root.module!r} gave in chunk {root.chunk}, but chunk {chunk} has not called"
                " it on values of its own. Every batch of the same structure must run the same modules; use"
                " pipeline_parallel=1 for steps that differ."
            )
        refuse_changed(value, version, root)
        return _held(value, chunk)

    def let_go(self) -> None:
        """Forget what later chunks did not ask for."""
        self.leaves = []
        self.known = {}


def _held(leaf: Any, chunk: int) -> Tensor:
    if not isinstance(leaf, Tensor) or is_placeholder(leaf):
        raise StageError(
            f"Chunk {chunk + 1} needs a value that chunk {chunk} does not have: {leaf!r}. It comes from a parameter of"
            " another stage, or from a module that this stage does not run; pass what the blocks compute, or use"
            " pipeline_parallel=1."
        )
    return leaf
