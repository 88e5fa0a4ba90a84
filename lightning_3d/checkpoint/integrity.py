"""Checksums: written with a checkpoint, compared before anything of it is used."""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from lightning_3d.errors import CheckpointError

T = TypeVar("T")
Facts = tuple[int, int]
"""Size in bytes and CRC-32 of a file."""

_BLOCK = 1 << 22
"""Bytes that are read at a time."""


def checksum(file: Path, start: int = 0, length: int | None = None) -> int:
    """CRC-32 of ``length`` bytes of a file from ``start`` on; by default of all."""
    left = length if length is not None else file.stat().st_size - start
    crc = 0
    with file.open("rb", buffering=0) as stream:
        stream.seek(start)
        while left > 0 and (block := stream.read(min(left, _BLOCK))):
            crc = zlib.crc32(block, crc)
            left -= len(block)
    return crc


def facts_of(file: Path) -> Facts:
    """What is noted of a file that was written, as it lies on the disk now."""
    return file.stat().st_size, checksum(file)


def verify(file: Path, expected: object, start: int = 0, length: int | None = None, what: str = "") -> None:
    """Compare bytes of a file with the checksum that was written with them.

    Args:
        file: The file.
        expected: What :func:`checksum` gave when it was written.
        start: First byte.
        length: Number of bytes; by default all.
        what: What these bytes hold, for the message.

    Raises:
        CheckpointError: They differ, cannot be read, or lie outside of the checkpoint.
    """
    refuse_foreign_link(file)
    try:
        found = checksum(file, start, length)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error
    if found != expected:
        where = f" where {what} lies" if what else ""
        raise CheckpointError(
            f"{file} is damaged{where}: its bytes have the checksum {found}, {expected} was written. It has changed"
            " since it was saved; take another checkpoint, or restore this file."
        )


def refuse_foreign_link(file: Path) -> None:
    """Look whether a file of a checkpoint is in truth another one.

    Raises:
        CheckpointError: It is a link out of its directory.
    """
    if file.is_symlink() and file.resolve().parent != file.parent.resolve():
        raise CheckpointError(f"{file} is a link to {file.resolve()}, which is outside of the checkpoint: not read.")


def share(items: Iterable[tuple[T, int]], rank: int, size: int) -> Sequence[T]:
    """What ``rank`` of ``size`` ranks checks, so that every item is checked once and all read about as much.

    Args:
        items: Each with its bytes, the same on all ranks.
        rank: Which rank.
        size: Number of ranks.
    """
    load = [(0, other) for other in range(size)]
    own = []
    for item, num_bytes in sorted(items, key=lambda pair: -pair[1]):
        least, other = load[0]
        heapq.heapreplace(load, (least + num_bytes, other))
        if other == rank:
            own.append(item)
    return own
