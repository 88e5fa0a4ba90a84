"""What a rank has done since its run began, as sums that only grow."""

from __future__ import annotations

from collections import defaultdict

from lightning_3d.events import StepEvents
from lightning_3d.monitor.own_time import times_of


class RankCounters:
    """Adds up the steps of a rank; every figure of a window is the difference of two readings."""

    def __init__(self) -> None:
        self.batches = 0
        self.samples = 0
        self.tokens = 0.0
        self.micro_batches = 0
        self.batch_s = 0.0
        """Without validation in the midst of a batch."""
        self.last_batch_s = 0.0
        self.evaluation_s = 0.0
        self.phase_s: defaultdict[str, float] = defaultdict(float)
        """Sums to ``batch_s``; see :func:`lightning_3d.monitor.own_time.seconds_by_phase`."""
        self.pipeline_s = 0.0
        self.busy_s = 0.0
        self.reading_s = 0.0
        """Of the wait for data, that for this rank's own loader."""
        self.message_bytes: defaultdict[str, int] = defaultdict(int)
        """What this rank handed in to messages, by phase."""

    def add(self, step: StepEvents, tokens_per_sample: float | None = None) -> None:
        """Add a step.

        Args:
            step: What the rank did.
            tokens_per_sample: Where given, tokens are counted by it and not by the batch's ids.
        """
        times = times_of(step)
        for name, seconds in times.seconds.items():
            self.phase_s[name] += seconds
        self.evaluation_s += times.evaluation_s
        self.last_batch_s = times.length
        self.batch_s += times.length
        self.pipeline_s += times.pipeline_s
        self.busy_s += times.busy_s
        self.reading_s += times.reading_s
        for event in step.events:
            if event.bytes:
                self.message_bytes[event.phase.value] += event.bytes
        self.batches += 1
        self.micro_batches += step.micro_batches
        self.samples += step.samples
        self.tokens += step.tokens if tokens_per_sample is None else step.samples * tokens_per_sample
