"""Stand-ins for values that another pipeline stage holds."""

from __future__ import annotations

import operator
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import Self, override

from lightning_3d.attributes import carry_attributes
from lightning_3d.errors import StageError
from lightning_3d.provenance import Recipe, Root, version_of

_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}


_ATOMS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size})
"""Types of which there are many among arguments, and which hold no tensors."""


class _ReadError(StageError):
    """An operation needs the values of a placeholder."""


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_WRITES = frozenset({"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow"))})
"""Names of operations that write and do not end in a single underscore."""


class _Context:
    """What the pipeline wants of operations on placeholders while it runs a step."""

    recording: bool = False
    demand: Callable[[list[Placeholder]], bool] | None = None
    random: bool = False
    refuse_writes: bool = False
    inside: str = ""


_context = _Context()


def refuse_lost_writes() -> None:
    """From now on, refuse to write a placeholder into a real tensor, which would be lost without a word."""
    _context.refuse_writes = True


@contextmanager
def lost_writes() -> Iterator[None]:
    """Within, such writes go nowhere: a module that another stage runs keeps its buffers there."""
    before, _context.refuse_writes = _context.refuse_writes, False
    try:
        yield
    finally:
        _context.refuse_writes = before


@contextmanager
def recording() -> Iterator[None]:
    """Within, placeholders remember how they were made, so that they can be made again from real tensors."""
    _context.recording = True
    try:
        yield
    finally:
        _context.recording, _context.demand = False, None


@contextmanager
def inside_of(name: str) -> Iterator[None]:
    """Within, operations are those of a module that another stage runs: what it keeps of them stays there."""
    before, _context.inside = _context.inside, name
    try:
        yield
    finally:
        _context.inside = before


def bind_on_demand(demand: Callable[[list[Placeholder]], bool]) -> None:
    """From now on until :func:`recording` ends, an operation of real tensors with placeholders asks for their values.

    Args:
        demand: Binds placeholders; returns whether it could.
    """
    _context.demand = demand


class Placeholder(Tensor):
    """A tensor without values, on a real device, which stands for what another stage computes.

    It holds a meta tensor; every operation on it runs on meta and gives placeholders, so shapes, types and the fact
    that a value depends on another stage follow through any user code. Once the value has arrived it is *bound*
    (:meth:`bind`): later operations then see the real tensor in its place, before autograd does.
    """

    meta: Tensor
    bound: Tensor | None
    origin: str
    source: Root | tuple[Recipe, int] | None
    """The module output it stands for, or the operation that made it and its place among the results."""

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device, requires_grad: bool = False, origin: str = "") -> Self:
        """A placeholder with the shape and type of ``meta``."""
        return Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            layout=meta.layout,
            device=device,
            requires_grad=requires_grad,
        )

    def __init__(self, meta: Tensor, device: torch.device, requires_grad: bool = False, origin: str = "") -> None:
        self.meta = meta.detach()
        self.bound = None
        self.origin = origin
        self.source = None
        self._version_then = 0

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool = False,
        origin: str = "",
    ) -> Self:
        """A placeholder from the facts of a tensor; ``origin`` names the module whose output it is."""
        return cls(torch.empty(tuple(shape), dtype=dtype, device="meta"), device, requires_grad, origin)

    @classmethod
    def like(cls, tensor: Tensor, origin: str = "") -> Self:
        """A placeholder with the shape, type, device and ``requires_grad`` of ``tensor``."""
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return cls(meta, tensor.device, tensor.requires_grad, origin)

    def bind(self, tensor: Tensor) -> None:
        """Let ``tensor`` take this placeholder's place in every later operation."""
        self.bound = tensor

    def comes_from(self, source: Root | tuple[Recipe, int]) -> None:
        """Note what this placeholder stands for, as it is now."""
        self.source = source
        self._version_then = version_of(self)

    @property
    def changed(self) -> bool:
        """Whether it was changed in place since it came from its source."""
        return version_of(self) != self._version_then

    @classmethod
    @override
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], Placeholder):
            # Mostly reads of attributes, which loops over all parameters make in every step.
            bound = args[0].bound
            args = args if bound is None else (bound,)
        else:
            args, kwargs = resolve((args, kwargs or {}))
            if _context.demand is not None and _bind_mixed((args, kwargs), _context.demand):
                args, kwargs = resolve((args, kwargs))
            if getattr(func, "__name__", "").endswith("_") and not _may_write(func, args, kwargs):
                return None
        try:
            return (_remembered if _context.recording else _run)(func, args, kwargs or {})
        except _ReadError as error:
            raise StageError(str(error)) from None

    @classmethod
    @torch.compiler.disable  # functions of the user that are compiled and get placeholders run as they are
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        flat, spec = pytree.tree_flatten((args, kwargs))
        first = next(item for item in flat if isinstance(item, Placeholder))
        if func in _READS:
            raise _ReadError(_read_message(func, first))
        if _context.refuse_writes and func._schema.is_mutable:
            for argument, value in (*zip(func._schema.arguments, args, strict=False), *_by_keyword(func, kwargs)):
                if argument.is_write and isinstance(value, Tensor) and not isinstance(value, Placeholder):
                    refuse_write(first)
        if torch.Tag.nondeterministic_seeded in func.tags:
            _context.random = True
        device, origin = first.device, first.origin
        metas = [_to_meta(item) for item in flat]
        meta_args, meta_kwargs = pytree.tree_unflatten(metas, spec)
        if isinstance(meta_kwargs.get("device"), torch.device):
            device = kwargs["device"]
            meta_kwargs["device"] = torch.device("meta")
        try:
            result = func(*meta_args, **meta_kwargs)
        except NotImplementedError as error:  # the shape of the result depends on values
            raise _ReadError(_read_message(func, first)) from error
        aliases = {id(meta): item for meta, item in zip(metas, flat, strict=True) if isinstance(item, Placeholder)}

        def wrap(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return item
            return aliases[id(item)] if id(item) in aliases else Placeholder(item, device, origin=origin)

        return pytree.tree_map(wrap, result)

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self.bound is not None:
            return repr(self.bound)
        shape = tuple(self.shape)
        return f"Placeholder(shape={shape}, dtype={self.dtype}, device='{self.device}', from={self.origin!r})"

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy: Tensor = Placeholder(self.meta, self.device, self.requires_grad, self.origin)
        if isinstance(self, nn.Parameter) or getattr(self, "_is_param", False):
            copy = nn.Parameter(copy.detach(), requires_grad=self.requires_grad)
        memo[id(self)] = copy
        return copy


def _by_keyword(func: Any, kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]


def _bind_mixed(tree: Any, demand: Callable[[list[Placeholder]], bool]) -> bool:
    """Ask for the placeholders of an operation that has real tensors too; whether they are bound now."""
    leaves = leaves_of(tree)
    unbound = [leaf for leaf in leaves if isinstance(leaf, Placeholder)]
    mixed = any(isinstance(leaf, Tensor) and not isinstance(leaf, Placeholder) for leaf in leaves)
    return bool(unbound) and mixed and demand(unbound)


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            # What a module of another stage gives is a leaf here, which autograd does not let change in place.
            if "leaf Variable that requires grad" not in str(error) or not is_placeholder(args[0] if args else None):
                raise
            with torch.no_grad():
                return func(*args, **kwargs)


def _remembered(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation, and let the placeholders that it makes know how they were made."""
    _context.random = False
    try:
        result = _run(func, args, kwargs)
    except _ReadError:
        unbound = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Placeholder)]
        if _context.demand is None or not _context.demand(unbound):
            raise
        args, kwargs = resolve((args, kwargs))
        return func(*args, **kwargs)
    if isinstance(result, Placeholder):
        made = [result]
    elif isinstance(result, tuple | list) and not isinstance(result, torch.Size):
        made = pytree.tree_leaves(result)
    else:
        return result
    recipe: Recipe | None = None
    for index, item in enumerate(made):
        if isinstance(item, Placeholder) and item.source is None:
            recipe = recipe or Recipe(func, args, kwargs, random=_context.random, inside=_context.inside)
            if not any(item is leaf for leaf in recipe.leaves):
                item.comes_from((recipe, index))
    return result


def _may_write(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether an operation that may write in place is to run: not where what it sets is another stage's."""
    if func == _SET_DATA:
        return isinstance(args[1], Placeholder)
    if not _context.refuse_writes or (func.__name__.endswith("__") and func.__name__ not in _WRITES):
        return True
    targets = leaves_of(args[:1])
    if any(isinstance(item, Tensor) and not isinstance(item, Placeholder) for item in targets):
        for item in leaves_of((args, kwargs)):
            refuse_write(item)
    return True


def refuse_write(value: object) -> None:
    """Refuse that ``value`` is written into a tensor of this stage.

    Raises:
        StageError: if another stage holds it.
    """
    if is_placeholder(value):
        raise StageError(
            f"{user_line()} writes a value of {value.origin!r}, which another pipeline stage holds, into a tensor of"  # type: ignore[attr-defined]
            " this stage, where it would be lost. Combine only what stands on the same stage, such as parameters with"
            " copies made of them once training begins; let a callback such as WeightAveraging keep averages; or use"
            " pipeline_parallel=1."
        )


def is_placeholder(value: object) -> bool:
    """Whether ``value`` is a placeholder whose real tensor has not arrived here."""
    return isinstance(value, Placeholder) and value.bound is None


def resolve(tree: Any) -> Any:
    """``tree`` with every bound placeholder replaced by the tensor it is bound to; the same object if there is none."""
    if isinstance(tree, Tensor):
        return tree.bound if isinstance(tree, Placeholder) and tree.bound is not None else tree
    kind = type(tree)
    if kind in _ATOMS:
        return tree
    if kind is tuple or kind is list:
        items = [resolve(item) for item in tree]
        return tree if all(map(operator.is_, items, tree)) else kind(items)
    if kind is dict:
        values = {key: resolve(value) for key, value in tree.items()}
        return tree if all(map(operator.is_, values.values(), tree.values())) else values
    if pytree.tree_is_leaf(tree):
        return tree
    return pytree.tree_map_only(Placeholder, resolve, tree)


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of ``tree`` in pytree's order, with every bound placeholder replaced by its tensor."""
    found: list[Any] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Any]) -> None:
    kind = type(tree)
    if kind is tuple or kind is list:
        for item in tree:
            _collect(item, found)
    elif kind is dict:
        for item in tree.values():
            _collect(item, found)
    elif isinstance(tree, Placeholder):
        found.append(tree if tree.bound is None else tree.bound)
    elif kind in _ATOMS or isinstance(tree, Tensor) or pytree.tree_is_leaf(tree):
        found.append(tree)
    else:
        found.extend(resolve(leaf) for leaf in pytree.tree_leaves(tree))


def try_bind(value: Placeholder) -> bool:
    """Ask for the value of a placeholder where the running step can; whether it is bound now."""
    return _context.demand is not None and _context.demand([value])


def placeholder_parameter(parameter: nn.Parameter, device: torch.device, name: str) -> nn.Parameter:
    """The parameter that stands for one of another stage: same facts and attributes, on ``device``, no memory."""
    meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    new = nn.Parameter(Placeholder(meta, device, origin=name), requires_grad=parameter.requires_grad)
    carry_attributes(parameter, new)
    return new


def _to_meta(item: Any) -> Any:
    if isinstance(item, Placeholder):
        return item.meta
    if isinstance(item, Tensor):
        # Meta kernels take scalars from the host beside their own tensors, from no other device.
        is_scalar = item.dim() == 0 and item.device.type == "cpu"
        return item if item.is_meta or is_scalar else item.to("meta")
    return item


def user_line() -> str:
    """``file:line`` of the innermost frame of the running code that belongs neither to torch nor to this package."""
    ours = os.path.dirname(os.path.abspath(__file__)) + os.sep
    models = os.path.join(ours, "models") + os.sep
    foreign = (os.path.dirname(torch.__file__) + os.sep, ours)
    for frame in reversed(traceback.extract_stack()):
        path = os.path.abspath(frame.filename)
        if path.startswith(models) or not (path.startswith(foreign) or "lightning" + os.sep + "pytorch" in path):
            return f"{path}:{frame.lineno} ({(frame.line or '').strip()})"
    return "unknown line"


def _read_message(func: Any, placeholder: Placeholder) -> str:
    origin = f" (it comes from {placeholder.origin!r})" if placeholder.origin else ""
    return (
        f"{user_line()} reads the value of a tensor{origin} that another pipeline stage computes, through"
        f" {func.name() if hasattr(func, 'name') else func}. A pipeline stage sees only its own part of the model, so"
        " code between the blocks must not branch on, print or convert activations. Move that line after the loss,"
        " compute the decision from the batch, or use pipeline_parallel=1."
    )
