"""What a chunk keeps of a micro-batch once it has handed it on."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from lightning_3d.pipeline.links import Flight, as_input
from lightning_3d.pipeline.transport import Fact
from lightning_3d.provenance import Root


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


def test_what_passes_on_to_later_chunks_is_not_held_in_between() -> None:
    root = Root(chunk=0, module="stem", call=0, leaf=0)
    flight = Flight()
    flight.arrived([root, None], [as_input(torch.ones(2), True), as_input(torch.ones(3), True)])
    passes = weakref.ref(flight.inputs[0])
    flight.outputs = [flight.value_of(root, 1)]
    flight.inputs = []
    assert len(flight.hand_over()) == 1
    assert passes() is None
    torch.autograd.backward(flight.edges, [torch.full((2,), 3.0)])
    assert [gradient.tolist() for gradient in flight.input_gradients()] == [[3.0, 3.0], [0.0, 0.0, 0.0]]


def test_what_arrived_may_be_changed_in_place_and_has_a_gradient_under_no_grad() -> None:
    flight = Flight()
    with torch.no_grad():
        flight.arrived([None], [as_input(torch.ones(2), True)])
    flight.inputs[0].mul_(2).square().sum().backward()
    assert flight.input_gradients()[0].tolist() == [8.0, 8.0]
    assert not as_input(torch.ones(2), False).requires_grad
