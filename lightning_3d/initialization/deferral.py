"""Recording how large tensors are made instead of making them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_3d.errors import ConfigError
from lightning_3d.initialization import recipes
from lightning_3d.initialization.recipes import Draw, Memory, any_recipes, memory_of, new_memory, new_step, value_of

LARGE = 2**14
"""Elements from which a new tensor is deferred. Smaller ones are made at once: they cost little and are often read."""

_META, _CPU = torch.device("meta"), torch.device("cpu")
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
_OVERWRITES = {"normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_"}
_VALUE_FREE = {*_OVERWRITES, "rand_like", "randn_like", "randint_like"}
"""How many random numbers these draw, and which, does not depend on the values of their arguments."""
_OVERWRITES |= {"zero_", "fill_", "copy_"}
_COPIES = {"_to_copy", "lift", "lift_fresh", "lift_fresh_copy", "clone", "detach"}
_DATA_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_active, _paused = [0], [0]


@contextlib.contextmanager
def deferring(least: int | None = LARGE, draws: bool = True) -> Iterator[None]:
    """Within, new tensors of ``least`` elements and more get no memory but a recipe.

    Operations on such tensors are recorded. Those that draw random numbers draw them once, so the generators move as
    ever and everything has the values that it would have had. Code within sees the device that a tensor was meant for;
    ``torch.device("meta")`` means the CPU there, with values. ``least=None`` defers only what asks for the meta device.
    ``draws=False`` is for models that get no values at all: the generators stay where they are, which saves hours.
    """
    if _active[0]:
        yield
        return
    _active[0] += 1
    try:
        with _Recorder(least, accepts_meta=True, draws=draws), _Calls():
            yield
    finally:
        _active[0] -= 1


def following() -> contextlib.AbstractContextManager[Any]:
    """Within, operations on tensors that have a recipe extend it, and everything else is as it always is."""
    return _Recorder(None, accepts_meta=False) if any_recipes() else contextlib.nullcontext()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Within, nothing is deferred, and the meta device gives what it always gives."""
    _paused[0] += 1
    try:
        yield
    finally:
        _paused[0] -= 1


class _Recorder(TorchDispatchMode):
    def __init__(self, least: int | None, accepts_meta: bool, draws: bool = True) -> None:
        super().__init__()
        self._least = least
        self._draws = draws
        self._accepts_meta = accepts_meta

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if _paused[0]:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            leaves, spec = pytree.tree_flatten((args, kwargs))
            if any(isinstance(leaf, DTensor) for leaf in leaves):
                return NotImplemented  # they call operations on what they hold
            if any(recipes.is_wrapper(leaf) for leaf in leaves):
                return func(*args, **kwargs)
            if any(memory_of(leaf) is not None for leaf in leaves):
                return self._record(func, args, kwargs, leaves, spec)
            return self._create(func, args, kwargs, leaves, spec)

    def _create(self, func: Any, args: Any, kwargs: dict[str, Any], leaves: list[Any], spec: Any) -> Any:
        """An operation on real tensors, or on none."""
        names = {argument.name for argument in func._schema.arguments}
        wants_meta = self._accepts_meta and _is_meta(kwargs.get("device"))
        name = func.overloadpacket.__name__
        bare = any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves)
        if "device" not in names or (bare and kwargs.get("device") is None):
            return func(*args, **kwargs)
        if not wants_meta and (self._least is None or name in _COPIES):
            return func(*args, **kwargs)
        device = _CPU if wants_meta else torch.device(kwargs.get("device") or _device_of(leaves))
        if device.type not in ("cpu", "cuda"):
            return func(*args, **kwargs)
        outline = _on_meta(func, leaves, spec, names)
        numbers = outline.numel() if isinstance(outline, Tensor) else 0
        if not isinstance(outline, Tensor) or (not wants_meta and numbers < (self._least or 0)):
            return func(*args, **kwargs)
        real = [device if _is_meta(leaf) else leaf for leaf in leaves]
        draw = Draw.now(device, leaves) if torch.Tag.nondeterministic_seeded in func.tags else None
        # Values of tensors that only lend their shape would be held for nothing.
        if name.endswith("_like") or name.startswith("new_"):
            real = [_shell(leaf) for leaf in real]
        step = new_step(func, real, spec, draw, is_empty=name in _EMPTY)
        new_memory(outline, 0, step, device)
        if draw is not None and self._draws:
            _advance(func, real, spec)
        return outline

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any], leaves: list[Any], spec: Any) -> Any:
        """An operation with at least one tensor that has a recipe."""
        memories = [memory for leaf in leaves if (memory := memory_of(leaf)) is not None]
        written = _written(func, args, kwargs)
        name = func.overloadpacket.__name__
        if any(tag in func.tags for tag in _DATA_TAGS) or any(memory_of(tensor) is None for tensor in written):
            return _at_once(func, leaves, spec, written)
        try:
            result = _on_meta(func, leaves, spec, {argument.name for argument in func._schema.arguments})
        except NotImplementedError:
            if len(written) != 1:
                return _at_once(func, leaves, spec, written)
            result = written[0]
        except RuntimeError:  # some kernels cannot do without values, and say so in their own words
            if written:
                raise
            return _at_once(func, leaves, spec, written)
        outputs = pytree.tree_leaves(result)
        new = [
            (index, output)
            for index, output in enumerate(outputs)
            if isinstance(output, Tensor) and memory_of(output) is None
        ]
        if not new and not written:
            return result  # a view
        device = memories[0].device
        if kwargs.get("device") is not None and not _is_meta(kwargs["device"]):
            device = torch.device(kwargs["device"])
        real = [device if _is_meta(leaf) else leaf for leaf in leaves]
        draw = Draw.now(device, leaves) if torch.Tag.nondeterministic_seeded in func.tags else None
        overwrites = name in _OVERWRITES or func is torch.ops.aten.bernoulli_.float
        fresh = [_memory(tensor) for tensor in written if overwrites and _covers(tensor)]
        step = new_step(func, real, spec, draw, fresh, is_empty=name in _EMPTY)
        for index, output in new:
            new_memory(output, index, step, device)
        if draw is not None and self._draws:
            if name in _VALUE_FREE or name in _EMPTY:
                real = [_scratch(leaf, device) for leaf in real]
            else:
                real = [_copied(leaf) for leaf in real]
            _advance(func, real, spec)
        for tensor in written:
            _memory(tensor).last = step
        return result


class _Calls(TorchFunctionMode):
    """What does not come as an operation on tensors: questions after the device, and reading through Python."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if _paused[0]:
            return func(*args, **kwargs)
        memory = memory_of(args[0]) if args else None
        if memory is not None:
            if func in _DEVICE_FACTS:
                return _DEVICE_FACTS[func](memory.device)
            if func in _READERS:
                return func(value_of(args[0]), *args[1:], **kwargs)
            if func == Tensor.__deepcopy__ and type(args[0]) is Tensor:
                return _deepcopy(args[0], args[1])
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            args = (args[0], _assignable(args[0], args[1]))
        elif func in _FROM_DATA and _is_meta(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        elif memory_of(kwargs.get("out")) is not None and func in _device_constructors():
            kwargs = {**kwargs, "device": _META}  # torch compares it with the output's own
        return func(*args, **kwargs)


_DEVICE_FACTS: dict[Any, Callable[[torch.device], Any]] = {
    Tensor.device.__get__: lambda device: device,
    Tensor.is_meta.__get__: lambda device: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
    Tensor.get_device: lambda device: -1 if device.index is None else device.index,
}
_READERS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__, Tensor.__format__, Tensor.__reduce_ex__)
_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor)


def constant(tensor: Tensor, device: torch.device = _CPU) -> Tensor:
    """A tensor with a recipe that gives the values of a real one."""
    outline = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    leaves, spec = pytree.tree_flatten(((tensor,), {}))
    new_memory(outline, 0, new_step(torch.clone, leaves, spec, None), device)
    return outline


def made_by(func: Callable[..., Tensor], arguments: Sequence[Any], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor with a recipe whose values a function gives, on the CPU."""
    with recipes.plainly():
        outline = torch.empty(tuple(shape), dtype=dtype, device="meta")
        leaves, spec = pytree.tree_flatten((tuple(arguments), {}))
        new_memory(outline, 0, new_step(func, leaves, spec, None), _CPU)
    return outline


def _assignable(target: Tensor, given: Tensor) -> Tensor:
    """What can be assigned to ``target.data``: both with a recipe, or none."""
    if not isinstance(given, Tensor) or recipes.is_wrapper(target) or recipes.is_wrapper(given):
        return given
    if memory_of(target) is None:
        return value_of(given)
    with recipes.plainly():
        return given if memory_of(given) is not None else constant(given.detach())


def _deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    if id(tensor) not in memo:
        copied = tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_(tensor.requires_grad)
        vars(copied).update(vars(tensor))
        memo[id(tensor)] = copied
    found: Tensor = memo[id(tensor)]
    return found


def _on_meta(func: Any, leaves: Sequence[Any], spec: Any, names: set[str]) -> Any:
    """What ``func`` gives for tensors without values, whatever device it was called for."""

    def outline(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf if leaf.is_meta else leaf.to("meta")
        if isinstance(leaf, torch.Generator):
            return None
        return _META if isinstance(leaf, torch.device) else leaf

    args, kwargs = pytree.tree_unflatten([outline(leaf) for leaf in leaves], spec)
    if "device" in names and not any(isinstance(leaf, Tensor) for leaf in leaves):
        kwargs["device"] = _META
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    return func(*args, **kwargs)


def _at_once(func: Any, leaves: Sequence[Any], spec: Any, written: Sequence[Tensor]) -> Any:
    """Compute an operation whose answer depends on values."""
    if any(memory_of(tensor) is not None for tensor in written):
        raise ConfigError(
            f"{func} changes a tensor of shape {tuple(written[0].shape)} in a way that cannot be done before it has"
            " memory. Build the model without that operation, or fill a new tensor and copy_ it."
        )
    values = [_value(leaf) for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(values, spec)
    recipes.give_back(sum(leaf.untyped_storage().nbytes() for leaf in values if isinstance(leaf, Tensor)))
    return func(*args, **kwargs)


def _value(leaf: Any) -> Any:
    return value_of(leaf) if isinstance(leaf, Tensor) else _CPU if _is_meta(leaf) else leaf


def _copied(leaf: Any) -> Any:
    return value_of(leaf) if memory_of(leaf) is not None else leaf.clone() if isinstance(leaf, Tensor) else leaf


def _scratch(leaf: Any, device: torch.device) -> Any:
    return recipes.Ref.of(leaf, 0).scratch(device) if memory_of(leaf) is not None else leaf


def _advance(func: Any, leaves: Sequence[Any], spec: Any) -> None:
    """Draw the random numbers of an operation and forget them."""
    args, kwargs = pytree.tree_unflatten(list(leaves), spec)
    drawn = pytree.tree_leaves(func(*args, **kwargs))
    used = sum(tensor.numel() * tensor.element_size() for tensor in drawn if isinstance(tensor, Tensor))
    del drawn, args, kwargs
    recipes.give_back(used)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def _covers(tensor: Tensor) -> bool:
    """Whether ``tensor`` is all of its storage, each place once."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    is_whole = tensor.numel() * tensor.element_size() == _memory(tensor).nbytes
    return is_whole and tensor.storage_offset() == 0 and (extent == tensor.numel() or tensor.numel() == 0)


def _memory(tensor: Tensor) -> Memory:
    memory = memory_of(tensor)
    assert memory is not None
    return memory


def _shell(leaf: Any) -> Any:
    """A tensor of the same shape that takes no memory, if its layout is the usual one."""
    if not isinstance(leaf, Tensor) or not (leaf.is_contiguous() or leaf.is_meta):
        return leaf
    if not leaf.is_contiguous():
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
    return torch.empty(1, dtype=leaf.dtype).expand(leaf.shape)


def _device_of(leaves: Sequence[Any]) -> torch.device:
    return next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), _CPU)


def _is_meta(value: object) -> bool:
    return (isinstance(value, torch.device) and value.type == "meta") or value == "meta"
