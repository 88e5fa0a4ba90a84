"""Finding the layers of a model that a pipeline can share out: its blocks, which are called one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_3d.errors import StageError
from lightning_3d.pipeline.observe import call_order
from lightning_3d.pipeline.repeated import is_block_list, repeated_layers
from lightning_3d.pipeline.teachers import teachers_among

_JOINS_FROM = 0.25
"""Share of the largest list's parameters from which on a list of another class becomes a part of the chain."""


@dataclass(frozen=True)
class BlockList:
    """One list of repeated layers of the model."""

    name: str
    """Fully qualified name of the ``ModuleList`` or ``Sequential``."""
    blocks: tuple[str, ...]
    """Fully qualified names of its children, in order."""


def find_block_lists(
    module: nn.Module, wanted: str | Sequence[str] = "auto", num_chunks: int = 1, order: Sequence[str] | None = None
) -> list[BlockList]:
    """The lists of repeated layers, in registration order (or in the order in which the user named them).

    ``"auto"`` takes the ``ModuleList`` or ``Sequential`` with the most parameters whose children share a class, and
    with it other lists outside of it with children of the same class. For a pipeline it also takes lists of other
    classes that are called before or after it (encoder and decoder form one chain). Where that makes fewer blocks than
    chunks it takes, in turn: the lists within its blocks; the children of a ``Sequential`` of various layers; the calls
    of the blocks of a list that is run through several times; the calls of one module that is called again and again.

    Args:
        module: The whole model.
        wanted: ``"auto"`` or names of lists.
        num_chunks: Pipeline stages times virtual stages.
        order: Names of modules in the order of their calls, empty if unknown; for a pipeline it is looked for.

    Raises:
        StageError: if a named list does not exist.
    """
    modules = dict(module.named_modules())
    if wanted != "auto":
        names = [wanted] if isinstance(wanted, str) else list(wanted)
        return [_named_list(modules, name) for name in names]
    if order is None and num_chunks > 1:
        order = call_order(module) or ()
    sequence = order if order is not None and num_chunks > 1 else ()
    calls = Counter(sequence)
    candidates = repeated_layers(module)
    asked = teachers_among(candidates, lambda: sequence or call_order(module))
    usable = {name: child for name, child in candidates.items() if name not in asked and _each_once(child, name, calls)}
    found = [_block_list(name, modules[name]) for name in _chain(usable, sequence)]
    if _count(found) < num_chunks:
        found = [inner for item in found for inner in _within(item, usable)]
    if _count(found) < num_chunks and not found:
        found = _various(modules, calls)
    if _count(found) < num_chunks:
        rest = {name: child for name, child in candidates.items() if name not in asked and name not in usable}
        found = _called_again(rest, sequence, num_chunks) or _repeated(modules, calls, num_chunks) or found
    return found


def in_call_order(blocks: Sequence[str], order: Sequence[str] | None) -> tuple[str, ...]:
    """``blocks`` as they are called, if that is known and each is called once; else as they are."""
    calls = Counter(order or ())
    if any(calls[name] != 1 for name in blocks) or len(set(blocks)) < len(blocks):
        return tuple(blocks)
    place = {name: index for index, name in enumerate(order or ())}
    return tuple(sorted(blocks, key=place.__getitem__))


def _chain(lists: Mapping[str, nn.Module], order: Sequence[str]) -> list[str]:
    """Names of the lists that form the chain, in the order of registration."""
    if not lists:
        return []
    largest = max(lists, key=lambda name: _num_parameters(lists[name]))
    kind = type(next(iter(lists[largest].children())))
    chosen: list[str] = [largest]
    for name, child in lists.items():
        if any(_one_in_other(name, other) for other in chosen):
            continue
        block = next(iter(child.children()))
        large = _num_parameters(child) >= _JOINS_FROM * _num_parameters(lists[largest])
        composite = any(True for _ in block.children())
        if type(block) is kind or (large and composite and _apart(name, chosen, lists, order)):
            chosen.append(name)
    return [name for name in lists if name in chosen]


def _apart(name: str, chosen: Sequence[str], lists: Mapping[str, nn.Module], order: Sequence[str]) -> bool:
    """Whether the blocks of a list are called before or after those of each chosen one, not in between."""
    own = _places(name, lists, order)
    others = [_places(other, lists, order) for other in chosen]
    return bool(own) and all(not other or own[-1] < other[0] or other[-1] < own[0] for other in others)


def _places(name: str, lists: Mapping[str, nn.Module], order: Sequence[str]) -> list[int]:
    blocks = set(_block_list(name, lists[name]).blocks)
    return [place for place, called in enumerate(order) if called in blocks]


def _each_once(child: nn.Module, name: str, calls: Counter[str]) -> bool:
    return not calls or all(calls[block] == 1 for block in _block_list(name, child).blocks)


def _within(item: BlockList, lists: Mapping[str, nn.Module]) -> list[BlockList]:
    """The lists within the blocks of a list, if these are made of them; else the list."""
    inner: list[str] = []
    for name in lists:
        if name.startswith(f"{item.name}.") and not any(_one_in_other(name, other) for other in inner):
            inner.append(name)
    parts = sum(_num_parameters(lists[name]) for name in inner)
    if 2 * parts < _num_parameters(lists[item.name]):
        return [item]
    return [_block_list(name, lists[name]) for name in inner]


def _various(modules: Mapping[str, nn.Module], calls: Counter[str]) -> list[BlockList]:
    """The ``Sequential`` or list of layers of various classes that has the most parameters."""
    lists = {
        name: child
        for name, child in modules.items()
        if name and isinstance(child, nn.ModuleList | nn.Sequential) and _each_once(child, name, calls)
    }
    holding = {
        name: child for name, child in lists.items() if sum(_num_parameters(part) > 0 for part in child.children()) > 1
    }
    largest = max(holding, key=lambda name: _num_parameters(holding[name]), default=None)
    return [] if largest is None else [_block_list(largest, holding[largest])]


def _called_again(lists: Mapping[str, nn.Module], order: Sequence[str], num_chunks: int) -> list[BlockList]:
    """The calls of the blocks of the list with the most parameters, where there are enough."""
    found = {name: tuple(order[place] for place in _places(name, lists, order)) for name in lists}
    largest = max(lists, key=lambda name: _num_parameters(lists[name]), default=None)
    if largest is None or len(found[largest]) < num_chunks:
        return []
    return [BlockList(largest, found[largest])]


def _repeated(modules: Mapping[str, nn.Module], calls: Counter[str], num_chunks: int) -> list[BlockList]:
    """The calls of the module with the most parameters that is called often enough."""
    often = [name for name, count in calls.items() if count >= num_chunks and _num_parameters(modules[name]) > 0]
    largest = max(often, key=lambda name: _num_parameters(modules[name]), default=None)
    return [] if largest is None else [BlockList(largest, (largest,) * calls[largest])]


def _count(lists: Sequence[BlockList]) -> int:
    return sum(len(item.blocks) for item in lists)


def _one_in_other(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")


def _named_list(modules: Mapping[str, nn.Module], name: str) -> BlockList:
    if name not in modules or not isinstance(modules[name], nn.ModuleList | nn.Sequential | nn.ModuleDict):
        lists = [key for key, child in modules.items() if key and is_block_list(child)]
        raise StageError(
            f"pipeline_blocks names {name!r}, which is not a ModuleList, ModuleDict or Sequential of this model. Lists"
            f" of repeated layers that it has: {', '.join(lists) or 'none'}."
        )
    return _block_list(name, modules[name])


def _block_list(name: str, module: nn.Module) -> BlockList:
    return BlockList(name, tuple(f"{name}.{child}" for child, _ in module.named_children()))


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
