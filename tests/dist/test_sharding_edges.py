"""Sharding where models and schedules are not plain: chunks, grouped blocks, ties, frozen and shared weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_3d import sharding
from lightning_3d.config import ParallelConfig, Sizes
from lightning_3d.mesh import Mesh, build_mesh
from lightning_3d.placeholder import placeholder_parameter
from lightning_3d.sharding import ZERO_RULES, make_ties
from lightning_3d.sharding.optimizer import local_step
from tests.dist.test_sharding import (
    MICRO_BATCHES,
    Net,
    Stage,
    _count,
    adamw,
    assert_same,
    batch,
    counted,
    loss_of,
    reference,
    run_step,
    setup,
    whole,
    whole_state,
)
from tests.harness import run_ranks


class ChunkedNet(Net):
    """Runs as two chunks, like two virtual stages on one rank."""

    def first(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks[:2]:
            x = block(x)
        return x

    def second(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks[2:]:
            x = block(x)
        return nn.functional.mse_loss(self.head(x) * self.scale, y)


def _interleaved_step(mesh: Mesh, stage: Stage, net: ChunkedNet, shards: Any, step: int) -> None:
    """Interleaved order in groups of two micro-batches: F0 F0 F1 F1 B1 B1 B0 B0."""
    xs, ys = (part.chunk(mesh.dp.size)[mesh.dp.rank].chunk(MICRO_BATCHES) for part in batch(step, mesh.dp.size))
    shards.prepare_forward()
    for start in range(0, MICRO_BATCHES, 2):
        pair = range(start, start + 2)
        outs = {i: stage(lambda i=i: net.first(xs[i])) for i in pair}
        ins = {i: out.detach().requires_grad_() for i, out in outs.items()}
        losses = {i: stage(lambda i=i, ins=ins: net.second(ins[i], ys[i])) / MICRO_BATCHES for i in pair}
        for i in pair:
            shards.prepare_backward(1, last_of_chunk=i == MICRO_BATCHES - 1, last_of_step=False, sync=True)
            losses[i].backward()
        for i in pair:
            last = i == MICRO_BATCHES - 1
            shards.prepare_backward(0, last_of_chunk=last, last_of_step=last, sync=True)
            outs[i].backward(ins[i].grad)
    shards.finish(True)


def _interleaved(rank: int, world: int, zero: int) -> dict[str, Any]:
    net = ChunkedNet().double()
    blocks = {0: list(net.blocks[:2]), 1: list(net.blocks[2:])}
    mesh, stage, net, shards = setup(rank, world, 1, zero, net, blocks=blocks, bucket_bytes=400)
    optimizer = adamw(net.parameters())
    for step in range(3):
        optimizer.zero_grad()
        with counted() as calls:
            _interleaved_step(mesh, stage, net, shards, step)
        grads = {item.name: whole(item.param.grad) for item in shards.owned}
        with local_step(optimizer):
            optimizer.step()
    gathers = sum(count for name, count in calls.items() if "allgather" in name)
    scatters = sum(count for name, count in calls.items() if "reduce_scatter" in name)
    return {
        "trained": {
            "grads": grads,
            "norms": [],
            "weights": {item.name: whole(item.param) for item in shards.owned},
            "state": whole_state(optimizer, shards.owned),
        },
        "counts": (gathers, scatters),
    }


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_two_chunks_on_a_rank_equal_one_process(zero: int) -> None:
    expected = reference(2, steps=3)
    # At stage 3 the root is used by both chunks: one gather more for every forward and every backward.
    root_again = 2 * MICRO_BATCHES if zero == 3 else 0
    counts = ZERO_RULES[zero].collectives(units=5, micro_batches=MICRO_BATCHES)
    for found in run_ranks(_interleaved, 2, zero):
        assert_same(found["trained"], expected)
        assert found["counts"] == (counts["all_gather"] + root_again, counts["reduce_scatter"])


def _train(rank: int, world: int, zero: int, kind: str) -> dict[str, Any]:
    net = Net().double()
    options: dict[str, Any] = {}
    if kind == "grouped":
        options["unit_bytes"] = 2 * sum(p.numel() * 8 for p in net.blocks[0].parameters())
    elif kind == "small":
        options["unit_bytes"] = 2**20
    elif kind == "recomputed":
        for block in net.blocks:
            block.forward = _recomputed(block.forward)  # type: ignore[method-assign]
    elif kind == "shared":
        net.blocks[1].norm.weight = net.blocks[3].norm.weight
    elif kind == "mixed":
        net.blocks[2].down.float()
        net.blocks[2].down.register_forward_pre_hook(lambda module, args: args[0].float())
    mesh, stage, net, shards = setup(rank, world, 1, zero, net, **options)
    optimizer = adamw(net.parameters())
    for step in range(3):
        if kind == "frozen":
            net.blocks[1].requires_grad_(step > 0)
            net.head.bias.requires_grad_(step != 1)
        optimizer.zero_grad()
        run_step(mesh, stage, net, shards, step)
        with local_step(optimizer):
            optimizer.step()
    return {
        "weights": {item.name: whole(item.param) for item in shards.owned},
        "note": shards.parameters_unsharded_note,
    }


def _recomputed(forward: Any) -> Any:
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def _one_process(kind: str) -> dict[str, Tensor]:
    net = Net().double()
    if kind == "shared":
        net.blocks[1].norm.weight = net.blocks[3].norm.weight
    elif kind == "mixed":
        net.blocks[2].down.float()
        net.blocks[2].down.register_forward_pre_hook(lambda module, args: args[0].float())
    optimizer = adamw(net.parameters())
    for step in range(3):
        if kind == "frozen":
            net.blocks[1].requires_grad_(step > 0)
            net.head.bias.requires_grad_(step != 1)
        optimizer.zero_grad()
        loss_of(net, *batch(step, 2)).backward()
        optimizer.step()
    return {name: whole(p) for name, p in net.named_parameters()}  # type: ignore[misc]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["grouped", "small", "recomputed", "frozen", "shared"])
def test_training_equals_one_process(zero: int, kind: str) -> None:
    expected = _one_process(kind)
    for found in run_ranks(_train, 2, zero, kind):
        assert_same(found["weights"], expected)
        assert ("several sharded units" in found["note"]) == (kind == "shared" and zero > 0)
        assert ("a scalar" in found["note"]) == (zero > 0)


@pytest.mark.parametrize("zero", [1, 3])
def test_parameters_of_another_type_stay_whole_and_train(zero: int) -> None:
    expected = _one_process("mixed")
    for found in run_ranks(_train, 2, zero, "mixed"):
        for name, weight in expected.items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-5)
        assert "blocks.2.down.weight stays whole: torch.float32 among parameters of torch.float64" in found["note"]


@pytest.mark.parametrize("zero", [0, 1])
def test_accumulation_sends_nothing_before_its_last_batch(zero: int) -> None:
    for found in run_ranks(_count, 2, zero, False):
        gathers = ZERO_RULES[zero].collectives(units=5, micro_batches=MICRO_BATCHES)["all_gather"]
        assert found == {"all_gather": gathers, "reduce_scatter": 0, "all_reduce": 0}


class Holder(nn.Module):
    def __init__(self, names: list[str], rank: int, held: set[str]) -> None:
        super().__init__()
        for index, name in enumerate(names):
            parameter = nn.Parameter(torch.full((3, 2), float(index)))
            if name not in held:
                parameter = placeholder_parameter(parameter, torch.device("cpu"), name)
            self.register_parameter(name, parameter)


def _ties(rank: int, world: int, zero: int) -> dict[str, Any]:
    """Four stages, two replicas: several ties over different stages, met in different orders."""
    mesh = build_mesh(Sizes(pp=4, dp=2, tp=1), torch.device("cpu"))
    stage_rank = mesh.pp.rank
    shared = [("a", (0, 3)), ("b", (1, 3)), ("c", (0, 1)), ("d", (0, 1, 2, 3)), ("e", (0, 3)), ("own", (2,))]
    held = {name for name, stages in shared if stage_rank in stages}
    module = Holder([name for name, _ in shared], rank, held)
    ties = make_ties([((name, f"{name}_alias"), stages) for name, stages in shared], module, mesh)
    stage = Stage(module)
    shards = sharding.build_sharding(
        stage, {stage_rank: []}, mesh, ParallelConfig(zero_stage=zero), ties=ties, unit_bytes=0
    )
    shards.prepare_forward()

    def loss() -> Tensor:
        # "e" is not used by the last stage
        terms = [getattr(module, n).sum() * (10.0**stage_rank) for n in held if (n, stage_rank) != ("e", 3)]
        return torch.stack(terms).sum() * (1.0 + mesh.dp.rank)

    value = stage(loss)
    shards.prepare_backward(stage_rank, True, True)
    value.backward()
    shards.finish()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, foreach=True)
    with local_step(optimizer):
        optimizer.step()
    grads = {item.name: whole(item.param.grad) for item in shards.owned}
    norm = sharding.global_norm(shards.owned, mesh).item()
    return {
        "grads": {name: grad[0, 0].item() for name, grad in grads.items()},
        "weights": {item.name: whole(item.param) for item in shards.owned},
        "norm": norm,
    }


@pytest.mark.parametrize("zero", [0, 1])
def test_several_ties_sum_over_their_stages_and_count_once(zero: int) -> None:
    expected = {"a": 1001.0, "b": 1010.0, "c": 11.0, "d": 1111.0, "e": 1.0, "own": 100.0}
    expected = {name: 1.5 * value for name, value in expected.items()}
    found = run_ranks(_ties, 8, zero)
    norm = sum(6 * value**2 for value in expected.values()) ** 0.5
    for result in found:
        for name, value in result["grads"].items():
            assert value == pytest.approx(expected[name])
        for name, weight in result["weights"].items():
            others = [other["weights"][name] for other in found if name in other["weights"]]
            assert all(torch.equal(weight, other) for other in others)
        assert result["norm"] == found[0]["norm"] == pytest.approx(norm)


def _partial(rank: int, world: int) -> list[float]:
    mesh = build_mesh(Sizes(pp=1, dp=2, tp=2), torch.device("cpu"))
    net = nn.Linear(2, 2)
    stage = Stage(net)
    shards = sharding.build_sharding(
        stage, {0: []}, mesh, ParallelConfig(zero_stage=1), partial=frozenset({"bias"}), unit_bytes=0
    )
    shards.prepare_forward()
    loss = stage(lambda: net(torch.ones(1, 2) * (1 + mesh.dp.rank)).sum() * (1 + mesh.tp.rank))
    shards.prepare_backward(0, True, True)
    loss.backward()
    shards.finish()
    return [whole(net.bias.grad)[0].item(), whole(net.weight.grad)[0, 0].item()]  # type: ignore[index]


def test_partial_gradients_are_summed_over_tensor_parallel_ranks() -> None:
    for rank, found in enumerate(run_ranks(_partial, 4)):
        assert found == [3.0, 1.5 * (1 + rank % 2)]


def _nothing_to_train(rank: int, world: int, zero: int) -> float:
    mesh = build_mesh(Sizes(pp=1, dp=2, tp=1), torch.device("cpu"))
    net = Net().double()
    net.requires_grad_(False)
    mesh, stage, net, shards = setup(rank, 2, 1, zero, net)
    optimizer = adamw([p for p in net.parameters()])
    for _ in range(2):
        shards.prepare_forward()
        stage(lambda: loss_of(net, *batch(0, 2)))
        shards.finish()
        norm = sharding.clip_by_norm(shards.owned, mesh, 1.0)
        with local_step(optimizer):
            optimizer.step()
    return norm.item()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_stage_that_trains_nothing_takes_part(zero: int) -> None:
    assert run_ranks(_nothing_to_train, 2, zero) == [0.0, 0.0]
