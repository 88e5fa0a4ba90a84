"""Further copies of the weights in a checkpoint, such as averages: saved in parts and placed again, as the model is.

A copy is a dict anywhere in Lightning's checkpoint whose keys are keys of the module's state dict and whose values are
what a rank holds under them. Callbacks and hooks need not say that they keep one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lightning_3d.checkpoint.names import original_name
from lightning_3d.checkpoint.parts import placed
from lightning_3d.checkpoint.reader import Source
from lightning_3d.checkpoint.state import MODEL, Entry, ModelState, model_entries, plain
from lightning_3d.collectives import broadcast_object, gather_object
from lightning_3d.mesh import Mesh
from lightning_3d.placeholder import is_placeholder

Path = tuple[str, ...]
"""Keys that lead through a checkpoint's dicts."""
_COPY = "copy."
_EXTRA_STATE = "_extra_state"
_NOT_SEARCHED = frozenset({"state_dict", "optimizer_states", "hyper_parameters", "datamodule_hyper_parameters"})


@dataclass(frozen=True)
class Copy:
    """One copy, as far as this rank holds it."""

    path: Path
    """Where it stands in the checkpoint."""
    values: Mapping[str, Tensor]
    """This rank's tensors."""
    names: tuple[str, ...]
    """Keys on any rank."""
    extra: Mapping[str, Any]
    """Extra state of modules, of all ranks."""


@dataclass(frozen=True)
class _Found:
    """What a rank tells rank 0 of a dict of tensors."""

    is_copy: bool
    names: frozenset[str]
    extra: Mapping[str, Any]


def find_copies(checkpoint: Mapping[str, Any], state: ModelState, mesh: Mesh) -> list[Copy]:
    """The copies in ``checkpoint``, the same in the same order on every rank; collective."""
    held = {name: tuple(plain(tensor).shape) for name, tensor in state.held}
    own = dict(_dicts_of_tensors(checkpoint))
    found = {path: _look_at(values, state, held) for path, values in own.items()}
    # Rank 0 sums up what thousands of ranks say, and no other one holds it.
    everyone: list[dict[Path, _Found]] | None = gather_object(found, mesh.control_world)
    merged: dict[Path, _Found] = broadcast_object(_merged(everyone or []), mesh.control_world)
    copies = []
    for path, report in merged.items():
        values = {original_name(k): v for k, v in own.get(path, {}).items() if isinstance(v, Tensor)}
        copies.append(Copy(path, values, tuple(name for name in state.keys if name in report.names), report.extra))
    return copies


def _merged(everyone: Sequence[Mapping[Path, _Found]]) -> dict[Path, _Found]:
    """What all ranks together say of the dicts that are copies."""
    merged = {}
    for path in dict.fromkeys(path for rank in everyone for path in rank):
        reports = [rank[path] for rank in everyone if path in rank]
        if all(report.is_copy for report in reports):
            names = frozenset(name for report in reports for name in report.names)
            extra = {key: value for report in reversed(reports) for key, value in report.extra.items()}
            merged[path] = _Found(True, names, extra)
    return merged


def copy_entries(copies: Sequence[Copy], state: ModelState, mesh: Mesh) -> list[Entry]:
    """Entries of what this rank holds of each copy."""
    return [
        replace(entry, key=copy_key(number, entry.key.removeprefix(MODEL)))
        for number, copy in enumerate(copies)
        for entry in (model_entries(state, copy.values, mesh) if copy.values else ())
    ]


def copy_key(number: int, name: str) -> str:
    """The key of a tensor in the copy of that number."""
    return f"{_COPY}{number}.{name}"


def without_tensors(checkpoint: Mapping[str, Any], copies: Sequence[Copy]) -> dict[str, Any]:
    """``checkpoint`` with no more than extra state in the place of ``copies``."""
    rest = dict(checkpoint)
    for copy in copies:
        _put(rest, copy.path, dict(copy.extra))
    return rest


def put_stored(
    checkpoint: dict[str, Any],
    described: Sequence[Mapping[str, Any]],
    ties: Mapping[str, str],
    index: Mapping[str, Source],
) -> None:
    """Put stored tensors where the copies that a manifest describes stood."""
    for number, copy in enumerate(described):
        stored = {name: index[copy_key(number, ties.get(name, name))] for name in copy["keys"]}
        _put(checkpoint, tuple(copy["path"]), stored)


def place_copies(checkpoint: dict[str, Any], state: ModelState, mesh: Mesh) -> None:
    """Replace the whole tensors of every copy in ``checkpoint`` by this rank's, in the form of the live ones."""
    live = {**state.parameters, **state.buffers}
    whole = {name: _whole_shape(name, tensor, state) for name, tensor in live.items()}
    for path, values in list(_dicts_of_tensors(checkpoint)):
        sources = {original_name(name): value for name, value in values.items() if isinstance(value, Source)}
        if any(whole.get(name) != tuple(value.shape) for name, value in sources.items()):
            continue
        known: dict[int, Tensor] = {}
        for name, value in sources.items():
            key = id(live[name])
            if key not in known:
                known[key] = placed(name, value, live[name], state, mesh)
        _put(checkpoint, path, {**values, **{name: known[id(live[name])] for name in sources}})


def _put(checkpoint: dict[str, Any], path: Path, values: Mapping[str, Any]) -> None:
    """Merge ``values`` into what stands at ``path``, or replace its tensors; no dict on the way is changed in place."""
    for key in path[:-1]:
        inner = dict(checkpoint.get(key) or {})
        checkpoint[key] = inner
        checkpoint = inner
    before = checkpoint.get(path[-1]) or {}
    kept = {key: value for key, value in before.items() if not isinstance(value, Source)}
    checkpoint[path[-1]] = {**kept, **values}


def _whole_shape(name: str, tensor: Tensor, state: ModelState) -> tuple[int, ...]:
    cut = state.cut_of(name)
    return tuple(cut.global_shape) if cut is not None else tuple(tensor.shape)


def _look_at(values: Mapping[str, Any], state: ModelState, held: Mapping[str, tuple[int, ...]]) -> _Found:
    known = set(state.keys)
    tensors = {original_name(name): value for name, value in values.items() if isinstance(value, Tensor)}
    is_copy = all(
        name in known and (is_placeholder(value) or tuple(plain(value).shape) == held.get(state.first_name(name)))
        for name, value in tensors.items()
    )
    extra = {name: value for name, value in values.items() if not isinstance(value, Tensor)} if is_copy else {}
    return _Found(is_copy, frozenset(tensors), extra)


def _dicts_of_tensors(tree: Mapping[Any, Any], path: Path = ()) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Every dict below ``tree`` that holds nothing but tensors and extra state of modules, with its path."""
    for key, value in tree.items():
        if not isinstance(key, str) or not isinstance(value, Mapping) or (not path and key in _NOT_SEARCHED):
            continue
        tensors = [name for name, item in value.items() if isinstance(item, Source)]
        if (
            tensors
            and all(isinstance(name, str) for name in tensors)
            and all(name in tensors or str(name).endswith(_EXTRA_STATE) for name in value)
        ):
            yield (*path, key), value
        else:
            yield from _dicts_of_tensors(value, (*path, key))
