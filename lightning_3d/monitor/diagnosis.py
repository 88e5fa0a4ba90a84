"""A callback that names what is wrong while a run trains, and writes down what the report is made from."""

from __future__ import annotations

import dataclasses
import socket
import time
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_3d.collectives import all_gather_object, gather_object
from lightning_3d.errors import ConfigError
from lightning_3d.events import EventSource, Phase, StepEvents
from lightning_3d.mesh import Mesh
from lightning_3d.monitor import leaks, stragglers
from lightning_3d.monitor.clocks import clock_offsets
from lightning_3d.monitor.leaks import LeakWatch, memory_in_use
from lightning_3d.monitor.own_time import StepTimes, summarize, times_of
from lightning_3d.monitor.record import Entry, Leak, Place, RankWindow, Run, Window, Writer
from lightning_3d.monitor.source import mesh_of, source_of

WINDOW = 20
"""Batches, unless another number is asked for."""


class Diagnosis(Callback):
    """Names slow ranks and growing memory, with rank, host, place on the mesh and phase, once per window of steps.

    At the end of each window, and of training, the ranks tell each other a few numbers through host memory; in between
    nothing is exchanged. Rank 0 warns, and writes ``monitor/record.jsonl`` in the log folder, which
    ``lightning-3d report`` reads.

    Args:
        every_n_steps: Batches in a window.
        skip_steps: Batches at the start that belong to no window: they compile, allocate and settle shapes.
        score: Robust z-score from which on a rank is named.
        watch_memory: Look for memory that grows at constant shapes.
    """

    def __init__(
        self,
        every_n_steps: int = WINDOW,
        skip_steps: int = 3,
        score: float = stragglers.LIMIT,
        watch_memory: bool = True,
    ) -> None:
        if every_n_steps < stragglers.FEWEST_STEPS:
            raise ConfigError(
                f"A window of {every_n_steps} batches: the median of so few steps says nothing. Use"
                f" {stragglers.FEWEST_STEPS} or more."
            )
        self.every_n_steps = every_n_steps
        self.skip_steps = skip_steps
        self.score = score
        self.watch_memory = watch_memory
        self._events: EventSource | None = None
        self._steps: list[StepTimes] = []
        self._writer: Writer | None = None
        self._leak: Leak | None = None
        self._watch: LeakWatch | None = None
        self._seen = self._known = self._first = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell each other who is where, and begin to listen. Collective."""
        events, mesh = source_of(trainer, type(self).__name__)
        self._run = _describe(trainer, mesh)
        folder = trainer.log_dir  # asks rank 0, so every rank must get here
        if trainer.is_global_zero and folder is not None:
            self._writer = Writer(folder)
            self._writer.write(self._run)
        self._watch = None
        if self.watch_memory:
            window = max(self.every_n_steps, leaks.FEWEST_STEPS)
            self._watch = LeakWatch(self._run.places[mesh.rank], mesh.device, window, self.skip_steps)
        self._steps, self._leak = [], None
        self._seen = self._known = 0
        self._first = trainer.global_step
        self._events = events
        events.listen(self._hear)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the memory; at the end of a window, at all ranks. Collective at the end of a window."""
        self._seen += 1
        if self._watch is not None:
            self._leak = self._watch.step(trainer.global_step, _shapes(batch)) or self._leak
        if self._seen == self.skip_steps:
            self._first = trainer.global_step
        elif self._seen > self.skip_steps and (self._seen - self.skip_steps) % self.every_n_steps == 0:
            self._close(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at what is left of the last window, if it is enough, and listen no more. Collective."""
        left = (self._seen - self.skip_steps) % self.every_n_steps
        if self._events is not None and self._seen > self.skip_steps and left >= stragglers.FEWEST_STEPS:
            self._events.flush()
            self._close(trainer)
        self._stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Listen no more."""
        self._stop()

    def _stop(self) -> None:
        events, self._events = self._events, None
        writer, self._writer = self._writer, None
        if events is not None:
            events.unlisten(self._hear)
        if writer is not None:
            writer.flush()

    @property
    def clock_offsets(self) -> list[float]:
        """Of every rank, what to add to ``time.time()`` to have that of rank 0; seconds, while a run trains."""
        return [place.clock_offset_s for place in self._run.places]

    def _hear(self, step: StepEvents) -> None:
        self._known += 1
        if self._known > self.skip_steps:
            self._steps.append(times_of(step))

    def _close(self, trainer: Trainer) -> None:
        mesh = mesh_of(trainer)
        # The step that has just ended is told of when the next begins, on a GPU even later: it is the next window's.
        steps, self._steps = self._steps, []
        memory = {"memory": memory_in_use(mesh.device)}
        if mesh.device.type == "cuda":
            memory["memory_peak"] = torch.cuda.max_memory_allocated(mesh.device)
        leak, self._leak = self._leak, None
        mine = summarize(mesh.rank, steps, memory)
        first, self._first = self._first, trainer.global_step
        with mesh.events.span(Phase.SYNC, label="diagnosis"):
            told: list[tuple[RankWindow, Leak | None]] | None = gather_object((mine, leak), mesh.control_world)
        if told is not None:
            ranks = tuple(figures for figures, _ in told)
            window = Window(first_step=first, last_step=trainer.global_step, wall=time.time(), ranks=ranks)
            self._tell(window, [leak for _, leak in told if leak is not None])

    def _tell(self, window: Window, leaking: list[Leak]) -> None:
        found = [
            dataclasses.replace(one, first_step=window.first_step, last_step=window.last_step)
            for one in stragglers.stragglers(window.ranks, self._run.places, self._run.shares, self.score)
        ]
        if self._writer is not None:
            entries: list[Entry] = [window, *found, *leaking]
            for entry in entries:
                self._writer.write(entry)
        if found:
            rank_zero_warn(stragglers.message(found))
        for leak in leaking:
            rank_zero_warn(leaks.message(leak))


def _describe(trainer: Trainer, mesh: Mesh) -> Run:
    """What does not change while the run trains. Collective."""
    device, memory = "cpu", 0
    if mesh.device.type == "cuda":
        properties = torch.cuda.get_device_properties(mesh.device)
        device, memory = properties.name, properties.total_memory
    mine = Place(rank=mesh.rank, host=socket.gethostname(), device=device, memory_bytes=memory, **mesh.coordinates)
    places = all_gather_object(mine, mesh.control_world)
    apart = clock_offsets(mesh.control_world)
    layout: Any = trainer.strategy.layout  # type: ignore[attr-defined]
    return Run(
        started=time.time(),
        places=tuple(
            dataclasses.replace(place, clock_offset_s=offset) for place, offset in zip(places, apart, strict=True)
        ),
        schedule=layout.schedule,
        virtual_stages=layout.virtual_stages,
        num_micro_batches=layout.num_micro_batches,
        shares=tuple(layout.shares),
        zero_stage=layout.zero_stage,
        sequence_parallel=layout.sequence_parallel,
        activation_checkpointing=layout.activation_checkpointing,
        accumulated=trainer.accumulate_grad_batches,
    )


def _shapes(batch: Any) -> tuple[object, ...]:
    return tuple(tuple(leaf.shape) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
