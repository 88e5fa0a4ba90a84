"""What a rank puts into a checkpoint: its tensors, and which part of the whole model each is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_3d.checkpoint.layout import Chunk, Cut, Shard, Share, local_chunks, local_shape
from lightning_3d.checkpoint.names import by_original_name, group_names, original_name
from lightning_3d.errors import CheckpointError
from lightning_3d.mesh import Mesh
from lightning_3d.placeholder import is_placeholder

MODEL = "model."
OPTIMIZER = "optimizer."


@dataclass(frozen=True, kw_only=True)
class ModelState:
    """A rank's view of the whole model, for saving and loading.

    Names may carry the prefixes of compile and checkpoint wrappers; they are taken out. Under FSDP2 the parameters
    must be the sharded ones: reshard before saving, and after loading, what is gathered.
    """

    parameters: Mapping[str, Tensor]
    """Every parameter under all its names (``named_parameters(remove_duplicate=False)``); those of other stages are
    placeholders, and skipped. A stage may hold a tied parameter under its second name alone."""
    keys: Sequence[str]
    """Keys of the whole module's state dict, in order (:func:`~lightning_3d.checkpoint.names.state_dict_keys`)."""
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """The persistent buffers of this rank's modules. Those of replica 0 are saved, as one process has one of each."""
    borrowed: frozenset[str] = frozenset()
    """Buffers (and parameters) that are loaded here but saved by another stage, which holds the truth about them."""
    ties: Mapping[str, str] = field(default_factory=dict)
    """Second names of tied parameters, each with the first name."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """How tensor parallelism cut parameters; a DTensor without an entry is cut as its placement says."""
    optimizers: Sequence[Optimizer] = ()
    groups: Sequence[Sequence[Sequence[str]]] | None = None
    """Per optimizer and group the parameter names of the *whole* model, in the order of ``configure_optimizers``;
    ``None`` reads them from the optimizers, whose groups must then still hold the placeholders."""
    module: nn.Module | None = None
    """Whose ``set_extra_state`` is called on loading; needed only where a submodule has extra state."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """What else describes the run (ZeRO stage, schedule, virtual stages): recorded, and shown by tools."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", by_original_name(self.parameters, "parameters"))
        object.__setattr__(self, "buffers", by_original_name(self.buffers, "buffers"))
        object.__setattr__(self, "cuts", by_original_name(self.cuts, "cuts"))
        object.__setattr__(self, "keys", tuple(dict.fromkeys(original_name(key) for key in self.keys)))
        ties = {original_name(alias): original_name(first) for alias, first in self.ties.items()}
        object.__setattr__(self, "ties", ties)
        object.__setattr__(self, "borrowed", frozenset(original_name(name) for name in self.borrowed))
        groups = group_names(self.optimizers, self.parameters) if self.groups is None else self.groups
        object.__setattr__(self, "groups", [self._first_names(of_optimizer) for of_optimizer in groups])

    def _first_names(self, groups: Sequence[Sequence[str]]) -> list[list[str]]:
        """``groups`` with every parameter once, under its first name."""
        seen: set[str] = set()
        result: list[list[str]] = []
        for group in groups:
            names = [self.first_name(original_name(name)) for name in group]
            result.append([name for name in dict.fromkeys(names) if name not in seen])
            seen.update(names)
        return result

    def first_name(self, name: str) -> str:
        """The name under which a tied parameter is kept; of others their own."""
        return self.ties.get(name, name)

    @property
    def held(self) -> list[tuple[str, Tensor]]:
        """The parameters and buffers of this rank by first name; a name repeats if several copies are held."""
        real: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in (*self.parameters.items(), *self.buffers.items()):
            if not is_placeholder(tensor):
                real.setdefault(id(tensor), (self.first_name(name), tensor))
        return list(real.values())

    @property
    def owned(self) -> dict[str, Tensor]:
        """The parameters and buffers that this rank saves, by first name, one copy of each."""
        owned: dict[str, Tensor] = {}
        for name, tensor in self.held:
            if name not in self.borrowed:
                owned.setdefault(name, tensor)
        return owned

    def local_state_dict(self) -> dict[str, Tensor]:
        """This rank's tensors under the whole module's keys, in order; placeholders for parameters of other stages."""
        here = {**self.parameters, **self.buffers, **dict(reversed(self.held))}
        named = {key: here.get(self.first_name(key), here.get(key)) for key in self.keys}
        return {key: tensor.detach() for key, tensor in named.items() if tensor is not None}

    def cut_of(self, name: str) -> Cut | None:
        """How tensor parallelism cut the parameter ``name``, known under any of its names."""
        first = self.first_name(name)
        names = (first, *(alias for alias, other in self.ties.items() if other == first))
        return next((self.cuts[key] for key in names if key in self.cuts), None)

    def group_of(self, optimizer: int) -> Sequence[Sequence[str]]:
        """Names in every group of one optimizer."""
        assert self.groups is not None
        return self.groups[optimizer]


@dataclass(frozen=True)
class Entry:
    """A tensor of the checkpoint as far as this rank holds it."""

    key: str
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    chunks: tuple[Chunk, ...]
    tensor: Tensor
    """This rank's plain tensor, without gradient."""

    @property
    def whole(self) -> bool:
        """Whether this rank holds all of it."""
        return self.tensor.numel() == math.prod(self.shape)


def plain(tensor: Tensor) -> Tensor:
    """This rank's part of ``tensor``, sharing its memory, without gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_of(name: str, tensor: Tensor, cut: Cut | None, mesh: Mesh) -> Entry:
    """Which part of the full tensor ``name`` this rank's ``tensor`` is.

    Args:
        name: Becomes the entry's key.
        tensor: A plain tensor (cut by tensor parallelism if ``cut`` says so) or a DTensor over the axes tp, dp.
        cut: How tensor parallelism cut it; ``None`` leaves it to the DTensor's placement.
        mesh: This rank's place.

    Raises:
        CheckpointError: The local tensor has another shape than the cut and the placement say.
    """
    over_tp, over_dp = _placements(tensor)
    shape = tuple(cut.global_shape) if cut is not None else tuple(tensor.shape)
    tp_share: Share | None = None
    dp_share: Shard | None = None
    if cut is not None:
        tp_share = Share(cut.dim, tuple(cut.intervals(mesh.tp.rank)))
    elif over_tp is not None:
        tp_share = Shard(over_tp, mesh.tp.rank, mesh.tp.size).share(shape[over_tp])
    if over_dp is not None:
        dp_share = Shard(over_dp, mesh.dp.rank, mesh.dp.size)
    local = plain(tensor)
    expected = local_shape(shape, tp_share, dp_share)
    if tuple(local.shape) != expected:
        raise CheckpointError(
            f"{name!r} on {mesh.where} has shape {tuple(local.shape)}, but its layout (full shape {shape}, over tp"
            f" {tp_share}, over dp {dp_share}) makes it {expected}. The checkpoint would be wrong; this is a bug unless"
            " user code replaced the parameter."
        )
    return Entry(name, shape, local_chunks(shape, tp_share, dp_share), local)


def extra_state(state: ModelState, values: Mapping[str, Any]) -> dict[str, Any]:
    """What modules of this stage put into the state dict besides tensors (``get_extra_state``), by key."""
    held = {name: not is_placeholder(parameter) for name, parameter in state.parameters.items()}
    extra = {}
    for key, value in values.items():
        if isinstance(value, Tensor):
            continue
        prefix = key.rpartition(".")[0]
        own = [here for name, here in held.items() if not prefix or name.startswith(prefix + ".")]
        if any(own) or not own:
            extra[key] = value
    return extra


def model_entries(state: ModelState, values: Mapping[str, Any], mesh: Mesh) -> list[Entry]:
    """Entries of the parameters and buffers that this rank holds.

    Args:
        state: The rank's view of the model.
        values: What to save, by name: the live tensors, or others of the same local shape (averaged weights, say).
            A name that is absent is not saved; a name that the model does not know is saved as a full tensor.
        mesh: This rank's place.

    Raises:
        CheckpointError: A value has not the shape of what this rank holds.
    """
    owned = state.owned
    chosen: dict[str, Tensor] = {}
    for name, value in values.items():
        if isinstance(value, Tensor) and not is_placeholder(value):
            chosen.setdefault(state.first_name(name), value)
    entries = []
    for name, value in chosen.items():
        live = owned.get(name)
        if live is None:
            if name not in state.keys and name not in state.borrowed:
                entries.append(shard_of(MODEL + name, value, None, mesh))
            continue
        entry = shard_of(MODEL + name, live, state.cut_of(name), mesh)
        if name in state.buffers and (mesh.dp.rank or mesh.tp.rank) and entry.whole:
            # Running statistics differ between replicas; a mixture of them would be nobody's.
            continue
        local = plain(value)
        if local.shape != entry.tensor.shape:
            raise CheckpointError(
                f"checkpoint['state_dict'][{name!r}] has shape {tuple(local.shape)} on {mesh.where}, where this rank's"
                f" part of the parameter has {tuple(entry.tensor.shape)}. A hook may replace values of the state"
                " dict by others of the same local shape, not by gathered ones."
            )
        entries.append(Entry(entry.key, entry.shape, entry.chunks, local))
    return entries


@dataclass(frozen=True)
class OptimizerParts:
    """The state of one optimizer, sorted by how it is kept."""

    entries: list[Entry]
    """Tensors: moments in the parameter's layout, step counts and the like whole."""
    scalars: dict[str, dict[str, Any]]
    """Numbers, strings and None by parameter name and key."""
    opaque: dict[str, dict[str, Any]]
    """What has no known layout: kept per rank, loadable at the same layout only."""


def optimizer_parts(index: int, packed: Mapping[str, Any], state: ModelState, mesh: Mesh) -> OptimizerParts:
    """The state in ``packed`` (what ``Optimizer.state_dict()`` gave) by parameter name.

    Args:
        index: Which optimizer.
        packed: ``{"state": {number: {...}}, "param_groups": [...]}``; numbers count the parameters of the groups.
        state: The rank's view of the model.
        mesh: This rank's place.
    """
    parts = OptimizerParts([], {}, {})
    numbered = numbered_parameters(state, index)
    for number, values in packed["state"].items():
        name, parameter = numbered[number]
        if is_placeholder(parameter):
            continue
        own = shard_of(name, parameter, state.cut_of(name), mesh)
        for key, value in values.items():
            full_key = f"{OPTIMIZER}{index}.{name}.{key}"
            if isinstance(value, Tensor):
                entry = _optimizer_entry(full_key, value, own, parameter)
                if entry is None:
                    parts.opaque.setdefault(name, {})[key] = plain(value).cpu()
                else:
                    parts.entries.append(entry)
            elif value is None or isinstance(value, (bool, int, float, str)):
                parts.scalars.setdefault(name, {})[key] = value
            else:
                parts.opaque.setdefault(name, {})[key] = value
    return parts


def numbered_parameters(state: ModelState, index: int) -> dict[int, tuple[str, Tensor]]:
    """Name and parameter behind every number in the state dict that this rank's optimizer ``index`` gives.

    Only the parameters that stand in its groups are numbered, which may leave out those of other stages.

    Raises:
        CheckpointError: It holds tensors that are no parameters of the module.
    """
    names = {id(parameter): state.first_name(name) for name, parameter in state.parameters.items()}
    flat = [parameter for group in state.optimizers[index].param_groups for parameter in group["params"]]
    unknown = [tuple(parameter.shape) for parameter in flat if id(parameter) not in names]
    if unknown:
        raise CheckpointError(
            f"Optimizer {index} holds tensors of shapes {unknown[:5]} which are not among the module's parameters."
        )
    return {number: (names[id(parameter)], parameter) for number, parameter in enumerate(flat)}


def _optimizer_entry(key: str, value: Tensor, own: Entry, parameter: Tensor) -> Entry | None:
    local = plain(value)
    if isinstance(value, DTensor) and (dims := reduced_dims(value.shape, parameter.shape)):
        return reduced_entry(key, own, dims, local)
    placed_alike = _placements(value) in (_placements(parameter), (None, None))
    if local.dim() > 0 and local.shape == own.tensor.shape and placed_alike:
        return Entry(key, own.shape, own.chunks, local)
    if local.dim() == 0 or (own.whole and not isinstance(value, DTensor)):
        return Entry(key, tuple(local.shape), local_chunks(local.shape), local)
    return None


def reduced_dims(shape: Sequence[int], whole: Sequence[int]) -> tuple[int, ...]:
    """Dims of size 1 in ``shape``, which is otherwise ``whole``: means over rows or columns, say. None if it is not."""
    if len(shape) != len(whole) or any(size not in (1, full) for size, full in zip(shape, whole, strict=True)):
        return ()
    return tuple(dim for dim, (size, full) in enumerate(zip(shape, whole, strict=True)) if size != full)


def reduced_entry(key: str, own: Entry, dims: Sequence[int], local: Tensor) -> Entry:
    """The part of a tensor that is like ``own`` but has the size 1 along ``dims``."""

    def along(values: Sequence[int], at: int) -> tuple[int, ...]:
        return tuple(at if dim in dims else value for dim, value in enumerate(values))

    chunks = [Chunk(along(c.offsets, 0), along(c.sizes, 1), along(c.local, 0)) for c in own.chunks]
    return Entry(key, along(own.shape, 1), tuple(dict.fromkeys(chunks)), local)


def _placements(tensor: Tensor) -> tuple[int | None, int | None]:
    """Dims along which a DTensor is cut over tp and over dp."""
    if not isinstance(tensor, DTensor):
        return None, None
    dims: dict[str, int | None] = {"tp": None, "dp": None}
    names = tensor.device_mesh.mesh_dim_names or ()
    for axis, placement in zip(names, tensor.placements, strict=True):
        if placement.is_partial():
            raise CheckpointError(f"A tensor of shape {tuple(tensor.shape)} is a partial sum over {axis!r}.")
        dim = getattr(placement, "dim", None)
        if axis in dims:
            dims[axis] = dim
        elif dim is not None:
            raise CheckpointError(
                f"A tensor of shape {tuple(tensor.shape)} is cut over the unknown mesh axis {axis!r}; known: tp, dp."
            )
    return dims["tp"], dims["dp"]
