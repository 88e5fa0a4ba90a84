"""The random generators that data loading draws from, in host memory."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class HostRandomState:
    """State of the default generators of torch (CPU), NumPy and Python."""

    state: dict[str, Any]
    """``torch``: uint8 tensor; ``numpy``, ``python``: what their modules give. Plain types: loads with weights_only."""

    @classmethod
    def get(cls) -> HostRandomState:
        """The state now."""
        name, keys, *rest = np.random.get_state()
        numpy_state = (name, torch.from_numpy(np.array(keys, dtype=np.int64)), *rest)
        return cls({"torch": torch.get_rng_state(), "numpy": numpy_state, "python": random.getstate()})

    @classmethod
    def of(cls, state: dict[str, Any]) -> HostRandomState:
        """From :attr:`state`."""
        return cls(state)

    def set(self) -> None:
        """Make it the state."""
        torch.set_rng_state(self.state["torch"])
        name, keys, *rest = self.state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
        version, inner, gauss = self.state["python"]
        random.setstate((version, tuple(inner), gauss))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostRandomState):
            return NotImplemented
        mine, theirs = self.state, other.state
        return (
            torch.equal(mine["torch"], theirs["torch"])
            and mine["python"] == theirs["python"]
            and torch.equal(mine["numpy"][1], theirs["numpy"][1])
            and mine["numpy"][2:] == theirs["numpy"][2:]
        )

    __hash__ = None  # type: ignore[assignment]


class GeneratorStates:
    """The generators that a loader and its samplers were given by the user."""

    def __init__(self, generators: list[torch.Generator]) -> None:
        self.generators = generators

    @classmethod
    def of(cls, loader: Any) -> GeneratorStates:
        """Those of one loader."""
        owners = [loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler"))]
        owners.append(getattr(owners[-1], "sampler", None))
        found: dict[int, torch.Generator] = {}
        for owner in owners:
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                found.setdefault(id(generator), generator)
        return cls(list(found.values()))

    def get(self) -> list[torch.Tensor]:
        """Their states, in order."""
        return [generator.get_state() for generator in self.generators]

    def set(self, states: Sequence[torch.Tensor]) -> None:
        """Put them into the states that the same loader of another rank, or another day, had."""
        for generator, state in zip(self.generators, states, strict=False):
            generator.set_state(state)


@contextmanager
def without_drawing(loader: Any) -> Iterator[None]:
    """Within it, what ``loader`` draws for itself comes from a copy of the generator that it was given.

    Its samplers keep the generator itself, also where they have been given the same one.
    """
    generator = getattr(loader, "generator", None)
    if not isinstance(generator, torch.Generator):
        yield
        return
    loader.generator = torch.Generator().set_state(generator.get_state())
    try:
        yield
    finally:
        loader.generator = generator
