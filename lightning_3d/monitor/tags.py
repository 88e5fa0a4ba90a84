"""Names under which a run's figures are logged, what they mean, and which belong on one chart."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_3d.monitor.figures import SHARES, Figures

DESCRIPTIONS: Mapping[str, str] = {
    "speed/tokens_per_s": "Tokens per second of the whole job, without validation.",
    "speed/tokens_per_s_per_device": "Tokens per second divided by all devices.",
    "speed/samples_per_s": "Samples per second of the whole job, without validation.",
    "speed/batch_s": "Seconds from the request for a batch to the request for the next, without validation.",
    "speed/mfu": "Model-FLOPs utilisation: operations that the model needs for the samples (forward and backward,"
    " nothing computed twice), over the dense 16-bit peak of all devices.",
    "pipeline/bubble": "Share of the pipeline's time in which a rank does not work: idle / (idle + busy), mean over"
    " ranks. The pipeline's time is that of the stage that takes longest.",
    "pipeline/bubble_worst": "The same, of the rank that waits most.",
    "pipeline/bubble_predicted": "What the schedule costs if all stages and micro-batches take the same time.",
    "time/compute": "Share of a batch's time spent in forwards and backwards, messages left out; mean over ranks.",
    "time/tp": "Share spent in collectives of tensor parallelism that nothing hides.",
    "time/pp": "Share spent waiting for other pipeline stages: the bubble and messages that come late.",
    "time/dp": "Share spent waiting for other replicas: for gradients, parameters and what they log.",
    "time/loader": "Share spent waiting for the data loader, that of the slowest replica.",
    "time/other": "The rest: optimizer, clipping, decisions of all ranks, callbacks, checkpoints, the engine itself.",
    "memory/peak_gb_max": "Most memory in use so far on the fullest rank, 1e9 bytes: of the device, or of the process.",
    "memory/peak_gb_mean": "The same, mean over ranks.",
    "memory/now_gb_max": "Memory in use at this step on the fullest rank.",
    "memory/now_gb_mean": "The same, mean over ranks.",
    "training/gradient_norm": "Norm of the whole model's gradient before clipping.",
    "training/loss_scale": "Factor of the loss under 16-bit floating point.",
    "training/learning_rate": "Learning rate; by optimizer and group where these have different ones.",
    "training/skipped_steps": "Optimizer steps left out because a gradient was not finite, since the run began.",
    "slowest/compute_rank": "The rank that spends most time in forwards and backwards.",
    "slowest/compute_excess_s": "Seconds per batch that this rank takes more than the median rank.",
    "slowest/loader_rank": "The rank that waits longest for its own loader.",
    "slowest/loader_excess_s": "Seconds per batch that it waits longer than the median of the ranks that read data.",
    "slowest/optimizer_rank": "The rank whose optimizer takes longest.",
    "slowest/optimizer_excess_s": "Seconds per batch that this rank takes more than the median rank.",
}

CHARTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "Where the time goes": {
        "bubble: measured, worst rank, predicted": (
            "pipeline/bubble$",
            "pipeline/bubble_worst",
            "pipeline/bubble_predicted",
        ),
        **{f"share of a batch's time: {name}": (f"time/{name}",) for name in SHARES},
    },
    "Speed": {
        "tokens per second": ("speed/tokens_per_s$",),
        "seconds per batch": ("speed/batch_s",),
        "model-FLOPs utilisation": ("speed/mfu",),
    },
    "Health": {
        "memory, GB": ("memory/.*",),
        "gradient norm": ("training/gradient_norm",),
        "slowest rank: seconds more than the median": ("slowest/.*_excess_s",),
        "learning rate": ("training/learning_rate.*",),
    },
}
"""For TensorBoard's page "Custom scalars": groups of charts with the tags (regular expressions) that each shows."""


def scalars(figures: Figures, predicted: float | None, mfu: float | None) -> dict[str, float]:
    """The figures by tag; what is not known is left out.

    Args:
        figures: Of the job.
        predicted: The bubble that the schedule costs.
        mfu: Model-FLOPs utilisation.
    """
    values: dict[str, float | None] = {
        "speed/tokens_per_s": figures.tokens_per_s,
        "speed/tokens_per_s_per_device": figures.tokens_per_s_per_rank,
        "speed/samples_per_s": figures.samples_per_s,
        "speed/batch_s": figures.step_s,
        "speed/mfu": mfu,
    }
    if figures.bubble:
        values["pipeline/bubble"] = sum(figures.bubble) / len(figures.bubble)
        values["pipeline/bubble_worst"] = max(figures.bubble)
        values["pipeline/bubble_predicted"] = predicted
    values |= {f"time/{name}": share for name, share in figures.mean_shares.items()}
    for name, sizes in (("peak", figures.memory_peak), ("now", figures.memory)):
        values[f"memory/{name}_gb_max"] = max(sizes) / 1e9
        values[f"memory/{name}_gb_mean"] = sum(sizes) / len(sizes) / 1e9
    for name, slowest in figures.slowest.items():
        values[f"slowest/{name}_rank"] = float(slowest.rank)
        values[f"slowest/{name}_excess_s"] = slowest.excess_s
    return {tag: value for tag, value in values.items() if value is not None}
