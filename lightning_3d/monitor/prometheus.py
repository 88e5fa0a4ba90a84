"""A callback that lets Prometheus see what every rank does."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_3d.collectives import all_gather_object, broadcast_object
from lightning_3d.errors import ConfigError
from lightning_3d.events import EventSource, StepEvents
from lightning_3d.mesh import Mesh
from lightning_3d.monitor.clocks import machine
from lightning_3d.monitor.device_scalars import Name
from lightning_3d.monitor.devices import gpu_uuid, memory_size, peak_flops, peak_memory
from lightning_3d.monitor.endpoint import Endpoint
from lightning_3d.monitor.gauges import Gauges
from lightning_3d.monitor.gpu_counters import GpuCounters
from lightning_3d.monitor.leaks import memory_in_use
from lightning_3d.monitor.model_flops import ModelFlops, count_model
from lightning_3d.monitor.noticeboard import Notice, Noticeboard
from lightning_3d.monitor.rank_counters import RankCounters
from lightning_3d.monitor.source import mesh_of, source_of

TARGETS = Path("monitor", "prometheus_targets.json")
"""In the log folder, unless another place is asked for: the endpoints of all hosts while the run trains."""
_POST_S = 1.0


class ThreeDPrometheus(Callback):
    """Serves the figures of every rank to Prometheus, at one port per host.

    Each rank adds up what it does and posts the sums in a small file in memory, about once a second; the first rank of
    every host answers scrapes from these files, in threads of its own. Ranks exchange nothing for it, and neither a
    post nor a scrape waits for the other. Every series has the labels ``run``, ``rank``, ``host``, ``pp``, ``dp``,
    ``tp`` and ``gpu_uuid``. docs/monitoring/prometheus.md lists the names, with a dashboard for Grafana.

    Args:
        port: Of every host; 0 takes any that is free.
        address: Of the interface to listen on. Whoever reaches it can read the figures.
        if_taken: What to do where the port is taken: ``"next"`` uses the next free one and warns, ``"error"`` ends the
            run.
        targets_file: Where rank 0 lists host and port of all endpoints while the run trains, for ``file_sd_configs`` of
            Prometheus; by default ``monitor/prometheus_targets.json`` in the log folder.
        stale_after_s: Seconds after which a rank that has posted nothing counts as down: only ``lightning3d_rank_up 0``
            is exported of it.
        gpu_counters: Export utilisation, memory, power, temperature and throttling of GPUs through nvidia-ml-py, for
            hosts without dcgm-exporter.
        tokens_per_sample: Counts tokens where batches hold no ids of samples x positions, or not only tokens.
        peak_tflops: Dense peak of a device for the model-FLOPs utilisation, TFLOP/s; by default that of 16-bit products
            on known GPUs.
        gradient_norm_every_n_steps: Batches between norms of the gradient, each a message between ranks; by default the
            Trainer's ``log_every_n_steps``, 0 is never.
        run: Tells this run's series from those of others; by default the end of its log folder, such as
            ``"lightning_logs/version_3"``, or host and process of rank 0 where nothing is logged.

    Raises:
        ConfigError: prometheus-client is not installed, or an argument makes no sense.
    """

    def __init__(
        self,
        port: int = 9410,
        address: str = "0.0.0.0",
        if_taken: Literal["next", "error"] = "next",
        targets_file: str | None = None,
        stale_after_s: float = 300.0,
        gpu_counters: bool = False,
        tokens_per_sample: float | None = None,
        peak_tflops: float | None = None,
        gradient_norm_every_n_steps: int | None = None,
        run: str | None = None,
    ) -> None:
        if importlib.util.find_spec("prometheus_client") is None:
            raise ConfigError(
                "ThreeDPrometheus needs prometheus-client, which is not installed. pip install 'lightning-3d[monitor]'."
            )
        if not 0 <= port <= 65535:
            raise ConfigError(f"port={port} is no port. Use one from 1024 to 65535, or 0 for any that is free.")
        if if_taken not in ("next", "error"):
            raise ConfigError(f"if_taken={if_taken!r} is unknown. Use 'next' or 'error'.")
        if stale_after_s <= _POST_S:
            raise ConfigError(
                f"stale_after_s={stale_after_s} is too short: ranks post every {_POST_S:g} s, or once per batch where"
                " that takes longer."
            )
        self.port, self.address, self.if_taken = port, address, if_taken
        self.targets_file = targets_file
        self.stale_after_s = stale_after_s
        self.gpu_counters = gpu_counters
        self.tokens_per_sample = tokens_per_sample
        self.peak_tflops = peak_tflops
        self.gradient_norm_every_n_steps = gradient_norm_every_n_steps
        self.run = run
        self.targets: list[str] = []
        """``host:port`` of every endpoint, while a run trains."""
        self._counters = RankCounters()
        self._events: EventSource | None = None
        self._gauges = Gauges()
        self._arrived: dict[Name, float] = {}
        self._flops: ModelFlops | None = None
        self._flops_per_sample: float | None = None
        self._board: Noticeboard | None = None
        self._endpoint: Endpoint | None = None
        self._notice: Notice | None = None
        self._written: Path | None = None
        self._labels: dict[str, Any] = {}
        self._posted = 0.0

    # --- begin and end ---------------------------------------------------------------------------------------------

    def before_layout(self, module: nn.Module, mesh: Mesh) -> None:
        """While the model is whole: count its operations, where they will be wanted."""
        if mesh.rank == 0 and peak_flops(mesh.device, self.peak_tflops) is not None:
            self._flops = count_model(module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the endpoints, and begin to listen. Collective."""
        events, mesh = source_of(trainer, type(self).__name__)
        self._close()
        host = socket.gethostname()
        folder = trainer.log_dir  # asks rank 0, so every rank must get here
        log_folder = Path(folder) if folder is not None and trainer.loggers else None
        run = self.run or ("/".join(log_folder.parts[-2:]) if log_folder is not None else f"{host}:{os.getpid()}")
        self._labels = {
            "run": broadcast_object(run, mesh.control_world),
            "rank": mesh.rank,
            "host": host,
            **mesh.coordinates,
            "gpu_uuid": gpu_uuid(mesh.device),
        }
        machines = all_gather_object((host, machine()), mesh.control_world)
        neighbours = [rank for rank, where in enumerate(machines) if where == machines[mesh.rank]]
        opened = all_gather_object(self._open(neighbours) if neighbours[0] == mesh.rank else None, mesh.control_world)
        self._refuse(opened)
        notices = opened[neighbours[0]][0]
        alone = None
        if self._board is None:
            try:
                self._notice = Notice(Noticeboard.path(Path(notices), mesh.rank))
            except OSError:  # a container that sees another file system than its neighbour
                alone = self._open([mesh.rank])
        added = all_gather_object(alone, mesh.control_world)
        self._refuse(added)
        if self._board is not None:
            self._board.unlink()
        self.targets = [
            f"{where[0]}:{one[1]}"
            for several in (opened, added)
            for where, one in zip(machines, several, strict=True)
            if one is not None
        ]
        self._write_targets(trainer, log_folder)
        self._counters = RankCounters()
        self._gauges.clear()
        self._arrived = {}
        self._post(trainer)
        self._events = events
        events.listen(self._hear)

    def _open(self, ranks: Sequence[int]) -> tuple[str, int, str]:
        """Open an endpoint for these ranks: the folder of their notices, the port, and what went wrong."""
        try:
            gpus = GpuCounters() if self.gpu_counters else None
            self._board = Noticeboard(ranks)
            self._notice = self._board.notices[int(self._labels["rank"])]
            self._endpoint = Endpoint(
                self._board.notices, self.port, self.address, self.if_taken == "next", self.stale_after_s, gpus
            )
        except (ConfigError, OSError) as error:
            return "", 0, f"{self._labels['host']}: {error}"
        return str(self._board.folder), self._endpoint.port, ""

    def _refuse(self, opened: Sequence[tuple[str, int, str] | None]) -> None:
        """Raise on every rank what went wrong on one, so that none waits for it."""
        wrong = [one[2] for one in opened if one is not None and one[2]]
        if wrong:
            self._close()
            raise ConfigError("; ".join(wrong))

    def _write_targets(self, trainer: Trainer, log_folder: Path | None) -> None:
        rank_zero_info(f"Prometheus can scrape {', '.join(self.targets)} (path /metrics)")
        path = Path(self.targets_file) if self.targets_file is not None else None
        if path is None and log_folder is not None:
            path = log_folder / TARGETS
        if trainer.is_global_zero and path is not None:
            whole = path.with_name(path.name + ".new")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                whole.write_text(json.dumps([{"targets": self.targets}]))
                whole.replace(path)  # Prometheus watches it, and must not see half of it
            except OSError as error:
                raise ConfigError(
                    f"ThreeDPrometheus cannot write the list of its endpoints to {path}: {error.strerror or error}."
                    " Give targets_file in a folder that rank 0 may write to."
                ) from error
            self._written = path

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the endpoint."""
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the endpoint."""
        self._close()

    def _close(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            events.unlisten(self._hear)
        endpoint, self._endpoint = self._endpoint, None
        board, self._board = self._board, None
        notice, self._notice = self._notice, None
        self.targets = []
        if self._written is not None:
            self._written.unlink(missing_ok=True)
            self._written = None
        if endpoint is not None:
            endpoint.close()
        if board is not None:
            board.close()
        elif notice is not None:
            notice.close()

    # --- steps -----------------------------------------------------------------------------------------------------

    def _hear(self, step: StepEvents) -> None:
        self._counters.add(step, self.tokens_per_sample)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Take the norm of the gradient now and then. Collective there."""
        every = self.gradient_norm_every_n_steps
        every = trainer.log_every_n_steps if every is None else every  # type: ignore[attr-defined]
        self._gauges.before_step(trainer, every, trainer.global_step)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Post, about once a second."""
        self._gauges.after_batch()
        self._arrived |= {name: value for name, _, value in self._gauges.arrived()}
        if time.monotonic() - self._posted >= _POST_S:
            if self._flops is not None:
                self._flops_per_sample = self._flops.per_sample(batch)
            self._post(trainer)

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Post, about once a second: a rank that validates is not down."""
        if self._notice is not None and time.monotonic() - self._posted >= _POST_S:
            self._post(trainer)

    def _post(self, trainer: Trainer) -> None:
        assert self._notice is not None
        self._posted = time.monotonic()
        values = self._values(trainer)
        told = {"labels": self._labels, "time": time.time(), "values": values}
        if not self._notice.post(told):
            groups = values.pop("learning_rate", ())
            rank_zero_warn(f"ThreeDPrometheus leaves out learning rates: those of {len(groups)} groups are too many.")
            self._notice.post(told)

    def _values(self, trainer: Trainer) -> dict[str, Any]:
        """By name of :data:`lightning_3d.monitor.metrics.METRICS`; what is not known is left out."""
        mesh, done = mesh_of(trainer), self._counters
        memory = memory_in_use(mesh.device)
        values: dict[str, Any] = {
            "global_step": trainer.global_step,
            "batches_total": done.batches,
            "micro_batches_total": done.micro_batches,
            "batch_seconds_total": done.batch_s,
            "last_batch_seconds": done.last_batch_s,
            "phase_seconds_total": [([name], seconds) for name, seconds in done.phase_s.items()],
            "evaluation_seconds_total": done.evaluation_s,
            "memory_bytes": memory,
            "memory_peak_bytes": max(memory, peak_memory(mesh.device)),
            "memory_size_bytes": memory_size(mesh.device),
            "message_bytes_total": [([name], size) for name, size in done.message_bytes.items()],
            "skipped_steps_total": self._gauges.skipped,
            "peak_flops_per_second": peak_flops(mesh.device, self.peak_tflops),
        }
        if mesh.is_replica_reader:
            values |= {
                "samples_total": done.samples,
                "tokens_total": done.tokens or None,
                "data_wait_seconds_total": done.reading_s,
            }
        if mesh.pp.size > 1:
            values |= {"pipeline_seconds_total": done.pipeline_s, "pipeline_busy_seconds_total": done.busy_s}
        if mesh.rank == 0:
            values |= self._of_the_job(trainer)
        return {name: value for name, value in values.items() if value is not None}

    def _of_the_job(self, trainer: Trainer) -> dict[str, Any]:
        """What is the same on all ranks."""
        self._arrived |= self._gauges.read(trainer, trainer.global_step)
        layout: Any = trainer.strategy.layout  # type: ignore[attr-defined]
        shape = (layout.schedule, layout.pipeline_parallel, layout.data_parallel, layout.tensor_parallel)
        values: dict[str, Any] = {
            "layout_info": [([*shape, layout.virtual_stages, layout.zero_stage], 1)],
            "bubble_predicted_ratio": layout.bubble if layout.pipeline_parallel > 1 else None,
            "model_flops_per_sample": self._flops_per_sample,
        }
        for (name, *labels), value in self._arrived.items():
            if labels:
                values.setdefault(name, []).append((labels, value))
            else:
                values[name] = value
        return values
