"""Names, units and meanings of what is exported to Prometheus, and how the ranks' notices become it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

PREFIX = "lightning3d_"
LABELS = ("run", "rank", "host", "pp", "dp", "tp", "gpu_uuid")
"""Of every series."""


class Metric(NamedTuple):
    """One name of the exporter, without its prefix."""

    text: str
    labels: tuple[str, ...] = ()
    """Besides :data:`LABELS`."""


METRICS: Mapping[str, Metric] = {
    "rank_up": Metric("1 while the rank goes on, 0 once it has posted nothing for long; its other series end then."),
    "last_post_timestamp_seconds": Metric("When the rank posted last, seconds since 1970."),
    "layout_info": Metric(
        "Layout of the run; rank 0.", ("schedule", "pipeline", "data", "tensor", "virtual_stages", "zero_stage")
    ),
    "global_step": Metric("Optimizer steps that the model has had (trainer.global_step)."),
    "batches_total": Metric("Training batches since the run began."),
    "micro_batches_total": Metric("Micro-batches that the rank worked on."),
    "samples_total": Metric("Samples of the rank's replica; on the rank that reads them, so that a sum is the job's."),
    "tokens_total": Metric("Tokens of the rank's replica; on the rank that reads them, so that a sum is the job's."),
    "batch_seconds_total": Metric("Time in training batches, without validation."),
    "last_batch_seconds": Metric("Time of the last batch that is known, without validation."),
    "phase_seconds_total": Metric("Time in training batches, each moment once, by what the rank did.", ("phase",)),
    "evaluation_seconds_total": Metric("Time in validation in the midst of training."),
    "data_wait_seconds_total": Metric("Time in which the rank waited for its own data loader."),
    "pipeline_seconds_total": Metric("Time from the rank's first action in the pipeline to its last, over batches."),
    "pipeline_busy_seconds_total": Metric("Of that, time in forwards and backwards."),
    "bubble_predicted_ratio": Metric("What the schedule costs if all stages and micro-batches take the same time."),
    "message_bytes_total": Metric("Bytes that the rank handed in to messages, by what for.", ("phase",)),
    "memory_bytes": Metric("Memory in use: of the device's allocator, or of the process on a CPU."),
    "memory_peak_bytes": Metric("Most memory in use so far."),
    "memory_size_bytes": Metric("Memory of the rank's device, where that is known."),
    "gradient_norm": Metric("Norm of the whole model's gradient before clipping; rank 0."),
    "loss_scale": Metric("Factor of the loss under 16-bit floating point; rank 0."),
    "skipped_steps_total": Metric("Optimizer steps left out because a gradient was not finite."),
    "learning_rate": Metric("Learning rate; rank 0.", ("optimizer", "group")),
    "model_flops_per_sample": Metric("Operations of a forward and backward of a sample, nothing twice; rank 0."),
    "peak_flops_per_second": Metric("Dense 16-bit peak of the rank's device, where that is known."),
    "gpu_utilization_ratio": Metric("Share of the last interval in which a kernel ran (NVML)."),
    "gpu_memory_used_bytes": Metric("Memory of the GPU in use by all processes (NVML)."),
    "gpu_memory_size_bytes": Metric("Memory of the GPU (NVML)."),
    "gpu_power_watts": Metric("Power that the GPU draws (NVML)."),
    "gpu_energy_joules_total": Metric("Energy since the driver was loaded (NVML)."),
    "gpu_temperature_celsius": Metric("Temperature of the GPU (NVML)."),
    "gpu_sm_clock_hertz": Metric("Clock of the multiprocessors (NVML)."),
    "gpu_throttled": Metric("1 while clocks are held back for this reason (NVML).", ("reason",)),
}

Notices = Mapping[int, Mapping[str, Any]]
"""By rank: ``"labels"``, ``"time"``, and ``"values"`` by name; under a name either a value, or a list of pairs of the
values of its own labels and a value."""


def families(notices: Notices, now: float, stale_after_s: float) -> Iterator[Family]:
    """What a scrape is answered with.

    Args:
        notices: What the ranks have posted.
        now: Seconds since 1970.
        stale_after_s: A rank that has posted nothing for longer is down, and only that is said of it.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    alive = {rank: now - notice["time"] <= stale_after_s for rank, notice in notices.items()}
    for name, metric in METRICS.items():
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(PREFIX + name, metric.text, labels=(*LABELS, *metric.labels))
        for rank, notice in notices.items():
            labels = [str(notice["labels"][label]) for label in LABELS]
            if name == "rank_up":
                family.add_metric(labels, float(alive[rank]))
            elif name == "last_post_timestamp_seconds":
                family.add_metric(labels, notice["time"])
            elif alive[rank] and name in notice["values"]:
                value = notice["values"][name]
                for more, number in value if isinstance(value, list) else [([], value)]:
                    family.add_metric([*labels, *map(str, more)], float(number))
        if family.samples:
            yield family
