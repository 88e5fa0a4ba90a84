"""How the model calls its blocks: found by running it on the meta device, without values or memory."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_3d.example_inputs import example_inputs, has_forward
from lightning_3d.tensor_parallel.clone import Ground, GuessValues, trial_tensor, without_hooks


@dataclass(frozen=True)
class BlockCall:
    """The arguments of one call of a block, with meta tensors for what depends on the model's input."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    trained: frozenset[int] = frozenset()
    """Indices among the leaves of ``(args, kwargs)`` of tensors whose gradient the model needs."""
    used: frozenset[int] | None = None
    """Indices among the leaves of what the block returns of tensors that anything reads; ``None`` if unknown."""

    @property
    def hidden(self) -> int:
        """Index of the hidden states among the leaves of ``(args, kwargs)``; -1 if there are none."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        found = (i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point())
        return next((i for i in found if leaves[i].dim() >= 2), -1)

    def leaves(self) -> tuple[list[Any], Any]:
        """Flat arguments and how to put them together again."""
        return pytree.tree_flatten((self.args, self.kwargs))

    def outputs(self, output: Any) -> dict[int, Tensor]:
        """The tensors of what the block returned that count, by index among the leaves; the leading one first."""
        found = {
            index: leaf
            for index, leaf in enumerate(pytree.tree_leaves(output))
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
        }
        leading = next(iter(found), -1)
        return {i: leaf for i, leaf in found.items() if i == leading or self.used is None or i in self.used}


@dataclass
class Calls:
    """What a meta run of the model showed."""

    entered: dict[str, BlockCall] = field(default_factory=dict)
    """Call of every block that was called with hidden states, even if it then failed on meta tensors."""
    blocks: dict[str, BlockCall] = field(default_factory=dict)
    """Call of every block that was reached."""
    loose: set[int] = field(default_factory=set)
    """``id`` of parameters that are read outside the forward of the module which holds them."""


@dataclass(frozen=True)
class _Way:
    """How a run is attempted."""

    narrow: bool = False
    """Whether float64 becomes float32."""
    grad: bool = True


def probe(root: nn.Module, wanted: Sequence[str], batch: int, length: int, noted: Sequence[str] = ()) -> Calls:
    """Run ``root`` or the part of it that holds the blocks on meta tensors until all ``wanted`` blocks were called.

    Inputs are those of ``example_inputs``, then hidden states. Blocks that no attempt reaches are missing from the
    answer.

    Args:
        root: The whole model; left as it is.
        wanted: Names of blocks.
        batch: Samples of made-up inputs.
        length: Sequence length of made-up inputs.
        noted: Names of further blocks, whose calls are kept if there are any.
    """
    calls = Calls()
    names = dict.fromkeys([*wanted, *noted])
    for way in (_Way(), _Way(narrow=True), _Way(grad=False)):
        for module, arguments in _attempts(root, wanted, batch, length):
            if all(name in calls.blocks for name in wanted):
                return calls
            for args, kwargs in arguments():
                found = Calls()
                with contextlib.suppress(Exception), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of what made-up inputs make code do
                    _run(root, module, [*names], args, kwargs, found, way)
                for name, call in found.entered.items():
                    calls.entered.setdefault(name, call)
                new = {name: call for name, call in found.blocks.items() if name not in calls.blocks}
                if new:
                    calls.blocks.update(new)
                    calls.loose |= found.loose
                if not new.keys().isdisjoint(wanted):
                    break
    return calls


def _attempts(
    root: nn.Module, wanted: Sequence[str], batch: int, length: int
) -> Iterator[tuple[nn.Module, Callable[[], Iterator[tuple[tuple[Any, ...], dict[str, Any]]]]]]:
    """Modules to call, outermost first, and the arguments to try on each."""
    hidden = _hidden_size(root, wanted)
    paths = sorted({path for name in wanted for path in _ancestors(name)}, key=lambda path: path.count("."))
    for path in paths:
        module = root.get_submodule(path)
        if not has_forward(module) or isinstance(module, nn.ModuleList):
            continue

        def arguments(module: nn.Module = module) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
            for args, kwargs in example_inputs(module, batch, length):
                yield pytree.tree_map(_to_meta, (args, kwargs))
            ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
            yield (ids, ids), {}
            if hidden:
                dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
                state = torch.zeros(batch, length, hidden, device="meta", dtype=dtype)
                yield (state,), {}
                yield (state[:, 0],), {}
                yield (state, state), {}

        yield module, arguments


def _run(
    root: nn.Module,
    module: nn.Module,
    wanted: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    calls: Calls,
    way: _Way,
) -> None:
    missing = set(wanted)
    pending: dict[str, BlockCall] = {}
    returned: dict[str, list[Any]] = {}
    handles = []
    ground = Ground(narrow=way.narrow)

    def seen(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name in missing:
                leaves = pytree.tree_leaves((args, dict(kwargs)))
                trained = (i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad)
                args, kwargs = pytree.tree_map_only(Tensor, torch.Tensor.detach, (args, dict(kwargs)))
                pending[name] = BlockCall(tuple(map(_without_cache, args)), _without_caches(kwargs), frozenset(trained))
                if pending[name].hidden >= 0:
                    calls.entered.setdefault(name, pending[name])

        return hook

    def done(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            # Only what the block could run on tells how it is called.
            if name in missing:
                missing.discard(name)
                calls.blocks[name] = pending[name]
                returned[name] = pytree.tree_leaves(output)
                watch.given.update(id(leaf) for leaf in returned[name] if isinstance(leaf, Tensor))

        return hook

    attributes = {part: dict(vars(part)) for part in root.modules()}
    for part in root.modules():
        vars(part).update(without_hooks(part))
    watch = _Watch(module, calls.loose)
    try:
        for name in wanted:
            handles.append(root.get_submodule(name).register_forward_pre_hook(seen(name), with_kwargs=True))
            handles.append(root.get_submodule(name).register_forward_hook(done(name)))
        tensors = _on_meta(module, ground)
        watch.follow(tensors)
        if way.narrow:
            args, kwargs = pytree.tree_map_only(Tensor, lambda x: trial_tensor(x, ground), (args, kwargs))
        with torch.set_grad_enabled(way.grad), torch.random.fork_rng(devices=[]), watch, GuessValues():
            result = torch.func.functional_call(module, tensors, args, kwargs, tie_weights=False)
        watch.read |= {id(leaf) for leaf in _leaves(result)} & watch.given
        for name, leaves in returned.items():
            used = frozenset(i for i, leaf in enumerate(leaves) if id(leaf) in watch.read)
            calls.blocks[name] = replace(calls.blocks[name], used=used)
    finally:
        watch.remove()
        for handle in handles:
            handle.remove()
        for part, values in attributes.items():
            vars(part).clear()
            vars(part).update(values)


def _leaves(value: Any, depth: int = 0) -> Iterator[Any]:
    """Tensors in what a model returns: in containers of any kind, and in attributes of objects."""
    if isinstance(value, Tensor):
        yield value
    elif depth < 6:
        if isinstance(value, Mapping):
            inner: Any = value.values()
        elif isinstance(value, (list, tuple, set)):
            inner = value
        else:
            inner = getattr(value, "__dict__", {}).values()
        for item in inner:
            yield from _leaves(item, depth + 1)


def _on_meta(module: nn.Module, ground: Ground) -> dict[str, Tensor]:
    """Parameters and buffers on the meta device; a module with two names once: exchanged twice, it is not restored."""
    made: dict[int, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for path, part in module.named_modules():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is None:
                continue
            if id(tensor) not in made:
                trained = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
                made[id(tensor)] = trial_tensor(tensor, ground).requires_grad_(trained)
            tensors[f"{path}.{name}".lstrip(".")] = made[id(tensor)]
    return tensors


class _Watch(TorchFunctionMode):
    """Notes parameters of embeddings and linear layers that are read while another module runs."""

    def __init__(self, module: nn.Module, loose: set[int]) -> None:
        super().__init__()
        self.given: set[int] = set()
        """``id`` of tensors that blocks returned."""
        self.read: set[int] = set()
        """Those of them that were read."""
        self._loose = loose
        self._owners = [part for part in module.modules() if isinstance(part, (nn.Linear, nn.Embedding))]
        self._names = {id(part): name for name, part in module.named_modules()}
        self._original: dict[str, int] = {
            name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)
        }
        self._watched: dict[int, int] = {}
        self._depth = 0
        self._handles: list[Any] = []
        for part in self._owners:
            self._handles.append(part.register_forward_pre_hook(self._enter))
            self._handles.append(part.register_forward_hook(self._leave, always_call=True))

    def follow(self, tensors: Mapping[str, Tensor]) -> None:
        """Watch the meta tensors that stand for the owners' parameters."""
        for part in self._owners:
            for name in part._parameters:
                full = f"{self._names[id(part)]}.{name}".lstrip(".")
                if full in tensors:
                    self._watched[id(tensors[full])] = self._original[full]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, *_: Any) -> None:
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        self._depth -= 1

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") != "__get__":
            for value in (*args, *(kwargs or {}).values()):
                if self._depth == 0 and id(value) in self._watched:
                    self._loose.add(self._watched[id(value)])
                for item in value if isinstance(value, (list, tuple)) else (value,):
                    if id(item) in self.given:
                        self.read.add(id(item))
        return func(*args, **(kwargs or {}))


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")[:-1]
    return [".".join(parts[:length]) for length in range(len(parts) + 1)]


def _hidden_size(root: nn.Module, wanted: Sequence[str]) -> int:
    for name in wanted:
        for part in root.get_submodule(name).modules():
            size = getattr(part, "embed_dim", getattr(part, "in_features", 0))
            if isinstance(size, int) and size:
                return size
    return 0


def _without_cache(value: Any) -> Any:
    """Key/value caches grow with every call, which a trial must not see."""
    return None if "cache" in type(value).__name__.lower() else value


def _without_caches(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: False if key == "use_cache" else _without_cache(value) for key, value in kwargs.items()}


def _to_meta(value: Any) -> Any:
    return value.detach().to("meta") if isinstance(value, Tensor) else value
