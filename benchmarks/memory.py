"""Peak memory of one contender, alone in its process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], None]) -> int:
    """The most bytes that tensors held at one time while ``run`` built, and trained, all that it needs.

    On CUDA the caching allocator counts, on CPU the profiler, which sees every allocation of a tensor. The size of the
    process would mostly be that of the libraries.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return max(event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]")
