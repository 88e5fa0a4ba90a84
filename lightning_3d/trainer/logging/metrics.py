"""Torchmetrics objects of a module: their states over micro-batches and replicas, never over the ranks of one replica.

A metric says how its states are put together when every process has seen other samples. Micro-batches and replicas are
put together that way too, so that any metric which works under DDP gives the value of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_3d.collectives import Op, all_gather, all_gather_object, all_reduce, as_bytes
from lightning_3d.events import Phase
from lightning_3d.mesh import Mesh
from lightning_3d.trainer.module.late_modules import LateModules

States = Mapping[str, Any]
"""What a metric holds: tensors and lists of tensors, by name."""

_REDUCTIONS: dict[Any, Op] = {dim_zero_sum: "sum", dim_zero_max: "max", dim_zero_min: "min"}


def bind_metrics(module: LightningModule, mesh: Mesh) -> None:
    """Let the metrics of a module gather their states over the data-parallel axis.

    By default they gather over all ranks and would count every sample once per stage and tensor-parallel rank. May be
    called again, for metrics that were made since.

    Args:
        module: The LightningModule. Metrics for which the user chose a process group, or a way to gather, keep it.
        mesh: The mesh.
    """
    if mesh.world.size == 1:
        return
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.process_group is None and metric.dist_sync_fn is None:
            metric.dist_sync_fn = _Replicas(mesh)
            metric.distributed_available_fn = metric.dist_sync_fn.are_several
            # A replica that got no sample would answer from its cache, and the others wait for it.
            metric.compute_with_cache = False
            metric._computed = None
            if type(metric)._sync_dist is Metric._sync_dist:
                # Bound, so that a copy of the metric gets one of its own.
                vars(metric)["_sync_dist"] = MethodType(_sync_dist, metric)
            else:  # it gathers by itself
                metric.process_group = mesh.dp.group


class _Replicas:
    """Gathers tensors from all replicas. Part of a metric, so it can be copied and pickled with it."""

    def __init__(self, mesh: Mesh | None) -> None:
        self.mesh = mesh

    def are_several(self) -> bool:
        return self.mesh is not None and self.mesh.dp.size > 1

    def __call__(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        assert self.mesh is not None
        return gather_all_tensors(tensor, self.mesh.dp.group)

    def __deepcopy__(self, memo: Any) -> _Replicas:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Replicas, (None,)  # there are no replicas where it is read


def _sync_dist(self: Metric, dist_sync_fn: Any = None, process_group: Any = None) -> None:
    """In place of torchmetrics' own, which waits for ever if replicas hold lists of different lengths."""
    if not isinstance(dist_sync_fn, _Replicas) or dist_sync_fn.mesh is None or process_group is not None:
        Metric._sync_dist(self, dist_sync_fn or gather_all_tensors, process_group)
        return
    own = states_of(self)
    parts = _gathered([] if _is_untouched(self, own) else [own], dist_sync_fn.mesh)
    if parts:
        _put(self, merged(self, parts))


def states_of(metric: Metric) -> dict[str, Any]:
    """What a metric holds now; lists are copied, tensors are not."""
    states = {name: getattr(metric, name) for name in metric._defaults}
    return {name: list(value) if isinstance(value, list) else value for name, value in states.items()}


def merged(metric: Metric, parts: Sequence[States]) -> dict[str, Any]:
    """The states of parts of the samples, as one state of all of them.

    Args:
        metric: Knows how.
        parts: At least one.
    """
    if len(parts) == 1:
        return dict(parts[0])
    whole: dict[str, Any] = {}
    for name, reduction in metric._reductions.items():
        values = [part[name] for part in parts]
        if any(isinstance(value, list) for value in values):
            items = [item for value in values for item in (value if isinstance(value, list) else [value])]
            whole[name] = reduction(items) if callable(reduction) and items else items
        elif reduction is dim_zero_cat:
            whole[name] = dim_zero_cat(values)
        else:
            stacked = torch.stack(values)
            whole[name] = reduction(stacked) if callable(reduction) else stacked
    return whole


def persistent_states(module: nn.Module) -> dict[str, Tensor]:
    """The states of metrics that are part of the state dict (``metric.persistent(True)``), by their keys there."""
    return {
        f"{path}.{name}" if path else name: getattr(metric, name)
        for path, metric in _persistent(module)
        for name, kept in metric._persistent.items()
        if kept and isinstance(getattr(metric, name), Tensor)
    }


@contextmanager
def states_of_all(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """While a checkpoint is made: :func:`persistent_states` are those of all replicas. Collective over dp."""
    synced = [
        metric
        for _, metric in _persistent(module)
        if isinstance(metric.dist_sync_fn, _Replicas) and _adds_up(metric) and not metric._is_synced
    ]
    for metric in synced:
        metric.sync(metric.dist_sync_fn)
    try:
        yield persistent_states(module)
    finally:
        for metric in synced:
            metric.unsync(metric._is_synced)


def leave_states_to_first(module: nn.Module, mesh: Mesh) -> None:
    """When a checkpoint has been loaded: one replica goes on from its states, the others add to them."""
    if mesh.dp.rank:
        for _, metric in _persistent(module):
            metric.reset()


def _persistent(module: nn.Module) -> list[tuple[str, Metric]]:
    found = [(path, inner) for path, inner in module.named_modules() if isinstance(inner, Metric)]
    return [(path, metric) for path, metric in found if any(metric._persistent.values())]


class StepStates:
    """Catches what the metrics of a module hold of one micro-batch alone, while a step calls them.

    Args:
        module: The LightningModule.
        mesh: The mesh.
    """

    def __init__(self, module: LightningModule, mesh: Mesh) -> None:
        self._module = module
        self._mesh = mesh
        self._late = LateModules(module)
        self._metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]

    def begin(self) -> None:
        """Before the steps of a batch: metrics may have come since the last one."""
        if self._late.changed():
            bind_metrics(self._module, self._mesh)
            self._metrics = [metric for metric in self._module.modules() if isinstance(metric, Metric)]

    @contextmanager
    def caught(self, states: dict[int, States]) -> Iterator[None]:
        """Around a step on a micro-batch.

        Args:
            states: Is filled, by the ``id`` of the metric.
        """
        before = [(metric, vars(metric).get("compute")) for metric in self._metrics]
        for metric, compute in before:
            if compute is not None:
                vars(metric)["compute"] = _catching(metric, compute, states)
        try:
            yield
        finally:
            for metric, compute in before:
                if compute is not None:
                    vars(metric)["compute"] = compute

    def value(self, metric: Metric, parts: Sequence[States]) -> Tensor:
        """The value of the samples of all micro-batches and replicas. Collective over dp.

        Args:
            metric: The metric; its own state stays as it is.
            parts: This replica's states, one per micro-batch; may be none, as long as another replica has some.
        """
        if _adds_up(metric):
            whole = _reduced(metric, merged(metric, parts) if parts else metric._defaults, self._mesh)
        else:
            whole = merged(metric, _gathered(parts, self._mesh))
        before, flags = states_of(metric), {name: getattr(metric, name) for name in _FLAGS}
        _put(metric, whole)
        vars(metric).update(_ALONE)
        try:
            with torch.no_grad():
                value: Tensor = metric.compute()
        finally:
            _put(metric, before)
            vars(metric).update(flags)
        return value


_ALONE = {"_computed": None, "_to_sync": False, "_should_unsync": False, "_update_count": 1}
_FLAGS = tuple(_ALONE)


def _catching(metric: Metric, compute: Callable[..., Any], states: dict[int, States]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not metric._should_unsync:  # within `forward`, which has put the state of all batches aside
            states[id(metric)] = states_of(metric)
            metric._to_sync = False  # `dist_sync_on_step`: replicas need not call it equally often
        return compute(*args, **kwargs)

    return call


def _put(metric: Metric, states: States) -> None:
    for name, value in states.items():
        setattr(metric, name, value)


def _is_untouched(metric: Metric, states: States) -> bool:
    """Whether no sample has gone into a metric, so that it has nothing to add."""
    if metric._update_count:
        return False
    pairs = [(states[name], default) for name, default in metric._defaults.items()]
    return all(
        not value
        if isinstance(value, list)
        else isinstance(default, Tensor) and torch.equal(value, default.to(value.device))
        for value, default in pairs
    )


def _adds_up(metric: Metric) -> bool:
    """Whether all states are tensors of which sums and extremes are taken."""
    defaults = metric._defaults.items()
    return all(isinstance(default, Tensor) and metric._reductions[name] in _REDUCTIONS for name, default in defaults)


def _reduced(metric: Metric, states: States, mesh: Mesh) -> dict[str, Any]:
    """States that add up, over replicas; without waiting for the device."""
    whole: dict[str, Any] = {}
    groups: dict[tuple[Op, torch.dtype], list[str]] = {}
    for name in metric._defaults:
        groups.setdefault((_REDUCTIONS[metric._reductions[name]], states[name].dtype), []).append(name)
    for (op, _), names in groups.items():
        flat = torch.cat([states[name].detach().reshape(-1).to(mesh.device) for name in names])
        flat = all_reduce(flat, mesh.dp, op)
        for name, piece in zip(names, flat.split([states[name].numel() for name in names]), strict=True):
            whole[name] = piece.view(states[name].shape)
    return whole


def _gathered(own: Sequence[States], mesh: Mesh) -> list[States]:
    """The states that all replicas have, in order. Collective over dp."""
    if mesh.dp.size == 1:
        return list(own)
    contents, notes = [], []
    for states in own:
        lists = {name: value if isinstance(value, list) else [value] for name, value in states.items()}
        contents += [as_bytes(tensor.detach().to(mesh.device)) for tensors in lists.values() for tensor in tensors]
        notes.append(
            [
                (name, isinstance(states[name], list), [(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
                for name, tensors in lists.items()
            ]
        )
    payload = torch.cat([*contents, torch.empty(0, dtype=torch.uint8, device=mesh.device)])
    with mesh.events.span(Phase.DP, label="metrics"):
        everyone = all_gather_object((payload.numel(), notes), mesh.control_dp)
    lengths = [length for length, _ in everyone]
    received = all_gather(payload, mesh.dp, sizes=lengths) if sum(lengths) else payload
    parts: list[States] = []
    start = 0
    for _, notes in everyone:
        for entries in notes:
            part: dict[str, Any] = {}
            for name, is_list, metas in entries:
                tensors = []
                for shape, dtype in metas:
                    stop = start + torch.Size(shape).numel() * dtype.itemsize
                    # A clone: a view as wider numbers must begin at a multiple of their size.
                    tensors.append(received[start:stop].clone().view(dtype).view(shape))
                    start = stop
                part[name] = tensors if is_list else tensors[0]
            parts.append(part)
    return parts
