"""Values of earlier stages that code needs after the entry of a chunk: found while the step runs, and computed here.

The output of every module is a *root*, which has the same name on every rank (:class:`~lightning_3d.provenance.Root`).
A placeholder knows its root or the operations that lead to roots. When it is needed the roots are fetched from the
stages that hold them, and the operations are run on the real tensors, under autograd.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_3d.errors import StageError
from lightning_3d.placeholder import Placeholder, resolve, user_line
from lightning_3d.provenance import Root, kept_inside


class Exchange(Protocol):
    """How a running chunk meets the others."""

    @property
    def modules(self) -> Collection[str] | None:
        """The modules whose outputs pass between chunks; ``None`` while that is being settled: all."""

    def enter(self, positions: list[int], placeholders: list[Placeholder], roots: Mapping[Root, Placeholder]) -> None:
        """Bind the arguments of the chunk's first block, at these places, and what arrives with them."""

    def fetch(self, root: Root, placeholder: Placeholder) -> None:
        """Bind what a module of an earlier chunk gave.

        Raises:
            StageError: if it does not pass between the chunks.
        """

    def keep(self, root: Root, value: Tensor) -> None:
        """Take note of what a module of this chunk gave, which later chunks may need."""


class Alone:
    """The :class:`Exchange` of a model that is not cut."""

    modules: Collection[str] = ()

    def enter(self, positions: list[int], placeholders: list[Placeholder], roots: Mapping[Root, Placeholder]) -> None:
        """Nothing arrives."""
        raise AssertionError("without a pipeline nothing arrives from other stages")

    def fetch(self, root: Root, placeholder: Placeholder) -> None:
        """Nothing is elsewhere."""
        raise AssertionError("without a pipeline nothing arrives from other stages")

    def keep(self, root: Root, value: Tensor) -> None:
        """Nobody asks."""


class Needs:
    """The values of other chunks in one run of the user's step for one chunk."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._calls: Counter[str] = Counter()
        self._modules = exchange.modules
        self.roots: dict[Root, Placeholder] = {}
        """What modules of earlier chunks gave."""

    @property
    def watching(self) -> bool:
        """Whether anything passes between chunks but the arguments of blocks, or may be found to."""
        return self._modules is None or len(self._modules) > 0

    def module_called(self, name: str, output: Any, running: int, *, entered: bool, whole: bool) -> None:
        """Note what a module gave.

        Args:
            name: The module.
            output: What it gave.
            running: The chunk that runs this call.
            entered: Whether this chunk's own part of the step has begun.
            whole: Whether the chunk that runs it computes all of it, and with parameters. What others give is made
                from other outputs by operations, which are run again where that is possible.
        """
        if self._modules is not None and name not in self._modules:
            return
        call = self._calls[name]
        self._calls[name] += 1
        for index, leaf in enumerate(pytree.tree_leaves(output)):
            if not isinstance(leaf, Tensor):
                continue
            root = Root(running, name, call, index)
            if not isinstance(leaf, Placeholder) or leaf.bound is not None:
                if entered:
                    self._exchange.keep(root, resolve(leaf))
            elif not entered and (whole or not self._can_be_made(leaf)):
                leaf.comes_from(root)
                self.roots[root] = leaf

    def bind(self, placeholders: Sequence[Placeholder]) -> bool:
        """Compute the values of ``placeholders``; whether that could be done.

        Raises:
            StageError: if one was made by something that cannot be done again.
        """
        roots: dict[Root, Placeholder] = {}
        if not all(self._collect(placeholder, roots) for placeholder in placeholders):
            return False
        for root, placeholder in roots.items():
            if placeholder.bound is None:
                self._exchange.fetch(root, placeholder)
        for placeholder in placeholders:
            self._compute(placeholder)
        return True

    def _collect(self, placeholder: Placeholder, roots: dict[Root, Placeholder]) -> bool:
        """Add the roots of a placeholder; whether all that it is made of can be had."""
        if placeholder.bound is not None:
            return True
        if placeholder.changed:
            raise StageError(self._cannot(placeholder, "was changed in place after it was made"))
        if isinstance(placeholder.source, Root):
            roots[placeholder.source] = placeholder
            return True
        if placeholder.source is None:
            return False
        recipe, _ = placeholder.source
        if recipe.obstacle is not None and recipe.inside:
            raise StageError(self._begin(placeholder) + f". {kept_inside(recipe.inside)}")
        if recipe.obstacle is not None:
            raise StageError(self._cannot(placeholder, recipe.obstacle))
        return all(self._collect(leaf, roots) for leaf in recipe.leaves if isinstance(leaf, Placeholder))

    def _can_be_made(self, placeholder: Placeholder) -> bool:
        try:
            return self._collect(placeholder, {})
        except StageError:
            return False

    def _compute(self, placeholder: Placeholder) -> Tensor:
        if placeholder.bound is None:
            assert isinstance(placeholder.source, tuple)
            recipe, index = placeholder.source
            value = recipe.run([self._value(leaf) for leaf in recipe.leaves])[index]
            if value.shape != placeholder.shape:
                now = f"was made by {recipe.name}, which now gives {tuple(value.shape)}"
                raise StageError(self._cannot(placeholder, now))
            placeholder.bind(value)
        assert placeholder.bound is not None
        return placeholder.bound

    def _value(self, leaf: Any) -> Any:
        return self._compute(leaf) if isinstance(leaf, Placeholder) else leaf

    @staticmethod
    def _begin(placeholder: Placeholder) -> str:
        return (
            f"{user_line()} needs a value of shape {tuple(placeholder.shape)} that comes from {placeholder.origin!r} on"
            " another pipeline stage"
        )

    @staticmethod
    def _cannot(placeholder: Placeholder, why: str) -> str:
        return (
            f"{Needs._begin(placeholder)}, and that cannot be computed here: it {why}. Pass it through the"
            " arguments of the blocks, compute it within a module, write changes in place as new tensors (x = x + y),"
            " or use pipeline_parallel=1."
        )
