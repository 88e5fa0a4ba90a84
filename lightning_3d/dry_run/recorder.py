"""Recording what a rank does in a step, and saying what its memory is for; in a dry run and in a real one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_3d.dry_run.allocations import Moment
from lightning_3d.dry_run.watch import Steps, Watch
from lightning_3d.dry_run.world import group_names
from lightning_3d.mesh import Mesh
from lightning_3d.placeholder import is_placeholder
from lightning_3d.trainer.setup.assembly import Assembly


class Recorder:
    """Follows a rank that is laid out.

    Args:
        trainer: With the optimizers.
        assembly: What the rank runs.
        mesh: Its place.
    """

    def __init__(self, trainer: pl.Trainer, assembly: Assembly, mesh: Mesh) -> None:
        self._trainer, self._assembly = trainer, assembly
        self.watch = Watch(group_names(mesh))
        self.first = 0
        """Index of the moment in which the last step began."""
        self.batch_bytes = 0
        """Of the batch of the last step, as it was given and as it was converted."""
        steps = Steps(self.watch, self._label)
        assembly.engine.progress = steps
        trainer.strategy.progress = steps  # type: ignore[attr-defined]
        self._mark_places()
        self._mark_finish()

    @contextmanager
    def recording(self, batch: Any) -> Iterator[None]:
        """Record a step on ``batch``."""
        gc.collect()  # what has become unreachable is not the step's
        allocations = self.watch.allocations
        self._label()
        self.first = len(allocations.moments)
        allocations.begin(Moment("start"))
        with self.watch.watching():
            self.batch_bytes = 0
            self.batch(batch)
            yield
        self._label()

    def batch(self, batch: Any) -> None:
        """The step holds ``batch``."""
        allocations = self.watch.allocations
        for leaf in pytree.tree_leaves(batch):
            if isinstance(leaf, Tensor) and leaf.dim():
                before = allocations.now
                allocations.see(leaf, "activations")
                self.batch_bytes += allocations.now - before

    def _label(self) -> None:
        """Say what memory is for, as far as it can be told from who holds it."""
        allocations, sharding = self.watch.allocations, self._assembly.sharding
        for tensor in held(self._assembly.stage.module):
            allocations.see(tensor, "parameters")
        for unit in sharding.shards.all_units if sharding.shards is not None else ():
            for group in unit.groups:
                for parameter in group.fsdp_params:
                    allocations.see(parameter.sharded_param, "parameters")
                    self._label_gathered(parameter)
        for item in sharding.owned:
            if item.param.grad is not None:
                allocations.see(item.param.grad, "gradients")
        for optimizer in self._trainer.optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        allocations.see(value, "optimizer")

    def _label_gathered(self, parameter: Any) -> None:
        """What FSDP2 holds of a parameter besides its shard."""
        allocations = self.watch.allocations
        for tensor in getattr(parameter, "all_gather_outputs", ()):
            allocations.see(tensor, "gathered parameters")
        gathered = getattr(parameter, "_unsharded_param", None)
        gradients = (
            getattr(parameter, "unsharded_accumulated_grad", None),
            gathered.grad if gathered is not None else None,
        )
        for gradient in gradients:
            if gradient is not None:
                allocations.see(gradient, "gradients")

    def _mark_finish(self) -> None:
        """Tell the record when the pipeline is through, and when an optimizer steps."""
        finish, allocations = self._assembly.sharding.finish, self.watch.allocations

        def marked(sync: bool = True) -> None:
            self._label()
            allocations.begin(Moment("reduce"))
            finish(sync)
            self._label()
            allocations.begin(Moment("between"))

        self._assembly.sharding.finish = marked  # type: ignore[method-assign]
        for optimizer in self._trainer.optimizers:
            optimizer.register_step_pre_hook(lambda *_: allocations.begin(Moment("optimizer")))

    def _mark_places(self) -> None:
        """Tell the record when a block runs, and when the last one has."""
        allocations = self.watch.allocations
        stage = self._assembly.stage
        last = stage.cut.chunks.num_chunks - 1

        def enter(*_: Any) -> None:
            allocations.place = "block"

        for chunk, members in stage.blocks.items():
            for index, block in enumerate(members):
                after = "head" if chunk == last and index == len(members) - 1 else ""

                def leave(*_: Any, after: str = after) -> None:
                    allocations.place = after

                block.register_forward_pre_hook(enter)
                block.register_forward_hook(leave)


def held(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers of which this rank has values."""
    return [tensor for tensor in (*module.parameters(), *module.buffers()) if not is_placeholder(tensor)]
