"""A plan as a recipe that ``lightning-3d fit --config`` runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from lightning_3d.errors import ConfigError
from lightning_3d.planner import Cluster, ModelShape, Plan
from lightning_3d.planner.gpus import CPU
from lightning_3d.planner.reading import shape_of_config
from lightning_3d.schedules import ENGINE_SCHEDULES

STRATEGY = "lightning_3d.ThreeDStrategy"
_UNLIKE = 0.01
"""Part of the parameters by which a model that is written down may miss the shape that was planned."""


def recipe(found: Plan, title: str, given: Mapping[str, Any], name: str) -> str:
    """The text of a recipe for the first layout of a plan, with what is predicted and how to launch it in its head.

    Args:
        found: The plan.
        title: What the model was called.
        given: What the user's recipe has; sizes are put into it, and what is missing is filled in: a model of Hugging
            Face with this shape, and files of tokens, whose path has to be set.
        name: Of the file, for the commands.

    Raises:
        ConfigError: If the layout cannot be trained.
    """
    layout, cluster = found.best.layout, found.cluster
    if layout.schedule_name not in ENGINE_SCHEDULES or layout.context_parallel * layout.expert_parallel > 1:
        raise ConfigError(
            f"{layout} cannot be trained yet: the engine runs {', '.join(ENGINE_SCHEDULES)}, without context or expert"
            " parallelism. Leave out --all-schedules, or --write."
        )
    if layout.precision == "fp8":
        raise ConfigError("--write: no precision of Lightning trains in fp8 here. Use --precision bf16-mixed.")
    options: dict[str, Any] = {
        "tensor_parallel": layout.tensor_parallel,
        "pipeline_parallel": layout.pipeline_parallel,
        "data_parallel": layout.data_parallel,
        "zero_stage": layout.zero_stage,
        "schedule": layout.schedule_name,
        "virtual_stages": layout.virtual_stages,
        "micro_batch_size": layout.micro_batch_size,
        "global_batch_size": found.global_batch,
        "sequence_parallel": layout.sequence_parallel,
        "loss_parallel": layout.loss_parallel and layout.tensor_parallel > 1,
        "activation_checkpointing": layout.activation_checkpointing,
    }
    if cluster.ranks_per_node % layout.tensor_parallel:
        options["allow_tp_across_nodes"] = True  # NVLink may reach further than a node
    if layout.reduce_dtype != "float32":
        options["reduce_dtype"] = layout.reduce_dtype
    trainer = dict(given.get("trainer") or {"max_steps": 100_000, "gradient_clip_val": 1.0})
    trainer |= {
        "accelerator": "cpu" if cluster.device.generation == CPU else "gpu",
        "num_nodes": cluster.num_nodes,
        "devices": cluster.ranks_per_node,
        "precision": layout.precision,
        "strategy": {"class_path": STRATEGY, "init_args": {**_kept(trainer.get("strategy")), **options}},
    }
    content = {"seed_everything": 42, **given, "trainer": trainer}
    content.setdefault("model", _model(found.shape))
    content.setdefault("data", _data(found.shape))
    return _head(found, title, name) + "\n" + yaml.safe_dump(content, sort_keys=False, width=110)


def _kept(strategy: Any) -> Mapping[str, Any]:
    """Options of the user's own that sizes do not touch."""
    options = strategy.get("init_args") if isinstance(strategy, Mapping) else None
    return {key: value for key, value in (options or {}).items() if key not in ("num_micro_batches", "pipeline_split")}


def prediction(found: Plan) -> list[str]:
    """Step time, speed and memory of the first layout of a plan, as lines for the head of a recipe."""
    predicted, shape = found.best.estimate, found.shape
    share = ", ".join(f"{part} {value:.0%}" for part, value in predicted.time_share.items() if value >= 0.005)
    return [
        f"Predicted: {predicted.step_time_s:.2f} s per step of {found.global_batch * shape.seq_len:,} tokens;"
        f" {predicted.tokens_per_s_per_gpu:,.0f} tokens/s per GPU;",
        f"  {predicted.device_memory_gb:.1f} GB of {found.cluster.gpu_memory_gb:.0f} GB on the fullest GPU;"
        f" MFU {predicted.mfu:.1%}; bubble {predicted.bubble_fraction:.1%} of the total;",
        f"  time on the busiest stage: {share}.",
    ]


def _head(found: Plan, title: str, name: str) -> str:
    best, cluster = found.best, found.cluster
    layout = best.layout
    nodes = f"--nnodes={cluster.num_nodes} --nproc-per-node={cluster.ranks_per_node}"
    lines = [
        f"{title} on {cluster} ({cluster.world_size:,} GPUs), as `lightning-3d plan` has it.",
        "",
        f"Layout: {layout}.",
        *prediction(found),
        *(f"Mind: {warning}" for warning in found.warnings),
        "",
        "Before the first start: look through data, learning rate and max_steps.",
        "",
        "What a rank holds and sends, told on any machine before the job is queued:",
        f"  lightning-3d dry-run --config {name} {_cluster_option(cluster)}",
        "",
        "torchrun, on every node, with HOST one of them:",
        f"  torchrun {nodes} --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 --rdzv-id=train \\",
        f"    -m lightning_3d fit --config {name}",
        "",
        "SLURM, as a batch script:",
        f"  #SBATCH --nodes={cluster.num_nodes} --ntasks-per-node={cluster.ranks_per_node}"
        f" --gpus-per-node={cluster.ranks_per_node}",
        f"  srun lightning-3d fit --config {name}",
    ]
    return "\n".join(f"# {line}".rstrip() for line in lines)


def _cluster_option(cluster: Cluster) -> str:
    """What tells the dry run of the cluster; of a GPU that no table has, only how many there are."""
    if isinstance(cluster.gpu, str):
        return f"--cluster {cluster}"
    return f"--world-size {cluster.world_size} --devices-per-node {cluster.ranks_per_node}"


def _data(shape: ModelShape) -> dict[str, Any]:
    arguments = {
        "train": "data/train-*.bin",
        "sequence_length": shape.seq_len,
        "dtype": "uint16" if shape.vocab <= 65536 else "uint32",
    }
    return {"class_path": "lightning_3d.models.TokenFiles", "init_args": arguments}


def _model(shape: ModelShape) -> dict[str, Any]:
    """A model of Hugging Face with this shape.

    Raises:
        ConfigError: If no class that is known here has it.
    """
    config = hugging_face_config(shape)
    made = shape_of_config(config, shape.seq_len).parameters
    if abs(made - shape.parameters) > _UNLIKE * shape.parameters:
        raise ConfigError(
            f"--write: a {config['model_type']} of these sizes has {made:,} parameters, the shape {shape.parameters:,}."
            " No class of transformers that is known here has it: give the model by --model package.module.Class."
        )
    return {"class_path": "lightning_3d.models.CausalLM", "init_args": {"config": config}}


def hugging_face_config(shape: ModelShape) -> dict[str, Any]:
    """What a configuration of Hugging Face says for this shape: llama, mixtral, bloom, gpt2 or gpt_neox."""
    if not shape.gated_mlp and (shape.learned_positions is None or shape.learned_positions):
        config: dict[str, Any] = {
            "model_type": "gpt2",
            "n_layer": shape.layers,
            "n_embd": shape.hidden,
            "n_head": shape.heads,
            "n_inner": shape.ffn_width,
            "n_positions": shape.seq_len,
            # The same function as gelu_new, in one kernel that keeps 4 instead of 16 bytes of every inner activation.
            "activation_function": "gelu_pytorch_tanh" if shape.activation == "gelu" else shape.activation,
        }
    elif shape.embedding_norm:
        config = {"model_type": "bloom", "n_layer": shape.layers, "hidden_size": shape.hidden, "n_head": shape.heads}
    else:
        config = {
            "model_type": "mixtral" if shape.experts else "llama" if shape.gated_mlp else "gpt_neox",
            "num_hidden_layers": shape.layers,
            "hidden_size": shape.hidden,
            "num_attention_heads": shape.heads,
            "intermediate_size": shape.expert_width if shape.experts else shape.ffn_width,
            "max_position_embeddings": shape.seq_len,
        }
        if shape.gated_mlp:
            config["num_key_value_heads"] = shape.kv_heads or shape.heads
        if shape.head_dim is not None:
            config["head_dim"] = shape.head_dim
        if shape.experts:
            config |= {"num_local_experts": shape.experts, "num_experts_per_tok": shape.experts_per_token}
    return {**config, "vocab_size": shape.vocab, "tie_word_embeddings": shape.tied_embeddings}
