"""A plan as tables for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from lightning_3d.planner import Candidate, Layout, Plan
from lightning_3d.planner.explain import recomputation

HEADINGS = (
    "", "tp", "pp", "dp", "schedule", "m × b", "zero", "recompute", "GB/GPU", "step s", "tok/s/GPU", "MFU",
    "bubble", "kernels", "tp", "pp", "dp",
)  # fmt: skip
"""Columns of a ranking; the last four are shares of the step."""
_WIDTH = 118


def render(found: Plan, title: str, top: int) -> None:
    """Print the plan on stdout: what to take and why first, then the ranking, the losers' reasons, and warnings."""
    print("\n".join(lines(found, title, top)))


def lines(found: Plan, title: str, top: int) -> list[str]:
    """What `render` prints."""
    shape, cluster = found.shape, found.cluster
    shown, rest = found.ranking[:top], found.ranking[top:]
    best = found.best.layout
    text = [
        f"{title}: {_amount(shape.parameters)} parameters, {shape.layers} layers, samples of {shape.seq_len:,} tokens",
        f"{cluster}: {cluster.world_size:,} GPUs of {cluster.gpu_memory_gb:.0f} GB, {found.usable_gb:.1f} GB usable",
        f"global batch {found.global_batch:,} samples = {found.global_batch * shape.seq_len:,} tokens;"
        f" {found.num_layouts:,} layouts tried in {found.seconds:.1f} s of one core",
        "",
        f"Take tp{best.tensor_parallel} pp{best.pipeline_parallel} dp{best.data_parallel},"
        f" {best.schedule_name}{f' with {best.virtual_stages} chunks per stage' if best.virtual_stages > 1 else ''},"
        f" {best.micro_batches} micro-batches of {best.micro_batch_size}, ZeRO-{best.zero_stage}"
        f"{', sequence parallel' if best.sequence_parallel else ''}.",
        *_wrapped(found.reason),
        "",
        *_table(shown),
    ]
    if rest:
        text.append(f"   and {len(rest)} more sizes, up to {rest[-1].estimate.step_time_s:.2f} s (--top, --json)")
    text += [
        "m × b: m micro-batches of b samples. v: chunks per stage. GB/GPU: as nvidia-smi shows it, fullest rank.",
        "Bubble: idle time of stages, of the total. kernels, tp, pp, dp: time of the busiest stage; pp is waiting.",
    ]
    if len(shown) > 1:
        text += ["", "Why not the others"]
        text += _reasons([(f"{index:>2}", candidate.why) for index, candidate in enumerate(shown[1:], 2)])
    if found.variants:
        text += ["", "At the sizes of the first, with other settings"]
        text += _reasons([(" -", candidate.why) for candidate in found.variants[:5]])
    if found.refusals:
        text += ["", "Not possible"]
        text += _reasons([(" -", f"{refusal.sizes}: {refusal.why}") for refusal in found.refusals[:8]])
        if len(found.refusals) > 8:
            text.append(f"   and {len(found.refusals) - 8} more (--json)")
    if found.warnings:
        text += ["", "Warnings for the first"]
        text += _reasons([(" !", warning) for warning in found.warnings])
    return text


def _table(candidates: Sequence[Candidate]) -> list[str]:
    rows = [HEADINGS, *(row(index, candidate) for index, candidate in enumerate(candidates, 1))]
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(HEADINGS))]
    text = ["  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)) for cells in rows]
    return [text[0], "─" * len(text[0]), *text[1:]]


def row(index: int, candidate: Candidate) -> tuple[str, ...]:
    """Cells of one layout, for `HEADINGS`."""
    layout, found = candidate.layout, candidate.estimate
    share = found.time_share
    return (
        str(index), str(layout.tensor_parallel), str(layout.pipeline_parallel), str(layout.data_parallel),
        _schedule(layout), f"{layout.micro_batches} × {layout.micro_batch_size}", str(layout.zero_stage),
        recomputation(layout), f"{found.device_memory_gb:.1f}", f"{found.step_time_s:.2f}",
        f"{found.tokens_per_s_per_gpu:,.0f}", f"{found.mfu:.1%}", f"{found.bubble_fraction:.1%}",
        *(f"{share[name]:.0%}" for name in ("compute", "tp", "pp", "dp")),
    )  # fmt: skip


def _schedule(layout: Layout) -> str:
    name = layout.schedule_name.removeprefix("interleaved_")
    return name if layout.virtual_stages == 1 or name == "zbv" else f"{name} v{layout.virtual_stages}"


def _reasons(entries: Sequence[tuple[str, str]]) -> list[str]:
    return [line for mark, text in entries for line in _wrapped(text, f"{mark}  ", " " * (len(mark) + 2))]


def _wrapped(text: str, first: str = "", then: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=then, break_long_words=False)


def _amount(count: int) -> str:
    return (
        f"{count / 1e12:.2f}e12"
        if count >= 1e12
        else f"{count / 1e9:.1f}e9"
        if count >= 1e9
        else f"{count / 1e6:.1f}e6"
    )
