"""Which blocks are alike, so that one of them can be planned and checked for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_3d.attributes import OF_MODULES
from lightning_3d.tensor_parallel.clone import Ground, GuessValues, trial_clone, trial_tensor
from lightning_3d.tensor_parallel.layout import Rule
from lightning_3d.tensor_parallel.probe import BlockCall, Calls
from lightning_3d.tensor_parallel.search import observed
from lightning_3d.tensor_parallel.sizes import whole_numbers
from lightning_3d.tensor_parallel.visible import visible_state


def built_alike(
    module: nn.Module, names: Sequence[str], rules: dict[str, Rule], chained: set[str]
) -> list[tuple[str, ...]]:
    """The named blocks in groups with the same classes, shapes, numbers of heads and rules.

    Args:
        module: The whole model.
        names: Names of blocks.
        rules: Rules by full name.
        chained: Names of those blocks that the pipeline runs as a chain.
    """
    groups: dict[object, list[str]] = {}
    for name in names:
        block = module.get_submodule(name)
        facts: list[object] = [name in chained]
        for path, part in block.named_modules():
            heads = tuple((k, v) for k, v in sorted(vars(part).items()) if "head" in k and isinstance(v, int))
            heads += tuple(whole_numbers(vars(part).get("config")))
            shapes = tuple((k, None if p is None else tuple(p.shape)) for k, p in part._parameters.items())
            rule = rules.get(f"{name}.{path}") if path else None
            facts.append((path, type(part), shapes, heads, None if rule is None else (rule.style, rule.parts)))
        groups.setdefault(tuple(facts), []).append(name)
    return [tuple(group) for group in groups.values()]


def computing_alike(
    module: nn.Module, group: tuple[str, ...], calls: Calls, batch: int, length: int
) -> list[tuple[str, ...]]:
    """A group of :func:`built_alike` in groups whose blocks are called alike and compute the same.

    What a block computes is what it did in a run without values: every operation, on which tensors, with which numbers.
    Of blocks that differ in nothing that such a run can see, one is run. Blocks that do not run like that are alike if
    their attributes are.

    Args:
        module: The whole model.
        group: Names of blocks.
        calls: How the model called them.
        batch: Samples of made-up calls.
        length: Sequence length of made-up calls.
    """
    if len(group) == 1:
        return [group]
    blocks = {name: module.get_submodule(name) for name in group}
    known = {name: calls.blocks.get(name) or calls.entered.get(name) for name in group}
    attributes = {name: _attributes(block) for name, block in blocks.items()}
    call, ground = None, Ground()
    for name in {key: name for name, key in reversed(attributes.items())}.values():
        call, _, ground, _ = observed(blocks[name], known[name], batch, length)
        if call is not None:
            break
    found: dict[object, list[str]] = {}
    traces: dict[object, object] = {}
    for name, block in blocks.items():
        own = known[name] or call
        key: object = attributes[name]
        if call is not None and own is not None:
            state = visible_state(block, own)
            if state not in traces:
                try:
                    traces[state] = trace(block, own, ground)
                except Exception:
                    traces[state] = None
            done = traces[state]
            key = (_form(own), attributes[name]) if done is None else (_form(own), _values(block), done)
        found.setdefault(key, []).append(name)
    for names in found.values():
        first = known[names[0]] or call
        if first is not None:  # what is read of one of them has to be right in all
            used = [None if (own := known[name]) is None else own.used for name in names]
            union = frozenset[int]().union(*(indices or () for indices in used))
            calls.blocks[names[0]] = replace(first, used=None if None in used else union)
    return [tuple(names) for names in found.values()]


def trace(block: nn.Module, call: BlockCall, ground: Ground) -> tuple[object, ...]:
    """What ``block`` computes in one call: equal for blocks that differ in the values of parameters alone.

    Args:
        block: The block; left as it is.
        call: How it is called.
        ground: Where to run a copy of it.

    Raises:
        Exception: whatever the block raises when it cannot run like that.
    """
    twin = trial_clone(block, ground)
    leaves, spec = call.leaves()
    leaves = [trial_tensor(leaf, ground) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    for index in {call.hidden, *call.trained} - {-1}:
        if leaves[index].is_floating_point():
            leaves[index] = leaves[index].requires_grad_().view_as(leaves[index])  # blocks may write into it
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    known = [*twin.parameters(), *twin.buffers(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
    record = _Record(known)
    with torch.enable_grad(), torch.random.fork_rng(devices=[]), GuessValues(), record:
        output = twin(*args, **kwargs)
    returned = pytree.tree_leaves(output)
    last = tuple(record.form(leaf) if isinstance(leaf, Tensor) else type(leaf) for leaf in returned)
    graph = _graph([leaf.grad_fn for leaf in returned if isinstance(leaf, Tensor) and leaf.grad_fn is not None])
    return (*record.done, last, graph)


class _Record(TorchDispatchMode):
    """Notes every operation, with tensors numbered in the order in which they appear."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.done: list[object] = []
        self._numbers: dict[int, int] = {}
        self._keep: list[Tensor] = []
        for tensor in known:
            self._number(tensor)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = (self.form(args), self.form(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self.done.append((func, torch.is_grad_enabled(), given, self.form(result)))
        return result

    def form(self, value: Any) -> object:
        if isinstance(value, Tensor):
            return self._number(value), tuple(value.shape), value.dtype
        if isinstance(value, (list, tuple)):
            return tuple(self.form(item) for item in value)
        if isinstance(value, dict):
            return tuple((key, self.form(item)) for key, item in value.items())
        return value if value is None or isinstance(value, (str, torch.dtype)) else repr(value)

    def _number(self, tensor: Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._keep)
            self._keep.append(tensor)  # its id must not be used again
        return self._numbers[id(tensor)]


def _graph(queue: list[Any]) -> tuple[object, ...]:
    """Names of the nodes of a graph of gradients, and what each leads to."""
    numbers: dict[Any, int] = {node: index for index, node in enumerate(dict.fromkeys(queue))}
    queue = list(numbers)
    done: list[object] = []
    for node in queue:
        following = []
        for other, place in node.next_functions:
            if other is not None and other not in numbers:
                numbers[other] = len(numbers)
                queue.append(other)
            following.append((None if other is None else numbers[other], place))
        done.append((node.name(), tuple(following)))
    return tuple(done)


def _form(call: BlockCall) -> tuple[object, ...]:
    """How a block is called, without values."""
    leaves, spec = call.leaves()
    forms = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x) for x in leaves)
    return forms, str(spec), call.trained


def _values(block: nn.Module) -> tuple[object, ...]:
    """Single numbers kept as tensors, by which code may choose what to compute."""
    return tuple(
        (f"{path}.{name}", tensor.item())
        for path, part in block.named_modules()
        for name, tensor in (*part._buffers.items(), *vars(part).items())
        if isinstance(tensor, Tensor) and tensor.numel() == 1 and not tensor.is_meta
    )


def _attributes(block: nn.Module) -> tuple[object, ...]:
    """What the modules of ``block`` keep beside parameters, buffers, modules and hooks."""
    return tuple(
        (path, name, _plain(value))
        for path, part in block.named_modules()
        for name, value in vars(part).items()
        if name not in OF_MODULES or name == "training"
    )


def _plain(value: Any) -> object:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if isinstance(value, dict):
        return tuple((repr(key), _plain(item)) for key, item in value.items())
    return type(value), id(getattr(value, "__func__", value))
