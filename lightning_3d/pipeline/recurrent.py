"""Counting recurrent layers without running every step: without values one step is as slow as a whole layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

_LAYERS: tuple[Callable[..., Any], ...] = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
_STEPS = 3
"""Steps that are run. The first may be cheaper, since nothing may want a gradient of the state it starts from."""


class Counter(Protocol):
    """What adds up operations: :class:`~lightning_3d.pipeline.flops.FlopCounter`."""

    costs: list[float]
    position: int
    products: float


class FewSteps(TorchFunctionMode):
    """Runs a recurrent layer on the first steps of its sequence, and counts the others: each costs what the last did.

    What the layer returns has its shapes, and repeats the first step.

    Args:
        counter: What counts the operations of these steps.
    """

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    def _amounts(self) -> tuple[float, float]:
        return self._counter.costs[self._counter.position], self._counter.products

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _LAYERS or kwargs or _is_packed(args):
            return func(*args, **(kwargs or {}))
        sequence, *others, batch_first = args
        dim = 1 if batch_first else 0
        length = sequence.shape[dim]
        if length <= _STEPS:
            return func(*args)
        before = self._amounts()
        func(sequence.narrow(dim, 0, _STEPS - 1), *others, batch_first)
        between = self._amounts()
        output, *states = func(sequence.narrow(dim, 0, _STEPS), *others, batch_first)
        after = self._amounts()
        # Such a layer returns the transpose of what it has put together, which costs others a copy.
        output = output.transpose(0, dim)[:1].repeat(length, 1, 1).transpose(0, dim)
        counter = self._counter
        counter.costs[counter.position], counter.products = (
            last + (length - _STEPS) * ((last - middle) - (middle - first)) - (middle - first)
            for first, middle, last in zip(before, between, after, strict=True)
        )
        return (output, *states)


def _is_packed(args: tuple[Any, ...]) -> bool:
    """Whether the second argument is the sizes of batches, and the sequences stand one behind the other."""
    return isinstance(args[1], Tensor) and not args[1].is_floating_point()
