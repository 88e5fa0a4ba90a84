"""Writes what the stock Trainer would have saved, tensor by tensor: never more than one of them is in memory."""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.storage import TypedStorage, UntypedStorage
from typing_extensions import override

from lightning_3d.checkpoint.directory import local_path, write_file
from lightning_3d.checkpoint.full import stock_content
from lightning_3d.checkpoint.reader import StoredTensor
from lightning_3d.collectives import as_bytes
from lightning_3d.errors import CheckpointError

_ALIGNMENT = 64
_HEADER, _EXTRA_HEADER, _ZIP64_EXTRA = 30, 4, 20
"""Bytes in front of a record of a zip file: before its name, before an extra field, and the field of large records."""


@dataclass(frozen=True)
class StockFile:
    """What :func:`write_lightning` has written."""

    file: Path
    num_values: int
    """Numbers in the state dict of the module; tied ones count once."""
    global_step: int


def write_lightning(
    path: str | os.PathLike[str], file: str | os.PathLike[str], weights_only: bool | None = None
) -> StockFile:
    """Write a checkpoint directory as one ``.ckpt`` file, for the stock Trainer and ``load_from_checkpoint``.

    One process, no process group. The file appears when it is complete.

    Args:
        path: A checkpoint directory, of any layout.
        file: What to write; an older file there is replaced.
        weights_only: As in :func:`~lightning_3d.checkpoint.read`; here hyper-parameters are not left out.

    Raises:
        CheckpointError: The checkpoint is damaged, or ``file`` is a directory.
    """
    target = local_path(file)
    if target.is_dir():
        raise CheckpointError(f"{target} is a directory; one file is to be written. Give its name.")
    content = stock_content(path, weights_only)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    try:
        write_file(part, lambda place: _write(content, place))
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    tensors = {id(value): value for value in content["state_dict"].values() if isinstance(value, StoredTensor | Tensor)}
    return StockFile(target, sum(tensor.numel() for tensor in tensors.values()), int(content.get("global_step", 0)))


def _write(content: Any, file: Path) -> None:
    """``torch.save`` of a content that holds stored tensors.

    Not with torch's own writer: it keeps what it has written in memory.
    """
    text = io.BytesIO()
    pickler = _Pickler(text)
    pickler.dump(content)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        _record(archive, "data.pkl", text.getvalue())
        _record(archive, "version", b"3\n")
        _record(archive, "byteorder", sys.byteorder.encode())
        for number, source in enumerate(pickler.sources):
            tensor = (
                source.read() if isinstance(source, StoredTensor) else torch.empty(0, dtype=torch.uint8).set_(source)
            )
            _record(archive, f"data/{number}", as_bytes(tensor.cpu()).numpy().data)


def _record(archive: zipfile.ZipFile, name: str, data: bytes | memoryview) -> None:
    entry = zipfile.ZipInfo(f"archive/{name}")
    large = len(data) >= zipfile.ZIP64_LIMIT
    begin = archive.start_dir + _HEADER + len(entry.filename) + (_ZIP64_EXTRA if large else 0)
    # So that a file that is mapped into memory has every tensor at an address that suits its type.
    padding = -(begin + _EXTRA_HEADER) % _ALIGNMENT
    entry.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    with archive.open(entry, "w", force_zip64=large) as stream:
        stream.write(data)


class _Storage:
    """Stands in the pickle for the values of a stored tensor."""

    def __init__(self, stored: StoredTensor, like: TypedStorage | UntypedStorage) -> None:
        self.stored, self.like = stored, like


class _Pickler(pickle.Pickler):
    """Pickles as ``torch.save`` does; notes where the values are to come from."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=2)
        self.sources: list[StoredTensor | UntypedStorage] = []
        """By the number under which the pickle knows them."""
        self._numbers: dict[int, int] = {}

    @override
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, StoredTensor):
            return NotImplemented
        rebuild, (storage, _, _, _, *rest) = torch.empty(0, dtype=obj.dtype).__reduce_ex__(2)
        stride = torch.empty(obj.shape, dtype=obj.dtype, device="meta").stride()
        return rebuild, (_Storage(obj, storage), 0, tuple(obj.shape), stride, *rest)

    @override
    def persistent_id(self, obj: Any) -> Any:
        source: StoredTensor | UntypedStorage
        if isinstance(obj, _Storage):
            source, identity, like = obj.stored, id(obj.stored), obj.like
        elif isinstance(obj, TypedStorage | UntypedStorage):
            source = obj._untyped_storage if isinstance(obj, TypedStorage) else obj
            identity, like = source._cdata, obj
        else:
            return None
        number = self._numbers.setdefault(identity, len(self.sources))
        if number == len(self.sources):
            self.sources.append(source)
        if isinstance(like, TypedStorage):
            kind, item = getattr(torch, like._pickle_storage_type()), like.dtype.itemsize
        else:
            kind, item = UntypedStorage, 1
        num_bytes = source.numel() * source.dtype.itemsize if isinstance(source, StoredTensor) else source.nbytes()
        return "storage", kind, str(number), "cpu", num_bytes // item
