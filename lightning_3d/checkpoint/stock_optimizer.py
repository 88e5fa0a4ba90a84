"""Names for the numbered state of an optimizer in a file of the stock Trainer, where there is no doubt about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_3d.checkpoint.names import original_name

Shape = tuple[int, ...]

_MOST_PLACES = 20_000
"""How many ways into the groups are followed at once before it counts as doubt."""
_BATCH_NORM = ("running_mean", "running_var")


def names_of_groups(packed: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[list[str]] | str:
    """The parameter names in every group of a torch optimizer's state dict, or why they are not certain.

    Names that the groups hold are taken. Otherwise every group's parameters are looked for among ``tensors`` in their
    order, by the shapes of their state, and taken if there is one way to find them.

    Args:
        packed: What ``Optimizer.state_dict()`` gave.
        tensors: The state dict of the module by plain name, every tied tensor once.
    """
    groups = packed["param_groups"]
    shapes = {number: _shape_of(values) for number, values in packed["state"].items()}
    if has_names(packed):
        found = _with_prefix([group.get("param_names") or group["params"] for group in groups], tensors)
    else:
        candidates = [(name, tuple(tensor.shape)) for name, tensor in tensors.items() if _may_train(name, tensors)]
        found = _in_order([[shapes.get(number) for number in group["params"]] for group in groups], candidates)
    if isinstance(found, str):
        return found
    numbers = [number for group in groups for number in group["params"]]
    names = [name for own in found for name in own]
    if len(numbers) != len(names) or len(set(names)) != len(names) or not shapes.keys() <= set(numbers):
        return "its groups and its state do not fit each other"
    for number, name in zip(numbers, names, strict=True):
        shape = shapes.get(number)
        if shape is not None and shape != tuple(tensors[name].shape):
            return f"the state of {name!r} has the shape {shape}, the parameter {tuple(tensors[name].shape)}"
    return found


def has_names(packed: Mapping[str, Any]) -> bool:
    """Whether the groups of a torch optimizer's state dict hold the names of their parameters."""
    return all(isinstance(n, str) for g in packed["param_groups"] for n in g.get("param_names") or g["params"])


def _shape_of(values: Mapping[str, Any]) -> Shape | None:
    """The shape of a parameter by its state; None where its state does not tell."""
    shapes = {tuple(value.shape) for value in values.values() if isinstance(value, Tensor) and value.dim()}
    return shapes.pop() if len(shapes) == 1 else None


def _may_train(name: str, tensors: Mapping[str, Tensor]) -> bool:
    owner, _, last = name.rpartition(".")
    counted = f"{owner}.num_batches_tracked" if owner else "num_batches_tracked"
    statistics = last in _BATCH_NORM and counted in tensors
    return (tensors[name].is_floating_point() or tensors[name].is_complex()) and not statistics


def _with_prefix(given: Sequence[Sequence[str]], tensors: Mapping[str, Tensor]) -> list[list[str]] | str:
    """Names as an optimizer was given them, which may be those of a submodule."""
    groups = [[original_name(name) for name in own] for own in given]
    names = [name for own in groups for name in own]
    first = names[0] if names else ""
    prefixes = [key.removesuffix(first) for key in tensors if key == first or key.endswith("." + first)]
    fitting = [prefix for prefix in prefixes if all(prefix + name in tensors for name in names)]
    if names and len(fitting) != 1:
        return f"its names, such as {first!r}, are {'not' if not fitting else 'in several places'} in the state dict"
    return [[fitting[0] + name for name in own] for own in groups]


def _in_order(
    groups: Sequence[Sequence[Shape | None]], candidates: Sequence[tuple[str, Shape]]
) -> list[list[str]] | str:
    """The one way to give every group a part of ``candidates``, in their order and disjoint."""
    # By how much of each group is found: how many ways lead there, and the last step of one (group or None, before).
    ways: dict[Shape, tuple[int, Any]] = {(0,) * len(groups): (1, None)}
    total = sum(map(len, groups))
    for place, (name, shape) in enumerate(candidates):
        later: dict[Shape, tuple[int, Any]] = {}
        for counts, (number, path) in ways.items():
            steps = [(counts, path)]
            for group, wanted in enumerate(groups):
                if counts[group] < len(wanted) and wanted[counts[group]] in (None, shape):
                    after = (*counts[:group], counts[group] + 1, *counts[group + 1 :])
                    steps.append((after, (group, name, path)))
            for after, taken in steps:
                if total - sum(after) < len(candidates) - place:
                    later[after] = (later[after][0] + number if after in later else number, taken)
        if len(later) > _MOST_PLACES:
            return "its parameters can be found in too many ways"
        ways = later
    number, path = ways.get(tuple(map(len, groups)), (0, None))
    if number != 1:
        how = "do not come in the order of the state dict" if not number else "can be found in several ways"
        return f"its parameters are numbered, and by their shapes they {how}"
    found: list[list[str]] = [[] for _ in groups]
    while path is not None:
        group, name, path = path
        found[group].append(name)
    return [own[::-1] for own in found]
