"""Tensors without memory that know how they were made, and the computation of their values when somebody needs them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from lightning_3d.errors import ConfigError

_KEPT_BY_COPY = 2**18
"""Bytes up to which a real argument of a recorded operation is copied; larger ones must not change."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor on a storage that has no memory: which one, and where on it."""

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conj: bool = False

    @classmethod
    def of(cls, tensor: Tensor, number: int) -> Ref:
        """``tensor`` stands on the storage of that number."""
        shape, stride = tuple(tensor.shape), tensor.stride()
        return cls(number, shape, stride, int(tensor.storage_offset()), tensor.dtype, tensor.is_conj())

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The same place on a real storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        found = empty.set_(storage, self.offset, self.shape, self.stride)
        return found.conj() if self.conj else found

    def scratch(self, device: torch.device) -> Tensor:
        """A real tensor laid out alike, with any values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Held:
    """A large real tensor among the arguments of a recorded operation."""

    tensor: Tensor
    version: int

    def value(self) -> Tensor:
        """The tensor.

        Raises:
            ConfigError: if it has changed since, so that the operation would compute something else.
        """
        if self.tensor._version != self.version:
            raise ConfigError(
                f"A tensor of shape {tuple(self.tensor.shape)} that a large parameter was made from has been changed in"
                " place afterwards, before the parameter got its memory. Change a copy (tensor.clone()) instead."
            )
        return self.tensor.detach()


@dataclass(slots=True)
class Draw:
    """The generator that an operation draws from, as it stood before."""

    device: torch.device
    state: Tensor
    is_own: bool
    """Whether the user gave the operation a generator of its own."""

    @classmethod
    def now(cls, device: torch.device, leaves: Sequence[Any]) -> Draw:
        """For an operation on ``device`` with these arguments."""
        own = next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None)
        if own is not None:
            return cls(torch.device(own.device), own.get_state(), True)
        return cls(device, _random_state(device), False)


@dataclass(eq=False, slots=True)
class Step:
    """One recorded operation."""

    number: int
    func: Callable[..., Any]
    leaves: list[Any]
    """Its flat arguments: :class:`Ref` for tensors without memory."""
    spec: Any
    needs: tuple[Step, ...]
    """The steps that made what it reads."""
    draw: Draw | None
    default_dtype: torch.dtype
    fresh: tuple[Memory, ...] = ()
    """What it overwrites as a whole: nothing that was there before matters."""
    made: list[tuple[int, Ref, Memory]] = field(default_factory=list)
    """The outputs, by index, that have storages of their own."""
    is_empty: bool = False
    """Whether it gives memory without values."""

    def numbers(self) -> set[int]:
        """The storages that it reads or writes."""
        read = {leaf.number for leaf in self.leaves if isinstance(leaf, Ref)}
        return read | {memory.number for _, _, memory in self.made}

    def run(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Compute on real storages; new ones are added."""
        for memory in self.fresh:
            if memory.number not in storages:
                storages[memory.number] = torch.UntypedStorage(memory.nbytes, device=memory.device)
        given = [leaf.on(storages[leaf.number]) if isinstance(leaf, Ref) else leaf for leaf in self.leaves]
        outputs = self.call(given)
        outside = {x.untyped_storage()._cdata for x in given if isinstance(x, Tensor)}
        for index, ref, memory in self.made:
            output: Tensor = outputs[index]
            storage = output.untyped_storage()
            if Ref.of(output, ref.number) != ref or storage._cdata in outside or storage.nbytes() != memory.nbytes:
                storage = torch.UntypedStorage(memory.nbytes, device=output.device)
                ref.on(storage).copy_(output)
            storages[memory.number] = storage

    def call(self, leaves: Sequence[Any]) -> list[Any]:
        """Call the operation with the random state that it had; gives its flat outputs."""
        own = None if self.draw is None or not self.draw.is_own else torch.Generator(self.draw.device)
        if self.draw is not None and own is not None:
            own.set_state(self.draw.state)
        elif self.draw is not None:
            _set_random_state(self.draw.device, self.draw.state)
        given = [own if isinstance(leaf, torch.Generator) else leaf for leaf in leaves]
        given = [leaf.value() if isinstance(leaf, Held) else leaf for leaf in given]
        args, kwargs = pytree.tree_unflatten(given, self.spec)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.default_dtype)
        try:
            return pytree.tree_leaves(self.func(*args, **kwargs))
        finally:
            torch.set_default_dtype(before)


@dataclass(eq=False, slots=True)
class Memory:
    """A storage that has no memory yet."""

    number: int
    nbytes: int
    device: torch.device
    """Where its values belong."""
    alive: StorageWeakRef
    last: Step | None = None
    """The step that wrote to it last."""


_MEMORIES: dict[int, Memory] = {}
"""By address of the storage, which is not used again while the weak reference to it lives."""
_counts = {"step": 0, "memory": 0, "purge_at": 256, "passing": 0}
_TRIM_EVERY = 2**26


def memory_of(tensor: Any) -> Memory | None:
    """The recipe of the storage that ``tensor`` stands on, if it has one."""
    if not _MEMORIES or not isinstance(tensor, Tensor) or is_wrapper(tensor):
        return None
    with torch._C.DisableTorchFunction():
        if not tensor.is_meta:
            return None
        return _MEMORIES.get(tensor.untyped_storage()._cdata)


def is_wrapper(value: object) -> bool:
    """Whether ``value`` is a tensor that holds others (a DTensor, a placeholder) and has no storage itself."""
    return isinstance(value, Tensor) and type(value).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def any_recipes() -> bool:
    """Whether any tensor of this process has a recipe."""
    return bool(_MEMORIES)


def new_step(
    func: Callable[..., Any],
    leaves: Sequence[Any],
    spec: Any,
    draw: Draw | None,
    fresh: Sequence[Memory] = (),
    is_empty: bool = False,
) -> Step:
    """Record an operation.

    Args:
        func: What is called.
        leaves: Its flat arguments, with the tensors themselves.
        spec: How they are put together.
        draw: Where its random numbers come from.
        fresh: Storages that it overwrites as a whole.
        is_empty: Whether what it makes has no values.
    """
    needs: dict[int, Step] = {}
    kept: list[Any] = []
    overwritten = {id(memory) for memory in fresh}
    for index, leaf in enumerate(leaves):
        memory = memory_of(leaf)
        if memory is not None:
            kept.append(Ref.of(leaf, memory.number))
            # The written tensor is the first argument of all operations that overwrite.
            if memory.last is not None and not (index == 0 and id(memory) in overwritten):
                needs[memory.last.number] = memory.last
        elif isinstance(leaf, Tensor):
            kept.append(_kept(leaf))
        else:
            kept.append(leaf)
    _counts["step"] += 1
    default = torch.get_default_dtype()
    return Step(_counts["step"], func, kept, spec, tuple(needs.values()), draw, default, tuple(fresh), [], is_empty)


def new_memory(tensor: Tensor, index: int, step: Step, device: torch.device) -> None:
    """Let the storage of a meta tensor have the recipe that ``step`` ends: its output of that index."""
    if len(_MEMORIES) > _counts["purge_at"]:
        forget()
        _counts["purge_at"] = max(256, 2 * len(_MEMORIES))
    storage = tensor.untyped_storage()
    _counts["memory"] += 1
    memory = Memory(_counts["memory"], storage.nbytes(), device, StorageWeakRef(storage), step)
    step.made.append((index, Ref.of(tensor, memory.number), memory))
    _MEMORIES[storage._cdata] = memory


def forget() -> None:
    """Drop the recipes of tensors that are gone."""
    for address in [address for address, memory in _MEMORIES.items() if memory.alive.expired()]:
        del _MEMORIES[address]


def history(memories: Iterable[Memory]) -> list[Step]:
    """All steps that the values on these storages depend on, in the order in which they were recorded."""
    found: dict[int, Step] = {}
    open_steps = [memory.last for memory in memories if memory.last is not None]
    while open_steps:
        step = open_steps.pop()
        if step.number not in found:
            found[step.number] = step
            open_steps.extend(step.needs)
    return [found[number] for number in sorted(found)]


def compute(memories: Sequence[Memory]) -> dict[int, torch.UntypedStorage]:
    """Real storages with the values, by number. What is only needed on the way is freed on the way."""
    steps = history(memories)
    last_use = {number: step.number for step in steps for number in step.numbers()}
    wanted = {memory.number for memory in memories}
    storages: dict[int, torch.UntypedStorage] = {}
    with plainly():
        for step in steps:
            step.run(storages)
            for number in step.numbers() - wanted:
                if last_use[number] == step.number:
                    give_back(storages.pop(number).nbytes())
    return storages


def give_back(nbytes: int) -> None:
    """Return freed memory to the system once this many bytes have been used in passing, a few at a time.

    The C library keeps blocks of up to 32 MB in its heap, where recipes made later hold them fast.
    """
    _counts["passing"] += nbytes
    if _counts["passing"] > _TRIM_EVERY and (trim := _trimmer()) is not None:
        _counts["passing"] = 0
        trim(0)


@functools.lru_cache(maxsize=1)
def _trimmer() -> Callable[[int], int] | None:
    with contextlib.suppress(OSError, AttributeError):
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
        return found
    return None


def value_of(tensor: Tensor) -> Tensor:
    """The values of a tensor with a recipe, in memory of their own; any other tensor as it is."""
    memory = memory_of(tensor)
    if memory is None:
        return tensor
    storage = compute([memory])[memory.number]
    with plainly():
        return Ref.of(tensor, memory.number).on(storage)


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Within, operations are computed as they are called, and the random generators are as before afterwards."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        devices = [torch.device("cpu"), *_cuda_devices()]
        states = [_random_state(device) for device in devices]
        try:
            yield
        finally:
            for device, state in zip(devices, states, strict=True):
                _set_random_state(device, state)


def _kept(tensor: Tensor) -> Tensor | Held:
    if tensor.is_meta:
        return tensor
    if tensor.numel() * tensor.element_size() <= _KEPT_BY_COPY:
        return tensor.detach().clone()
    return Held(tensor, tensor._version)


def _cuda_devices() -> list[torch.device]:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return []
    return [torch.device("cuda", torch.cuda.current_device())]


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
