"""ZeRO stages 1 to 3 as switches of FSDP2: one table, and the calls that set the switches during a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _NormBase

from lightning_3d.attributes import share_attributes
from lightning_3d.events import EventSource, Phase
from lightning_3d.initialization import following
from lightning_3d.placeholder import is_placeholder

UNIT_BYTES = 25 * 2**20
"""Smaller blocks share one collective: below this size latency costs more than what overlap wins."""


@dataclass(frozen=True, kw_only=True)
class ZeroRule:
    """What one ZeRO stage keeps, frees and sends. Engine, memory model and tests read this table."""

    shards_optimizer: bool
    shards_gradients: bool
    shards_parameters: bool
    reduce_each_micro_batch: bool
    """Whether gradients are reduce-scattered after every backward, or once per step after the last one."""

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 is used at all."""
        return self.shards_optimizer

    @property
    def gathers_once(self) -> bool:
        """Whether parameters are gathered once a step and kept until its last backward."""
        return self.is_sharded and not self.shards_parameters

    def collectives(self, units: int, micro_batches: int) -> dict[str, int]:
        """Collectives over the dp axis in a step of ``units`` sharded units: (groups of) blocks, and the root."""
        if not self.is_sharded:
            return {"all_gather": 0, "reduce_scatter": 0}
        return {
            "all_gather": units if self.gathers_once else 2 * units * micro_batches,
            "reduce_scatter": units * (micro_batches if self.reduce_each_micro_batch else 1),
        }


ZERO_RULES: Mapping[int, ZeroRule] = {
    0: ZeroRule(shards_optimizer=False, shards_gradients=False, shards_parameters=False, reduce_each_micro_batch=False),
    1: ZeroRule(shards_optimizer=True, shards_gradients=False, shards_parameters=False, reduce_each_micro_batch=False),
    2: ZeroRule(shards_optimizer=True, shards_gradients=True, shards_parameters=False, reduce_each_micro_batch=True),
    3: ZeroRule(shards_optimizer=True, shards_gradients=True, shards_parameters=True, reduce_each_micro_batch=True),
}


class Unit:
    """Modules whose parameters travel in one collective: a block, a few small ones, or the root with all the rest."""

    def __init__(self, modules: Sequence[nn.Module], chunk: int | None) -> None:
        self.modules = tuple(modules)
        self.chunk = chunk
        """The chunk it belongs to; ``None`` for the root."""
        self.has_reduced = False
        self.followers: list[Unit] = []
        """Units of the same chunk that run backward before this one, in that order."""

    @property
    def module(self) -> FSDPModule:
        """The module that carries the switches of the unit."""
        return cast(FSDPModule, self.modules[0])

    @property
    def state(self) -> Any:
        """FSDP2's state of the unit."""
        return self.module._get_fsdp_state()

    @property
    def groups(self) -> list[Any]:
        """FSDP2's parameter groups of the unit: one, or none when it has no parameters."""
        state = self.state
        if hasattr(state, "_fsdp_param_groups"):
            return list(state._fsdp_param_groups)
        return [] if state._fsdp_param_group is None else [state._fsdp_param_group]

    def wait_for_gather(self) -> None:
        """Let a gather that was started but that no forward has used finish."""
        for group in self.groups:
            if group._all_gather_result is not None:
                group.wait_for_unshard()


class ZeroShards:
    """The parameters of a stage sharded over the dp axis, and the switches that a step sets.

    Args:
        root: The stage; FSDP2's root.
        blocks: The blocks of every chunk of this rank.
        rule: Row of :data:`ZERO_RULES`, not 0.
        dp_mesh: One-dimensional mesh of the dp axis.
        param_dtype: Type in which parameters are gathered, or ``None`` for their own.
        reduce_dtype: Type in which gradients are summed, or ``None`` for their own.
        ignored: Parameters to leave whole.
        unit_bytes: Blocks are grouped until a unit has this size.
        events: Told where this rank waits for the others.
    """

    def __init__(
        self,
        root: nn.Module,
        blocks: Mapping[int, Sequence[nn.Module]],
        rule: ZeroRule,
        dp_mesh: DeviceMesh,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        ignored: set[nn.Parameter],
        unit_bytes: int = UNIT_BYTES,
        events: EventSource | None = None,
    ) -> None:
        self.rule = rule
        self.events = events or EventSource()
        self.root = Unit([root], None)
        self.units = [Unit(group, chunk) for chunk in sorted(blocks) for group in _group(blocks[chunk], unit_bytes)]
        # Inputs are left as they are: autocast casts what computes, and the user's own float inputs stay exact.
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        for unit in (*self.units, self.root):
            _shard(unit, dp_mesh, rule, policy, ignored)
        self._chunks = sorted(blocks)
        self._link()
        self.completes = not rule.reduce_each_micro_batch
        """Whether :meth:`finish` reduces what no backward has reduced."""
        self.arrived: dict[int, bool] = {}
        """By id of parameter: whether this replica has a gradient of it; emptied when a step is finished."""
        if dp_mesh.device_type == "cpu":
            for unit in (*self.units, self.root):  # gloo cannot average
                unit.module.set_force_sum_reduction_for_comms(True)

    @property
    def all_units(self) -> list[Unit]:
        """All units in the order of a forward pass, the root first."""
        return [self.root, *self.units]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters."""
        return [item.sharded_param for item in self._fsdp_params()]

    def prepare_forward(self) -> None:
        """Before the first forward of a step or of an evaluation batch."""
        self.root.state._lazy_init()
        self._refresh_types()
        if self.rule.gathers_once:
            # All of them, in one order, whatever the user's code then calls: a block that only some replicas skip
            # must not change who waits for whom. FSDP2 waits for each where it is used.
            for unit in self.all_units:
                unit.module.unshard(async_op=True)

    def prepare_backward(self, chunk: int, last_of_chunk: bool, last_of_step: bool, sync: bool) -> None:
        """Before the backward of one micro-batch of ``chunk``.

        Args:
            chunk: The chunk that runs.
            last_of_chunk: Whether it is the chunk's last backward in this step.
            last_of_step: Whether it is this rank's last backward in this step.
            sync: Whether the optimizer steps after this step.
        """
        if not self.arrived:
            self.arrived = {id(parameter): parameter.grad is not None for parameter in self.parameters}
        each = self.rule.reduce_each_micro_batch
        for unit in self.units:
            unit.wait_for_gather()
            runs = unit.chunk == chunk
            unit.has_reduced = unit.has_reduced and not runs
            self._switch(unit, runs and (each or (last_of_chunk and sync)), runs and last_of_chunk and sync)
        self.root.wait_for_gather()
        self.root.has_reduced = False
        # The first chunk of a rank runs backward last, so one reduction then covers every chunk of the micro-batch.
        reduce_root = (each and chunk == self._first_chunk(chunk)) or (last_of_step and sync)
        self._switch(self.root, reduce_root, last_of_step and sync)
        root = self.root.module
        root.set_is_last_backward(last_of_step)
        mine = [unit for unit in self.units if unit.chunk == chunk]
        self.root.followers = mine[::-1]
        if self.rule.shards_parameters:
            root.set_modules_to_backward_prefetch([mine[-1].module] if mine else [])

    def finish(self, sync: bool) -> None:
        """After the last backward: reduce what no backward reached, and free what is gathered.

        On a GPU, what the computing stream is given afterwards comes after all reductions.
        """
        if not sync:
            return
        if self.completes:
            for unit in (*self.units[::-1], self.root):
                if not unit.has_reduced:
                    unit.wait_for_gather()
                    self._switch(unit, True, True)
                    for group in unit.groups:
                        group.post_backward()
                        group._training_state = type(group._training_state).IDLE
        for unit in self.all_units:
            unit.has_reduced = False
        self._wait_for_reductions()
        self.release()

    def _wait_for_reductions(self) -> None:
        """What FSDP2 does when a backward of its root ends, and nobody for reductions that began outside of one."""
        for unit in self.all_units:
            for group in unit.groups:
                if group._post_reduce_event is not None:
                    group.finalize_backward()
        if inputs := getattr(self.root.state._comm_ctx, "reduce_scatter_states", None):
            inputs.clear()  # read by reductions that are over by then

    def release(self) -> None:
        """Free gathered parameters, so that user code and the optimizer see the shards."""
        for unit in self.all_units:
            unit.wait_for_gather()
            unit.module.reshard()
        order = getattr(self.root.state._comm_ctx, "post_forward_order", None)
        if order:  # evaluation has no backward that would empty it
            order.clear()
            for unit in self.all_units:
                for group in unit.groups:
                    group._post_forward_indices.clear()

    def _first_chunk(self, chunk: int) -> int:
        return self._chunks[0] if self._chunks else chunk

    def _switch(self, unit: Unit, reduce: bool, reshard: bool) -> None:
        unit.module.set_requires_gradient_sync(reduce, recurse=False)
        unit.module.set_reshard_after_backward(reshard or self.rule.shards_parameters, recurse=False)

    def _link(self) -> None:
        """Fix the order of reductions, and that of prefetches."""
        for index, unit in enumerate(self.units):
            unit.followers = [other for other in self.units[index + 1 :] if other.chunk == unit.chunk][::-1]
            if self.rule.shards_parameters:
                # FSDP2 guesses from the order of forwards, which micro-batches and chunks shuffle.
                before = self.units[index - 1] if index and self.units[index - 1].chunk == unit.chunk else self.root
                unit.module.set_modules_to_backward_prefetch([before.module])
        for unit in self.all_units:
            for group in unit.groups:
                group.post_backward = _OrderedReduction(self, unit, group)
                # On a GPU the first makes the computing stream wait for parameters, the second for reduced gradients.
                group.wait_for_unshard = _Timed(self.events, group.wait_for_unshard, "all_gather")
                group.finalize_backward = _Timed(self.events, group.finalize_backward, "reduce_scatter")

    def _refresh_types(self) -> None:
        """FSDP2 fixes the types of a group's gradients once; parameters that were frozen then have none."""
        for unit in self.all_units:
            for group in unit.groups:
                if group._orig_dtype is None and any(p.sharded_param.requires_grad for p in group.fsdp_params):
                    group._init_mp_dtypes()

    def _fsdp_params(self) -> Iterator[Any]:
        for unit in self.all_units:
            for group in unit.groups:
                yield from group.fsdp_params


class _Timed:
    """A method of a group in which this rank may wait for the other replicas."""

    def __init__(self, events: EventSource, call: Callable[..., None], label: str) -> None:
        self._events, self._call, self._label = events, call, label

    def __call__(self, *args: Any) -> None:
        with self._events.span(Phase.DP, label=self._label):
            self._call(*args)


class _OrderedReduction:
    """A group's post-backward with two promises FSDP2 does not make.

    Units reduce in the same order on all replicas, and every trainable parameter takes part, with zeros where this
    replica made no gradient. Otherwise a layer that only some replicas skip would pair the gradients of different
    layers.
    """

    def __init__(self, shards: ZeroShards, unit: Unit, group: Any) -> None:
        self._shards, self._unit, self._group = shards, unit, group
        self._post_backward = group.post_backward

    def __call__(self, *args: Any) -> None:
        for unit in self._unit.followers:
            if not unit.has_reduced and self._reduces(unit):
                for group in unit.groups:
                    group.post_backward()
        if self._group.reduce_grads:
            self._complete()
            self._unit.has_reduced = True
        with self._shards.events.span(Phase.DP, label="reduce_scatter"):  # waits on a CPU alone
            self._post_backward(*args)

    def _reduces(self, unit: Unit) -> bool:
        return any(group.reduce_grads for group in unit.groups)

    def _complete(self) -> None:
        items = [item for item in self._group.fsdp_params if hasattr(item, "_unsharded_param")]
        for item in items:
            item.accumulate_unsharded_grad_if_needed()
        widened = any(item.unsharded_accumulated_grad is not None for item in items)
        for item in items:
            parameter = item._unsharded_param
            present = item.unsharded_accumulated_grad is not None or parameter.grad is not None
            key = id(item.sharded_param)
            self._shards.arrived[key] = present or self._shards.arrived.get(key, False)
            if widened:
                item.to_accumulated_grad_if_needed()
            if not present and item.sharded_param.requires_grad:
                if widened:
                    item.unsharded_accumulated_grad = torch.zeros_like(parameter, dtype=item.reduce_dtype)
                else:
                    parameter.grad = torch.zeros_like(parameter)


class _Gathered:
    """Lets a gathered parameter have the attributes of its shard, and the user's hooks.

    They see the gradient that this replica has made of the whole parameter, as where nothing is sharded.
    """

    def __init__(self, item: Any, hooks: Any) -> None:
        self._item, self._hooks = item, hooks
        self._init = item.init_unsharded_param

    def __call__(self) -> None:
        self._init()
        gathered = self._item._unsharded_param
        share_attributes(self._item.sharded_param, gathered)
        if self._hooks is not None and gathered.requires_grad and gathered._backward_hooks is not self._hooks:
            gathered._backward_hooks = self._hooks


def unshardable(
    root: nn.Module, blocks: Mapping[int, Sequence[nn.Module]], casts: bool, unit_bytes: int = UNIT_BYTES
) -> dict[nn.Parameter, str]:
    """Parameters that FSDP2 cannot shard here, with the reason: they are kept whole and all-reduced.

    Args:
        root: The stage.
        blocks: The blocks of every chunk of this rank.
        casts: Whether parameters are gathered in another type than their own.
        unit_bytes: As given to :class:`ZeroShards`.
    """
    reasons: dict[nn.Parameter, str] = {}
    seen: dict[nn.Parameter, int] = {}
    units = [group for chunk in sorted(blocks) for group in _group(blocks[chunk], unit_bytes)]
    inside = {id(module) for unit in units for block in unit for module in block.modules()}
    outside = [module for module in root.modules() if id(module) not in inside]
    for index, modules in enumerate([[m for block in unit for m in block.modules()] for unit in units] + [outside]):
        kinds: dict[torch.dtype, int] = {}
        for module in modules:
            for parameter in module.parameters(recurse=False):
                if is_placeholder(parameter):
                    continue
                if seen.setdefault(parameter, index) != index:
                    reasons[parameter] = "used in several sharded units"
                elif parameter.dim() == 0:
                    reasons[parameter] = "a scalar"
                elif not parameter.is_contiguous():
                    reasons[parameter] = "not contiguous in memory"
                elif casts and isinstance(module, _NormBase):
                    reasons[parameter] = "batch normalisation computes in the type of its statistics"
                elif parameter.requires_grad:
                    kinds[parameter.dtype] = kinds.get(parameter.dtype, 0) + parameter.numel()
        if len(kinds) > 1:
            main = max(kinds, key=lambda dtype: kinds[dtype])
            for module in modules:
                for parameter in module.parameters(recurse=False):
                    if parameter.requires_grad and not is_placeholder(parameter) and parameter.dtype != main:
                        reasons[parameter] = f"{parameter.dtype} among parameters of {main}"
    return reasons


def _group(blocks: Sequence[nn.Module], unit_bytes: int) -> list[list[nn.Module]]:
    """Runs of consecutive blocks of at least ``unit_bytes``; none when all together are smaller."""
    groups: list[list[nn.Module]] = []
    current: list[nn.Module] = []
    size = 0
    for block in blocks:
        current.append(block)
        size += sum(_bytes(p) for p in block.parameters() if not is_placeholder(p))
        if size >= unit_bytes:
            groups.append(current)
            current, size = [], 0
    if current and groups:
        groups[-1].extend(current)
    return groups


def _bytes(tensor: Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    return int(local.numel() * local.element_size())


def _shard(
    unit: Unit, dp_mesh: DeviceMesh, rule: ZeroRule, policy: MixedPrecisionPolicy, ignored: set[nn.Parameter]
) -> None:
    target: Any = list(unit.modules) if len(unit.modules) > 1 else unit.modules[0]
    before = {
        (id(module), key): (dict(vars(parameter)), parameter._backward_hooks)
        for root in unit.modules
        for module in root.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None
    }
    with following():  # shards of parameters without memory are recipes too
        fully_shard(
            target,
            mesh=dp_mesh,
            reshard_after_forward=rule.shards_parameters,
            mp_policy=policy,
            ignored_params=ignored,
        )
    for group in unit.groups:
        for item in group.fsdp_params:
            attributes, hooks = before[id(item._module_info.module), item._module_info.param_name]
            for name, value in attributes.items():
                vars(item.sharded_param).setdefault(name, value)
            item.init_unsharded_param = _Gathered(item, hooks)
