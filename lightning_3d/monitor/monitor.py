"""A callback that logs where the time and the memory of a run go."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_3d.collectives import all_gather_object, gather_object
from lightning_3d.errors import ConfigError
from lightning_3d.events import EventSource, Phase, StepEvents
from lightning_3d.mesh import Mesh
from lightning_3d.monitor.clocks import clock_offsets
from lightning_3d.monitor.device_scalars import Name
from lightning_3d.monitor.devices import peak_flops, peak_memory
from lightning_3d.monitor.diagnosis import WINDOW, Diagnosis
from lightning_3d.monitor.figures import Figures, figures, utilisation
from lightning_3d.monitor.gauges import Gauges
from lightning_3d.monitor.leaks import memory_in_use
from lightning_3d.monitor.model_flops import ModelFlops, count_model
from lightning_3d.monitor.own_time import StepTimes, summarize, times_of
from lightning_3d.monitor.record import RankWindow
from lightning_3d.monitor.source import mesh_of, source_of
from lightning_3d.monitor.step_picture import RankStep, draw_step, step_trace
from lightning_3d.monitor.tags import scalars
from lightning_3d.monitor.tensorboard import TensorBoardPages
from lightning_3d.pictures import svg

_WINDOW = 100
"""Steps at most that a point is the mean of."""
_PICTURED = 3
"""Steps that a rank keeps for a picture: devices may know the times of one more or less than others."""


class ThreeDMonitor(Callback):
    """Logs, through the loggers of the Trainer, speed, bubble, shares of time, memory and what becomes of training.

    Every ``every_n_steps`` batches the ranks tell each other one small set of numbers through host memory; no device
    waits for it, and on GPUs nothing is synchronised. Charts appear in TensorBoard with descriptions and a page of
    custom charts; any other logger gets the same numbers. Now and then a step is drawn: a picture in TensorBoard, and
    ``monitor/step_*.svg`` and ``.trace.json`` (for https://ui.perfetto.dev) in the log folder.

    Args:
        every_n_steps: Batches between points; by default the Trainer's ``log_every_n_steps``. A point is the mean over
            them, over the last 100 at most.
        tokens_per_sample: Counts tokens where batches hold no ids of samples x positions, or not only tokens.
        peak_tflops: Dense peak of a device for the model-FLOPs utilisation, TFLOP/s; by default that of 16-bit products
            on known GPUs. On unknown devices nothing is logged.
        picture_every_n_steps: Batches between pictures of a step; 0 is never.
        skip_steps: Batches at the start that are left out: they settle shapes, compile and allocate.
        diagnose: Name slow ranks and growing memory, and write the record that ``lightning-3d report`` reads.
        window: Batches after which that is done, 4 or more; and once more when training ends.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        tokens_per_sample: float | None = None,
        peak_tflops: float | None = None,
        picture_every_n_steps: int = 1000,
        skip_steps: int = 2,
        diagnose: bool = True,
        window: int = WINDOW,
    ) -> None:
        given = {"every_n_steps": every_n_steps, "tokens_per_sample": tokens_per_sample, "peak_tflops": peak_tflops}
        for name, value in given.items():
            if value is not None and value <= 0:
                raise ConfigError(f"{name}={value} is not positive. Leave it out for the default.")
        self.every_n_steps = every_n_steps
        self.tokens_per_sample = tokens_per_sample
        self.peak_tflops = peak_tflops
        self.picture_every_n_steps = picture_every_n_steps
        self.skip_steps = skip_steps
        self.diagnosis = Diagnosis(window) if diagnose else None
        self.figures: Figures | None = None
        """Those of the last window, on rank 0."""
        self._events: EventSource | None = None
        self._steps: deque[StepTimes] = deque(maxlen=_WINDOW)
        self._for_picture: list[tuple[int, StepEvents]] = []
        self._pages: list[TensorBoardPages] = []
        self._flops: ModelFlops | None = None
        self._folder: Path | None = None
        self._offsets: list[float] = [0.0]
        self._gauges = Gauges()
        self._known = self._next_picture = 0

    # --- begin and end ---------------------------------------------------------------------------------------------

    def before_layout(self, module: nn.Module, mesh: Mesh) -> None:
        """While the model is whole: count its operations, where they will be wanted."""
        if mesh.rank == 0 and peak_flops(mesh.device, self.peak_tflops) is not None:
            self._flops = count_model(module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to listen. Collective."""
        events, mesh = source_of(trainer, type(self).__name__)
        if self.diagnosis is not None:
            self.diagnosis.on_train_start(trainer, pl_module)
            self._offsets = self.diagnosis.clock_offsets
        else:
            self._offsets = clock_offsets(mesh.control_world)
        folder = trainer.log_dir  # asks rank 0, so every rank must get here
        self._folder = Path(folder) / "monitor" if folder is not None and trainer.loggers else None
        self._pages = []
        if trainer.is_global_zero:
            self._pages = [page for logger in trainer.loggers if (page := TensorBoardPages.of(logger)) is not None]
        for page in self._pages:
            page.lay_out()
        self._steps.clear()
        self._for_picture.clear()
        self._gauges.clear()
        self._known = 0
        self._next_picture = self.skip_steps + 2
        self._events = events
        events.listen(self._hear)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what is still on its way from the device, and listen no more. Collective."""
        if self.diagnosis is not None:
            self.diagnosis.on_train_end(trainer, pl_module)
        if self._events is not None:
            self._events.flush()
            self._log_arrived(trainer)
        self._stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Listen no more."""
        if self.diagnosis is not None:
            self.diagnosis.on_exception(trainer, pl_module, exception)
        self._stop()

    def _stop(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            events.unlisten(self._hear)

    def _hear(self, step: StepEvents) -> None:
        self._known += 1
        if self._known > self.skip_steps:
            self._steps.append(times_of(step))
            self._for_picture = [*self._for_picture[-_PICTURED + 1 :], (self._known, step)]

    # --- steps -----------------------------------------------------------------------------------------------------

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Take the norm of the gradient in the last step of a window. Collective there."""
        self._gauges.before_step(trainer, self._every(trainer), _step(trainer))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log at the end of a window. Collective there."""
        if self.diagnosis is not None:
            self.diagnosis.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._gauges.after_batch()
        every, seen = self._every(trainer), self._gauges.seen
        if every and seen % every == 0:
            self._close(trainer, batch)
        self._log_arrived(trainer)
        if self.picture_every_n_steps and seen >= self._next_picture and self._draw(trainer):
            self._next_picture = seen + self.picture_every_n_steps

    def _every(self, trainer: Trainer) -> int:
        """Batches between points; 0 where the Trainer logs nothing."""
        return int(self.every_n_steps or trainer.log_every_n_steps)  # type: ignore[attr-defined]

    def _close(self, trainer: Trainer, batch: Any) -> None:
        mesh = mesh_of(trainer)
        steps = list(self._steps)
        self._steps.clear()
        memory = memory_in_use(mesh.device)
        # A system tells of the peak of a process late.
        peak = max(memory, peak_memory(mesh.device))
        window = summarize(mesh.rank, steps, {"memory": memory, "memory_peak": peak})
        with mesh.events.span(Phase.SYNC, label="monitor"):
            windows: list[RankWindow] | None = gather_object(window, mesh.control_world)
        if windows is None:
            return
        found = figures(windows, mesh.sizes, self.tokens_per_sample)
        values = self._training(trainer)
        if found is not None:
            self.figures = found
            layout: Any = trainer.strategy.layout  # type: ignore[attr-defined]
            values |= scalars(found, layout.bubble, self._utilisation(found, mesh, batch))
        step = _step(trainer)
        for name, of, value in self._gauges.arrived():
            if of == step:  # on one row of a table with the others
                values[_tag(name)] = value
            else:
                self._log(trainer, {_tag(name): value}, of)
        self._log(trainer, values, step)

    def _log(self, trainer: Trainer, values: dict[str, float], step: int) -> None:
        pages = {id(page.logger): page for page in self._pages}
        for logger in trainer.loggers:
            page = pages.get(id(logger))
            left = values if page is None else page.scalars(values, step)
            if left:
                logger.log_metrics(left, step=step)

    def _log_arrived(self, trainer: Trainer) -> None:
        """Log what has arrived from the device."""
        for name, step, value in self._gauges.arrived():
            if trainer.is_global_zero:
                self._log(trainer, {_tag(name): value}, step)

    def _utilisation(self, found: Figures, mesh: Mesh, batch: Any) -> float | None:
        peak = peak_flops(mesh.device, self.peak_tflops)
        flops = self._flops.per_sample(batch) if self._flops is not None else None
        return None if peak is None or flops is None else utilisation(found, flops, peak)

    def _training(self, trainer: Trainer) -> dict[str, float]:
        """What becomes of the model, as far as the host knows it."""
        rates = self._gauges.read(trainer, _step(trainer))
        values = {"training/skipped_steps": float(self._gauges.skipped)}
        if len(set(rates.values())) == 1:
            values["training/learning_rate"] = next(iter(rates.values()))
        else:
            values |= {_tag(name): rate for name, rate in rates.items()}
        return values

    # --- picture ---------------------------------------------------------------------------------------------------

    def _draw(self, trainer: Trainer) -> bool:
        """Draw the last step that all stages of the first replica know, if any. Collective among these."""
        mesh = mesh_of(trainer)
        if self._folder is None or mesh.dp.rank or mesh.tp.rank:
            return True
        with mesh.events.span(Phase.SYNC, label="picture"):
            told: list[Mapping[int, StepEvents]] = all_gather_object(dict(self._for_picture), mesh.control_pp)
        shared = set.intersection(*(set(steps) for steps in told))
        if mesh.rank or not shared:
            return bool(shared)
        which = max(shared)
        ranks = [
            RankStep(
                name=f"pp{stage} dp0 tp0",
                stage=stage,
                rank=mesh.pp.ranks[stage],
                step=steps[which],
                clock_offset_s=self._offsets[mesh.pp.ranks[stage]],
            )
            for stage, steps in enumerate(told)
        ]
        layout: Any = trainer.strategy.layout  # type: ignore[attr-defined]
        drawing = draw_step(ranks, layout.bubble if mesh.pp.size > 1 else None)
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"step_{ranks[0].step.step:06d}"
        (self._folder / f"{name}.svg").write_text(svg(drawing))
        (self._folder / f"{name}.trace.json").write_text(json.dumps(step_trace(ranks)))
        for page in self._pages:
            page.picture(drawing, ranks[0].step.step)
        return True


def _step(trainer: Trainer) -> int:
    """Under which Lightning's own loggers have this batch."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def _tag(name: Name) -> str:
    return f"training/{'_'.join(name)}"
