"""Column and row layers alone: four MLPs on two ranks, beside bare local tensors and beside ``parallelize_module``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.contest import Loop, Turns, alternate
from lightning_3d import tensor_parallel
from lightning_3d.config import ParallelConfig, Sizes
from lightning_3d.mesh import build_mesh

TOKENS = 256
LAYERS = 4


class MLP(nn.Module):
    """Two linear layers around a GELU, added to the input."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Four MLPs."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(MLP(hidden) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _BareMLP(nn.Module):
    """What a rank computes, in the fewest operations: plain pieces of the weights and two all-reduces."""

    def __init__(self, whole: Any, rank: int, ranks: int) -> None:
        super().__init__()
        self.up_weight = nn.Parameter(whole.up.weight.detach().chunk(ranks, 0)[rank].clone())
        self.up_bias = nn.Parameter(whole.up.bias.detach().chunk(ranks, 0)[rank].clone())
        self.down_weight = nn.Parameter(whole.down.weight.detach().chunk(ranks, 1)[rank].clone())
        self.down_bias = nn.Parameter(whole.down.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(F.linear(_Copy.apply(x), self.up_weight, self.up_bias))
        return x + (_Reduce.apply(F.linear(inner, self.down_weight)) + self.down_bias)


def ours(hidden: int) -> nn.Module:
    """The stack with the layers of this package."""
    module = Stack(hidden)
    size = dist.get_world_size()
    mesh = build_mesh(Sizes(pp=1, dp=1, tp=size), torch.device("cpu"))
    config = ParallelConfig(tensor_parallel=size)
    plan = tensor_parallel.plan(module, [[f"blocks.{i}" for i in range(LAYERS)]], config, size)
    tensor_parallel.apply(module, plan, mesh, lambda name: True)
    return module


def bare(hidden: int) -> nn.Module:
    """The stack on bare local tensors."""
    module = Stack(hidden)
    module.blocks = nn.ModuleList(_BareMLP(block, dist.get_rank(), dist.get_world_size()) for block in module.blocks)
    return module


def with_dtensor(hidden: int) -> nn.Module:
    """The stack under ``parallelize_module``."""
    module = Stack(hidden)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in module.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return module


CONTENDERS: dict[str, Callable[[int], nn.Module]] = {"ours": ours, "bare": bare, "dtensor": with_dtensor}


def loop(module: nn.Module, hidden: int) -> Loop:
    """Forward and backward, over and over."""
    x = torch.randn(TOKENS, hidden, generator=torch.Generator().manual_seed(2))
    parameters = list(module.parameters())  # looking for them takes time where there are more modules, not in layers

    def step() -> float:
        for parameter in parameters:
            parameter.grad = None
        loss = module(x.clone().requires_grad_()).square().mean()
        loss.backward()
        return float(loss.detach())

    return Loop(step)


def race(names: tuple[str, ...], hidden: int, rounds: int, steps: int) -> list[Turns]:
    """On a rank: let the named contenders take turns."""
    return alternate([loop(CONTENDERS[name](hidden), hidden) for name in names], rounds, steps)
