"""Gradients of cut parameters reach ``grad``, hooks and ``torch.autograd.grad`` as those of any parameter do."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from lightning_3d.tensor_parallel.parameters import local_view, local_views
from tests.harness import run_ranks


def _parameters() -> tuple[nn.Parameter, nn.Parameter]:
    mesh = init_device_mesh("cpu", (1,))
    values = torch.arange(6.0).view(2, 3), torch.ones(2)
    weight, bias = (nn.Parameter(DTensor.from_local(value, mesh, [Shard(0)])) for value in values)
    return weight, bias


def _loss(weight: nn.Parameter, bias: nn.Parameter, x: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, *local_views(weight, bias)).sin().sum() + local_view(weight).square().sum()


def _plain(weight: nn.Parameter, bias: nn.Parameter, x: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias).sin().sum() + weight.square().sum()


def _observe(rank: int, world_size: int) -> None:
    weight, bias = _parameters()
    plain = tuple(nn.Parameter(p.detach().to_local().clone()) for p in (weight, bias))
    x = torch.linspace(-1, 1, 12).view(4, 3).requires_grad_()
    expected = torch.autograd.grad(_plain(*plain, x), plain)

    def equal(found: Tensor | None, wanted: Tensor) -> None:
        assert isinstance(found, DTensor) and found.placements == (Shard(0),)
        torch.testing.assert_close(found.to_local(), wanted)

    given = torch.autograd.grad(_loss(weight, bias, x), (weight, bias))
    assert weight.grad is None and bias.grad is None
    for found, wanted in zip(given, expected, strict=True):
        equal(found, wanted)

    for times in (1, 2):  # the second backward adds up
        _loss(weight, bias, x).backward()
        equal(weight.grad, times * expected[0])
        equal(bias.grad, times * expected[1])

    weight.grad = bias.grad = None
    for reentrant in (True, False):
        checkpoint(_loss, weight, bias, x, use_reentrant=reentrant).backward()
    equal(weight.grad, 2 * expected[0])

    weight.grad = bias.grad = None
    _loss(weight, bias, x).backward(inputs=[bias])
    assert weight.grad is None
    equal(bias.grad, expected[1])

    weight.grad = bias.grad = None
    seen: list[str] = []
    weight.register_hook(lambda gradient: seen.append("hook"))
    bias.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    _loss(weight, bias, x).backward()
    assert sorted(set(seen)) == ["accumulated", "hook"]
    equal(weight.grad, expected[0])
    equal(bias.grad, expected[1])


def test_cut_parameters_get_gradients_as_others_do() -> None:
    run_ranks(_observe, 1)
