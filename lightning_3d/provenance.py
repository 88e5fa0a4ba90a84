"""Where a value that this rank does not hold comes from: the output of a module, or an operation on other values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_3d.errors import StageError


@dataclass(frozen=True)
class Root:
    """A tensor in the output of a module, which names it on every rank."""

    chunk: int
    """The chunk that runs this call of the module."""
    module: str
    """Fully qualified name of the module."""
    call: int
    """Which call of it in the step, from 0."""
    leaf: int
    """Place of the tensor among the leaves of the output."""


class Recipe:
    """One operation on values, some of them not here, to be run when its result is needed and they have come.

    It runs under the grad mode and the autocast under which the user's code ran. What is random, and what was changed
    in place since, cannot be computed again.
    """

    def __init__(self, func: Callable[..., Any], args: Any, kwargs: Any, *, random: bool, inside: str = "") -> None:
        self.leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._func = func
        self._random = random
        self.inside = inside
        """The module of another stage whose code it is, if any."""
        self._versions = [version_of(leaf) for leaf in self.leaves]
        device = next((leaf.device.type for leaf in self.leaves if isinstance(leaf, Tensor)), "cpu")
        self._grad = torch.is_grad_enabled()
        self._autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        self._results: list[Any] | None = None

    @property
    def name(self) -> str:
        """Name of the operation."""
        return getattr(self._func, "__name__", str(self._func))

    @property
    def obstacle(self) -> str | None:
        """Why it cannot run later, if it cannot."""
        if self._random:
            return f"was made by {self.name}, which draws random numbers, outside of any module"
        if self._results is None and [version_of(leaf) for leaf in self.leaves] != self._versions:
            return f"was made by {self.name} from a tensor that was changed in place afterwards"
        return None

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of the result, computed once; ``leaves`` take the place of the recipe's own."""
        if self._results is None:
            args, kwargs = pytree.tree_unflatten(list(leaves), self._spec)
            device, dtype, enabled = self._autocast
            with torch.set_grad_enabled(self._grad), torch.autocast(device, dtype, enabled):
                self._results = pytree.tree_leaves(self._func(*args, **kwargs))
            self.leaves = []
        return self._results


def kept_inside(name: str) -> str:
    """What to say of a value that was made within the module of that name and left there, not returned."""
    return (
        f"It was computed inside {name!r} and kept there, for example as an attribute (self.aux = ...), which stays on"
        " the stage that runs it. Return it from there, beside what goes to the next block, and collect it in the model"
        " that calls the blocks; or use pipeline_parallel=1."
    )


def version_of(value: Any) -> int:
    """How often a tensor has been changed in place; 0 for what keeps no count."""
    if not isinstance(value, Tensor):
        return 0
    with torch._C.DisableTorchFunctionSubclass():  # a placeholder's own, not that of what it is bound to
        return 0 if value.is_inference() else value._version


def refuse_changed(value: Any, version: int, root: Root) -> None:
    """Raise if ``value`` was changed in place since it had ``version``.

    Raises:
        StageError: naming the module whose output it is.
    """
    if version_of(value) != version:
        raise StageError(
            f"The output of {root.module!r} is needed again on a later pipeline stage, but was changed in place after"
            " the call. Write the change as a new tensor (x = x + y for x += y), or use pipeline_parallel=1."
        )
