"""Writes safetensors files tensor by tensor: never more than one of them is in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from lightning_3d.checkpoint.reader import StoredTensor
from lightning_3d.checkpoint.state import plain
from lightning_3d.collectives import as_bytes
from lightning_3d.errors import CheckpointError

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What the format calls the types that it has."""


def write_safetensors(
    file: Path, tensors: Mapping[str, Tensor | StoredTensor], dtype: torch.dtype | None = None
) -> None:
    """Write ``tensors``, read one by one, into ``file``, and bring it to the disk.

    Args:
        file: Replaced if it exists.
        tensors: By name.
        dtype: Type of the floating-point values in the file; ``None`` keeps each as it is.

    Raises:
        CheckpointError: The format has no such type.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + stored_bytes(name, tensor, dtype)
        kind = NAMES[stored_type(tensor, dtype)]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # values begin at a multiple of eight bytes
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            value = tensor.read() if isinstance(tensor, StoredTensor) else plain(tensor).detach().cpu()
            value = value.to(stored_type(tensor, dtype)).contiguous()
            if value.numel():
                stream.write(as_bytes(value).numpy().data)
        stream.flush()
        os.fsync(stream.fileno())


def stored_type(tensor: Tensor | StoredTensor, dtype: torch.dtype | None) -> torch.dtype:
    """The type that ``tensor`` has in the file."""
    return dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype


def stored_bytes(name: str, tensor: Tensor | StoredTensor, dtype: torch.dtype | None) -> int:
    """Size in the file.

    Raises:
        CheckpointError: The format has no such type.
    """
    kind = stored_type(tensor, dtype)
    if kind not in NAMES:
        raise CheckpointError(f"{name!r} has the type {kind}, which safetensors files cannot hold. Convert it first.")
    return tensor.shape.numel() * kind.itemsize
