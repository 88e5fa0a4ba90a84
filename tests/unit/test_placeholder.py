"""Placeholders follow shapes through user code, refuse to be read, and give way to the tensor they are bound to."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

from lightning_3d.errors import StageError
from lightning_3d.placeholder import Placeholder, _to_meta, is_placeholder, placeholder_parameter

CPU = torch.device("cpu")


def make(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> Placeholder:
    return Placeholder.of(shape, dtype, CPU, requires_grad, origin="embed")


def test_operations_give_placeholders_with_the_right_shape_type_and_device() -> None:
    x = make(2, 5, 8)
    y = F.layer_norm(x @ torch.randn(8, 6) + 1.0, (6,)).transpose(1, 2)[:, None].to(torch.bfloat16)
    assert is_placeholder(y)
    assert y.shape == (2, 1, 6, 5)
    assert y.dtype is torch.bfloat16
    assert y.device == CPU


def test_a_module_with_placeholder_parameters_gives_placeholders() -> None:
    linear = nn.Linear(4, 3)
    for name, parameter in list(linear.named_parameters()):
        linear._parameters[name] = placeholder_parameter(parameter, CPU, f"head.{name}")
    out = linear(torch.randn(2, 4))
    assert is_placeholder(out)
    assert out.shape == (2, 3)
    assert out.requires_grad
    assert out.origin.startswith("head.")


def test_requires_grad_follows_frozen_parameters() -> None:
    linear = nn.Linear(4, 3)
    for name, parameter in list(linear.named_parameters()):
        linear._parameters[name] = placeholder_parameter(parameter.requires_grad_(False), CPU, name)
    assert not linear(torch.randn(2, 4)).requires_grad


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: float(x.sum()),
        lambda x: bool((x > 0).all()),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x + 1),
        lambda x: x.nonzero(),
    ],
    ids=["item", "float", "if", "mask", "equal", "nonzero"],
)
def test_reading_a_value_names_the_line_and_what_to_do(read: object) -> None:
    with pytest.raises(StageError) as caught:
        read(make(3))  # type: ignore[operator]
    message = str(caught.value)
    assert "test_placeholder.py:" in message
    assert "'embed'" in message
    assert "pipeline_parallel=1" in message


def test_a_bound_placeholder_is_the_tensor_for_every_later_operation_and_for_autograd() -> None:
    x = make(3, requires_grad=True)
    tensor = torch.arange(3.0, requires_grad=True)
    x.bind(tensor)
    assert not is_placeholder(x)
    ((x + 1) * x).sum().backward()
    assert tensor.grad is not None
    assert torch.equal(tensor.grad, 2 * tensor.detach() + 1)
    assert x.sum().item() == 3.0
    assert torch.cat([x, x]).shape == (6,)


def test_factories_and_in_place_operations_keep_to_the_reported_device() -> None:
    x = make(2, 3)
    assert torch.zeros_like(x).device == CPU
    assert is_placeholder(torch.zeros_like(x))
    assert x.add_(1) is x
    assert torch.arange(x.size(1), device=x.device).tolist() == [0, 1, 2]


def test_a_copied_module_keeps_placeholder_parameters() -> None:
    linear = nn.Linear(4, 3)
    linear.weight = placeholder_parameter(linear.weight, CPU, "weight")
    twin = copy.deepcopy(linear)
    assert is_placeholder(twin.weight)
    assert isinstance(twin.weight, nn.Parameter)
    assert twin.weight is not linear.weight


def test_scalars_of_a_gpu_take_part_in_operations_and_those_of_the_host_keep_their_values() -> None:
    """A meta kernel mixes with scalars of the host only: the scale of an embedding lies on the GPU."""
    with FakeTensorMode():
        assert _to_meta(torch.ones((), device="cuda")).is_meta
    scalar = torch.tensor(2.0)
    assert _to_meta(scalar) is scalar
    assert (make(2, 3) * scalar).shape == (2, 3)
