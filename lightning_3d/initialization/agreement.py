"""What the recipes of a module are, in a form that ranks can compare and take over from each other."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.initialization.recipes import Held, Ref, history, memory_of
from lightning_3d.initialization.values import named_tensors

_VALUES = (bool, int, float, complex, Tensor, Held)


class Recipes:
    """All recorded operations that a module's tensors depend on: their structure, and the values that they were given.

    Ranks that built the same module have the same structure. The values (states of random generators, numbers, small
    tensors) differ where a rank was seeded for itself; those of another rank can then be taken over.
    """

    def __init__(self, module: nn.Module) -> None:
        memories = [memory for _, tensor in named_tensors(module) if (memory := memory_of(tensor)) is not None]
        self._steps = history(memories)

    def __len__(self) -> int:
        return len(self._steps)

    def structure(self) -> bytes:
        """A digest of which operations there are, on what shapes."""
        numbers: dict[int, int] = {}
        facts: list[object] = []
        for step in self._steps:
            places = [ref for _, ref, _ in step.made]
            leaves: list[object] = []
            for leaf in step.leaves:
                if isinstance(leaf, Ref):
                    places.append(leaf)
                elif not isinstance(leaf, _VALUES) and not callable(leaf):
                    leaves.append(str(leaf) if isinstance(leaf, (torch.dtype, type(None))) else type(leaf).__name__)
            refs = [
                (numbers.setdefault(ref.number, len(numbers)), ref.shape, ref.stride, ref.offset, str(ref.dtype))
                for ref in places
            ]
            facts.append((getattr(step.func, "__name__", ""), str(step.spec), leaves, refs, step.draw is not None))
        return hashlib.sha256(repr(facts).encode()).digest()

    def values(self) -> list[Any]:
        """The values, in order; they pickle."""
        found: list[Any] = []
        for step in self._steps:
            found.append(None if step.draw is None else step.draw.state)
            found += [_plain(leaf) for leaf in step.leaves if isinstance(leaf, _VALUES)]
        return found

    def digest(self) -> bytes:
        """A digest of the values."""
        sums = hashlib.sha256()
        for value in self.values():
            sums.update(_bytes(value) if isinstance(value, Tensor) else pickle.dumps(value))
        return sums.digest()

    def take_over(self, values: list[Any]) -> None:
        """Compute with the values of another rank from now on."""
        left = iter(values)
        for step in self._steps:
            state = next(left)
            if step.draw is not None:
                step.draw.state = state
            for index, leaf in enumerate(step.leaves):
                if isinstance(leaf, _VALUES):
                    step.leaves[index] = next(left)


def _plain(leaf: Any) -> Any:
    return leaf.value() if isinstance(leaf, Held) else leaf


def _bytes(tensor: Tensor) -> bytes:
    if tensor.is_meta:
        return b""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
