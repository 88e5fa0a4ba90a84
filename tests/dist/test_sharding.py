"""Sharded data parallelism against one process: gradients, steps, and how often it communicates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d import sharding
from lightning_3d.config import ParallelConfig, Sizes
from lightning_3d.mesh import Mesh, build_mesh
from lightning_3d.sharding import ZERO_RULES, OwnedParameter, Sharding
from lightning_3d.sharding.optimizer import local_step
from tests.harness import run_ranks

WIDTH, HIDDEN, MICRO_BATCHES, SAMPLES = 6, 8, 4, 2


class Stage(nn.Module):
    """As the pipeline's: runs what it is given as the root of the sharding."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, call: Callable[[], Any]) -> Any:
        return call()


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.group is None:
            return x + self.down(torch.tanh(self.up(y)))
        y = _SumGradient.apply(y, self.group)
        y = torch.tanh(nn.functional.linear(y, self.up.weight.to_local(), self.up.bias.to_local()))
        y = _Sum.apply(nn.functional.linear(y, self.down.weight.to_local()), self.group)
        return x + y + self.down.bias

    def split(self, mesh: Mesh) -> None:
        """Cut over the tensor-parallel ranks by hand."""
        assert mesh.device_mesh is not None
        self.group = mesh.tp.group
        tp = mesh.device_mesh["tp"]
        for linear, name, dim in ((self.up, "weight", 0), (self.up, "bias", 0), (self.down, "weight", 1)):
            local = getattr(linear, name).detach().chunk(mesh.tp.size, dim)[mesh.tp.rank].contiguous()
            setattr(linear, name, nn.Parameter(DTensor.from_local(local, tp, [Shard(dim)])))


class Net(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.skip: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            if index not in self.skip:
                x = block(x)
        return self.head(x) * self.scale


def batch(step: int, replicas: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    size = replicas * MICRO_BATCHES * SAMPLES
    return torch.randn(size, 3, generator=generator).double(), torch.randn(size, 5, generator=generator).double()


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(net(x), y)


def setup(
    rank: int, dp: int, tp: int, zero: int, net: Net | None = None, **options: Any
) -> tuple[Mesh, Stage, Net, Sharding]:
    mesh = build_mesh(Sizes(pp=1, dp=dp, tp=tp), torch.device("cpu"))
    net = net or Net().double()
    if tp > 1:
        for block in net.blocks:
            block.split(mesh)
    stage = Stage(net)
    blocks = options.pop("blocks", None) or {0: list(net.blocks)}
    options.setdefault("unit_bytes", 0)
    shards = sharding.build_sharding(stage, blocks, mesh, ParallelConfig(zero_stage=zero), **options)
    return mesh, stage, net, shards


def run_step(
    mesh: Mesh, stage: Stage, net: Net, shards: Sharding, step: int, sync: bool = True, scale: float = 1.0
) -> None:
    """One step of the replica's part of the batch, two micro-batches in flight as under 1F1B."""
    xs, ys = (part.chunk(mesh.dp.size)[mesh.dp.rank].chunk(MICRO_BATCHES) for part in batch(step, mesh.dp.size))
    shards.prepare_forward()
    losses = []
    done = 0

    def backward() -> None:
        nonlocal done
        done += 1
        last = done == MICRO_BATCHES
        shards.prepare_backward(0, last, last, sync)
        losses.pop(0).backward()

    for x, y in zip(xs, ys, strict=True):
        losses.append(stage(lambda x=x, y=y: loss_of(net, x, y)) * (scale / MICRO_BATCHES))
        if len(losses) == 2:
            backward()
    while losses:
        backward()
    shards.finish(sync)


def whole(tensor: Tensor | None) -> Tensor | None:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return None if tensor is None else tensor.detach().clone()


def whole_state(optimizer: torch.optim.Optimizer, owned: list[OwnedParameter]) -> dict[str, dict[str, Tensor]]:
    return {
        item.name: {key: whole(value) for key, value in optimizer.state[item.param].items()}
        for item in owned
        if item.param in optimizer.state
    }


def reference(
    replicas: int, steps: int, clip: float | None = None, accumulate: int = 1, skip: Any = None, kind: Any = None
) -> dict[str, Any]:
    net = Net().double()
    optimizer = (kind or adamw)(net.parameters())
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            x, y = batch(step * accumulate + part, replicas)
            for replica, (rx, ry) in enumerate(zip(x.chunk(replicas), y.chunk(replicas), strict=True)):
                net.skip = skip(step, replica) if skip else set()
                loss = loss_of(net, rx, ry) / replicas / accumulate
                loss.backward()
                losses.append(loss.item())
        grads = {name: whole(p.grad) for name, p in net.named_parameters()}
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), clip).item())
        optimizer.step()
    return {
        "grads": grads,
        "norms": norms,
        "weights": {name: whole(p) for name, p in net.named_parameters()},
        "state": {n: dict(optimizer.state[p]) for n, p in net.named_parameters() if p in optimizer.state},
    }


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def _train(rank: int, world: int, dp: int, tp: int, zero: int, options: dict[str, Any]) -> dict[str, Any]:
    steps, clip, accumulate = options.get("steps", 3), options.get("clip"), options.get("accumulate", 1)
    mesh, stage, net, shards = setup(rank, dp, tp, zero, **options.get("build", {}))
    optimizer = adamw(net.parameters())
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            net.skip = options["skip"](step, mesh.dp.rank) if "skip" in options else set()
            sync = part == accumulate - 1
            run_step(mesh, stage, net, shards, step * accumulate + part, sync, 1.0 / accumulate)
            if options.get("evaluate"):
                with torch.no_grad():
                    shards.prepare_forward()
                    stage(lambda: net(torch.ones(2, 3).double()))
                    shards.release()
        grads = {item.name: whole(item.param.grad) for item in shards.owned}
        if clip is not None:
            norms.append(sharding.clip_by_norm(shards.owned, mesh, clip).item())
        with local_step(optimizer):
            optimizer.step()
    return {
        "grads": grads,
        "norms": norms,
        "weights": {item.name: whole(item.param) for item in shards.owned},
        "state": whole_state(optimizer, shards.owned),
    }


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, Tensor):
        assert isinstance(found, Tensor), where
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, list):
        assert found == pytest.approx(expected, rel=1e-10), where
    else:
        assert found == expected, where


LAYOUTS = [(2, 1), (4, 1), (2, 2)]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("dp", "tp"), LAYOUTS)
def test_training_equals_one_process(dp: int, tp: int, zero: int) -> None:
    expected = reference(dp, steps=3, clip=0.05)
    for found in run_ranks(_train, dp * tp, dp, tp, zero, {"clip": 0.05}):
        assert_same(found, expected)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_accumulation_with_evaluation_between_equals_one_process(zero: int) -> None:
    expected = reference(2, steps=2, accumulate=3)
    for found in run_ranks(_train, 2, 2, 1, zero, {"steps": 2, "accumulate": 3, "evaluate": True}):
        assert_same(found, expected)


def skip_on_one_replica(step: int, replica: int) -> set[int]:
    return {2} if step % 2 == 0 and replica == 1 else set()


def skip_everywhere(step: int, replica: int) -> set[int]:
    return {1} if step < 2 else set()


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("skip", [skip_on_one_replica, skip_everywhere])
def test_a_layer_skipped_counts_as_zero_or_as_none_everywhere(zero: int, skip: Any) -> None:
    expected = reference(2, steps=3, skip=skip)
    for found in run_ranks(_train, 2, 2, 1, zero, {"skip": skip}, timeout=40):
        assert_same(found, expected)


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    with _Count() as mode:
        yield mode.calls


def _count(rank: int, world: int, zero: int, sync: bool) -> dict[str, int]:
    net = Net().double()
    net.scale.requires_grad_(False)
    mesh, stage, net, shards = setup(rank, world, 1, zero, net)
    run_step(mesh, stage, net, shards, 0)
    with counted() as calls:
        run_step(mesh, stage, net, shards, 1, sync)
    print(calls)
    gathers = sum(count for name, count in calls.items() if "allgather" in name)
    scatters = sum(count for name, count in calls.items() if "reduce_scatter" in name)
    return {"all_gather": gathers, "reduce_scatter": scatters, "all_reduce": calls["c10d::allreduce_"]}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_collectives_of_a_step_are_those_of_the_table(zero: int) -> None:
    expected = ZERO_RULES[zero].collectives(units=5, micro_batches=MICRO_BATCHES)
    for found in run_ranks(_count, 2, zero, True):
        assert found["all_reduce"] == (2 if zero == 0 else 1)  # one asks which parameters have a gradient
        assert {key: found[key] for key in expected} == expected
