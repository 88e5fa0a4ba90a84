"""Why one layout is better than another, in words with numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lightning_3d.planner.estimate import Estimate
from lightning_3d.planner.layout import Layout
from lightning_3d.planner.legality import Sizes

if TYPE_CHECKING:
    from lightning_3d.planner.search import Candidate

SAME = 0.005
"""Difference of step times that no prediction can tell."""
TIME_ERROR = 0.05
"""Difference of step times that is smaller than the error of the predictions; docs/planner.md has the figures."""
MEMORY_ERROR = 0.04
"""Error of the predicted memory, as a fraction of what a GPU offers."""
_WORTH_SAYING = 0.3
"""Part of the loss that a second cause must have to be named too."""


def is_tight(estimate: Estimate, usable_gb: float) -> bool:
    """Whether less memory is left than its prediction may be wrong by."""
    return estimate.device_memory_gb > (1 - MEMORY_ERROR) * usable_gb


def compare(best: Candidate, other: Candidate, usable_gb: float) -> str:
    """What ``other`` loses by against ``best``: ``"+12%: 27% of the step waits for other stages ..."``."""
    lost, causes = _loss(best, other)
    if lost <= SAME and is_tight(other.estimate, usable_gb) and not is_tight(best.estimate, usable_gb):
        left = usable_gb - other.estimate.device_memory_gb
        causes = f"leaves {left:.1f} GB of memory, less than the error of its prediction"
    return f"{lost:+.1%}" + (f": {causes}" if causes else "")


def _loss(best: Candidate, other: Candidate) -> tuple[float, str]:
    """How much longer the other's step is, as a fraction, and why."""
    lost = other.estimate.step_time_s - best.estimate.step_time_s
    fraction = lost / best.estimate.step_time_s
    if fraction < SAME:
        return fraction, "no difference within the error of a prediction"
    own, theirs = _parts(best.estimate), _parts(other.estimate)
    causes = {name: theirs[name] - own[name] for name in own if theirs[name] > own[name]}
    order = sorted(causes, key=lambda name: -causes[name])
    named = [
        name for name in order[:2] if causes[name] > _WORTH_SAYING * max(lost, causes[order[0]]) or name == order[0]
    ]
    return fraction, "; ".join(_phrase(name, best, other) for name in named)


def _parts(estimate: Estimate) -> dict[str, float]:
    parts = {name: estimate.time_share[name] * estimate.step_time_s for name in ("compute", "tp", "pp", "dp")}
    return {**parts, "optimizer": estimate.optimizer_s}


def _phrase(name: str, best: Candidate, other: Candidate) -> str:
    layout, estimate = other.layout, other.estimate
    share = f"{estimate.time_share.get(name, 0.0):.0%} of the step"
    if name == "compute":
        return _compute_phrase(best, other)
    if name == "tp":
        return f"tensor-parallel collectives are {share}"
    if name == "pp":
        count = layout.micro_batches
        chunks = f" of {layout.virtual_stages} chunks" if layout.virtual_stages > 1 else ""
        many = f"{count} micro-batches" if count > 1 else "1 micro-batch"
        return f"{share} waits for other stages: {many} for {layout.pipeline_parallel} stages{chunks}"
    if name == "dp":
        if layout.zero_stage >= 2 and layout.micro_batches > 1:
            return f"ZeRO-{layout.zero_stage} communicates in each of {layout.micro_batches} micro-batches, {share}"
        if layout.zero_stage == 3:
            return f"ZeRO-3 gathers the parameters for forward and backward, {share}"
        held = sum(getattr(estimate.memory[0], kind) for kind in ("parameters", "gradients")) / 1e9
        return f"{share} waits for replicas, dp{layout.data_parallel} on {held:.0f} GB of weights and gradients"
    return "each rank updates more of the optimizer's states"


def _compute_phrase(best: Candidate, other: Candidate) -> str:
    slower = other.estimate.compute_s / best.estimate.compute_s - 1
    mine, theirs = best.layout, other.layout
    if _recomputed(theirs) > _recomputed(mine):
        return f"recomputes {_blocks(theirs)} to fit, kernels take {slower:.0%} longer"
    causes = []
    if theirs.tensor_parallel > mine.tensor_parallel:
        causes.append(f"matrices cut over {theirs.tensor_parallel} ranks")
    if theirs.micro_batch_size < mine.micro_batch_size:
        causes.append(f"micro-batches of {theirs.micro_batch_size}")
    if theirs.num_chunks > mine.num_chunks:
        causes.append("embedding and head weigh more in smaller stages")
    return f"kernels take {slower:.0%} longer" + (f" ({', '.join(causes)})" if causes else "")


def _recomputed(layout: Layout) -> float:
    value = layout.activation_checkpointing
    return 1.0 / value if isinstance(value, int) else 1.0 if value == "full" else 0.1 if value else 0.0


def _blocks(layout: Layout) -> str:
    value = layout.activation_checkpointing
    return f"every {value}th block".replace("2th", "2nd") if isinstance(value, int) else "every block"


def recomputation(layout: Layout) -> str:
    """For tables: ``"no"``, ``"1/4"``, ``"all"`` or its name."""
    value = layout.activation_checkpointing
    return "no" if value is None else f"1/{value}" if isinstance(value, int) else "all" if value == "full" else value


def setting(best: Layout | None, other: Layout) -> str:
    """The settings besides sizes in which ``other`` differs from ``best``; all of them without one."""
    texts = {
        "schedule": f"{other.schedule_name} v{other.virtual_stages}"
        if other.virtual_stages > 1
        else other.schedule_name,
        "micro_batch_size": f"micro-batch {other.micro_batch_size}",
        "zero_stage": f"ZeRO-{other.zero_stage}",
        "activation_checkpointing": f"recompute {recomputation(other)}",
    }
    names = [
        name
        for name in texts
        if best is None
        or getattr(other, name) != getattr(best, name)
        or (name == "schedule" and other.virtual_stages != best.virtual_stages)
    ]
    return ", ".join(texts[name] for name in names)


def reason(
    best: Candidate, others: Sequence[Candidate], least: Mapping[Sizes, tuple[float, Layout]], usable_gb: float
) -> str:
    """Why the first is the first."""
    layout, found = best.layout, best.estimate
    recompute = "without recomputation" if layout.activation_checkpointing is None else f"recomputing {_blocks(layout)}"
    text = (
        f"It fits {recompute} ({found.device_memory_gb:.0f} of {usable_gb:.0f} GB usable) and spends"
        f" {found.time_share['compute']:.0%} of the step in kernels."
    )
    passed_over = min(others, key=lambda one: one.estimate.step_time_s, default=None)
    if passed_over is not None and passed_over.estimate.step_time_s < (1 - SAME) * found.step_time_s:
        gained, left = -_loss(best, passed_over)[0], usable_gb - passed_over.estimate.device_memory_gb
        text += (
            f" {_sizes(passed_over.layout)} is {gained:.1%} faster on paper, which is within the error of a prediction,"
            f" but leaves {left:.1f} GB, which is within the error of its memory."
        )
    slower = [one for one in others if one.estimate.step_time_s >= (1 - SAME) * found.step_time_s]
    if slower:
        lost, causes = _loss(best, slower[0])
        how = f"{lost:.1%} slower: {causes}" if lost >= SAME else "as fast, within the error of a prediction"
        text += f" The next sizes, {_sizes(slower[0].layout)}, are {how}."
    own = layout.tensor_parallel * layout.pipeline_parallel
    smaller = [
        (sizes, needed) for sizes, (needed, _) in least.items() if sizes.tp * sizes.pp < own and needed > usable_gb
    ]
    if smaller:
        sizes, needed = max(smaller, key=lambda entry: (entry[0].tp * entry[0].pp, -entry[1]))
        text += f" Less model parallelism does not fit: {sizes} needs {needed:.0f} GB at least."
    return text


def _sizes(layout: Layout) -> str:
    return str(Sizes(layout.tensor_parallel, layout.pipeline_parallel, layout.data_parallel, layout.context_parallel))
