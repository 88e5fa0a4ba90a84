"""What held a run back, most costly first, each with its figure and the change that it suggests.

Predictions of the pipeline come from running the schedule on paper with the measured times of the stages
(:func:`lightning_3d.schedules.simulate`), so that uneven stages count; those of messages from what travels.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_3d.monitor.figures import COMPUTE
from lightning_3d.monitor.record import Leak
from lightning_3d.monitor.run_figures import RunFigures
from lightning_3d.schedules import SCHEDULES, bubble_fraction, build, simulate

LEAST = 0.02
"""Least share of a step that is told of."""
_MUCH_MEMORY, _LITTLE_MEMORY = 0.9, 0.5
_UNEVEN = 1.05
_MOST_TIMES = 4
"""Times as many micro-batches as now, at most, are suggested: each has its own cost."""
_GOOD_BUBBLE = 0.1
_AHEAD = 100_000
"""Steps within which a leak that fills the device is what matters most."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One thing that held the run back."""

    kind: str
    """``"straggler"``, ``"loader"``, ``"bubble"``, ``"uneven stages"``, ``"tensor parallel"``, ``"data parallel"``,
    ``"memory"``, ``"leak"``, ``"checkpoint"`` or ``"other"``."""
    lost: float
    """Share of a step that it costs; 0 where it costs none yet."""
    figure: str
    """What was measured."""
    change: str
    """What to do about it, with what is predicted of it."""
    rank: int | None = None
    """The rank that it is about, if it is one."""


def causes_of(figures: RunFigures) -> list[Cause]:
    """All causes that cost more than :data:`LEAST` of a step, or end the run: these first, then by what they cost."""
    found = [
        *_stragglers(figures),
        *_loader(figures),
        *_pipeline(figures),
        *_tensor_parallel(figures),
        *_data_parallel(figures),
        *_besides(figures),
    ]
    found = sorted((cause for cause in found if cause.lost >= LEAST), key=lambda cause: -cause.lost)
    return [*_leaks(figures), *found, *_memory(figures)]


def _stragglers(figures: RunFigures) -> Iterator[Cause]:
    for one in figures.slow:
        if one.phase == "loader":
            continue
        share = one.excess_s / figures.usual_s
        healthy = 1 - min(share, 0.99)
        seen = f"in {one.windows} of {figures.num_windows} windows"
        doing = "comes late to collectives by" if one.phase == "entry" else f"takes in {one.phase}"
        more = "" if one.phase == "entry" else " more than ranks that do the same"
        yield Cause(
            kind="straggler",
            lost=share * one.windows / figures.num_windows,
            figure=f"{one.place} {doing} {_ms(one.excess_s)} per batch{more}, {seen}; the others wait for it",
            change=f"{_advice(one.phase)}; without it a batch takes {_ms(figures.usual_s * healthy)} instead of"
            f" {_ms(figures.usual_s)}",
            rank=one.place.rank,
        )


def _advice(phase: str) -> str:
    if phase in COMPUTE or phase == "optimizer":
        return (
            "look at that device: clock and temperature (nvidia-smi -q -d PERFORMANCE), other processes on it, and"
            " code that runs on this rank only; leave the host out if it stays slow"
        )
    if phase == "checkpoint":
        return "look at the disk of that host, or use async_save=True"
    if phase == "entry":
        return "look at the links of that host (ibstat, nvidia-smi topo -m), and at what its CPU does besides"
    return "look at callbacks and hooks that work on this rank only, and at garbage collection"


def _loader(figures: RunFigures) -> Iterator[Cause]:
    readers = [place.rank for place in figures.places if place.pp == 0 and place.tp == 0]
    lost = max(figures.seconds[rank].get("loader", 0.0) for rank in readers)
    one = next((slow for slow in figures.slow if slow.phase == "loader"), None)  # all wait for it alike
    who = f"the data loader of {one.place}" if one is not None else "data loaders"
    if one is None and len(readers) > 1:
        who = f"the slowest of {len(readers)} data loaders"
    yield Cause(
        kind="loader",
        lost=lost / figures.step_s,
        figure=f"a batch waits {_ms(lost)} for {who}",
        change=f"more num_workers, prefetch_factor, persistent_workers=True, or work done once instead of in every"
        f" epoch; without the waiting a batch takes {_ms(figures.step_s - lost)} instead of {_ms(figures.step_s)}",
        rank=None if one is None else one.place.rank,
    )


def _pipeline(figures: RunFigures) -> Iterator[Cause]:
    run = figures.run
    stages = run.sizes[0]
    count = round(figures.micro_batches)
    if stages == 1 or count < 1 or run.schedule not in SCHEDULES:
        return
    chunks = run.virtual_stages
    forward = figures.stage_seconds(("forward",))
    backward = figures.stage_seconds(("backward", "weight"))
    measured = statistics.fmean(figures.job.bubble) if figures.job.bubble else 0.0
    total, now = _simulated(run.schedule, chunks, count, forward, backward)
    even = bubble_fraction(run.schedule, stages, chunks, count)
    mean_forward, mean_backward = statistics.fmean(forward), statistics.fmean(backward)
    even_total, _ = _simulated(run.schedule, chunks, count, [mean_forward] * stages, [mean_backward] * stages)
    lost = even * even_total / figures.step_s
    loads = [f + b for f, b in zip(forward, backward, strict=True)]
    rest = f"; with these stages {now:.0%} is expected, {even:.0%} if they were equal"
    yield Cause(
        kind="bubble",
        lost=lost,
        figure=f"stages wait {measured:.0%} of the pipeline's time, with {count} micro-batches in {stages} stages"
        f" ({run.schedule}){rest}",
        change=_fewer_bubbles(figures, count, even),
    )
    if max(loads) > _UNEVEN * statistics.fmean(loads):
        slowest = loads.index(max(loads))
        yield Cause(
            kind="uneven stages",
            lost=max(0.0, total - even_total) / figures.step_s,
            figure=f"stage {slowest} computes {_ms(loads[slowest])} per batch, the mean of stages is"
            f" {_ms(statistics.fmean(loads))}",
            change=f"pipeline_split='profile', or a list with fewer blocks on stage {slowest}; with equal stages a"
            f" batch takes {_ms(figures.step_s - (total - even_total))} instead of {_ms(figures.step_s)}",
        )


def _fewer_bubbles(figures: RunFigures, count: int, now: float) -> str:
    run = figures.run
    stages, chunks = run.sizes[0], run.virtual_stages
    advice = []
    most = int(figures.samples) if figures.samples else count * _MOST_TIMES
    more = count
    while more * 2 <= min(most, count * _MOST_TIMES) and bubble_fraction(run.schedule, stages, chunks, more) > (
        _GOOD_BUBBLE if more > count else 0
    ):
        more *= 2
    if more > count:
        then = bubble_fraction(run.schedule, stages, chunks, more)
        advice.append(f"num_micro_batches {count} → {more}: bubble {now:.0%} → {then:.0%}")
    else:
        then = bubble_fraction(run.schedule, stages, chunks, _MOST_TIMES * count)
        advice.append(
            f"a batch of {_MOST_TIMES} times as many samples (each is a micro-batch of its own already), micro-batches"
            f" {count} → {_MOST_TIMES * count}: bubble {now:.0%} → {then:.0%}"
        )
    if chunks == 1:
        then = bubble_fraction("interleaved_1f1b", stages, 2, count)
        advice.append(f"schedule='interleaved_1f1b', virtual_stages=2: bubble {now:.0%} → {then:.0%}")
    return "; or ".join(advice)


def _simulated(
    schedule: str, chunks: int, count: int, forward: Sequence[float], backward: Sequence[float]
) -> tuple[float, float]:
    """Time of a batch and the bubble, for what every stage computes per batch."""
    plan = build(schedule, len(forward), chunks, count)
    share = count * chunks
    times = [
        [values[stage] / share for stage in plan.placement] for values in (forward, backward)
    ]  # of one micro-batch in one chunk
    timeline = simulate(plan, times[0], times[1])
    return timeline.total, timeline.bubble_fraction


def _tensor_parallel(figures: RunFigures) -> Iterator[Cause]:
    size = figures.run.sizes[2]
    if size == 1:
        return
    lost = figures.exposed("tp", ("pp", "dp")) / figures.step_s
    change = "a larger micro_batch_size, whose messages are fewer and larger"
    if size > 2 or figures.run.sizes[0] * figures.run.sizes[1] > 1:
        # Half the ranks share a layer: half the samples each, and (t - 1) / t of each activation travels.
        less = 0.5 * (1 - 2 / size) / (1 - 1 / size)
        then = lost * less / (1 - lost + lost * less)
        change = (
            f"tensor_parallel {size} → {size // 2}, if the parameters fit: messages {lost:.0%} → {then:.0%} of a batch;"
            f" or {change}"
        )
    yield Cause(
        kind="tensor parallel",
        lost=lost,
        figure=f"messages of tensor parallelism over {size} ranks take {lost:.0%} of a batch that nothing hides",
        change=change,
    )


def _data_parallel(figures: RunFigures) -> Iterator[Cause]:
    run = figures.run
    if run.sizes[1] == 1:
        return
    lost = figures.exposed("dp", ("pp", "tp")) / figures.step_s
    then = lost / (2 - lost)
    change = (
        f"accumulate_grad_batches {run.accumulated} → {2 * run.accumulated}, or twice the batch: gradients"
        f" {lost:.0%} → {then:.0%} of the time"
    )
    if run.zero_stage == 3:
        change = f"zero_stage=1 or 2, if the parameters fit: they are gathered once per step; or {change}"
    yield Cause(
        kind="data parallel",
        lost=lost,
        figure=f"messages of gradients and parameters between {run.sizes[1]} replicas take {lost:.0%} of a batch that"
        " nothing hides",
        change=change,
    )


def _besides(figures: RunFigures) -> Iterator[Cause]:
    named = {one.place.rank for one in figures.slow}
    healthy = [place.rank for place in figures.places if place.rank not in named] or range(len(figures.places))
    # Saves are rare, so only a mean knows them. Of the rest a few long batches are no reason to change every one.
    for phase, seconds, step, what, change in (
        (
            "checkpoint",
            figures.seconds,
            figures.step_s,
            "the time for checkpoints",
            "async_save=True, or save less often",
        ),
        (
            "other",
            figures.usual,
            figures.usual_s,
            "the time between the parts of a step (hooks, callbacks, logging, Python)",
            "fewer logged values, a larger log_every_n_steps, and Trainer(profiler='simple') to see which hook it is",
        ),
    ):
        lost = statistics.median(seconds[rank].get(phase, 0.0) for rank in healthy)
        yield Cause(
            kind=phase,
            lost=lost / step if step else 0.0,
            figure=f"{what} is {_ms(lost)} per batch",
            change=f"{change}; without it a batch takes {_ms(step - lost)}",
        )


def _leaks(figures: RunFigures) -> Iterator[Cause]:
    for leak in figures.leaks:
        grown = leak.grown[0] if leak.grown else None
        what = "" if grown is None else f"; most of it: {grown.more} more of {grown.what}"
        held = f", held by {grown.where}" if grown is not None and grown.where else ""
        yield Cause(
            kind="leak",
            lost=0.0,
            figure=f"memory of {leak.place} grows by {leak.bytes_per_step / 1e6:.2f} MB per batch at constant"
            f" shapes{what}{held}{_until_full(leak)}",
            change="keep numbers instead of tensors (loss.item(), .detach()), and empty lists that every step adds to"
            + (
                "" if grown is not None else "; torch.cuda.memory._record_memory_history() lets the next report name it"
            ),
            rank=leak.place.rank,
        )


def _until_full(leak: Leak) -> str:
    left = leak.place.memory_bytes - leak.bytes
    if leak.kind != "device" or left <= 0:
        return ""
    steps = left / leak.bytes_per_step
    return f"; the device is full after {steps:,.0f} more" if steps < _AHEAD else ""


def _memory(figures: RunFigures) -> Iterator[Cause]:
    used = {
        place.rank: figures.memory_peak[place.rank] / place.memory_bytes
        for place in figures.places
        if place.memory_bytes and figures.memory_peak[place.rank]
    }
    if not used:
        return
    rank = max(used, key=lambda fullest: used[fullest])
    size = figures.samples / figures.micro_batches if figures.micro_batches else 0.0
    if used[rank] >= _MUCH_MEMORY:
        ckpt = figures.run.activation_checkpointing is None
        yield Cause(
            kind="memory",
            lost=0.0,
            figure=f"{figures.places[rank]} uses {used[rank]:.0%} of its memory: micro-batches of {size:g} samples"
            " cannot be larger",
            change=("activation_checkpointing=2 (every second block), " if ckpt else "")
            + ("zero_stage=2 or 3, " if figures.run.zero_stage < 2 and figures.run.sizes[1] > 1 else "")
            + "or more tensor or pipeline parallelism; lightning-3d plan compares them",
            rank=rank,
        )
    elif used[rank] <= _LITTLE_MEMORY and size:
        pipeline = figures.run.sizes[0] > 1
        yield Cause(
            kind="memory",
            lost=0.0,
            figure=f"the fullest rank uses {used[rank]:.0%} of its memory with micro-batches of {size:g} samples",
            change=f"micro_batch_size={2 * max(1, round(size))} makes larger kernels and fewer messages"
            + (", with a batch twice as large, lest the bubble grow" if pipeline else "")
            + ("; or do without activation_checkpointing" if figures.run.activation_checkpointing is not None else ""),
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
