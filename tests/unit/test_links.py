"""What a chunk keeps of a micro-batch once it has handed it on."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from lightning_3d.pipeline.links import Flight
from lightning_3d.pipeline.transport import Fact


def outputs(x: Tensor) -> list[Tensor]:
    """One made of ``x``, one without a gradient, and ``x`` itself, which passes on to a later chunk."""
    return [(x * 2).unsqueeze(0) + 1, torch.zeros(3, dtype=torch.long), x]


def test_of_what_was_handed_on_only_the_way_of_its_gradients_is_kept() -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    flight = Flight(outputs=outputs(x))
    handed_on = flight.hand_over()
    values = [weakref.ref(tensor) for tensor in handed_on[:2]]
    assert [tensor.shape for tensor in handed_on] == [(1, 3), (3,), (3,)]
    del handed_on
    assert [value() for value in values] == [None, None]
    assert flight.awaited == [Fact((1, 3), torch.float64, True), Fact((3,), torch.float64, True)]
    torch.autograd.backward(flight.edges, [torch.ones(1, 3, dtype=torch.float64), torch.full((3,), 5.0).double()])
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3,), 7.0, dtype=torch.float64))


def test_nothing_is_awaited_of_what_has_no_gradient() -> None:
    flight = Flight(outputs=[torch.ones(2)])
    assert len(flight.hand_over()) == 1
    assert flight.edges == [] and flight.awaited == []
