"""Peak memory of the steps of one contender, alone in its process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_WINDOW = "watched steps"


class Peak:
    """The most bytes that tensors hold at one time in the steps that are watched, what was there before included.

    On CUDA the caching allocator counts, on CPU the profiler, which sees every allocation of a tensor. The size of the
    process would mostly be that of the libraries.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._window: record_function | None = None

    def watch(self) -> None:
        """The steps that count begin."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._window = record_function(_WINDOW)
        self._window.__enter__()

    def done(self) -> None:
        """They are over."""
        assert self._window is not None
        self._window.__exit__(None, None, None)
        if torch.cuda.is_available():
            self.bytes = torch.cuda.max_memory_allocated()


def measure(run: Callable[[Peak], None]) -> int:
    """Peak bytes of what ``run`` watches.

    Args:
        run: Builds all that it needs and trains; calls ``watch`` and ``done`` of what it is given.
    """
    peak = Peak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run(peak)
    if peak.bytes:
        return peak.bytes
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    window = next(event for event in events if event.get("name") == _WINDOW)
    begin, end = float(window["ts"]), float(window["ts"]) + float(window["dur"])
    return max(
        event["args"]["Total Allocated"]
        for event in events
        if event.get("name") == "[memory]" and begin <= float(event["ts"]) <= end
    )
