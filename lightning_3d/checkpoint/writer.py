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
            dcp.save(
                {},
                storage_writer=_IndexedWriter(folder, on_gpu=any(entry.tensor.is_cuda for entry in entries)),
                planner=_ChunkPlanner(entries),
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
    """Tells DCP of explicit chunks of full tensors, which placements of DTensor cannot describe (packed layers)."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = {entry.key: entry for entry in entries}
        self._slices = {(entry.key, chunk.offsets): chunk.slices for entry in entries for chunk in entry.chunks}

    @override
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    @override
    def create_local_plan(self) -> SavePlan:
        items = []
        for entry in self._entries.values():
            # Only the type survives into the metadata: memory format and pinning say nothing about the full tensor.
            properties = TensorProperties(dtype=entry.tensor.dtype)
            for chunk in entry.chunks:
                data = TensorWriteData(
                    ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)),
                    properties,
                    torch.Size(entry.shape),
                )
                index = MetadataIndex(entry.key, chunk.offsets)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    @override
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        holders = [{_piece(item): _num_bytes(item) for item in plan.items} for plan in all_plans]
        chosen = share_out(holders)
        tensors: dict[str, TensorStorageMetadata] = {}
        plans = []
        for rank, plan in enumerate(all_plans):
            items = []
            for item in plan.items:
                tensor = _merge(tensors, item)
                if chosen[_piece(item)] == rank:
                    index = dataclasses.replace(item.index, index=len(tensor.chunks))
                    items.append(dataclasses.replace(item, index=index))
                    tensor.chunks.append(_data(item).chunk)
            plans.append(dataclasses.replace(plan, items=items))
        broken = [
            f"{key!r} ({sum(math.prod(chunk.sizes) for chunk in tensor.chunks)} of {math.prod(tensor.size)} values)"
            for key, tensor in tensors.items()
            if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.size)
        ]
        if broken:
            raise CheckpointError(f"The ranks do not hold these tensors whole and once: {', '.join(broken[:8])}.")
        return plans, Metadata(dict(tensors))

    @override
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor:
        tensor = self._entries[write_item.index.fqn].tensor
        return tensor[self._slices[_piece(write_item)]].contiguous()


@dataclasses.dataclass(frozen=True)
class _Checked(WriteResult):
    """Where DCP has put a piece, and the checksum of its bytes."""

    checksum: int


class _IndexedWriter(dcp.FileSystemWriter):
    """DCP's files, and beside its pickled metadata an index in JSON: the one that is read."""

    def __init__(self, folder: Path, on_gpu: bool) -> None:
        # Copying ahead waits for all that the GPU was given so far, once for every piece: in the background that is the
        # steps of training, and copies that lie in host memory gain nothing from it.
        ahead = _COPY_AHEAD if on_gpu else 0
        super().__init__(
            folder, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=ahead, overwrite=False
        )
        self._folder = folder

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
        super().finish(metadata, results)
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


def _merge(tensors: dict[str, TensorStorageMetadata], item: WriteItem) -> TensorStorageMetadata:
    data = _data(item)
    tensor = tensors.setdefault(item.index.fqn, TensorStorageMetadata(data.properties, data.size, []))
    if tensor.size != data.size or tensor.properties.dtype != data.properties.dtype:
        raise CheckpointError(
            f"{item.index.fqn!r} is {tuple(tensor.size)} {tensor.properties.dtype} on one rank and {tuple(data.size)}"
            f" {data.properties.dtype} on another: two different tensors have one name."
        )
    return tensor


def _piece(item: WriteItem) -> Piece:
    return item.index.fqn, tuple(item.index.offset or ())


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data


def _num_bytes(item: WriteItem) -> int:
    data = _data(item)
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
