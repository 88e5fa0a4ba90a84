"""Names of spans for profilers, and torch's switches for collectives that hang."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_3d import NVTXRanges, ThreeDProfiler, ThreeDStrategy
from lightning_3d.config import Sizes
from lightning_3d.errors import ConfigError
from lightning_3d.events import EventSource, Phase
from lightning_3d.mesh import build_mesh
from lightning_3d.monitor.ranges import Ranges, name_of, name_spans_for
from lightning_3d.trainer.processes.flight_recorder import FlightRecorder


def test_names_tell_stage_chunk_and_micro_batch() -> None:
    assert name_of((Phase.FORWARD, 3, 7, "", 0), 1) == "forward s1 c3 m7"
    assert name_of((Phase.TP, -1, -1, "all_reduce", 64), 0) == "tp all_reduce s0"


def test_nvtx_ranges_open_and_close_with_their_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", said.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: said.append("pop"))
    events = EventSource()
    ranges = Ranges(events, 1, "nvtx")
    with events.span(Phase.LOADER):
        pass
    assert said == []  # not installed
    ranges.install()
    with pytest.raises(ConfigError, match="one of them"):
        Ranges(events, 1, "profiler").install()
    events.begin_step(0)
    with events.span(Phase.FORWARD, 1, 0), events.span(Phase.TP, label="all_gather"):
        pass
    with pytest.raises(ValueError), events.span(Phase.OPTIMIZER):
        raise ValueError
    events.end_step()
    assert said == ["forward s1 c1 m0", "tp all_gather s1", "pop", "pop", "optimizer s1", "pop"]
    events.begin_step(1, "validation")
    with events.span(Phase.FORWARD, 1, 2):
        pass
    events.end_step()
    assert said[-2:] == ["forward s1 c1 m2", "pop"]
    ranges.remove()
    events.begin_step(1)
    assert not events.is_recording and events.opener is None
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="needs CUDA"):
            NVTXRanges().on_fit_start(None, None)  # type: ignore[arg-type]


def test_ranks_that_do_not_exist_cannot_be_profiled() -> None:
    mesh = build_mesh(Sizes(pp=1, dp=1, tp=1), torch.device("cpu"))
    trainer: Any = SimpleNamespace(profiler=ThreeDProfiler(ranks=[0, 4]))
    with pytest.raises(ConfigError, match="there are 1 ranks"):
        name_spans_for(trainer, EventSource(), mesh)


def test_one_option_sets_torchs_switches_and_leaves_those_that_are_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_DISTRIBUTED_DEBUG")
    for name in (*names, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.setenv(name, "")  # so that the test leaves them as they were
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "77")
    FlightRecorder(False).prepare(tmp_path)
    assert not any(name in os.environ for name in names)
    recorder = FlightRecorder("detail")
    try:
        recorder.prepare(tmp_path)
        assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    finally:
        os.environ.pop("TORCH_DISTRIBUTED_DEBUG")
        dist.set_debug_level_from_env()
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ  # its older name is set
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "flight_recorder" / "rank_")
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    recorder.use(tmp_path / "logs")
    recorder.dump(2, "where it stands")
    assert (tmp_path / "logs" / "flight_recorder" / "standing_2.txt").read_text() == "where it stands"
    assert "torchfrtrace" in recorder.hint
    for wrong in ("details", 1, 0):
        with pytest.raises(ConfigError, match="debug_collectives"):
            ThreeDStrategy(debug_collectives=wrong)  # type: ignore[arg-type]
