"""What happens in a block: which layers read which values, found by running a meta copy of it under autograd."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_3d.tensor_parallel.clone import Ground, GuessValues, trial_clone, trial_tensor
from lightning_3d.tensor_parallel.layers import is_linear
from lightning_3d.tensor_parallel.layout import Position
from lightning_3d.tensor_parallel.probe import BlockCall

OUTPUT = "<output>"


@dataclass
class LayerUse:
    """One call of a linear layer or attention in the block."""

    name: str
    source: int
    """``id`` of the tensor it read."""
    reads: frozenset[str] = frozenset()
    """Layers whose outputs reach its input without passing another layer."""
    reads_hidden: bool = False
    """Whether the hidden states reach its input without passing another layer."""
    parameters: frozenset[str] = frozenset()
    """Parameters of other modules that reach its input that way."""
    depends_on_hidden: bool = False
    """Whether its input depends on the hidden states at all."""
    splits: tuple[int, ...] = ()
    """Sections into which its output is split along the features, as far as seen."""


@dataclass
class Observation:
    """What one call of a block showed."""

    layers: dict[str, LayerUse] = field(default_factory=dict)
    """Linear layers and attentions, in order of their calls; layers called twice are left out."""
    readers: dict[str, frozenset[str]] = field(default_factory=dict)
    """By layer: which layers, or ``OUTPUT``, its output reaches without passing another layer."""
    sizes: dict[str, dict[str, int]] = field(default_factory=dict)
    """By module: whole-number attributes (also ``config.name``) that its code read."""
    inputs: dict[str, dict[Position, tuple[int, bool]]] = field(default_factory=dict)
    """By module: ``id`` of tensor arguments, and whether they depend on the hidden states."""
    shapes: dict[str, dict[Position, tuple[int, ...]]] = field(default_factory=dict)
    """By module: shapes of tensor arguments of any type."""
    trained: dict[str, tuple[Position, ...]] = field(default_factory=dict)
    """By module: arguments that are arguments of the block too, other than its hidden states, and need a gradient."""
    called: set[str] = field(default_factory=set)
    """Modules that ran exactly once."""


def observe(block: nn.Module, call: BlockCall, ground: Ground) -> Observation:
    """Run a copy of ``block`` once, without its values.

    Args:
        block: The original; left as it is.
        call: How it is called.
        ground: Where to run.

    Raises:
        Exception: whatever the block raises when it cannot run like that.
    """
    twin = trial_clone(block, ground)
    watch = _Watch(twin)
    leaves, spec = call.leaves()
    hidden = call.hidden
    leaves = [trial_tensor(leaf, ground) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    if hidden >= 0:
        leaves[hidden] = leaves[hidden].detach().requires_grad_()
        watch.hidden = leaves[hidden]
        leaves[hidden] = leaves[hidden].view_as(leaves[hidden])  # not a leaf: blocks may write into it
    watch.trained = {id(leaves[index]) for index in call.trained if index != hidden}
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    with torch.enable_grad(), torch.random.fork_rng(devices=[]), watch, GuessValues():
        output = twin(*args, **kwargs)
    return watch.finish(call.outputs(output))


class _Mark(torch.autograd.Function):
    """Identity that leaves its tag in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tag: tuple[str, str]) -> Tensor:
        ctx.tag = tag
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Watch:
    def __init__(self, block: nn.Module) -> None:
        self.hidden: Tensor | None = None
        self.trained: set[int] = set()
        self._block = block
        self._parameters = {id(parameter): name for name, parameter in block.named_parameters()}
        self._found = Observation()
        self._entries: dict[str, list[Any]] = {}
        self._calls: dict[str, int] = {}
        self._keep: list[Any] = []
        self._active = False

    def __enter__(self) -> None:
        for name, module in list(self._block.named_modules()):
            if is_linear(module) or isinstance(module, nn.MultiheadAttention):
                module.register_forward_pre_hook(self._before(name), with_kwargs=True)
                module.register_forward_hook(self._after(name))
            elif name:
                module.register_forward_pre_hook(self._arguments(name), with_kwargs=True)
            if not is_linear(module):
                self._record_sizes(name, module)
        self._active = True

    def __exit__(self, *_: Any) -> None:
        self._active = False

    def _before(self, name: str) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._keep.append((args, kwargs))
            self._calls[name] = self._calls.get(name, 0) + 1
            first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
            if name not in self._found.layers:
                self._found.layers[name] = LayerUse(name, id(first))
            marked: dict[int, Tensor] = {}

            def mark(x: Tensor) -> Tensor:
                if not x.is_floating_point():
                    return x
                if id(x) not in marked:
                    marked[id(x)] = _Mark.apply(x, ("in", name))
                    self._entries.setdefault(name, []).append(marked[id(x)].grad_fn)
                return marked[id(x)]

            return pytree.tree_map_only(Tensor, mark, (args, kwargs))

        return hook

    def _after(self, name: str) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            def mark(x: Tensor) -> Tensor:
                return _Mark.apply(x, ("out", name))

            return pytree.tree_map_only(Tensor, mark, output)

        return hook

    def _arguments(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._keep.append((args, kwargs))
            self._calls[name] = self._calls.get(name, 0) + 1
            places: list[tuple[Position, Any]] = [*enumerate(args), *kwargs.items()]
            self._found.shapes.setdefault(name, {p: tuple(x.shape) for p, x in places if isinstance(x, Tensor)})
            self._found.trained.setdefault(name, tuple(place for place, x in places if id(x) in self.trained))
            self._found.inputs.setdefault(
                name,
                {
                    place: (id(x), x.requires_grad)
                    for place, x in places
                    if isinstance(x, Tensor) and x.is_floating_point()
                },
            )

        return hook

    def _record_sizes(self, name: str, module: nn.Module) -> None:
        _spy(module, lambda attribute, value: self._size(name, attribute, value))
        config = vars(module).get("config")
        if config is not None and not isinstance(config, (nn.Module, dict)) and hasattr(config, "__dict__"):
            spied = copy.copy(config)
            _spy(spied, lambda attribute, value: self._size(name, f"config.{attribute}", value))
            module.config = spied

    def _size(self, name: str, attribute: str, value: int) -> None:
        if self._active:
            self._found.sizes.setdefault(name, {})[attribute] = value

    def finish(self, outputs: dict[int, Tensor]) -> Observation:
        self._active = False
        found = self._found
        readers: dict[str, set[str]] = {name: set() for name in found.layers}
        splits: dict[str, list[Any]] = {}
        for name, use in found.layers.items():
            reach = self._reach(self._entries.get(name, []), splits)
            use.reads, use.reads_hidden = frozenset(reach.layers), reach.hidden
            use.parameters = frozenset(reach.parameters)
            for source in reach.layers:
                readers[source].add(name)
        # Of the others it is known when a layout is tried whether they stay whole.
        leading = next(iter(outputs.values()))
        for source in self._reach([leading.grad_fn], splits).layers:
            readers[source].add(OUTPUT)
        found.readers = {name: frozenset(names) for name, names in readers.items()}
        for name, use in found.layers.items():
            use.depends_on_hidden = use.reads_hidden or any(
                found.layers[source].depends_on_hidden for source in use.reads if source in found.layers
            )
            use.splits = _sections(splits.get(name, []))
        found.called = {name for name, count in self._calls.items() if count == 1}
        twice = {name for name, count in self._calls.items() if count > 1}
        found.layers = {name: use for name, use in found.layers.items() if name not in twice}
        return found

    def _reach(self, starts: list[Any], splits: dict[str, list[Any]]) -> _Reach:
        """What lies upstream of ``starts``, up to the next layers."""
        reach = _Reach()
        seen = set()
        queue = [(None, node) for node in starts if node is not None]
        while queue:
            reader, node = queue.pop()
            tag = getattr(node, "tag", None)
            if isinstance(tag, tuple) and tag[0] == "out":
                reach.layers.add(tag[1])
                if reader is not None:
                    splits.setdefault(tag[1], []).append(reader)
                continue
            if node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None:
                if variable is self.hidden:
                    reach.hidden = True
                elif id(variable) in self._parameters:
                    reach.parameters.add(self._parameters[id(variable)])
            queue.extend((node, following) for following, _ in node.next_functions if following is not None)
        return reach


@dataclass
class _Reach:
    layers: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    hidden: bool = False


def _sections(readers: list[Any]) -> tuple[int, ...]:
    """Sections from the nodes that read a layer's output: a split, or slices that tile it."""
    bounds: set[tuple[int, int]] = set()
    for node in readers:
        name = node.name()
        if name.startswith("SplitWithSizesBackward"):
            return tuple(int(size) for size in node._saved_split_sizes)
        if name.startswith("SplitBackward"):
            return (int(node._saved_split_size),)
        if name.startswith("SliceBackward"):
            bounds.add((int(node._saved_start), int(node._saved_end)))
    ordered = sorted(bounds)
    if len(ordered) > 1 and ordered[0][0] == 0:
        tiles = all(left[1] == right[0] for left, right in itertools.pairwise(ordered))
        if tiles:
            return tuple(end - start for start, end in ordered)
    return ()


def _spy(obj: Any, note: Callable[[str, int], None]) -> None:
    """Tell ``note`` of every whole-number attribute that is read from ``obj``."""
    cls: Any = type(obj)

    def read(self: Any, name: str) -> Any:
        value = cls.__getattribute__(self, name)
        if type(value) is int and not name.startswith("__"):
            note(name, value)
        return value

    obj.__class__ = type(cls.__name__, (cls,), {"__getattribute__": read, "__module__": cls.__module__})


def ancestors(name: str) -> Iterator[str]:
    """The modules around ``name``, innermost first; the last is the block itself, ``""``."""
    while name:
        name = name.rpartition(".")[0]
        yield name
