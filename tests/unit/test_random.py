"""Streams: equal where they must be, different where they must be, and repeated by recomputation."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_3d.config import Sizes
from lightning_3d.mesh import Axis, Mesh, build_mesh
from lightning_3d.random import LocalStream, StepStreams, mix_seed

ALONE = build_mesh(Sizes(pp=1, dp=1, tp=1), torch.device("cpu"))


def _mesh(pp: int = 0, dp: int = 0, tp: int = 0) -> Mesh:
    def axis(name: str, size: int, rank: int) -> Axis:
        return Axis(name, size, rank, tuple(range(size)), None)

    return dataclasses.replace(
        ALONE, pp=axis("pp", 2, pp), dp=axis("dp", 2, dp), tp=axis("tp", 2, tp), world=axis("world", 8, 0)
    )


def _draw(streams: StepStreams, step: int = 0, micro_batch: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    with streams.micro_batch(step, micro_batch):
        before = torch.rand(4)
        with streams.block("layers.0"):
            inside = torch.rand(4)
        return before, inside, torch.rand(4)


def test_model_ranks_draw_alike_and_replicas_do_not() -> None:
    here = _draw(StepStreams(_mesh(), seed=7))
    for mesh in (_mesh(pp=1), _mesh(tp=1)):
        assert all(map(torch.equal, here, _draw(StepStreams(mesh, seed=7))))
    assert not any(map(torch.equal, here, _draw(StepStreams(_mesh(dp=1), seed=7))))
    assert not any(map(torch.equal, here, _draw(StepStreams(_mesh(), seed=7), step=1)))
    assert not any(map(torch.equal, here, _draw(StepStreams(_mesh(), seed=7), micro_batch=1)))


def test_blocks_of_sequence_parallel_ranks_differ() -> None:
    before, inside, after = _draw(StepStreams(_mesh(), seed=7, sequence_parallel=True))
    other = _draw(StepStreams(_mesh(tp=1), seed=7, sequence_parallel=True))
    assert torch.equal(before, other[0])
    assert not torch.equal(inside, other[1])
    assert torch.equal(after, other[2])


def test_a_block_draws_the_same_whatever_ran_before_it() -> None:
    streams = StepStreams(_mesh(), seed=7)
    with streams.micro_batch(0, 0), streams.block("layers.3"):
        alone = torch.rand(4)
    with streams.micro_batch(0, 0):
        torch.rand(9)
        with streams.block("layers.2"):
            torch.rand(5)
        with streams.block("layers.3"):
            assert torch.equal(torch.rand(4), alone)


def test_the_shared_stream_is_left_where_it_was() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    _draw(StepStreams(_mesh(), seed=7))
    assert torch.equal(torch.rand(2), expected)


def test_one_rank_alone_keeps_the_numbers_of_plain_pytorch() -> None:
    torch.manual_seed(3)
    expected = torch.rand(12)
    torch.manual_seed(3)
    assert torch.equal(torch.cat(_draw(StepStreams(ALONE))), expected)


def test_the_local_stream_differs_over_ranks_and_the_outer_one_does_not() -> None:
    local, outer = [], []
    for rank in range(2):
        torch.manual_seed(5)
        stream = LocalStream(Axis("tp", 2, rank, (0, 1), None), torch.device("cpu"))
        for _ in range(2):
            stream.open()
            stream.open()
            local.append(torch.rand(3))
            stream.close()
            outer.append(torch.rand(3))
        stream.close()
    assert torch.equal(outer[0], outer[2])
    assert torch.equal(outer[1], outer[3])
    assert len({tuple(draw.tolist()) for draw in local}) == 4


def test_recomputation_repeats_the_local_stream_even_when_it_stops_half_way() -> None:
    stream = LocalStream(Axis("tp", 2, 1, (0, 1), None), torch.device("cpu"))
    masks: list[Tensor] = []

    def region(x: Tensor) -> Tensor:
        x = x.exp()
        stream.open()
        mask = torch.rand(3)
        masks.append(mask)
        x = (x * mask).exp()
        stream.close()
        last = torch.rand(3)
        masks.append(last)
        return x * last

    torch.manual_seed(1)
    x = torch.ones(3, requires_grad=True)
    for _ in range(2):
        masks.clear()
        state = torch.get_rng_state()
        output = checkpoint(region, x, use_reentrant=False)
        after = torch.get_rng_state()
        output.sum().backward()
        assert torch.equal(torch.get_rng_state(), after)
        assert not torch.equal(after, state)
        assert torch.equal(masks[0], masks[2])
        assert all(torch.equal(first, again) for first, again in zip(masks[:2], masks[2:], strict=False))


def test_seeds_do_not_depend_on_the_process() -> None:
    assert mix_seed(1, "layers.0", 2) == mix_seed(1, "layers.0", 2)
    assert len({mix_seed(a, b) for a in range(50) for b in range(50)}) == 2500
    assert 0 <= mix_seed(-1, 2**70) < 2**63
