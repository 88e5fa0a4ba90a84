"""``lightning-3d plan``: which layout to take for a model on a cluster, why, and what it costs."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from lightning_3d.cli.config_files import read_recipe
from lightning_3d.cli.did_you_mean import suggest
from lightning_3d.cli.numbers import not_negative, positive
from lightning_3d.cli.paths import check_writable, write_file
from lightning_3d.cli.plan_page import page
from lightning_3d.cli.plan_recipe import recipe
from lightning_3d.cli.plan_table import render
from lightning_3d.errors import ConfigError
from lightning_3d.planner import PRESETS, Candidate, Cluster, ModelShape, Plan, plan, preset
from lightning_3d.planner.layout import PRECISIONS

_DESCRIPTION = """
Choose tensor, pipeline and data parallel sizes, chunks, micro-batches, ZeRO stage and recomputation for a model on a
cluster: every legal layout is compared with the memory of the GPU, what fits is timed by running its schedule on paper,
and each loser is told why. Needs no GPU. Without further options only what training can run is recommended.
"""
_EPILOG = """examples:
  lightning-3d plan --model llama3-70b --cluster h100-80g:64x8 --global-batch 1024
  lightning-3d plan --model path/to/config.json --seq-len 8192 --cluster a100-80g:512 --global-batch 512 --html p.html
  lightning-3d plan --config recipes/mine.yaml --cluster h100-80g:8x8 --write recipes/mine-64.yaml
  lightning-3d plan --model gpt3-175b --cluster a100-80g:128x8 --global-batch 1536 --tp 8 --pp 8,16 --json

models by name: """ + ", ".join(PRESETS)
_OPTIONS = {
    "--tp": ("tensor_parallel", "tensor parallel sizes to choose from"),
    "--pp": ("pipeline_parallel", "pipeline stages to choose from"),
    "--dp": ("data_parallel", "replicas to choose from"),
    "--virtual-stages": ("virtual_stages", "chunks per stage to choose from"),
    "--micro-batch": ("micro_batch_size", "samples of a micro-batch to choose from"),
    "--zero": ("zero_stage", "ZeRO stages to choose from"),
}

_TEXTS, _MAYBE_FLAGS = ("norm", "activation"), ("biases", "learned_positions", "dropout", "packed_attention")
"""Fields of a shape that are words, and those that are true, false or left to the family."""
_MISREAD = 0.03
"""Part of the parameters that the shape may miss without a word."""
_MISCOUNTED = 0.1
"""The same of the operations, which depend on how attention is written."""


def main(args: list[str]) -> int:
    """Run the command with the arguments after its name and return the exit code.

    Raises:
        ConfigError: For a model or GPU that is not known, sizes that cannot work, or a model that fits nowhere.
    """
    given, rest = _parser().parse_known_args(args)
    unknown = [arg for arg in rest if arg.startswith("-") and not arg.startswith(("--model.", "--hf-config"))]
    if unknown or (rest and given.model is None):
        raise ConfigError(f"{(unknown or rest)[0]} is no option of plan. See lightning-3d plan --help.")
    check_writable("--write", given.write)
    check_writable("--html", given.html)
    job = _Job(given, rest)
    found = plan(
        job.shape, job.cluster, job.global_batch, fixed=job.fixed, reserve_gb=given.reserve_gb,
        all_schedules=given.all_schedules, tp_across_nodes=given.tp_across_nodes,
    )  # fmt: skip
    if given.write is not None:
        write_file("--write", given.write, recipe(found, job.title, job.recipe, given.write.name))
    if given.html is not None:
        write_file("--html", given.html, page(found, job.title, given.top))
    if given.json:
        print(json.dumps(_as_json(found, job.title), indent=2))
    else:
        render(found, job.title, given.top)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-3d plan",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", metavar="MODEL", help="a name below, a Hugging Face config.json or its folder, or"
        " package.module.Class (with --model.ARGUMENT=VALUE for what it takes)")  # fmt: skip
    add("--config", metavar="RECIPE", help="a recipe whose model, batch, sequence length and precision are used")
    add("--cluster", metavar="GPU:NODESxGPUS", required=True, help="such as a100-80g:128x8, or a YAML file")
    add("--global-batch", type=positive, metavar="N", help="samples of an optimizer step")
    add("--seq-len", type=positive, metavar="N", help="tokens of a sample (default: the model's)")
    add("--precision", choices=PRECISIONS, help="(default bf16-mixed)")
    for name, (_, text) in _OPTIONS.items():
        add(name, type=_sizes, metavar="N[,N...]", help=f"{text} (default: all that are legal)")
    add("--recompute", metavar="HOW[,HOW...]", help="none, full, or every k-th block, to choose from")
    add("--schedule", metavar="NAME[,NAME...]", help="schedules to choose from")
    add(
        "--no-sequence-parallel",
        action="store_true",
        help="for models that the strategy does not cut along the sequence",
    )
    add("--all-schedules", action="store_true", help="also those that can be simulated but not trained with yet")
    add("--tp-across-nodes", action="store_true", help="also tensor parallelism wider than a node")
    add("--reserve-gb", type=not_negative, metavar="GB", help="memory of a GPU that stays free (default 3 %%)")
    add("--top", type=positive, default=8, metavar="N", help="rows of the ranking (8)")
    add("--json", action="store_true", help="print one JSON object")
    add("--write", type=Path, metavar="FILE", help="write a recipe for `lightning-3d fit --config FILE`")
    add("--html", type=Path, metavar="FILE", help="write a report with pictures")
    return parser


def _sizes(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number or list of numbers such as 4,8") from None
    if any(size < 0 for size in found):
        raise argparse.ArgumentTypeError(f"{text!r} must not be negative")
    return found


class _Job:
    """What the plan is for, gathered from options and recipe."""

    def __init__(self, given: argparse.Namespace, rest: Sequence[str]) -> None:
        if (given.model is None) == (given.config is None):
            raise ConfigError("plan needs one of --model and --config.")
        self.cluster = Cluster.parse(given.cluster)
        self.recipe: dict[str, Any] = read_recipe(given.config, "to plan for") if given.config is not None else {}
        """What the user's recipe has, or what follows from ``--model``."""
        trainer = _section(self.recipe, "trainer")
        strategy = _section(_section(trainer, "strategy"), "init_args")
        data = _section(_section(self.recipe, "data"), "init_args")
        self.seq_len = data.get("sequence_length") if given.seq_len is None else given.seq_len
        self.title, self.shape = self._model(given, rest)
        batch = strategy.get("global_batch_size") if given.global_batch is None else given.global_batch
        if batch is None:
            raise ConfigError("plan needs --global-batch: samples of an optimizer step over all replicas.")
        self.global_batch = int(batch)
        self.fixed = {field: getattr(given, name[2:].replace("-", "_")) for name, (field, _) in _OPTIONS.items()}
        self.fixed["schedule"] = given.schedule.split(",") if given.schedule else None
        self.fixed["sequence_parallel"] = False if given.no_sequence_parallel else None
        self.fixed["activation_checkpointing"] = _recomputations(given.recompute)
        self.fixed["precision"] = given.precision or trainer.get("precision")
        self.fixed = {
            name: value[0] if isinstance(value, list) and len(value) == 1 else value
            for name, value in self.fixed.items()
            if value is not None
        }

    def _model(self, given: argparse.Namespace, rest: Sequence[str]) -> tuple[str, ModelShape]:
        if given.config is not None:
            return Path(given.config).name, self._read_off(["--config", given.config, *rest])
        path = Path(given.model)
        arguments = _arguments(rest)
        if path.suffix == ".json" or (path / "config.json").is_file():
            if arguments:
                raise ConfigError(
                    f"--model.{next(iter(arguments))} is for a class or a name of the planner; {path} is a file that"
                    " says all of its model. Change it there."
                )
            self.recipe["model"] = {
                "class_path": "lightning_3d.models.CausalLM",
                "init_args": {"config": str(path.parent if path.name == "config.json" else path)},
            }
            return str(path), _shape_of_file(path / "config.json" if path.is_dir() else path, self.seq_len)
        try:
            known = preset(given.model)
        except ConfigError:
            if "." not in given.model and ":" not in given.model:
                raise
        else:
            return given.model, _changed(known, arguments, self.seq_len)
        if given.write is not None and ":" in given.model:
            raise ConfigError(f"--write needs a class that recipes can name: package.module.Class, not {given.model}.")
        self.recipe["model"] = {"class_path": given.model, **({"init_args": arguments} if arguments else {})}
        return given.model, self._read_off(["--model", given.model, *rest])

    def _read_off(self, args: Sequence[str]) -> ModelShape:
        """Build the user's module without memory and look at it."""
        import torch

        from lightning_3d.cli.doctor import build_model
        from lightning_3d.planner.reading import shape_of_module

        with contextlib.redirect_stdout(sys.stderr), torch.device("meta"):  # stdout is for the answer
            module = build_model(args).module
        shape = shape_of_module(module, self.seq_len)
        held = sum(parameter.numel() for parameter in module.parameters())
        if abs(shape.parameters - held) > _MISREAD * held:
            sys.stderr.write(
                f"warning: read as {shape.layers} layers of width {shape.hidden} with {shape.parameters:,} parameters,"
                f" but the model has {held:,}: it is no plain transformer, and the plan is that far off.\n"
            )
        if (misread := _counted_otherwise(module, shape)) is not None:
            sys.stderr.write(f"warning: {misread}\n")
        return shape


def _counted_otherwise(module: Any, shape: ModelShape) -> str | None:
    """What to say if the operations that a run on the meta device counts are not those of the shape."""
    from lightning_3d.pipeline.block_lists import find_block_lists
    from lightning_3d.pipeline.flops import LONGEST, count_flops
    from lightning_3d.planner.flops import model_flops_per_token

    length = min(shape.seq_len, LONGEST)
    blocks = [name for found in find_block_lists(module) for name in found.blocks]
    counted = count_flops(module, blocks, length=length) if blocks else None
    if counted is None or counted.inputs != f"1 x {length}":
        return None  # no made-up sample of tokens runs through it
    formula = length * model_flops_per_token(replace(shape, seq_len=length))
    if abs(counted.products - formula) <= _MISCOUNTED * counted.products:
        return None
    return (
        f"a training step on a sample of {length:,} tokens takes {counted.products / 1e12:.3g} TFLOP, counted on the"
        f" module, but {formula / 1e12:.3g} by the shape that was read off it: times are that far off."
    )


def _arguments(rest: Sequence[str]) -> dict[str, Any]:
    """What ``--model.NAME VALUE`` or ``--model.NAME=VALUE`` give, as a recipe would have it."""
    import yaml

    found: dict[str, Any] = {}
    left = iter(rest)
    for arg in left:
        name, equals, value = arg.partition("=")
        if not name.startswith("--"):
            raise ConfigError(f"{arg} belongs to no option of plan. See lightning-3d plan --help.")
        value = value if equals else next(left, "")
        if name.startswith("--model."):
            try:
                found[name.removeprefix("--model.")] = yaml.safe_load(value)
            except yaml.YAMLError as error:
                raise ConfigError(f"{name}={value} is not YAML: {error}") from error
    return found


def _changed(shape: ModelShape, changes: Mapping[str, Any], seq_len: int | None) -> ModelShape:
    """A shape known by name, with fields given as ``--model.FIELD=VALUE``."""
    names = [field.name for field in fields(ModelShape)]
    for name, value in changes.items():
        if name not in names:
            near = suggest(name, names, prefix="model.")
            raise ConfigError(f"--model.{name} is no part of a shape.{near} There are: {', '.join(names)}.")
        flag = isinstance(getattr(shape, name), bool) or name in _MAYBE_FLAGS
        if value is not None and (name in _TEXTS) + 2 * flag != isinstance(value, str) + 2 * isinstance(value, bool):
            kind = "true or false" if flag else "a word" if name in _TEXTS else "a whole number"
            raise ConfigError(f"--model.{name}={value} must be {kind}.")
    if seq_len is not None:
        if changes.get("seq_len", seq_len) != seq_len:
            raise ConfigError(f"--seq-len {seq_len} and --model.seq_len={changes['seq_len']} differ. Give one of them.")
        changes = {**changes, "seq_len": seq_len}
    return replace(shape, **changes)


def _section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = content.get(name)
    return value if isinstance(value, Mapping) else {}


def _shape_of_file(path: Path, seq_len: int | None) -> ModelShape:
    from lightning_3d.planner.reading import shape_of_config

    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--model {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"--model {path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--model {path} holds no configuration: a JSON object is expected.")
    return shape_of_config(content, seq_len)


def _recomputations(text: str | None) -> list[str | int | None] | None:
    if text is None:
        return None
    found: list[str | int | None] = []
    for part in text.split(","):
        if part not in ("none", "full") and not (part.isdigit() and int(part) > 0):
            raise ConfigError(f"--recompute {part!r} is not known. Use none, full, or a number k for every k-th block.")
        found.append(None if part == "none" else "full" if part == "full" else int(part))
    return found


def _as_json(found: Plan, title: str) -> dict[str, Any]:
    cluster = found.cluster
    return {
        "model": {"name": title, "parameters": found.shape.parameters, **asdict(found.shape)},
        "cluster": {
            "name": str(cluster), "gpu": cluster.device.name, "num_nodes": cluster.num_nodes,
            "gpus_per_node": cluster.ranks_per_node, "gpus": cluster.world_size,
        },
        "global_batch_size": found.global_batch,
        "usable_memory_gb": found.usable_gb,
        "reason": found.reason,
        "warnings": found.warnings,
        "ranking": [_candidate(candidate) for candidate in found.ranking],
        "variants": [_candidate(candidate) for candidate in found.variants],
        "refused": [asdict(refusal) for refusal in found.refusals],
        "layouts_tried": found.num_layouts,
        "layouts_timed": found.num_timed,
        "search_seconds": found.seconds,
    }  # fmt: skip


def _candidate(candidate: Candidate) -> dict[str, Any]:
    found = candidate.estimate
    numbers = {
        name: getattr(found, name)
        for name in (
            "step_time_s", "tokens_per_s_per_gpu", "memory_gb", "device_memory_gb", "mfu", "hfu", "compute_s", "tp_s",
            "pp_s", "dp_s", "exposed_dp_s",
        )
    }  # fmt: skip
    return {
        "layout": {**asdict(candidate.layout), "num_micro_batches": candidate.layout.micro_batches},
        **numbers,
        "bubble_fraction_of_total": found.bubble_fraction,
        "time_share": dict(found.time_share),
        "memory_gb_per_stage": [stage.in_gb() for stage in found.memory],
        "why_not_first": candidate.why,
    }
