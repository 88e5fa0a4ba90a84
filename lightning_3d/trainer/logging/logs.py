"""``self.log`` in steps: recorded per micro-batch on the last stage, combined, and logged once per batch everywhere."""

from __future__ import annotations

import builtins
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata
from torch import Tensor
from torchmetrics import Metric

from lightning_3d.collectives import all_gather, all_gather_object, all_reduce
from lightning_3d.errors import StageError
from lightning_3d.events import Phase
from lightning_3d.mesh import Mesh
from lightning_3d.pipeline.foreign import refuse_foreign
from lightning_3d.trainer.data.ledger import BatchFacts
from lightning_3d.trainer.logging.metrics import States, StepStates


class LogKey(NamedTuple):
    """One call of ``self.log`` within a step, without its value."""

    fx: str
    name: str
    occurrence: int
    """How often this name was logged before in the same step."""
    op: str
    """``mean``, ``sum``, ``max`` or ``min``: how micro-batches and replicas are combined, and batches later."""
    builtin: bool
    """Whether ``reduce_fx`` was Python's own function: Lightning compares it from call to call."""
    dtype: torch.dtype | None
    """float64 if the value has it, else float32, as Lightning keeps it; ``None`` when there is no value to combine (a
    metric that only computes at the end)."""
    own_batch_size: bool
    """Whether the user gave ``batch_size``: then it is the weight of the value."""
    metric: str | None
    """Attribute name of the torchmetrics object that was logged."""
    of_states: bool
    """Whether its value is that of its states over all micro-batches and replicas, rather than a mean of values."""
    of_all: bool
    """Whether every replica logs the sum of all rather than its share."""
    options: tuple[tuple[str, Any], ...]
    """What else was given to ``self.log``."""


class Logged(NamedTuple):
    """What was logged for one batch: the same on every rank."""

    keys: tuple[LogKey, ...]
    values: Tensor | None
    """``[2, keys]`` float64 on the device: values, and the samples they stand for."""
    told: tuple[str, ...] = ()
    """What any of the replicas told the others of its step besides values."""


class _Kinds(NamedTuple):
    """How keys are combined, ``[keys]`` on the device; kept, so that no step has to bring it there."""

    mean: Tensor
    extreme: Tensor
    of_all: Tensor
    sign: Tensor
    """float64: -1 for a minimum, else 1."""


_STOP = "trainer.should_stop"
"""What a replica tells whose step has asked the Trainer to stop."""


@dataclass
class _MicroBatch:
    weight: float | Tensor
    size: int
    of_all: bool
    values: dict[LogKey, tuple[Tensor | None, float | Tensor | None]] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)
    states: dict[int, States] = field(default_factory=dict)
    """What torchmetrics objects hold of these samples alone, by ``id``."""


class LogRelay:
    """Gives every rank, loop and logger the value that one process would have logged for the global batch.

    While the user's step runs, what ``self.log`` hands to Lightning's result collection is set aside. Afterwards the
    values are combined over the micro-batches and replicas by their ``reduce_fx``, a mean weighted as the loss is (or
    by the ``batch_size`` that was given), and handed on once, on every rank, without any further synchronisation. A key
    that only some micro-batches or replicas have logged is combined over those. Fillers do not count. Of a torchmetrics
    object the states are combined, and its value computed from them.

    Args:
        module: The LightningModule, attached to a Trainer.
        mesh: The mesh.
    """

    def __init__(self, module: LightningModule, mesh: Mesh) -> None:
        self.module = module
        self.mesh = mesh
        self._facts = BatchFacts(1, 1)
        self._stopping = False
        self._micro_batches: list[_MicroBatch] = []
        self._states = StepStates(module, mesh)
        self._pass_through = False
        self._signatures: dict[tuple[LogKey | str, ...], int] = {}
        self._merged: dict[tuple[int, ...], tuple[LogKey | str, ...]] = {}
        self._kinds: dict[tuple[LogKey, ...], _Kinds] = {}
        self._results: Any = None
        self._logged: dict[tuple[LogKey, int | None], str] = {}
        """What was logged to these results before -> where they keep it."""

    def begin(self, facts: BatchFacts, num_micro_batches: int) -> None:
        """A batch begins."""
        self._facts = facts
        self._stopping = self.module.trainer.should_stop
        self._micro_batches = []
        self._states.begin()
        # With one stage, replica and micro-batch, the user's call is the one call there is.
        self._pass_through = num_micro_batches == 1 and self.mesh.pp.size == self.mesh.dp.size == 1

    @contextmanager
    def recording(self, size: int, weight: float | Tensor, of_all: bool = False) -> Iterator[None]:
        """Around the user's step on one micro-batch.

        Args:
            size: Its samples. With none, what is logged does not count.
            weight: Its weight in the loss.
            of_all: Sums are those of all replicas already, unless ``sync_dist`` asks for them to be added up.
        """
        results = self.module.trainer._results
        if results is None:
            yield
            return
        micro_batch = _MicroBatch(weight, size, of_all)
        if size:
            self._micro_batches.append(micro_batch)
        log = results.log

        def record(fx: str, name: str, value: Metric | Tensor, **options: Any) -> None:
            if self._pass_through:
                log(fx, name, value, **{**options, **_SETTLED})
            else:
                _record(micro_batch, fx, name, value, options)

        # On the object, not on `self.log`: the user may have kept, overridden or wrapped that, and its checks should
        # raise at the user's line.
        results.log = record
        try:
            with nullcontext() if self._pass_through else self._states.caught(micro_batch.states):
                yield
        except BaseException:
            # The step ended at a cut: this rank, or another, runs the same micro-batch once more, further.
            self._micro_batches = [other for other in self._micro_batches if other is not micro_batch]
            raise
        finally:
            del results.log

    def collect(self, told: tuple[str, ...] = ()) -> Logged:
        """Combine over micro-batches and replicas. Collective over dp; called on the last stage.

        Args:
            told: What the others are to know of this replica's step, whatever it logs; of fillers they hear nothing.
        """
        if self._pass_through:
            return Logged((), None, told)
        micro_batches = [] if self._facts.filler else self._micro_batches
        keys = tuple(dict.fromkeys(key for micro_batch in micro_batches for key in micro_batch.values))
        self._micro_batches = []
        if self.module.trainer.should_stop:
            told = (*told, _STOP)
        everything = self._agree(keys if self._facts.filler else (*keys, *told))
        agreed = tuple(key for key in everything if isinstance(key, LogKey))
        told = tuple(key for key in everything if isinstance(key, str))
        if not any(key.dtype is not None for key in agreed):
            return Logged(agreed, None, told)
        values, weights, samples = self._combine(agreed, micro_batches)
        reduced = self._reduce(agreed, values, weights, samples)
        for index, key in enumerate(agreed):
            if key.of_states:
                metric = _find_metric(self.module, key)
                parts = [m.states[id(metric)] for m in micro_batches if key in m.values and m.size]
                reduced[0, index] = self._states.value(metric, parts)
        return Logged(agreed, reduced, told)

    def replay(self, logged: Logged) -> None:
        """Log the values of one batch, as one step on the global batch would have, and stop if it asks to.

        On every rank: one that decides by its own loss would leave the loop alone.
        """
        if _STOP in logged.told:
            self.module.trainer.should_stop = True
        elif self._facts.filler:
            self.module.trainer.should_stop = self._stopping
        if not logged.keys:
            return
        trainer = self.module.trainer
        connector, results = trainer._logger_connector, trainer._results
        assert results is not None
        if results is not self._results:
            self._results, self._logged = results, {}
        fx = logged.keys[0].fx
        if connector.should_reset_tensors(fx):
            results.reset(metrics=False, fx=fx)
        numbers: dict[torch.dtype, Sequence[Tensor]] = {}
        sizes: Sequence[Tensor] = ()
        if logged.values is not None:  # all at once: a kernel for each would take as long as for all
            types = {key.dtype for key in logged.keys if key.dtype is not None}
            numbers = {dtype: logged.values[0].to(dtype).unbind() for dtype in types}
            sizes = logged.values[1].round().to(torch.int64).unbind()
        for index, key in enumerate(logged.keys):
            value: Any = None
            batch_size: Any = self._facts.global_size
            if key.dtype is not None and sizes:
                value, batch_size = numbers[key.dtype][index], sizes[index]
            if key.metric is not None:
                metric = _find_metric(self.module, key)
                if value is not None:
                    metric._forward_cache = value
                value = metric
            place = self._logged.get((key, results.dataloader_idx))
            if place is not None and place in results:
                # With the same arguments as before. Checking that again takes Lightning longer than the update.
                results.update_metrics(place, value, batch_size)
                continue
            results.log(
                key.fx,
                key.name,
                value,
                **dict(key.options),
                reduce_fx=getattr(builtins if key.builtin else torch, key.op),
                **_SETTLED,
                batch_size=batch_size,
                metric_attribute=key.metric,
            )
            if isinstance(value, Tensor):
                place = f"{key.fx}.{key.name}"
                if results.dataloader_idx is not None and dict(key.options).get("add_dataloader_idx", True):
                    place += f".{results.dataloader_idx}"
                self._logged[key, results.dataloader_idx] = place
        connector._current_fx = fx

    def _agree(self, keys: tuple[LogKey | str, ...]) -> tuple[LogKey | str, ...]:
        """The keys of all replicas, and what they tell, in one order."""
        axis = self.mesh.control_dp
        if axis.group is None:
            return keys
        mine = self._signatures.get(keys)
        if mine is None:
            digest = hashlib.blake2b(repr(keys).encode(), digest_size=7).digest()
            mine = self._signatures[keys] = int.from_bytes(digest, "little")
        with self.mesh.events.span(Phase.DP, label="logged"):  # where a replica waits whose forward is done
            signatures = tuple(all_gather(torch.tensor([mine], dtype=torch.int64), axis).tolist())
        if len(set(signatures)) == 1:
            return keys
        # All replicas see the same signatures, so all know without a word whether these were merged before.
        if signatures not in self._merged:
            with self.mesh.events.span(Phase.DP, label="logged"):
                everyone = all_gather_object(keys, axis)
            self._merged[signatures] = tuple(dict.fromkeys(key for theirs in everyone for key in theirs))
        return self._merged[signatures]

    def _combine(self, keys: tuple[LogKey, ...], micro_batches: Sequence[_MicroBatch]) -> tuple[Tensor, Tensor, Tensor]:
        """Over this replica's micro-batches: combined values, weights and samples, each ``[keys]`` float64.

        Means and sums are left as sums (of weight times value), so that they can be added up over replicas; of a
        minimum, the negative is the largest.
        """
        device, kinds = self.mesh.device, self._kinds_of(keys)
        absent = torch.zeros((), dtype=torch.float64, device=device)
        if not micro_batches:
            nothing = torch.zeros(len(keys), dtype=torch.float64, device=device)
            return torch.where(kinds.extreme, float("-inf"), nothing), nothing, nothing
        rows, weights, samples = [], [], []
        for micro_batch in micro_batches:
            for key in keys:
                value, own = micro_batch.values.get(key, (None, None))
                rows.append(absent if value is None else value)
                # A piece of no samples repeats one of another, only to keep the ranks in step.
                present = key in micro_batch.values and micro_batch.size > 0
                size = micro_batch.size if own is None else own
                weights.append((micro_batch.weight if own is None else own) if present else 0.0)
                samples.append(size if present else 0)
        shape = (len(micro_batches), len(keys))
        values = _stack(rows, device).view(shape) * kinds.sign
        weight = _stack_numbers(weights, device).view(shape)
        sample = _stack_numbers(samples, device).view(shape)
        # What weighs nothing may be NaN: the mean over no tokens, say.
        weighted = torch.where(weight > 0, values * weight, 0.0).sum(0)
        added = torch.where(sample > 0, values, 0.0).sum(0)
        largest = torch.where(sample > 0, values, float("-inf")).amax(0)
        combined = torch.where(kinds.mean, weighted, torch.where(kinds.extreme, largest, added))
        return combined, weight.sum(0), sample.sum(0)

    def _reduce(self, keys: tuple[LogKey, ...], values: Tensor, weights: Tensor, samples: Tensor) -> Tensor:
        """Over replicas: ``[2, keys]`` of values and samples."""
        kinds = self._kinds_of(keys)
        if self.mesh.dp.size > 1:
            largest = values.clone()
            values, weights, samples = all_reduce(torch.stack([values, weights, samples]), self.mesh.dp).unbind()
            if any(key.op in ("max", "min") for key in keys):
                values = torch.where(kinds.extreme, all_reduce(largest, self.mesh.dp, "max"), values)
        values = torch.where(kinds.mean, values / weights, values)
        values = torch.where(kinds.of_all, values / samples, values)
        return torch.stack([values * kinds.sign, samples])

    def _kinds_of(self, keys: tuple[LogKey, ...]) -> _Kinds:
        if keys not in self._kinds:
            rows = [[key.op == "mean", key.op in ("max", "min"), key.of_all] for key in keys]
            signs = [-1.0 if key.op == "min" else 1.0 for key in keys]
            mean, extreme, of_all = _onto(torch.tensor(rows).t().contiguous(), self.mesh.device).unbind()
            sign = _onto(torch.tensor(signs, dtype=torch.float64), self.mesh.device)
            self._kinds[keys] = _Kinds(mean, extreme, of_all, sign)
        return self._kinds[keys]


def _as_it_is(value: Any, *args: Any, **kwargs: Any) -> Any:
    return value


_SETTLED: dict[str, Any] = {"sync_dist": True, "sync_dist_fn": _as_it_is, "sync_dist_group": None}
"""The values are those of all ranks already; Lightning, told that they are not, would advise ``sync_dist``."""


def _record(micro_batch: _MicroBatch, fx: str, name: str, value: Metric | Tensor, options: dict[str, Any]) -> None:
    options = dict(options)
    own = options.pop("batch_size", None)
    attribute = options.pop("metric_attribute", None)
    of_all = micro_batch.of_all and not options.get("sync_dist", False)
    # Settled by this relay: the value is the same on all ranks already.
    for settled in ("sync_dist", "sync_dist_fn", "sync_dist_group"):
        options.pop(settled, None)
    reduce_fx = options.pop("reduce_fx", torch.mean)
    # Lightning's own check of `reduce_fx`, at the user's line rather than when the values are handed on.
    reduce_fx = _Metadata(fx, name, reduce_fx=reduce_fx).reduce_fx
    op: str = reduce_fx.__name__
    if not isinstance(value, Metric):
        number: Tensor | None = value
    else:
        number = value._forward_cache if options.get("on_step", True) else None  # later it computes its own value
    if not isinstance(number, Tensor) or number.numel() != 1:
        number = None
    refuse_foreign(number, f"self.log({name!r}, ...)")
    number = None if number is None else number.detach().reshape(())
    occurrence = micro_batch.count.get(name, 0)
    micro_batch.count[name] = occurrence + 1
    key = LogKey(
        fx=fx,
        name=name,
        occurrence=occurrence,
        op=op,
        builtin=reduce_fx is getattr(builtins, op, None),
        dtype=None if number is None else torch.float64 if number.dtype == torch.float64 else torch.float32,
        own_batch_size=own is not None,
        metric=attribute if isinstance(value, Metric) else None,
        of_states=number is not None and id(value) in micro_batch.states,
        of_all=of_all and op == "sum",
        options=tuple(sorted(options.items())),
    )
    micro_batch.values[key] = (number, own)


def _find_metric(module: LightningModule, key: LogKey) -> Metric:
    found: Any = module
    for part in (key.metric or "").split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part, None)
    if not isinstance(found, Metric):
        raise StageError(
            f"self.log({key.name!r}, ..., metric_attribute={key.metric!r}) names no torchmetrics object of the module,"
            " so the other ranks cannot log it. Make the metric an attribute of the LightningModule."
        )
    return found


def _stack(values: Sequence[Tensor], device: torch.device) -> Tensor:
    if len({value.dtype for value in values}) > 1:
        values = [value.to(torch.float64) for value in values]
    return torch.stack([_onto(value, device) for value in values]).to(torch.float64)


def _stack_numbers(numbers: Sequence[float | Tensor], device: torch.device) -> Tensor:
    if not any(isinstance(number, Tensor) for number in numbers):
        return _onto(torch.tensor(numbers, dtype=torch.float64), device)
    full = (
        torch.full((), number, dtype=torch.float64, device=device) if not isinstance(number, Tensor) else number
        for number in numbers
    )
    return _stack(list(full), device)


def _onto(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on the device: copies from memory that is not pinned would wait until the device has done its work."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
