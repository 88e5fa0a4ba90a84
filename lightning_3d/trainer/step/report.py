"""What the last stage tells the other stages of its replica after each batch, in one message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule

from lightning_3d.events import Phase
from lightning_3d.mesh import Mesh
from lightning_3d.trainer.data.messages import Channel
from lightning_3d.trainer.logging.logger_calls import LoggerCalls
from lightning_3d.trainer.logging.logs import LogRelay
from lightning_3d.trainer.module.mirror import Snapshot, StateMirror

_OUTPUT = "output"
"""What a replica tells whose step returned something."""


class StepReport:
    """Makes a batch look the same on every stage: the step's output, logged values and the state of the module.

    What the step called on loggers is carried out on rank 0.

    Call :meth:`begin` before and :meth:`publish` after the micro-batches of each batch, on every rank.

    Args:
        module: The LightningModule.
        mesh: The mesh.
        relay: Its logged values.
        mirror: Its state.
    """

    def __init__(self, module: LightningModule, mesh: Mesh, relay: LogRelay, mirror: StateMirror) -> None:
        self.module = module
        self.mesh = mesh
        self.relay = relay
        self.mirror = mirror
        self.calls = LoggerCalls(module, mesh)
        """What steps call on loggers; the step on each micro-batch runs within its ``recording``."""
        self._before: Snapshot | None = None
        self._filler = False
        self.any_output = True
        """Whether the step of any replica returned something for the last batch."""
        self._channel = Channel(
            mesh.control_pp,
            source=mesh.pp.size - 1,
            devices=mesh.pp if mesh.device.type != "cpu" else None,
            device=mesh.device,
        )

    def begin(self, filler: bool, num_micro_batches: int = 1) -> None:
        """A batch begins; what the module holds now is what changes are measured against."""
        self._filler = filler
        self.calls.begin(filler, num_micro_batches)
        if filler:
            self._before = self.mirror.snapshot(copy=True)
        elif self.mesh.pp.size > 1:
            self._before = self.mirror.snapshot()

    def counting(self, size: int, virtual_stages: int) -> AbstractContextManager[None]:
        """Around the user's step on one micro-batch: what it does to the module must count once, where it is real.

        Args:
            size: Samples of the micro-batch; what a step does with none is undone.
            virtual_stages: Chunks of this rank. With several, a step also runs on the last stage up to an earlier cut.
        """
        runs_twice = virtual_stages > 1 and self.mesh.pp.is_last
        return nullcontext() if not runs_twice and (size or self._filler) else self._undone_unless_counted(size)

    @contextmanager
    def _undone_unless_counted(self, size: int) -> Iterator[None]:
        before = self.mirror.snapshot(copy=True)
        try:
            yield
        except BaseException:
            self.mirror.restore(before)
            raise
        if not size:
            self.mirror.restore(before)

    def publish(self, output: Any) -> Any:
        """The batch has run. Collective over dp and pp.

        Args:
            output: What the step returned for the whole batch; looked at on the last stage only.

        Returns:
            The last stage's output, on every stage.
        """
        mirror, before = self.mirror, self._before
        self._before = None
        last = self.mesh.pp.is_last
        if self._filler and before is not None:
            mirror.restore(before)
        logged = self.relay.collect(() if output is None else (_OUTPUT,)) if last else None
        calls = self.calls.collect() or None
        if self.mesh.pp.size > 1:
            if not self._filler and before is not None and not last:
                # What this stage did before its part of the model is done by the last stage as well.
                mirror.restore(before)
            delta = mirror.delta(before) if last and not self._filler and before is not None else None
            message = (output, logged, delta or None, calls)
            with self.mesh.events.span(Phase.SYNC, label="outputs"):
                told, _ = self._channel.exchange(message, names=mirror.names, named=mirror.named)
            output, logged, delta, calls = told
            if delta is not None and not last:
                mirror.apply(delta)
        if logged is not None:
            self.relay.replay(logged)
            self.any_output = _OUTPUT in logged.told
        self.calls.replay(calls)
        return output
