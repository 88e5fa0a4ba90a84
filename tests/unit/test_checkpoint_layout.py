"""The boxes that ranks hold tile the full tensor and are where torch puts them."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_3d.checkpoint.layout import Chunk, Shard, Share, box, local_chunks, local_shape, overlap, share_bounds
from lightning_3d.tensor_parallel.parameters import ParameterCut


@st.composite
def layouts(draw):
    dims = draw(st.integers(1, 3))
    parts = draw(st.integers(1, 3))
    cut_dim = draw(st.integers(0, dims - 1))
    shard_dim = draw(st.integers(0, dims - 1))
    shape = [draw(st.integers(1, 9)) for _ in range(dims)]
    shape[cut_dim] *= parts
    return tuple(shape), cut_dim, parts, draw(st.integers(1, 5)), shard_dim, draw(st.integers(1, 5))


def cut_by_torch(full, dim, parts, rank, size):
    """The rank's share, by torch's own chunking."""
    pieces = []
    for part in full.chunk(parts, dim) if parts > 1 else [full]:
        chunks = part.chunk(size, dim)
        pieces.append(chunks[rank] if rank < len(chunks) else part.narrow(dim, 0, 0))
    return torch.cat(pieces, dim)


def packed(dim, length, parts, rank, size):
    return Share(dim, ParameterCut(dim, (0,) * dim + (length,), (length // parts,) * parts, size).intervals(rank))


@given(layouts())
def test_chunks_tile_the_full_tensor_and_point_at_its_values(layout):
    shape, cut_dim, parts, cut_size, shard_dim, shard_size = layout
    full = torch.arange(math.prod(shape)).view(shape)
    seen = torch.zeros(shape, dtype=torch.int)
    for tp in range(cut_size):
        for dp in range(shard_size):
            cut, shard = packed(cut_dim, shape[cut_dim], parts, tp, cut_size), Shard(shard_dim, dp, shard_size)
            local = cut_by_torch(cut_by_torch(full, cut_dim, parts, tp, cut_size), shard_dim, 1, dp, shard_size)
            assert local_shape(shape, cut, shard) == tuple(local.shape)
            covered = torch.zeros(local.shape, dtype=torch.int)
            for chunk in local_chunks(shape, cut, shard):
                where = box(chunk.offsets, chunk.sizes)
                assert torch.equal(full[where], local[chunk.slices])
                seen[where] += 1
                covered[chunk.slices] += 1
            assert bool((covered == 1).all())
    assert bool((seen == 1).all())


def test_uneven_vocabulary_is_cut_as_torch_chunk_cuts_it():
    rows = [local_chunks((1001, 4), Shard(0, rank, 2).share(1001)) for rank in range(2)]
    assert rows == [(Chunk((0, 0), (501, 4), (0, 0)),), (Chunk((501, 0), (500, 4), (0, 0)),)]


def test_packed_rows_of_an_uncut_tensor_are_one_chunk():
    assert len(local_chunks((12, 4), packed(0, 12, 3, 0, 1))) == 1
    assert len(local_chunks((12, 4), packed(0, 12, 3, 0, 2))) == 3


def test_a_rank_without_rows_has_no_chunk():
    assert local_chunks((2, 4), shard=Shard(0, 2, 4)) == ()
    assert local_shape((2, 4), shard=Shard(0, 2, 4)) == (0, 4)


def test_scalars_and_tensors_without_elements_have_one_chunk_on_every_rank():
    assert local_chunks(()) == (Chunk((), (), ()),)
    assert local_chunks((0, 3), shard=Shard(0, 1, 2)) == (Chunk((0, 0), (0, 3), (0, 0)),)


def test_sections_may_differ_in_length():
    """Grouped-query attention packs 8 query, 2 key and 2 value rows."""
    cut = ParameterCut(0, (12, 4), (8, 2, 2), 2)
    chunks = local_chunks((12, 4), Share(0, cut.intervals(1)), Shard(0, 0, 2))
    assert chunks == (Chunk((4, 0), (3, 4), (0, 0)),)
    chunks = local_chunks((12, 4), Share(0, cut.intervals(1)), Shard(0, 1, 2))
    assert [(chunk.offsets[0], chunk.sizes[0], chunk.local[0]) for chunk in chunks] == [
        (7, 1, 0),
        (9, 1, 1),
        (11, 1, 2),
    ]


@given(st.integers(0, 30), st.integers(1, 8))
def test_shares_are_torch_chunks(length, size):
    expected = [len(chunk) for chunk in torch.arange(length).chunk(size)] if length else [0]
    sizes = [stop - start for start, stop in (share_bounds(length, rank, size) for rank in range(size))]
    assert [size for size in sizes if size] == [size for size in expected if size]


def test_overlap_of_boxes():
    assert overlap((0, 2), (4, 4), (2, 0), (4, 3)) == ((2, 2), (2, 1))
    assert overlap((0,), (4,), (4,), (2,)) is None
    assert overlap((), (), (), ()) == ((), ())
