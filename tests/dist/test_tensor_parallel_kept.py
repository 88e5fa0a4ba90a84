"""What cut layers keep for the backward, and what they send in it: no more than a rank's share has to be."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.tensor_parallel import ParameterCut, linear
from lightning_3d.tensor_parallel import collectives as sent
from lightning_3d.tensor_parallel.parameters import cut_parameter
from lightning_3d.tensor_parallel.weights import own
from tests.dist.tensor_parallel_models import build
from tests.dist.test_tensor_parallel import cut, mesh_of
from tests.harness import run_ranks

WHOLE = (2, 8, 32)
"""Hidden states of all tokens."""


def kept_by(call: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """What ``call`` gives, and the tensors that its graph keeps, each once."""
    kept: dict[tuple[int, torch.dtype], Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr(), tensor.dtype] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return call(), list(kept.values())


def block_of(rank: int, world_size: int, **options: bool) -> nn.Module:
    model = build("grouped").float()
    cut("grouped", model, mesh_of(world_size), **options)
    return model.blocks[0]  # type: ignore[index, return-value]


def _under_autocast(rank: int, world_size: int) -> None:
    block = block_of(rank, world_size)
    x = torch.randn(WHOLE, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        # Queries, keys and values read one copy, gate and up another, the third is the block's own; weights have none.
        output, kept = kept_by(lambda: block(x))
        short = [tensor for tensor in kept if tensor.dtype == torch.bfloat16]
        weights = {parameter._local_tensor.shape for parameter in block.parameters() if isinstance(parameter, DTensor)}
        assert len(weights) == 5
        assert [tuple(tensor.shape) for tensor in short if tensor.shape in weights] == []
        assert sum(tensor.shape == WHOLE for tensor in short) == 3
    with mock.patch.object(sent, "all_reduce", wraps=sent.all_reduce) as reduced:
        output.float().square().sum().backward()
    assert [call.args[0].dtype for call in reduced.call_args_list] == [torch.bfloat16] * 2
    assert x.grad is not None and x.grad.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert block(x).dtype == torch.float32


def _of_frozen_layers(rank: int, world_size: int) -> None:
    layer = block_of(rank, world_size).mlp.gate  # type: ignore[union-attr]
    assert isinstance(layer, nn.Linear)
    layer.weight.requires_grad_(False)
    _, kept = kept_by(lambda: layer(torch.randn(WHOLE, requires_grad=True)))
    assert [tuple(tensor.shape) for tensor in kept] == [(24, 32)]


def _of_a_sequence(rank: int, world_size: int) -> None:
    block = block_of(rank, world_size, sequence_parallel=True)
    for short in (False, True):
        x = torch.randn(WHOLE, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=short, cache_enabled=False):
            output, kept = kept_by(lambda x=x: block(x))
        assert [tensor for tensor in kept if tensor.shape == WHOLE] == []
        with mock.patch.object(linear, "all_gather", wraps=linear.all_gather) as gathered:
            output.float().square().sum().backward()
        # Two row layers gather their gradient, and two groups of column layers their input, once each.
        assert [call.kwargs.get("async_op", False) for call in gathered.call_args_list] == [False, True] * 2
        assert {call.args[0].dtype for call in gathered.call_args_list} == {torch.bfloat16 if short else torch.float32}


def _alone(rank: int, world_size: int) -> None:
    """A column layer that has a sequence for itself sums its gradient while it computes that of its weight."""
    model = build("nanogpt").float()
    cut("nanogpt", model, mesh_of(world_size), sequence_parallel=True)
    output = model.blocks[0](torch.randn(WHOLE, requires_grad=True))  # type: ignore[index, operator]
    own = mock.patch.object(linear, "reduce_scatter", wraps=linear.reduce_scatter)
    others = mock.patch.object(sent, "reduce_scatter", wraps=sent.reduce_scatter)
    with own as overlapped, others as exposed:
        output.square().sum().backward()
    assert [call.kwargs["async_op"] for call in overlapped.call_args_list] == [True, True]
    assert not exposed.called


def _of_a_gradient_of_two(rank: int, world_size: int) -> None:
    device_mesh = mesh_of(world_size).device_mesh
    assert device_mesh is not None
    how = ParameterCut(0, (4, 3), (4,), world_size)
    up, more = (cut_parameter(nn.Parameter(torch.zeros(4, 3)), how, device_mesh["tp"], rank) for _ in range(2))
    for _ in range(2):
        ((own(up) + own(more)) * torch.ones(2, 3)).sum().backward()
    for parameter in (up, more):
        assert isinstance(parameter.grad, DTensor)
        assert torch.equal(parameter.grad._local_tensor, torch.full((2, 3), 2.0))


def _all(rank: int, world_size: int) -> None:
    for check in (_under_autocast, _of_frozen_layers, _of_a_sequence, _alone, _of_a_gradient_of_two):
        torch.manual_seed(0)
        check(rank, world_size)


def test_cut_layers_keep_and_send_no_more_than_they_have_to() -> None:
    run_ranks(_all, 2)
