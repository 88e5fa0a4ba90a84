"""What passes the cuts between chunks, and what a chunk keeps of a micro-batch until its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_3d.errors import StageError
from lightning_3d.pipeline.transport import Fact
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
    """Types of all of them at the sender, known to it and to the receiver: under mixed precision, shards of its
    parameters are gathered in another type than the parameters have that stand for them elsewhere."""
    needs_grad: list[bool] = field(default_factory=list)
    """Which of those have a gradient at the sender."""

    def has(self, root: Root) -> bool:
        """Whether ``root`` passes here."""
        return root in self.carried or root in self.roots

    @property
    def known_roots(self) -> list[Root | None]:
        """The root of every value that passes, where there is one."""
        return [*self.roots, *self.carried]

    def refuse_others(self, tensors: Sequence[Tensor], chunk: int) -> None:
        """Raise if ``chunk`` is to hand on tensors of other types or with other gradients than were settled.

        Raises:
            StageError: since the next chunk would wait for other messages than come.
        """
        found = [(tensor.dtype, tensor.requires_grad) for tensor in tensors]
        settled = list(zip(self.dtypes, self.needs_grad, strict=True))
        if found != settled:
            raise StageError(
                f"Chunk {chunk} hands on {_in_words(found)}, but handed on {_in_words(settled)} for a batch of the same"
                " structure before. Steps must not come to run under torch.no_grad(), or in another type, from one"
                " batch to the next. Freeze layers with requires_grad_(False) or BackboneFinetuning, which stages see;"
                " let a bool in the batch say what differs; or use pipeline_parallel=1."
            )

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
    """What arrived, in the order of the link, while the chunk runs."""
    entries: list[Any] = field(default_factory=list)
    """Of those with a gradient: where the graph begins."""
    outputs: list[Tensor] = field(default_factory=list)
    """What is to be handed on, in the order of the next link."""
    edges: list[GradientEdge] = field(default_factory=list)
    """Where the gradients of what was handed on go; its values are not kept for that,"""
    awaited: list[Fact] = field(default_factory=list)
    """and what those gradients are."""
    leaves: list[Any] = field(default_factory=list)
    """Until it is handed on: the flattened arguments of the first block of the next chunk,"""
    known: dict[Root, tuple[Tensor, int]] = field(default_factory=dict)
    """and what later chunks may need, with how often it had been changed."""
    result: Any = None
    """On the last chunk: what the user's step returned."""

    def keep(self, root: Root, value: Tensor) -> None:
        """Hold a value that later chunks may need."""
        self.known[root] = (value, version_of(value))

    def arrived(self, roots: Sequence[Root | None], tensors: Sequence[Tensor]) -> None:
        """Take what came, with what it is where that is known."""
        self.inputs += tensors
        self.entries += [tensor.grad_fn for tensor in tensors if tensor.requires_grad]
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

    def input_gradients(self) -> list[Tensor]:
        """After the backward: the gradients of what arrived, in its order; zeros for what had no effect."""
        found = []
        for entry in self.entries:
            shape, dtype, device = entry.kind
            found.append(
                entry.gradient if entry.gradient is not None else torch.zeros(shape, dtype=dtype, device=device)
            )
        return found

    def hand_over(self) -> list[Tensor]:
        """The outputs, which from now on are the next chunk's; what later chunks did not ask for is forgotten."""
        outputs, self.outputs = self.outputs, []
        trained = [tensor for tensor in outputs if tensor.requires_grad]
        self.edges = [get_gradient_edge(tensor) for tensor in trained]
        self.awaited = [Fact.of(tensor) for tensor in trained]
        self.leaves = []
        self.known = {}
        return outputs


def as_input(tensor: Tensor, requires_grad: bool) -> Tensor:
    """What arrived, where this chunk's graph begins if it has a gradient.

    Not a leaf: what the first layer may do in one process (``ReLU(inplace=True)``), autograd forbids to do to a leaf.
    And even where the first block runs under ``no_grad``: others may use what it was given, and the sender waits.
    """
    if not requires_grad:
        return tensor
    with torch.enable_grad():
        result: Tensor = _Arrival.apply(torch.empty(0, device=tensor.device, requires_grad=True), tensor)
    return result


class _Arrival(torch.autograd.Function):
    """Gives the tensor itself, and keeps its gradient, for the sender."""

    gradient: Tensor | None
    kind: tuple[torch.Size, torch.dtype, torch.device]

    @staticmethod
    def forward(ctx: Any, graph: Tensor, tensor: Tensor) -> Tensor:
        """Make ``tensor`` a part of a graph; ``graph`` is what needs a gradient for that."""
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(tensor)
        ctx.gradient, ctx.kind = None, (tensor.shape, tensor.dtype, tensor.device)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None]:
        """Keep it."""
        ctx.gradient = gradient
        return None, None


def _in_words(kinds: Sequence[tuple[torch.dtype, bool]]) -> str:
    return ", ".join(f"{dtype} {'with' if grad else 'without'} gradient" for dtype, grad in kinds)


def _held(leaf: Any, chunk: int) -> Tensor:
    if not isinstance(leaf, Tensor) or is_placeholder(leaf):
        raise StageError(
            f"Chunk {chunk + 1} needs a value that chunk {chunk} does not have: {leaf!r}. It comes from a parameter of"
            " another stage, or from a module that this stage does not run; pass what the blocks compute, or use"
            " pipeline_parallel=1."
        )
    return leaf
