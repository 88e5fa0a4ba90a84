"""``lightning-3d dry-run``: what a recipe would hold, send and compute on a cluster, told without one."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_3d.cli.command import CLI, FAILURE, STRATEGY, SUCCESS
from lightning_3d.cli.config_files import read_recipe
from lightning_3d.cli.dry_run_report import render
from lightning_3d.cli.numbers import positive, whole
from lightning_3d.cli.numbers import positive_number as seconds
from lightning_3d.config import ParallelConfig, Sizes
from lightning_3d.dry_run import Batch, Job, dry_run
from lightning_3d.dry_run.comparison import Comparison, compare
from lightning_3d.errors import ConfigError
from lightning_3d.example_inputs import example_inputs
from lightning_3d.initialization import deferring, reading_late
from lightning_3d.pipeline.micro_batches import batch_size_of
from lightning_3d.planner import Cluster
from lightning_3d.planner.gpus import CPU
from lightning_3d.strategy import ThreeDStrategy
from lightning_3d.trainer.setup.choice import Circumstances, choose, has_choice
from lightning_3d.trainer.setup.chooser import sample_length

_DESCRIPTION = """Run ranks of the job of a recipe without memory and without the other ranks, by the code that trains:
the module is laid out, cut and sharded, and steps through its schedule with an optimizer. Shows per pipeline stage what
it holds, its memory at the fullest moment, arithmetic and messages, beside the planner's estimate and the memory of the
GPU. What the run would refuse is refused here. Exit code 0: it fits, or no GPU is known; 1: it does not fit; 2: it
cannot run."""
_EPILOG = """examples:
  lightning-3d dry-run --config recipes/quickstart.yaml --world-size 8
  lightning-3d dry-run --config my.yaml --cluster a100-80g:128x8 --stages 0,15 --json"""
_KEYS = ("seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler")
_ALONE: Mapping[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "callbacks": None,
    "plugins": None,
    "profiler": None,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "fast_dev_run": False,
    "num_sanity_val_steps": 0,
}
"""What a Trainer on one machine cannot have, or would do for nothing."""


def main(args: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Args:
        args: What follows ``dry-run``.

    Raises:
        ThreeDError: what the run would raise.
    """
    try:
        given = _parser().parse_args(list(args))
    except SystemExit as exit:
        return int(exit.code or SUCCESS)
    cluster = Cluster.parse(given.cluster) if given.cluster else None
    # The user's code may print, and stdout is for the answer; ranks are forks, which lack the threads of this process.
    with contextlib.redirect_stdout(sys.stderr), _quiet():
        job = _job(given, cluster)
        found = dry_run(job, stages=_stages(given.stages, job.sizes.pp), rank=given.rank, limit_s=given.limit_s)
        against = compare(job, found, cluster)
    if given.json:
        print(json.dumps({**found.as_json(), "comparison": against.as_json()}, indent=2))
    else:
        render(found, against)
    sys.stdout.flush()
    return _verdict(against)


def _verdict(against: Comparison) -> int:
    if against.fits is False:
        sys.stderr.write(f"error: {against.why}\n")
        return FAILURE
    return SUCCESS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-3d dry-run", description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--config", required=True, help="the recipe, as `lightning-3d fit --config` takes it")
    parser.add_argument(
        "--world-size", type=positive, help="ranks of the job; by default those of the recipe or --cluster"
    )
    parser.add_argument("--cluster", help="GPUs, such as a100-80g:128x8 (nodes x GPUs), to compare with")
    parser.add_argument("--devices-per-node", type=positive, help="default: of the recipe or --cluster, else 8")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=whole, help="run this rank")
    which.add_argument("--stages", default="all", help="all (the default), or numbers such as 0,1,15")
    parser.add_argument("--batch-shape", help="of one sample, such as 2049:int64, or input_ids=2048:int64,labels=...")
    parser.add_argument(
        "--batch-size", type=positive, help="samples that a replica reads at once; by default the recipe's"
    )
    parser.add_argument("--limit-s", type=seconds, default=600.0, help="seconds after which to give up")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(before)
        logger.setLevel(level)


class _Recipe(CLI):
    """Trainer, model and data of a recipe, for a world that is not there."""

    def __init__(self, recipe: dict[str, Any]) -> None:
        self._refused = None
        LightningCLI.__init__(
            self,
            args=recipe,
            run=False,
            subclass_mode_model=True,
            subclass_mode_data=True,
            seed_everything_default=42,
            save_config_callback=None,
            trainer_defaults={"strategy": {"class_path": STRATEGY}},
            parser_kwargs={"prog": "lightning-3d dry-run", "allow_abbrev": False},
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the recipe."""
        LightningCLI.parse_arguments(self, parser, args)


def _job(given: argparse.Namespace, cluster: Cluster | None) -> Job:
    recipe = read_recipe(given.config, "to run")
    trainer = recipe["trainer"] = dict(recipe.get("trainer") or {})
    world, per_node = _world(given, cluster, trainer)
    if world % per_node:
        raise ConfigError(
            f"{world} ranks do not divide into nodes of {per_node} devices. Use --devices-per-node or another"
            " --world-size."
        )
    accelerator = trainer.get("accelerator")
    trainer.update(_ALONE, devices=per_node, num_nodes=world // per_node)
    with deferring(1, draws=False), reading_late(1):
        cli = _Recipe({key: recipe[key] for key in _KEYS if key in recipe})
        module = cli.model
        strategy = cli.trainer.strategy
        if not isinstance(strategy, ThreeDStrategy):
            raise ConfigError(
                f"{given.config} trains with {type(strategy).__name__}, but a dry run is of the 3D strategy. Use"
                " strategy='3d'."
            )
        is_chosen = has_choice(strategy.config, world) and not strategy.config.elastic
        if not is_chosen:
            strategy.config.sizes(world, per_node)  # what cannot work is refused before anything is built
        cli.trainer.strategy.connect(module)
        module.trainer = cli.trainer
        with strategy.tensor_init_context():
            module.setup("fit")
            module.configure_model()
    if is_chosen:
        strategy.config = _chosen(cli, strategy, cluster, world, per_node)
    sizes = strategy.config.sizes(world, per_node)
    on_gpus = accelerator in ("gpu", "cuda") if cluster is None else cluster.device.generation != CPU
    return Job(trainer=cli.trainer, module=module, sizes=sizes, batch=_batch(given, cli, sizes), on_gpus=on_gpus)


def _chosen(
    cli: LightningCLI, strategy: ThreeDStrategy, cluster: Cluster | None, world: int, per_node: int
) -> ParallelConfig:
    """The options with the sizes that a run on ``cluster`` would choose in the place of ``"auto"``."""
    config = strategy.config
    if cluster is None:
        names = [name for name in ("tensor_parallel", "pipeline_parallel") if getattr(config, name) == "auto"]
        sys.stderr.write(
            f"note: left 'auto' and taken to be 1: {', '.join(names)}. A run chooses for its devices; with --cluster"
            " so does this command.\n"
        )
        return config
    here = dataclasses.replace(cluster, num_nodes=world // per_node, gpus_per_node=per_node)
    choice = choose(
        cli.model,
        config,
        Circumstances(
            cluster=here,
            is_known=here.device.generation != CPU,
            precision=str(cli.trainer.precision_plugin.precision),
            accumulated=cli.trainer.accumulate_grad_batches,
            seq_len=sample_length([cli.datamodule]),
        ),
    )
    for text in filter(None, (choice.reason, choice.warning)):
        sys.stderr.write(f"note: {text}\n")
    sizes = choice.sizes
    return config.replace(tensor_parallel=sizes.tp, pipeline_parallel=sizes.pp, data_parallel=sizes.dp)


def _world(given: argparse.Namespace, cluster: Cluster | None, trainer: Mapping[str, Any]) -> tuple[int, int]:
    """Ranks in all and on a node."""
    devices = trainer.get("devices")
    devices = devices if isinstance(devices, int) and devices > 0 else None
    per_node = given.devices_per_node or (cluster.ranks_per_node if cluster is not None else devices)
    nodes = trainer.get("num_nodes") or 1
    world = given.world_size or (cluster.world_size if cluster is not None else (devices or 1) * int(nodes))
    if world < 1:
        raise ConfigError(f"num_nodes={nodes} x devices={devices} make no ranks: both are positive whole numbers.")
    return world, min(per_node or 8, world)


def _stages(text: str, count: int) -> list[int] | None:
    if text == "all":
        return None
    try:
        stages = sorted({int(item) for item in text.split(",")})
    except ValueError:
        raise ConfigError(f"--stages {text} must be 'all' or numbers of stages, such as 0,1,{count - 1}.") from None
    if any(not 0 <= stage < count for stage in stages):
        raise ConfigError(f"--stages {text}: this job has the stages 0 to {count - 1}.")
    return stages


def _batch(given: argparse.Namespace, cli: LightningCLI, sizes: Sizes) -> Batch:
    """What a replica reads at once: as described, of the recipe's own loader, or made up for the model."""
    strategy = cli.trainer.strategy
    assert isinstance(strategy, ThreeDStrategy)
    total = strategy.config.global_batch_size
    size = given.batch_size
    if size is None and total is not None:
        size = max(1, total // sizes.dp // cli.trainer.accumulate_grad_batches)
    if given.batch_shape:
        return Batch(_described(given.batch_shape), size or 1)
    example = _of_loader(cli)
    if example is not None:
        return Batch(example, size or batch_size_of(example))
    args, kwargs = next(itertools.islice(example_inputs(cli.model), 1), ((), {}))
    example = kwargs or (args[0] if len(args) == 1 else args)
    if not pytree.tree_leaves(example):
        raise ConfigError(
            "The recipe has no data, and no example_input_array says what a batch looks like. Give --batch-shape, such"
            " as 2049:int64."
        )
    return Batch(example, size or batch_size_of(example))


def _of_loader(cli: LightningCLI) -> Any:
    """The first batch of the recipe's data; ``None`` without any. Files of tokens need not be there yet."""
    data = cli.datamodule
    if data is None and not is_overridden("train_dataloader", cli.model, LightningModule):
        return None
    try:
        if data is None:
            return next(iter(cli.model.train_dataloader()))
        data.trainer = cli.trainer
        data.prepare_data()
        data.setup("fit")
        return next(iter(data.train_dataloader()))
    except Exception as error:
        length = getattr(data, "sequence_length", None)
        if isinstance(error, FileNotFoundError) and isinstance(length, int) and length > 0:
            shape = f"{length + 1}:int64"
            sys.stderr.write(f"note: {error} Until they are there, a sample is taken to be --batch-shape {shape}.\n")
            return _described(shape)
        raise ConfigError(
            f"The data of the recipe cannot be loaded here: {type(error).__name__}: {error} Say what a sample looks"
            " like instead, with --batch-shape, such as 2049:int64."
        ) from error


def _described(text: str) -> Any:
    """A batch of one sample from ``2049:int64`` or ``name=2048:int64,other=3x224x224:float32``."""

    def tensor(item: str) -> torch.Tensor:
        shape, _, name = item.partition(":")
        dtype = getattr(torch, name or "float32", None)
        try:
            dims = [int(length) for length in shape.split("x") if length]
        except ValueError:
            dims = [-1]
        if not isinstance(dtype, torch.dtype) or any(length < 1 for length in dims):
            raise ConfigError(
                f"--batch-shape {item!r} must be the shape of a sample and a type, such as 2049:int64 or"
                " 3x224x224:float32."
            )
        return torch.zeros(1, *dims, dtype=dtype)

    items = text.split(",")
    if "=" in text:
        return {name: tensor(value) for name, _, value in (item.partition("=") for item in items)}
    found = [tensor(item) for item in items]
    return found[0] if len(found) == 1 else found
