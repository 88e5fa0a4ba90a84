"""Rows of ``published_runs.csv`` as what the planner takes: the one place that reads the columns.

Only what a run physically was decides (GPU, sizes, precision, recomputation), never its source or its name; a missing
cell is filled as a person would who knows only the others. docs/planner.md lists the rules.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_3d.errors import ConfigError
from lightning_3d.planner import Cluster, Layout, ModelShape, gpu, preset
from lightning_3d.planner.activations import layer_activations
from lightning_3d.planner.flops import hardware_flops_per_token, model_flops_per_token

CSV = Path(__file__).parent / "published_runs.csv"
_ONE_NVLINK = 25.0
"""GB/s of one link of an A100, in one direction."""
_PRESETS = re.compile(r"mixtral[ -]8x(7|22)b|llama[ -]?[23](\.1)?[ -](7|8|13|70|405)b\b|gpt-?3[ -]175b")
"""Models whose shape is known from their name, where the columns do not give it."""
_VOCAB = 51200
"""GPT-2's vocabulary, padded as Megatron pads it: where none is given."""


COLUMNS = ("id", "gpu", "n_gpus", "layers", "hidden", "seq_len", "tp", "pp", "global_batch")
"""Without these no row is a run; others may be missing."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One published run."""

    id: str
    source: str
    shape: ModelShape
    cluster: Cluster
    layout: Layout
    step_time_s: float | None
    """As measured, or from tokens per second, or from FLOP/s and their convention."""
    measured_as: str
    """Which of these."""
    memory_gb: float | None
    """As measured, in 1e9 bytes."""
    memory_of_last: bool
    """Whether that is the memory of the last stage, not of the fullest."""
    memory_of_device: bool
    """Whether the device was asked (nvidia-smi), which also counts CUDA's context and what the allocator holds."""
    faults: str = ""
    """Measured figures that cannot be, and are left out."""


def read(path: Path = CSV) -> tuple[list[Run], dict[str, str]]:
    """All rows from which a run can be made, and for the others what is missing.

    Raises:
        ConfigError: If there is no such file, or it lacks columns without which no row is a run.
    """
    runs, left_out = [], {}
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    reader = csv.DictReader(lines)
    if lacking := [name for name in COLUMNS if name not in (reader.fieldnames or ())]:
        raise ConfigError(f"{path} lacks the columns {', '.join(lacking)}. {CSV.name} has all that are read.")
    for row in reader:
        try:
            runs.append(as_run(row))
        except (ConfigError, ValueError) as error:
            left_out[row["id"] or f"line {reader.line_num}"] = str(error)
    return runs, left_out


def as_run(row: Mapping[str, str]) -> Run:
    """One row.

    Raises:
        ValueError: If too much is missing to make a run of it.
    """
    shape = as_shape(row)
    cluster = as_cluster(row)
    layout = as_layout(row, shape, cluster)
    faults = []
    try:
        seconds, measured_as = _step_time(row, shape, cluster, layout)
    except ValueError as error:
        seconds, measured_as = None, ""
        faults.append(str(error))
    try:
        memory = _measured(row, "mem_gb_per_gpu")
    except ValueError as error:
        memory = None
        faults.append(str(error))
    return Run(
        id=row["id"],
        source=row.get("source") or "",
        shape=shape,
        cluster=cluster,
        layout=layout,
        step_time_s=seconds,
        measured_as=measured_as,
        memory_gb=memory,
        faults="; ".join(faults),
        memory_of_device="nvidia-smi" in (row.get("flops_formula_note") or "").lower(),
        memory_of_last="last global rank" in (row.get("flops_formula_note") or "").lower(),
    )


def as_shape(row: Mapping[str, str]) -> ModelShape:
    """The model. Whether the MLP is gated and the embedding tied follows from the count of parameters."""
    hidden, layers, seq_len = (_whole(row, name) for name in ("hidden", "layers", "seq_len"))
    billions, vocab = _number(row, "params_b"), _whole(row, "vocab") or _VOCAB
    known = _PRESETS.search((row.get("model_name") or "").lower())
    if known and not (hidden and layers and not known[0].startswith("mixtral")):
        return preset(known[0].replace(" ", "-"), **({"seq_len": seq_len} if seq_len else {}))
    if layers is None and hidden and billions:
        layers = round((billions * 1e9 - vocab * hidden) / (12 * hidden**2))
    if not (hidden and layers and seq_len):
        raise ValueError("no layers, hidden size or sequence length")
    heads = _whole(row, "heads") or _usual_heads(hidden, _whole(row, "tp") or 1)
    kv_heads, ffn = _whole(row, "kv_heads"), _whole(row, "ffn_hidden")
    modern = (kv_heads or heads) != heads
    gated = ffn is not None and ffn != 4 * hidden
    candidates = [
        ModelShape(
            layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn_hidden=ffn, vocab=vocab, seq_len=seq_len,
            gated_mlp=is_gated, tied_embeddings=tied, learned_positions=False,
        )
        for is_gated in ((gated, not gated) if ffn else (False,))
        for tied in ((False, True) if gated or modern else (True, False))
    ]  # fmt: skip
    if billions is None:
        return candidates[0]
    shape = min(candidates, key=lambda shape: round(abs(shape.parameters / 1e9 / billions - 1), 2))
    if not 0.75 < shape.parameters / 1e9 / billions < 1.25:
        raise ValueError(f"the columns make a model of {shape.parameters / 1e9:.0f}e9 parameters, not {billions:.0f}e9")
    return shape


def as_cluster(row: Mapping[str, str]) -> Cluster:
    """GPUs and links; link speeds that are not given are the usual ones of the GPU, with one exception.

    Where A100s share network cards, the node has no NVSwitch, and a ring runs over the four NVLinks between two GPUs:
    BLOOM's model card describes such nodes ("8 GPUs per node using NVLink 4 inter-gpu connects, 4 OmniPath links").
    """
    count = _whole(row, "n_gpus")
    if not row.get("gpu") or not count:
        raise ValueError("no GPU or number of GPUs")
    nvlink, network = _number(row, "intra_node_GBps"), _number(row, "inter_node_Gbps")
    if nvlink is None and network is not None and gpu(row["gpu"]).generation == "ampere" and network < 100:
        nvlink = 4 * _ONE_NVLINK
    per_node = min(count, _whole(row, "gpus_per_node") or gpu(row["gpu"]).gpus_per_node)
    while count % per_node:  # nodes that were used in part
        per_node -= 1
    return Cluster.of_gpus(
        row["gpu"],
        count,
        per_node,
        intra_node_GBps=nvlink,
        inter_node_Gbps=network,
    )


def as_layout(row: Mapping[str, str], shape: ModelShape, cluster: Cluster) -> Layout:
    """Axes, schedule and settings."""
    tp, pp = _whole(row, "tp"), _whole(row, "pp")
    if _whole(row, "dp") == cluster.world_size:
        tp, pp = tp or 1, pp or 1
    if not tp or not pp:
        raise ValueError("no tensor or pipeline parallel size")
    cp, ep = _whole(row, "cp") or 1, _whole(row, "ep") or 1
    dp, remainder = divmod(cluster.world_size, tp * pp * cp)
    batch, micro = _whole(row, "global_batch"), _whole(row, "micro_batch") or 1
    if ep > 1 and not shape.experts:
        raise ValueError("experts are not in the columns")
    if remainder or not dp:
        raise ValueError(f"{cluster.world_size} GPUs are no multiple of tp x pp x cp = {tp * pp * cp}")
    if not batch or batch % dp:
        raise ValueError("no global batch that the replicas could share out")
    while batch % (dp * micro):
        micro -= 1
    zero = _whole(row, "zero_stage")
    if not row.get("micro_batch") and pp == 1:
        micro = _largest_micro_batch(shape, batch // dp, tp)
    text = " ".join((row.get("precision") or "bf16", row.get("activation_ckpt") or "")).lower()
    recompute = (row.get("activation_ckpt") or "").lower()
    checkpointing = next((kind for kind in ("full", "selective") if recompute.startswith(kind)), None)
    # ZeRO-3 is FSDP: plain PyTorch modules. The others are Megatron and its kin, with kernels of their own.
    fully_sharded = zero == 3 or (zero == 2 and pp == 1)
    schedule = _schedule(row.get("model_name") or "")
    virtual = _whole(row, "virtual_pp")
    if virtual is None:
        m = batch // (dp * micro)
        virtual = 1 if schedule or pp == 1 else _one_layer_chunks(shape.layers, pp, m)
    split: str | tuple[int, ...] | None = "uniform"  # Megatron, DeepSpeed and torchtitan count layers
    if shape.layers < pp * virtual:
        virtual, split = _short_ends(shape.layers, pp, virtual)
    sharded_states = zero if zero is not None else 1
    told: dict[str, Any] = {}
    if recompute == "none":  # a run that says so is a plain one
        told |= {"sequence_parallel": False, "overlap_tensor_parallel": False}
    if "overlap" in text:
        told["overlap_grad_reduce"] = True
    if fully_sharded and ("fp8" in text or "float8" in text):
        told["fused_elementwise"] = True
    describe = Layout.fsdp if fully_sharded else Layout.megatron
    return describe(
        shape,
        cluster,
        tensor_parallel=tp,
        pipeline_parallel=pp,
        data_parallel=dp,
        context_parallel=cp,
        expert_parallel=ep if dp % ep == 0 else 1,
        zero_stage=sharded_states,
        schedule=schedule,
        virtual_stages=virtual,
        pipeline_split=split,
        micro_batch_size=micro,
        global_batch_size=batch,
        **({"activation_checkpointing": checkpointing} if recompute else {}),
        precision=row.get("precision") or "bf16",
        reduce_dtype="float16" if text.startswith("fp16") else "bfloat16" if "pure" in text else "float32",
        keeps_16bit_gradients="bf16optimizer" in text,
        **told,
    )


def _schedule(name: str) -> str | None:
    """The schedule, where the name of the run tells it; ``None`` where it follows from the chunks."""
    lower = name.lower()
    for told, schedule in (("zb-2p", "zb_h2"), ("zb-1p", "zb_h1"), ("zb-v", "zbv"), ("gpipe", "gpipe")):
        if told in lower:
            return schedule
    return None


def _one_layer_chunks(layers: int, stages: int, micro_batches: int) -> int:
    """Chunks per rank where they are not given: one layer each, if the micro-batches allow interleaving."""
    if micro_batches % stages:
        return 1
    # The first and last stage are often a layer short, for the embedding and the head.
    return next((total // stages for total in (layers, layers + 2, layers + 1) if total % stages == 0), 1)


def _short_ends(layers: int, stages: int, virtual: int) -> tuple[int, tuple[int, ...] | str]:
    """Chunks where the first and the last are a layer short and have none."""
    if layers + 2 == stages * virtual:
        return virtual, (0, *[1] * layers, 0)
    return max(1, layers // stages), "uniform"


def _largest_micro_batch(shape: ModelShape, samples: int, tp: int) -> int:
    """The most samples, up to 4, whose activations take a third of 80 GB: where nothing is said."""
    each = shape.layers * layer_activations(shape, 1, tp, tp > 1, flash_attention=True)
    return max(n for n in (1, 2, 4) if samples % n == 0 and (n == 1 or n * each < 35e9))


def _usual_heads(hidden: int, tensor_parallel: int) -> int:
    """Heads of about 128 that the tensor-parallel ranks can share."""
    able = [n for n in range(tensor_parallel, hidden + 1, tensor_parallel) if hidden % n == 0]
    return min(able, key=lambda n: abs(hidden / n - 128))


def _step_time(row: Mapping[str, str], shape: ModelShape, cluster: Cluster, layout: Layout) -> tuple[float | None, str]:
    seconds, rate = _measured(row, "step_time_s"), _measured(row, "tokens_per_s_per_gpu")
    if seconds:
        return seconds, "step time"
    tokens = layout.samples * shape.seq_len / cluster.world_size
    if rate:
        return tokens / rate, "tokens/s"
    teraflops, note = _measured(row, "tflops_per_gpu"), (row.get("flops_formula_note") or "").lower()
    if not teraflops:
        return None, ""
    if "hardware flops" not in note and ("model flops" in note or "mfu" in note):
        return tokens * model_flops_per_token(shape, "causal" in note and "non-causal" not in note) / (
            teraflops * 1e12
        ), "model FLOP/s"
    checkpointing = layout.activation_checkpointing
    return tokens * hardware_flops_per_token(shape, checkpointing) / (teraflops * 1e12), "hardware FLOP/s"


def _number(row: Mapping[str, str], name: str) -> float | None:
    text = (row.get(name) or "").strip()
    try:
        return float(text) if text else None
    except ValueError:
        raise ValueError(f"{name}={text!r} is no number") from None


def _measured(row: Mapping[str, str], name: str) -> float | None:
    number = _number(row, name)
    if number is not None and not 0 < number < math.inf:
        raise ValueError(f"{name}={row[name]} cannot have been measured")
    return number


def _whole(row: Mapping[str, str], name: str) -> int | None:
    number = _number(row, name)
    if number is not None and not (number.is_integer() and number >= 0):
        raise ValueError(f"{name}={row[name]} is no whole number")
    return None if number is None else int(number)
