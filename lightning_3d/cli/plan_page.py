"""A plan as one HTML file without anything outside of it: ranking, memory, time, timeline."""

from __future__ import annotations

from html import escape

from lightning_3d.cli.plan_table import HEADINGS, row
from lightning_3d.pictures import Bar, Panel, draw_bars, draw_timelines, svg
from lightning_3d.pictures.colours import SERIES
from lightning_3d.planner import Candidate, ModelShape, Plan
from lightning_3d.planner.gpus import CPU
from lightning_3d.schedules import SCHEDULES, build, simulate

_STYLE = """
body { font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif; color: #222;
  max-width: 1180px; margin: 2em auto; padding: 0 1.5em; }
h1 { font-size: 1.5em; margin-bottom: 0.2em; } h2 { font-size: 1.15em; margin-top: 2em; }
.take { background: #eef5fb; border-left: 4px solid #0072b2; padding: 0.8em 1em; margin: 1.2em 0; }
.warning { background: #fdf5e6; border-left: 4px solid #e69f00; padding: 0.4em 1em; margin: 0.5em 0; }
.pale { color: #666; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 0.25em 0.6em; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { color: #666; font-weight: 600; } tr.other td { border-bottom: 0; padding-top: 0.5em; }
td.why { text-align: left; white-space: normal; color: #666; padding-top: 0; }
tr.first td { background: #eef5fb; font-weight: 600; }
"""
_PARTS = {"kernels": "compute", "tensor parallel": "tp", "waiting for stages": "pp", "replicas": "dp", "other": "other"}
_TIME_COLOURS = {
    "kernels": SERIES[0],
    "tensor parallel": SERIES[1],
    "waiting for stages": "#d9d9d9",
    "replicas": SERIES[3],
    "other": SERIES[6],
}
_WIDTH = 1140.0
_MOST_STAGES = 16
_MOST_SPANS = 12_000


def page(found: Plan, title: str, top: int) -> str:
    """The text of the file.

    Args:
        found: The plan.
        title: What the model was called.
        top: Layouts in the ranking.
    """
    shape, cluster, best = found.shape, found.cluster, found.best
    shown = found.ranking[:top]
    facts = (
        f"{shape.parameters / 1e9:.1f}e9 parameters, sequences of {shape.seq_len:,} tokens, global batch"
        f" {found.global_batch:,} samples; {found.num_layouts:,} layouts tried, {len(found.ranking)} sizes fit"
    )
    warnings = "".join(f'<p class="warning">{escape(text)}</p>' for text in found.warnings)
    refused = "".join(f"<li>{escape(entry.sizes)}: {escape(entry.why)}</li>" for entry in found.refusals)
    variants = "".join(f"<li>{escape(entry.why)}</li>" for entry in found.variants[:8])
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Plan: {escape(title)} on {escape(str(cluster))}</title><style>{_STYLE}</style></head><body>
<h1>{escape(title)} on {escape(str(cluster))}</h1>
<p class="pale">{escape(facts)}</p>
<div class="take"><b>Take {escape(str(best.layout))}.</b> {escape(found.reason)}</div>
{warnings}
<h2>Ranking</h2>
<div class="scroll">{_ranking(shown)}</div>
<p class="pale">GB/GPU: as nvidia-smi shows it, on the fullest rank; up to {found.usable_gb:.1f} GB may be used. Bubble:
idle time of stages, of the total time. The last four columns are shares of the step on the busiest stage.</p>
<h2>Where the time goes</h2>
<div class="scroll">{_time(shown)}</div>
<h2>Memory of the first layout</h2>
<div class="scroll">{_memory(found)}</div>
<h2>A step of the first layout</h2>
<div class="scroll">{_timeline(shape, best)}</div>
{f"<h2>The same sizes with other settings</h2><ul>{variants}</ul>" if variants else ""}
{f"<h2>Not possible</h2><ul>{refused}</ul>" if refused else ""}
</body></html>
"""


def _ranking(candidates: tuple[Candidate, ...]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in HEADINGS)
    lines = [f"<table><thead><tr>{head}</tr></thead><tbody>"]
    for index, candidate in enumerate(candidates, 1):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row(index, candidate))
        lines.append(f'<tr class="{"first" if index == 1 else "other"}">{cells}</tr>')
        if candidate.why:
            lines.append(
                f'<tr><td></td><td class="why" colspan="{len(HEADINGS) - 1}">{escape(candidate.why)}</td></tr>'
            )
    return "\n".join([*lines, "</tbody></table>"])


def _time(candidates: tuple[Candidate, ...]) -> str:
    bars = []
    for candidate in candidates:
        layout, found = candidate.layout, candidate.estimate
        parts = {name: found.time_share[key] * found.step_time_s for name, key in _PARTS.items()}
        label = f"tp{layout.tensor_parallel} pp{layout.pipeline_parallel} dp{layout.data_parallel}"
        bars.append(Bar(label, parts, f"{found.mfu:.1%} MFU"))
    return svg(
        draw_bars(bars, "seconds per step, busiest stage", "Time of a step", colours=_TIME_COLOURS, width=_WIDTH)
    )


def _memory(found: Plan) -> str:
    stages = found.best.estimate.memory
    step = -(-len(stages) // _MOST_STAGES)
    chosen = sorted({*range(0, len(stages), step), len(stages) - 1})
    bars = []
    for index in chosen:
        parts = stages[index].in_gb()
        if found.cluster.device.generation != CPU:
            parts["CUDA, NCCL, fragments"] = stages[index].on_device / 1e9 - sum(parts.values())
        bars.append(Bar(f"stage {index}", parts, f"{sum(parts.values()):.1f} GB"))
    limit = (found.usable_gb, f"usable: {found.usable_gb:.1f} GB")
    return svg(draw_bars(bars, "GB on a rank, at its peak", "Memory by kind", limit, width=_WIDTH))


def _timeline(shape: ModelShape, best: Candidate) -> str:
    layout, found = best.layout, best.estimate
    name = layout.schedule_name
    if layout.pipeline_parallel == 1 or name not in SCHEDULES:
        return "<p>No pipeline: every rank runs the whole model on its micro-batches.</p>"
    count, note = layout.micro_batches, ""
    most = max(2 * layout.pipeline_parallel, _MOST_SPANS // (2 * layout.num_chunks))
    if count > most:
        count = max(1, most // layout.pipeline_parallel) * layout.pipeline_parallel
        note = f"<p class='pale'>Shown with {count} of its {layout.micro_batches} micro-batches.</p>"
    schedule = build(name, layout.pipeline_parallel, layout.virtual_stages, count)
    forward, backward, weight = ([1e3 * times[part] for times in found.chunk_s] for part in range(3))
    if SCHEDULES[name].splits_backward:
        backward = [whole - part for whole, part in zip(backward, weight, strict=True)]
    timeline = simulate(schedule, forward, backward, 1e3 * found.message_s, weight_time=weight)
    layers = layout.chunk_layers(shape)
    kept = [size * layout.pipeline_parallel / sum(layers) for size in layers]
    return note + svg(draw_timelines([Panel(schedule, timeline, kept, "ms")], _WIDTH))
