"""One rank of the job: laid out and stepped by the code of the real run, without memory and without the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_3d.config import ParallelConfig
from lightning_3d.dry_run.extension import actions_ahead
from lightning_3d.dry_run.gpu_operations import as_on_gpus
from lightning_3d.dry_run.memoryless import Memoryless
from lightning_3d.dry_run.recorder import Recorder
from lightning_3d.dry_run.unchecked import unchecked
from lightning_3d.initialization import parameters_from
from lightning_3d.mesh import Mesh
from lightning_3d.pipeline.engine import Step
from lightning_3d.pipeline.links import Link
from lightning_3d.pipeline.micro_batches import MicroBatch
from lightning_3d.pipeline.transport import Pending, Transport
from lightning_3d.strategy import ThreeDStrategy
from lightning_3d.tensor_parallel import BlockCheck
from lightning_3d.trainer.data.batches import BatchLedger
from lightning_3d.trainer.setup.assembly import Assembly, assemble
from lightning_3d.trainer.setup.blueprint import Blueprint
from lightning_3d.trainer.step.sanity import SanityChecks
from lightning_3d.trainer.step.steps import StepRunner


@dataclass(frozen=True)
class Batch:
    """What a replica's batch looks like."""

    example: Any
    """A batch of any number of samples: tensors are cut along dim 0."""
    samples: int
    """Samples of a replica's batch in the real run."""

    def of(self, samples: int, memoryless: Memoryless) -> Any:
        """A batch of ``samples``, without values."""

        def outline(leaf: Tensor) -> Tensor:
            if not leaf.dim():
                return leaf
            shape = (samples, *leaf.shape[1:])
            return memoryless.tensor(shape, torch.empty(shape, device="meta").stride(), leaf.dtype)

        return pytree.tree_map_only(Tensor, outline, self.example)


class Rank:
    """A rank that is laid out, and can run steps.

    Args:
        trainer: With a :class:`~lightning_3d.ThreeDStrategy`; its loops are not run.
        module: The whole module, with recipes instead of memory.
        config: The options, with the micro-batch size of the run.
        mesh: The rank's place, in a world that is not there.
        blueprint: How the module is cut, if that is known.
        check: What says whether a cut block keeps its numbers.
        on_gpus: Whether messages are known to have arrived, as NCCL knows it (gloo does not), and operations keep what
            they keep on GPUs.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        config: ParallelConfig,
        mesh: Mesh,
        blueprint: Blueprint | None = None,
        check: BlockCheck = unchecked,
        on_gpus: bool = False,
    ) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ThreeDStrategy)
        self.trainer, self.module, self.config, self.mesh = trainer, module, config, mesh
        self.memoryless = Memoryless()
        self._on_gpus = on_gpus
        _begin_training(trainer, module)
        strategy.config = config
        strategy._mesh = mesh
        precision = strategy._precision
        ledger = BatchLedger(mesh.dp.size)
        precision.attach(mesh, config)
        precision.on_batch = ledger.take
        with parameters_from(lambda ref: self.memoryless.tensor(ref.shape, ref.stride, ref.dtype)):
            self.assembly: Assembly = assemble(module, config, mesh, precision, check, blueprint)
        if self._on_gpus:
            self.assembly.engine._transport = _Arriving(mesh)
        strategy._assembly, strategy.model = self.assembly, module
        precision.owned = self.assembly.sharding.owned
        self.runner = StepRunner(trainer, module, self.assembly, config, mesh, precision, ledger)
        strategy._runner = self.runner
        strategy._sanity = SanityChecks(module, self.assembly.sharding, mesh, every=0)
        self._strategy, self._precision = strategy, precision

    @contextmanager
    def _without_memory(self) -> Iterator[None]:
        with self.memoryless, as_on_gpus() if self._on_gpus else nullcontext():
            yield

    def forward(self, batch: Any) -> Mapping[int, Link]:
        """Run the forward of one micro-batch through all chunks of this rank; gives what passes the cuts."""
        self.module._current_fx_name = "training_step"
        with self._without_memory():
            batch = self._precision.convert_input(batch)
            self.runner._begin(self.runner._ledger.current, 1)
            call = self.runner._caller("training", self.module.training_step, (batch, 0), [1.0])
            self.assembly.engine.run(Step(pieces=[MicroBatch(0, batch, 1)], call=call, mode="train"))
        return self.assembly.engine.links

    def make_optimizers(self) -> None:
        """Call the user's ``configure_optimizers``."""
        with self.memoryless:
            self._strategy.setup_optimizers(self.trainer)
        self._precision.connect(self.module, self.trainer.optimizers, [])
        self.recorder = Recorder(self.trainer, self.assembly, self.mesh)

    def run_ahead(self, ahead: int) -> None:
        """From here on run ``ahead`` forwards of 1F1B before the first backward, as a stage further down does."""
        engine, pp = self.assembly.engine, self.mesh.pp
        engine._actions = lambda count: actions_ahead(pp.rank, pp.size, ahead, count)  # type: ignore[method-assign]

    def run_as_it_is(self) -> None:
        """From here on run the schedule of this stage again."""
        vars(self.assembly.engine).pop("_actions", None)

    def step(self, batch: Any) -> None:
        """One batch as Lightning runs it: the step, backward, clipping and the optimizers."""
        with self._without_memory(), self.recorder.recording(batch):
            batch = self._precision.convert_input(batch)
            self.recorder.batch(batch)
            kwargs = OrderedDict(batch=batch, batch_idx=0)
            loop = self.trainer.fit_loop.epoch_loop
            if self.module.automatic_optimization:
                loop.automatic_optimization.run(self.trainer.optimizers[0], 0, kwargs)
            else:
                loop.manual_optimization.run(kwargs)
        engine = self.assembly.engine
        engine._step = replace(engine._step, pieces=[])  # a batch of another size would be seen in the next step


class _Arriving(Transport):
    """Messages that have arrived when the engine asks for the first time, so that it holds on to none of them."""

    @override
    def send(self, tensors: Sequence[Tensor], peer: int, kind: int, chunk: int, micro_batch: int) -> Pending:
        sent = super().send(tensors, peer, kind, chunk, micro_batch)
        return Pending([], sent.tensors, self._device)


def _begin_training(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """What the Trainer sets before its loops begin."""
    trainer.strategy.connect(module)
    module.trainer = trainer
    trainer.state.fn, trainer.state.status = TrainerFn.FITTING, TrainerStatus.RUNNING
    trainer.state.stage = RunningStage.TRAINING
    trainer.accumulate_grad_batches = 1
    # Without data the number of steps is not known; schedulers that ask for it get what was given, or a thousand.
    loop = trainer.fit_loop
    loop.max_epochs = -1
    if loop.epoch_loop.max_steps in (-1, None):
        loop.epoch_loop.max_steps = 1000
    module.train()
