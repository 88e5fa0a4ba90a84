"""Sharded parameters in steps that the user drives: several backwards and optimizer steps, in any order."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from lightning_3d.sharding.zero import ZeroShards


class ManualUse:
    """Gathers parameters whenever a module is called or runs backward, however often a step does so.

    FSDP2 gathers the root's parameters when the step begins and frees them at its backward, which under manual
    optimization is followed by further forwards. And user code freezes the parameters that its optimizers hold
    (``toggle_optimizer``), which are the shards, while modules compute with the gathered ones: ``requires_grad``
    follows, whichever of them was set.

    Args:
        shards: The sharded parameters of a stage without a pipeline.
    """

    def __init__(self, shards: ZeroShards) -> None:
        self._shards = shards
        shards.completes = True  # the root's backward hooks are set when its forward ends, which is later
        # At stage 3 blocks are gathered by their own hooks; the root's hook runs once per step.
        self._units = [shards.root] if shards.rule.shards_parameters else shards.all_units
        self._flags: dict[int, bool] = {}
        """By id of FSDP2's item: ``requires_grad`` of shard and gathered parameter, as of the last look."""
        users: dict[nn.Module, list[tuple[Any, Any]]] = {}
        for unit in shards.all_units:
            for group in unit.groups:
                for item in group.fsdp_params:
                    self._flags[id(item)] = item.sharded_param.requires_grad
                    for module in (item._module_info.module, *item._module_info.shared_modules):
                        users.setdefault(module, []).append((group, item))
        for module, pairs in users.items():
            module.register_forward_pre_hook(partial(self._before_call, pairs), prepend=True)

    def gather(self) -> None:
        """Gather what is not gathered. Collective over the dp axis if anything is missing."""
        if all(group.is_unsharded for unit in self._units for group in unit.groups):
            return
        self._shards.prepare_forward()
        for unit in self._units:
            unit.module.unshard()
            unit.wait_for_gather()

    def _before_call(self, pairs: list[tuple[Any, Any]], module: nn.Module, args: Any) -> None:
        # A look at all units in the call of every layer would take longer than the layer.
        if not all(group.is_unsharded for group, _ in pairs):
            self.gather()
        for _, item in pairs:
            gathered = getattr(item, "_unsharded_param", None)
            if gathered is None:
                continue
            shard = item.sharded_param
            changed = shard.requires_grad != self._flags[id(item)]
            wanted = shard.requires_grad if changed else gathered.requires_grad
            for parameter in (shard, gathered):
                if parameter.requires_grad != wanted:
                    parameter.requires_grad_(wanted)
            self._flags[id(item)] = wanted
