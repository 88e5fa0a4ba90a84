"""What a rank has done since its run began, as sums that only grow."""

from __future__ import annotations

from collections import defaultdict

from lightning_3d.events import Phase, StepEvents
from lightning_3d.monitor.own_time import READ, pipeline_seconds, seconds_by_phase


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
        phases = seconds_by_phase(step)
        self.evaluation_s += phases.pop(Phase.EVALUATION.value, 0.0)
        for name, seconds in phases.items():
            self.phase_s[name] += seconds
        self.last_batch_s = sum(phases.values())
        self.batch_s += self.last_batch_s
        whole, busy = pipeline_seconds(step)
        self.pipeline_s += whole
        self.busy_s += busy
        for event in step.events:
            if event.phase is Phase.LOADER and event.label == READ:
                self.reading_s += event.seconds
            elif event.bytes:
                self.message_bytes[event.phase.value] += event.bytes
        self.batches += 1
        self.micro_batches += step.micro_batches
        self.samples += step.samples
        self.tokens += step.tokens if tokens_per_sample is None else step.samples * tokens_per_sample
