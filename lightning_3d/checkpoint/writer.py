"""Tensors into a directory through ``torch.distributed.checkpoint``: every byte once, spread over the ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import warnings
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from lightning_3d.checkpoint.agreement import describe, together
from lightning_3d.checkpoint.directory import INDEX, write_file
from lightning_3d.checkpoint.integrity import checksum
from lightning_3d.checkpoint.names import listed
from lightning_3d.checkpoint.state import Entry
from lightning_3d.collectives import all_gather_object, as_bytes
from lightning_3d.errors import CheckpointError
from lightning_3d.mesh import Mesh, where

Piece = tuple[str, tuple[int, ...]]
"""A key and the offsets of a chunk: what two ranks must agree on to hold the same piece."""
Description = tuple[str, tuple[int, ...], torch.dtype, list[tuple[tuple[int, ...], tuple[int, ...]]]]
"""Key, full shape, type, and offsets and sizes of the chunks that a rank holds."""
_METADATA = ".metadata"
"""What DCP calls its own description of the whole."""

_COPY_AHEAD = 10_000_000
"""Bytes that are on their way from a GPU while others are written."""


def write_tensors(folder: Path, entries: Sequence[Entry], mesh: Mesh) -> None:
    """Write the tensors of all ranks into ``folder``; collective.

    Raises:
        CheckpointError: A key has different contents on different stages, or chunks that do not make a whole.
    """
    together(mesh, "Preparing the checkpoint", lambda: _refuse_repeated(entries))
    refuse_collisions(entries, mesh)
    together(mesh, "Writing the checkpoint", lambda: _write(folder, entries, mesh))


def described(entries: Iterable[Entry]) -> list[Description]:
    """What other ranks need to know of a rank's entries."""
    return [
        (entry.key, entry.shape, entry.tensor.dtype, [(chunk.offsets, chunk.sizes) for chunk in entry.chunks])
        for entry in entries
    ]


def pieces_of(descriptions: Iterable[Description]) -> dict[Piece, int]:
    """The pieces that a rank holds, and their bytes."""
    return {
        (key, offsets): math.prod(sizes) * dtype.itemsize
        for key, _, dtype, chunks in descriptions
        for offsets, sizes in chunks
    }


def share_out(holders: Sequence[Mapping[Piece, int]], prefer: int | None = None) -> dict[Piece, int]:
    """Which rank writes (or sends) each piece.

    Pieces with one holder are its own; the others go, in order, to the holder with the fewest bytes so far.

    Args:
        holders: Per rank its pieces and their bytes.
        prefer: A rank that takes whatever it holds.
    """
    ranks: dict[Piece, list[int]] = defaultdict(list)
    size: dict[Piece, int] = {}
    for rank, pieces in enumerate(holders):
        for piece, nbytes in pieces.items():
            ranks[piece].append(rank)
            size[piece] = nbytes
    load = [0] * len(holders)
    chosen: dict[Piece, int] = {}
    for piece in sorted(ranks, key=lambda piece: len(ranks[piece]) > 1):
        candidates = ranks[piece]
        rank = prefer if prefer in candidates else min(candidates, key=lambda rank: load[rank])
        load[rank] += size[piece]
        chosen[piece] = rank
    return chosen


def _write(folder: Path, entries: Sequence[Entry], mesh: Mesh) -> None:
    alone = mesh.world.size == 1
    try:
        # A world of one without a process group is meant. Only then: filters are those of all threads.
        with warnings.catch_warnings() if alone else contextlib.nullcontext():
            if alone:
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            planner = _ChunkPlanner(entries)
            dcp.save(
                {},
                storage_writer=_IndexedWriter(folder, planner, any(entry.tensor.is_cuda for entry in entries)),
                planner=planner,
                process_group=mesh.control_world.group,
                no_dist=alone,
            )
    except CheckpointException as error:
        # DCP raises the failures of all ranks on every rank.
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
        texts = [f"on {where(rank, mesh.sizes)}: {describe(cause)}" for rank, cause in causes.items()]
        raise CheckpointError("Writing the checkpoint failed " + "; ".join(texts[:4])) from next(iter(causes.values()))


def _refuse_repeated(entries: Iterable[Entry]) -> None:
    seen: set[str] = set()
    for entry in entries:
        if entry.key in seen:
            raise CheckpointError(f"{entry.key!r} would be saved twice by one rank: names must be unique.")
        seen.add(entry.key)


def refuse_collisions(entries: Sequence[Entry], mesh: Mesh) -> None:
    """Refuse a key that several pipeline stages hold with different contents; collective over pp.

    Raises:
        CheckpointError: naming such keys.
    """
    if mesh.pp.size == 1:
        return
    own = {entry.key: (entry.shape, str(entry.tensor.dtype)) for entry in entries}
    stages = all_gather_object(own, mesh.control_pp)
    count: dict[str, int] = defaultdict(int)
    for stage in stages:
        for key in stage:
            count[key] += 1
    repeated = {key for key, stages_with_it in count.items() if stages_with_it > 1}
    sums = {entry.key: _checksum(entry.tensor) for entry in entries if entry.key in repeated}

    def compare(all_sums: Sequence[Mapping[str, int]]) -> None:
        different = []
        for key in sorted(repeated):
            facts = {(stage[key], sums[key]) for stage, sums in zip(stages, all_sums, strict=True) if key in stage}
            if len(facts) > 1:
                different.append(key)
        if different:
            at = [where(rank, mesh.sizes) for rank in mesh.pp.ranks]
            raise CheckpointError(
                f"{listed(different)} differ between pipeline stages ({', '.join(at)}): one copy would overwrite the"
                " other without a trace. Tied parameters must be equal on all stages, and every other name belongs to"
                " one stage only."
            )

    all_sums = all_gather_object(sums, mesh.control_pp)
    together(mesh, "Saving", lambda: compare(all_sums))


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(as_bytes(tensor.detach().cpu()).numpy().data)


class _ChunkPlanner(SavePlanner):
    """Tells DCP of explicit chunks of full tensors, which placements of DTensor cannot describe (packed layers).

    Ranks send each other plain tuples in ``planner_data``, and the metadata of the whole stays on rank 0. DCP's way
    would send objects, and those for the pieces of all ranks to each of them.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = {entry.key: entry for entry in entries}
        self._chunks = {(entry.key, chunk.offsets): chunk for entry in entries for chunk in entry.chunks}
        self.metadata = Metadata({})
        """What all ranks write; on rank 0, once they have planned."""

    @override
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    @override
    def create_local_plan(self) -> SavePlan:
        return SavePlan([], planner_data=described(self._entries.values()))

    @override
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        told: list[Sequence[Description]] = [plan.planner_data for plan in all_plans]
        self.metadata = Metadata(dict(_tensors(told)))
        pieces: list[list[Piece]] = [[] for _ in told]
        for piece, rank in share_out([pieces_of(each) for each in told]).items():
            pieces[rank].append(piece)
        plans = [dataclasses.replace(plan, planner_data=own) for plan, own in zip(all_plans, pieces, strict=True)]
        return plans, Metadata({})

    @override
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return dataclasses.replace(new_plan, items=[self._item(piece) for piece in new_plan.planner_data])

    def _item(self, piece: Piece) -> WriteItem:
        entry, chunk = self._entries[piece[0]], self._chunks[piece]
        # Only the type survives into the metadata: memory format and pinning say nothing about the full tensor.
        properties = TensorProperties(dtype=entry.tensor.dtype)
        data = TensorWriteData(_stored_chunk(chunk.offsets, chunk.sizes), properties, torch.Size(entry.shape))
        return WriteItem(MetadataIndex(*piece), WriteItemType.SHARD, tensor_data=data)

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor:
        key, offsets = write_item.index.fqn, tuple(write_item.index.offset or ())
        return self._entries[key].tensor[self._chunks[key, offsets].slices].contiguous()


@dataclasses.dataclass(frozen=True)
class _Checked(WriteResult):
    """Where DCP has put a piece, and the checksum of its bytes."""

    checksum: int


class _IndexedWriter(dcp.FileSystemWriter):
    """DCP's files, and beside its pickled metadata an index in JSON: the one that is read."""

    def __init__(self, folder: Path, planner: _ChunkPlanner, on_gpu: bool) -> None:
        # Copying ahead waits for all that the GPU was given so far, once for every piece: in the background that is the
        # steps of training, and copies that lie in host memory gain nothing from it.
        ahead = _COPY_AHEAD if on_gpu else 0
        super().__init__(
            folder, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=ahead, overwrite=False
        )
        self._folder = folder
        self._planner = planner

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        results = super().write_data(plan, planner).wait() if plan.items else []  # no file without content
        done.set_result([self._checked(result) for result in results])
        return done

    def _checked(self, result: WriteResult) -> WriteResult:
        info = result.storage_data
        # Read again, not taken from memory: what was meant to be written is not what counts.
        crc = checksum(self._folder / info.relative_path, info.offset, info.length)
        return _Checked(result.index, result.size_in_bytes, info, crc)

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata = self._planner.metadata
        write_file(self._folder / _METADATA, lambda _: super(_IndexedWriter, self).finish(metadata, results))
        stored = {(result.index.fqn, tuple(result.index.offset or ())): result for rank in results for result in rank}
        tensors: dict[str, Any] = {}
        for key, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            chunks = []
            for chunk in tensor.chunks:
                result = stored[key, tuple(chunk.offsets)]
                assert isinstance(result, _Checked)
                info = result.storage_data
                place = [str(info.relative_path), info.offset, info.length, result.checksum]
                chunks.append([list(chunk.offsets), list(chunk.sizes), *place])
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[key] = {"dtype": dtype, "shape": list(tensor.size), "chunks": chunks}
        text = json.dumps({"tensors": tensors}, separators=(",", ":"))
        write_file(self._folder / INDEX, lambda path: path.write_text(text, encoding="utf-8"))


def _tensors(told: Iterable[Iterable[Description]]) -> dict[str, TensorStorageMetadata]:
    """All tensors, every piece once.

    Raises:
        CheckpointError: What ranks say does not make wholes.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    known: dict[Piece, tuple[int, ...]] = {}
    held: dict[str, int] = defaultdict(int)
    for key, shape, dtype, chunks in (description for rank in told for description in rank):
        tensor = tensors.get(key)
        if tensor is None:
            tensor = tensors[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
        if tensor.size != shape or tensor.properties.dtype != dtype:
            raise CheckpointError(
                f"{key!r} is {tuple(tensor.size)} {tensor.properties.dtype} on one rank and {shape} {dtype} on another:"
                " two different tensors have one name."
            )
        for offsets, sizes in chunks:
            if (key, offsets) not in known:
                known[key, offsets] = sizes
                held[key] += math.prod(sizes)
                tensor.chunks.append(_stored_chunk(offsets, sizes))
            elif known[key, offsets] != sizes:
                held[key] = -1
    broken = [
        f"{key!r} ({held[key]} of {tensor.size.numel()} values)"
        for key, tensor in tensors.items()
        if held[key] != tensor.size.numel()
    ]
    if broken:
        raise CheckpointError(f"The ranks do not hold these tensors whole and once: {', '.join(broken[:8])}.")
    return tensors


def _stored_chunk(offsets: Sequence[int], sizes: Sequence[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
