"""Python objects with tensors in them, sent along an axis. A structure that was sent before is not sent again."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_3d.collectives import as_bytes
from lightning_3d.mesh import Axis
from lightning_3d.placeholder import Placeholder

_SMALL = 32 * 1024  # bytes; smaller tensors travel together in one buffer
_ALIGNMENT = 16
_NOTES = 8
_KNOWN = 64  # structures that both ends remember


@dataclass(frozen=True)
class TensorMeta:
    """What the receiver must know to make room for a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_device: bool
    """Whether it goes from device to device or from host memory to host memory."""
    pinned: bool

    @property
    def num_bytes(self) -> int:
        """Size of the values."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


class _Encoder(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor], names: Mapping[int, str]) -> None:
        super().__init__(file, protocol=5)
        self._tensors = tensors
        self._names = names
        self._seen: dict[int, int] = {}

    @override
    def persistent_id(self, obj: Any) -> tuple[str, Any] | None:
        if (name := self._names.get(id(obj))) is not None:
            return ("named", name)
        if isinstance(obj, Placeholder):
            if obj.bound is None:  # in an object that only its owner looks into, such as a cache of keys and values
                return ("placeholder", (tuple(obj.shape), obj.dtype, obj.device.type, obj.origin))
            obj = obj.bound
        if type(obj) is Tensor and obj.layout == torch.strided and not obj.is_quantized and obj.device.type != "meta":
            index = self._seen.get(id(obj))
            if index is None:
                index = self._seen[id(obj)] = len(self._tensors)
                self._tensors.append(obj.detach())
            return ("tensor", index)
        return None


class _Decoder(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor], named: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._named = named

    @override
    def persistent_load(self, pid: tuple[str, Any]) -> Any:
        kind, key = pid
        if kind == "placeholder":
            shape, dtype, device, origin = key
            return Placeholder.of(shape, dtype, torch.device(device), origin=origin)
        return self._named[key] if kind == "named" else self._tensors[key]


def encode(value: Any, names: Mapping[int, str] | None = None) -> tuple[bytes, list[Tensor]]:
    """Split ``value`` into a structure (bytes) and its tensors.

    Args:
        value: Anything that pickles.
        names: Objects (by ``id``) which the receiver has under a name: they are sent as that name.
    """
    buffer, tensors = io.BytesIO(), list[Tensor]()
    _Encoder(buffer, tensors, names or {}).dump(value)
    return buffer.getvalue(), tensors


def decode(structure: bytes, tensors: Sequence[Tensor], named: Mapping[str, Any] | None = None) -> Any:
    """Put what :func:`encode` took apart together again."""
    return _Decoder(io.BytesIO(structure), tensors, named or {}).load()


class NotSent(Exception):
    """What was to be sent does not pickle; the cause says why. The others still wait for a message."""


class Channel:
    """One rank of an axis tells the others something, again and again.

    Every message costs one small header in host memory; the structure follows when it is new, then the tensors: host
    tensors over the control group, device tensors from device to device without waiting for them.

    Args:
        control: The axis, with a group for host memory.
        source: Index along the axis of the rank that sends.
        devices: The same axis with a group for tensors on the device; ``None`` sends all tensors from host memory.
        device: Where the device tensors of the receiver are put.
    """

    def __init__(
        self, control: Axis, source: int, devices: Axis | None = None, device: torch.device | None = None
    ) -> None:
        self.control = control
        self.source = source
        self._devices = devices
        self._device = device or torch.device("cpu")
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._structures: OrderedDict[int, tuple[list[TensorMeta], bytes]] = OrderedDict()
        self._next = 0

    @property
    def is_source(self) -> bool:
        """Whether this rank sends."""
        return self.control.rank == self.source

    def exchange(
        self,
        value: Any = None,
        notes: Sequence[int] = (),
        *,
        names: Mapping[int, str] | None = None,
        named: Mapping[str, Any] | None = None,
    ) -> tuple[Any, tuple[int, ...]]:
        """Send (at the source) or receive a value and up to eight whole numbers. Collective over the axis.

        Args:
            value: What is sent; ignored at the receivers.
            notes: Numbers that travel in the header; ignored at the receivers.
            names: At the source, the objects to be sent by name, by ``id``.
            named: At the receivers, the objects of those names.

        Returns:
            ``(value, notes)``; at the source the very objects that were given.

        Raises:
            NotSent: At the source, if the value does not pickle; nothing was sent then.
        """
        if self.control.group is None:
            return value, tuple(notes)
        if self.is_source:
            self._send(value, notes, names)
            return value, tuple(notes)
        return self._receive(named)

    def _send(self, value: Any, notes: Sequence[int], names: Mapping[int, str] | None) -> None:
        try:
            structure, tensors = encode(value, names)
        except Exception as error:
            raise NotSent(f"{type(error).__name__}: {error}") from error
        metas = [self._meta(tensor) for tensor in tensors]
        message = pickle.dumps((metas, structure), protocol=5)
        number = self._known.get(message)
        new = number is None
        if number is None:
            number, self._next = self._next, self._next + 1
            self._known[message] = number
            if len(self._known) > _KNOWN:
                self._known.popitem(last=False)
        header = [number, len(message) if new else 0, *notes]
        self._broadcast(torch.tensor(header + [0] * (2 + _NOTES - len(header)), dtype=torch.int64), self.control)
        if new:
            self._broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), self.control)
        for on_device, axis in self._routes():
            share = [t for t, meta in zip(tensors, metas, strict=True) if meta.on_device == on_device]
            where = self._device if on_device else torch.device("cpu")
            self._send_tensors([t.to(where).contiguous() for t in share], axis)

    def _receive(self, named: Mapping[str, Any] | None) -> tuple[Any, tuple[int, ...]]:
        header = torch.empty(2 + _NOTES, dtype=torch.int64)
        self._broadcast(header, self.control)
        number, num_bytes, *notes = header.tolist()
        if num_bytes:
            payload = torch.empty(num_bytes, dtype=torch.uint8)
            self._broadcast(payload, self.control)
            self._structures[number] = pickle.loads(payload.numpy().tobytes())
            if len(self._structures) > _KNOWN:
                self._structures.popitem(last=False)
        metas, structure = self._structures[number]
        tensors: dict[int, Tensor] = {}
        for on_device, axis in self._routes():
            share = [i for i, meta in enumerate(metas) if meta.on_device == on_device]
            where = self._device if on_device else torch.device("cpu")
            tensors.update(zip(share, self._receive_tensors([metas[i] for i in share], axis, where), strict=True))
        return decode(structure, [tensors[i] for i in range(len(metas))], named), tuple(notes)

    def _routes(self) -> list[tuple[bool, Axis]]:
        return [(False, self.control)] if self._devices is None else [(False, self.control), (True, self._devices)]

    def _meta(self, tensor: Tensor) -> TensorMeta:
        on_device = self._devices is not None and tensor.device.type != "cpu"
        pinned = tensor.device.type == "cpu" and torch.cuda.is_available() and tensor.is_pinned()
        return TensorMeta(tuple(tensor.shape), tensor.dtype, on_device, pinned)

    def _broadcast(self, tensor: Tensor, axis: Axis) -> None:
        dist.broadcast(tensor, src=axis.ranks[self.source], group=axis.group)

    def _send_tensors(self, tensors: list[Tensor], axis: Axis) -> None:
        raw = [as_bytes(tensor) for tensor in tensors]
        small = [piece for piece in raw if piece.numel() <= _SMALL]
        if buffer := _pack(small):
            self._broadcast(torch.cat(buffer), axis)
        for piece in raw:
            if piece.numel() > _SMALL:
                self._broadcast(piece, axis)

    def _receive_tensors(self, metas: list[TensorMeta], axis: Axis, where: torch.device) -> list[Tensor]:
        small = [meta for meta in metas if meta.num_bytes <= _SMALL]
        total = sum(_padded(meta.num_bytes) for meta in small)
        buffer = torch.empty(total, dtype=torch.uint8, device=where)
        if total:
            self._broadcast(buffer, axis)
        received, offset = [], 0
        for meta in metas:
            if meta.num_bytes <= _SMALL:
                piece = buffer[offset : offset + meta.num_bytes]
                offset += _padded(meta.num_bytes)
                # A copy: the next message must not keep, or share, the memory of this one.
                tensor = piece.clone().view(meta.dtype).view(meta.shape)
            else:
                pinned = meta.pinned and torch.cuda.is_available()
                tensor = torch.empty(meta.shape, dtype=meta.dtype, device=where, pin_memory=pinned)
                self._broadcast(as_bytes(tensor), axis)
            received.append(tensor)
        return received


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _pack(pieces: list[Tensor]) -> list[Tensor]:
    """The pieces, each filled up to the alignment that any dtype needs; nothing when there are no bytes at all."""
    parts: list[Tensor] = []
    for piece in pieces:
        parts.append(piece)
        if gap := _padded(piece.numel()) - piece.numel():
            parts.append(piece.new_zeros(gap))
    return parts if any(part.numel() for part in parts) else []
