"""Names for profilers: the spans of a step, with stage, chunk and micro-batch, as ranges of NVTX or torch's profiler.

They are the spans that the timings come from, so there is one set of names: ``forward s1 c3 m7`` is the forward of
micro-batch 7 through chunk 3 on stage 1, ``tp all_reduce s1`` a collective within it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from torch.profiler import record_function
from typing_extensions import override

from lightning_3d.errors import ConfigError
from lightning_3d.events import MODES, EventSource, Opener, Row, StepEvents
from lightning_3d.mesh import Mesh
from lightning_3d.monitor.source import source_of

Target = Literal["nvtx", "profiler"]


def name_of(row: Row, stage: int) -> str:
    """What a span is called, such as ``"forward s1 c3 m7"``: stage, chunk, micro-batch, as far as it has them."""
    phase, chunk, micro_batch, label, _ = row
    parts = [phase.value, label, f"s{stage}"]
    if chunk >= 0:
        parts.append(f"c{chunk}")
    if micro_batch >= 0:
        parts.append(f"m{micro_batch}")
    return " ".join(part for part in parts if part)


class Ranges:
    """Names the spans of an event source while it is installed.

    Args:
        events: The source.
        stage: This rank's stage.
        target: ``"profiler"`` for ``record_function``, ``"nvtx"`` for nsys.
    """

    def __init__(self, events: EventSource, stage: int, target: Target) -> None:
        self._events = events
        self._opener = _nvtx(stage) if target == "nvtx" else _recorded(stage)

    def install(self) -> None:
        """Begin with the next step.

        Raises:
            ConfigError: Another profiler names the spans.
        """
        if self._events.opener is not None:
            raise ConfigError(
                "NVTXRanges and torch's profiler were both asked for, and a process has room for one of them: both read"
                " the GPU through CUPTI. Leave out the callback or the Trainer's profiler."
            )
        self._events.opener = self._opener
        self._events.listen(self._ignore, MODES)

    def remove(self) -> None:
        """End."""
        if self._events.opener is self._opener:
            self._events.opener = None
        self._events.unlisten(self._ignore)

    def _ignore(self, step: StepEvents) -> None:
        """Spans are only made while somebody listens."""


def _recorded(stage: int) -> Opener:
    def open_range(row: Row) -> Callable[[], None]:
        region = record_function(name_of(row, stage))
        region.__enter__()
        return lambda: region.__exit__(None, None, None)

    return open_range


def _nvtx(stage: int) -> Opener:
    pop: Callable[[], Any] = torch.cuda.nvtx.range_pop

    def open_range(row: Row) -> Callable[[], None]:
        torch.cuda.nvtx.range_push(name_of(row, stage))
        return pop

    return open_range


class NVTXRanges(Callback):
    """Marks stages, chunks, micro-batches, collectives and the loader as NVTX ranges, which ``nsys`` shows.

    ``nsys profile -t cuda,nvtx ... lightning-3d fit ...``. Needs CUDA.
    """

    def __init__(self) -> None:
        self._ranges: Ranges | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin.

        Raises:
            ConfigError: Without CUDA, or with another strategy.
        """
        if not torch.cuda.is_available():
            raise ConfigError("NVTXRanges needs CUDA, which this torch or this machine lacks. Use profiler='pytorch'.")
        events, mesh = source_of(trainer, "NVTXRanges")
        self._ranges = Ranges(events, mesh.pp.rank, "nvtx")
        self._ranges.install()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End."""
        self._remove()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End."""
        self._remove()

    def _remove(self) -> None:
        ranges, self._ranges = self._ranges, None
        if ranges is not None:
            ranges.remove()


class ThreeDProfiler(PyTorchProfiler):
    """Lightning's ``PyTorchProfiler``, on chosen ranks only; a trace tells where on the mesh its rank is.

    ``profiler="pytorch"`` has the same names and traces every rank.

    Args:
        ranks: Global ranks that are profiled.
        dirpath: Where the traces go; by default the log folder.
        filename: Where the table of operators goes, instead of standard output.
        profiler_kwargs: As for ``PyTorchProfiler``.
    """

    def __init__(
        self,
        ranks: Sequence[int] = (0,),
        dirpath: str | None = None,
        filename: str | None = None,
        **profiler_kwargs: Any,
    ) -> None:
        super().__init__(dirpath=dirpath, filename=filename, **profiler_kwargs)
        self.ranks = tuple(ranks)

    @property
    def is_chosen(self) -> bool:
        """Whether this rank is profiled."""
        module = self._lightning_module
        mesh = _mesh_of(module)  # its rank is that of the process, whoever it passes for within a step
        rank = None if module is None else module.global_rank if mesh is None else mesh.rank
        return rank in self.ranks

    @override
    def start(self, action_name: str) -> None:
        """Profile on chosen ranks, once the mesh stands."""
        if not self.is_chosen:
            return
        super().start(action_name)
        mesh = _mesh_of(self._lightning_module)
        add = getattr(self.profiler, "add_metadata_json", None)
        if mesh is not None and add is not None and getattr(self.profiler, "profiler", None) is not None:
            with contextlib.suppress(RuntimeError):  # between two recordings there is nothing to add to
                add("lightning_3d", json.dumps({"rank": mesh.rank, **mesh.coordinates}))

    @override
    def stop(self, action_name: str) -> None:
        """As ``start``."""
        if self.is_chosen:
            super().stop(action_name)


def name_spans_for(trainer: Trainer, events: EventSource, mesh: Mesh) -> Ranges | None:
    """Name spans for torch's profiler where the Trainer runs it; the strategy calls this once the mesh stands.

    Raises:
        ConfigError: A rank that was chosen does not exist.
    """
    profiler = trainer.profiler  # type: ignore[attr-defined]
    if isinstance(profiler, ThreeDProfiler) and not set(profiler.ranks) <= set(mesh.world.ranks):
        raise ConfigError(
            f"ThreeDProfiler(ranks={list(profiler.ranks)}): there are {mesh.world.size} ranks, from 0 to"
            f" {mesh.world.size - 1}. Choose from these."
        )
    if not isinstance(profiler, PyTorchProfiler) or (isinstance(profiler, ThreeDProfiler) and not profiler.is_chosen):
        return None
    ranges = Ranges(events, mesh.pp.rank, "profiler")
    ranges.install()
    return ranges


def _mesh_of(module: LightningModule | None) -> Mesh | None:
    strategy = None if module is None or module._trainer is None else module.trainer.strategy
    mesh = getattr(strategy, "_mesh", None)
    return mesh if isinstance(mesh, Mesh) else None
