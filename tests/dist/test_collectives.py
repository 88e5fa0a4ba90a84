"""Collectives on gloo: the same answers as arithmetic on the stacked tensors, for every payload."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_3d import collectives
from lightning_3d.config import Sizes
from lightning_3d.errors import ConfigError
from lightning_3d.mesh import Axis, build_mesh
from tests.harness import run_ranks

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def _axis(world_size: int) -> Axis:
    return build_mesh(Sizes(pp=1, dp=1, tp=world_size), torch.device("cpu")).tp


def _inputs(world_size: int, dtype: torch.dtype, shape: tuple[int, ...] = (6, 4, 12)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 3, shape, generator=generator).to(dtype) for _ in range(world_size)]


def _all_payloads(rank: int, world_size: int) -> None:
    axis = _axis(world_size)
    for dtype in DTYPES:
        parts = _inputs(world_size, dtype)
        stacked = torch.stack(parts)
        reductions = {
            "sum": stacked.any(0) if dtype == torch.bool else stacked.sum(0).to(dtype),
            "max": stacked.amax(0),
            "min": stacked.amin(0),
        }
        for op, expected in reductions.items():
            mine = parts[rank].clone()
            assert collectives.all_reduce(mine, axis, op) is mine  # type: ignore[call-overload]
            assert torch.equal(mine, expected), (dtype, op)
            turned = parts[rank].clone().transpose(0, 2)  # not contiguous
            collectives.all_reduce(turned, axis, op, async_op=True).wait()  # type: ignore[call-overload]
            assert torch.equal(turned, expected.transpose(0, 2)), (dtype, op)
        for dim in (0, 1, -1):
            assert torch.equal(collectives.all_gather(parts[rank], axis, dim), torch.cat(parts, dim)), dtype
            later = collectives.all_gather(parts[rank], axis, dim, async_op=True)
            assert torch.equal(later.wait(), torch.cat(parts, dim))
        for dim in (0, -1):
            expected = reductions["sum"].tensor_split(world_size, dim)[rank]
            assert torch.equal(collectives.reduce_scatter(parts[rank], axis, dim), expected), dtype
            assert torch.equal(collectives.reduce_scatter(parts[rank], axis, dim, async_op=True).wait(), expected)


def _averages(rank: int, world_size: int) -> None:
    axis = _axis(world_size)
    for dtype in (torch.float32, torch.bfloat16):
        parts = _inputs(world_size, dtype)
        expected = torch.stack(parts).sum(0).div(world_size)
        assert torch.equal(collectives.all_reduce(parts[rank].clone(), axis, "avg"), expected)
        piece = collectives.reduce_scatter(parts[rank], axis, 0, "avg")
        assert torch.equal(piece, expected.tensor_split(world_size)[rank])
        later = collectives.reduce_scatter(parts[rank], axis, 0, "avg", async_op=True)
        assert torch.equal(later.wait(), piece)
    with pytest.raises(ConfigError, match="avg"):
        collectives.all_reduce(torch.ones(2, dtype=torch.int64), axis, "avg")


def _ragged(rank: int, world_size: int) -> None:
    axis = _axis(world_size)
    sizes = collectives.chunk_sizes(7, world_size)
    whole = torch.arange(21.0).view(3, 7)
    mine = whole.split(list(sizes), 1)[rank]
    assert torch.equal(collectives.all_gather(mine, axis, 1, sizes), whole)
    piece = collectives.reduce_scatter(whole, axis, 1, sizes=sizes)
    assert torch.equal(piece, mine * world_size)
    with pytest.raises(ConfigError, match="evenly"):
        collectives.reduce_scatter(whole, axis, 1)


def _objects(rank: int, world_size: int) -> None:
    axis = _axis(world_size)
    assert collectives.broadcast_object({"from": rank}, axis, 1) == {"from": 1}
    assert collectives.all_gather_object(rank, axis) == list(range(world_size))
    assert collectives.gather_object(rank, axis) == (list(range(world_size)) if rank == 0 else None)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("check", [_all_payloads, _averages, _ragged, _objects], ids=lambda check: check.__name__[1:])
def test_collectives_match_arithmetic(world_size: int, check: object) -> None:
    run_ranks(check, world_size)  # type: ignore[arg-type]


def test_an_axis_of_one_sends_nothing() -> None:
    axis = Axis("tp", 1, 0, (0,), None)
    tensor = torch.ones(3)
    assert collectives.all_reduce(tensor, axis) is tensor
    assert collectives.all_reduce(tensor, axis, async_op=True).wait() is tensor
    assert collectives.all_gather(tensor, axis, 0) is tensor
    assert collectives.reduce_scatter(tensor, axis, 0) is tensor
    assert collectives.broadcast_object("x", axis) == "x"
    assert collectives.all_gather_object("x", axis) == collectives.gather_object("x", axis) == ["x"]


def test_chunks_are_those_of_torch() -> None:
    for length in range(1, 20):
        for pieces in range(1, 6):
            chunks = [len(chunk) for chunk in torch.arange(length).chunk(pieces)]
            assert collectives.chunk_sizes(length, pieces) == tuple(chunks + [0] * (pieces - len(chunks)))


def test_bytes_of_a_tensor_of_one_element_with_any_stride() -> None:
    column = torch.arange(14).view(2, 7)[:1, 3]
    assert column.stride() == (7,) and column.is_contiguous()
    assert collectives.as_bytes(column).view(torch.int64).tolist() == [3]
    assert collectives.as_bytes(torch.arange(4).view(2, 2).t()).view(torch.int64).tolist() == [0, 2, 1, 3]
