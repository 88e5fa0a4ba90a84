"""Reads any box of any stored tensor, straight from the file: nothing is unpickled, nothing else is read."""

from __future__ import annotations

import functools
import math
import os
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from lightning_3d.checkpoint.directory import INDEX, named, read_json
from lightning_3d.checkpoint.integrity import share, verify
from lightning_3d.checkpoint.layout import box, overlap
from lightning_3d.checkpoint.state import Entry, plain
from lightning_3d.errors import CheckpointError


@dataclass(frozen=True)
class StoredChunk:
    """A box of a stored tensor and the bytes of a file that hold it (as ``torch.save`` wrote them)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    length: int
    checksum: int


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor that still lies in a checkpoint. It has a shape and a type; :meth:`read` gives its values."""

    key: str
    shape: torch.Size
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]

    def numel(self) -> int:
        """Number of values."""
        return self.shape.numel()

    def verify(self) -> None:
        """Compare its bytes in the files with their checksums.

        Raises:
            CheckpointError: They have changed.
        """
        for chunk in self.chunks:
            verify(chunk.file, chunk.checksum, chunk.start, chunk.length, repr(self.key))

    def read(self) -> Tensor:
        """The full tensor, verified, in host memory."""
        self.verify()
        full = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(full, (0,) * full.dim())
        return full

    def read_into(self, target: Tensor, offsets: Sequence[int]) -> None:
        """Fill ``target`` with the box of this tensor that begins at ``offsets`` and has ``target``'s shape.

        Raises:
            CheckpointError: The files do not hold the whole box.
        """
        filled = 0
        for chunk in self.chunks:
            shared = overlap(offsets, target.shape, chunk.offsets, chunk.sizes)
            if shared is None:
                continue
            starts, sizes = shared
            source = _values(chunk, self.dtype, self.key)
            source = source[box([start - first for start, first in zip(starts, chunk.offsets, strict=True)], sizes)]
            target[box([start - first for start, first in zip(starts, offsets, strict=True)], sizes)].copy_(source)
            filled += math.prod(sizes)
        if filled != target.numel():
            raise CheckpointError(
                f"{self.key!r}: the checkpoint holds {filled} of the {target.numel()} values asked for (from"
                f" {tuple(offsets)}, shape {tuple(target.shape)}); it is damaged."
            )


Source = Tensor | StoredTensor
"""A full tensor, in memory or still in a file."""


def check_shape(entry: Entry, source: Source) -> None:
    """Refuse a tensor that the entry is not a part of.

    Raises:
        CheckpointError: Their full shapes differ.
    """
    if tuple(source.shape) != entry.shape:
        raise CheckpointError(
            f"{entry.key!r} has shape {tuple(source.shape)} in the checkpoint and {entry.shape} in the model."
        )


def fill(entry: Entry, source: Source) -> None:
    """Copy this rank's part of ``source``, a full tensor, into the entry's memory.

    Raises:
        CheckpointError: Their full shapes differ.
    """
    check_shape(entry, source)
    with torch.no_grad():
        for chunk in entry.chunks:
            target = entry.tensor[chunk.slices]
            if isinstance(source, StoredTensor):
                source.read_into(target, chunk.offsets)
            else:
                target.copy_(plain(source)[box(chunk.offsets, chunk.sizes)])


def verify_tensors(index: Mapping[str, StoredTensor], rank: int = 0, size: int = 1) -> None:
    """Compare the stored bytes with their checksums: all of them, or the share of one of ``size`` ranks.

    Raises:
        CheckpointError: Some have changed.
    """
    chunks = [((key, chunk), chunk.length) for key, tensor in index.items() for chunk in tensor.chunks]
    for key, chunk in share(chunks, rank, size):
        verify(chunk.file, chunk.checksum, chunk.start, chunk.length, repr(key))


def read_index(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint directory by key.

    Raises:
        CheckpointError: The index is damaged.
    """
    content = read_json(folder / INDEX)
    # Many pieces lie in one file. Links are found when the bytes are compared with their checksums.
    place = functools.cache(functools.partial(named, folder))
    try:
        return {key: _stored(folder, key, entry, place) for key, entry in content["tensors"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder / INDEX} is damaged: {type(error).__name__} {error}.") from error


def _stored(folder: Path, key: str, entry: Mapping[str, Any], place: Callable[[str], Path]) -> StoredTensor:
    dtype = getattr(torch, entry["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{folder / INDEX}: {key!r} has the type {entry['dtype']!r}, which torch does not know.")
    chunks = [
        StoredChunk(tuple(offsets), tuple(sizes), place(file), int(start), int(length), int(crc))
        for offsets, sizes, file, start, length, crc in entry["chunks"]
    ]
    return StoredTensor(key, torch.Size(entry["shape"]), dtype, tuple(chunks))


def _values(chunk: StoredChunk, dtype: torch.dtype, key: str) -> Tensor:
    num_bytes = math.prod(chunk.sizes) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(chunk.sizes, dtype=dtype)
    try:
        with open(chunk.file, "rb") as stream:
            start = _data_start(stream, chunk, num_bytes)
        # Copy-on-write, because torch has no read-only tensors; nothing writes to it.
        mapped = np.memmap(chunk.file, dtype=np.uint8, mode="c", offset=start, shape=(num_bytes,))
    except (OSError, ValueError, zipfile.BadZipFile, struct.error) as error:
        raise CheckpointError(f"{chunk.file} is damaged where {key!r} lies: {error}.") from error
    return torch.from_numpy(mapped).view(dtype).view(chunk.sizes)


def _data_start(stream: BinaryIO, chunk: StoredChunk, num_bytes: int) -> int:
    """Where the bytes of the tensor begin: the uncompressed record ``data/0`` of the zip that ``torch.save`` writes."""
    with zipfile.ZipFile(cast(Any, _Window(stream, chunk.start, chunk.length))) as archive:
        record = next((entry for entry in archive.infolist() if entry.filename.endswith("/data/0")), None)
    if record is None or record.compress_type != zipfile.ZIP_STORED or record.file_size != num_bytes:
        found = "no data" if record is None else f"{record.file_size} bytes"
        raise ValueError(f"{num_bytes} bytes of values expected, {found} found")
    header = chunk.start + record.header_offset
    stream.seek(header + 26)
    name_length, extra_length = struct.unpack("<HH", stream.read(4))
    return header + 30 + name_length + extra_length


class _Window:
    """A part of a file as a file, for :class:`zipfile.ZipFile`."""

    def __init__(self, stream: BinaryIO, start: int, length: int) -> None:
        self._stream = stream
        self._start = start
        self._length = length
        self._position = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        position = base + offset
        if position < 0:
            raise OSError("seek before the beginning")
        self._position = position
        return position

    def read(self, size: int = -1) -> bytes:
        left = max(self._length - self._position, 0)
        size = left if size < 0 else min(size, left)
        self._stream.seek(self._start + self._position)
        data = self._stream.read(size)
        self._position += len(data)
        return data
