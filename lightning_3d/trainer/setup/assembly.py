"""Turning the user's LightningModule into this rank's part of a 3D run: the order of set-up, readable top down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_3d import tensor_parallel
from lightning_3d.checkpoint import state_dict_keys
from lightning_3d.config import ParallelConfig, Sizes
from lightning_3d.errors import ConfigError
from lightning_3d.initialization import following, is_deferred, materialise, missing_values, rebuild
from lightning_3d.mesh import Mesh
from lightning_3d.pipeline.blocks import ChunkMap
from lightning_3d.pipeline.compiling import choose_parts, compile_parts
from lightning_3d.pipeline.cut import Cut
from lightning_3d.pipeline.engine import Engine
from lightning_3d.pipeline.recompute import recompute_blocks, recompute_wrapped
from lightning_3d.pipeline.stage import Stage
from lightning_3d.pipeline.ties import find_shared
from lightning_3d.pipeline.wrappers import unwrap
from lightning_3d.placeholder import is_placeholder, refuse_lost_writes
from lightning_3d.precision import PrecisionRule, ThreeDPrecision
from lightning_3d.random import States, StepStreams
from lightning_3d.sharding import Sharding, build_sharding, make_ties
from lightning_3d.trainer.data.global_batch import accumulated_batches
from lightning_3d.trainer.logging.metrics import bind_metrics
from lightning_3d.trainer.module.kept import KeptParameters
from lightning_3d.trainer.module.parameter_hooks import ParameterHooks, refuse_late_hooks
from lightning_3d.trainer.setup.blueprint import Blueprint, draw, profiler, tell_all
from lightning_3d.trainer.setup.layout import Layout, expected_micro_batches
from lightning_3d.trainer.setup.start import own_memory, refuse_views, share_random_state, share_weights

_ATTRIBUTE = "_lightning_3d_assembly"
_SHAPING = (
    "zero_stage",
    "schedule",
    "virtual_stages",
    "pipeline_blocks",
    "pipeline_split",
    "tp_plan",
    "sequence_parallel",
    "loss_parallel",
    "activation_checkpointing",
    "compile",
    "reduce_dtype",
)
"""Options that decide what a rank holds of a module and how it runs it, beside the sizes of the mesh."""


@dataclass(eq=False)
class Assembly:
    """What this rank runs."""

    config: ParallelConfig
    topology: Mesh
    precision: PrecisionRule
    stage: Stage
    engine: Engine
    sharding: Sharding
    streams: StepStreams
    plan: tensor_parallel.AppliedPlan
    layout: Layout
    keys: tuple[str, ...]
    """Keys of the whole module's state dict, in order."""
    ties: dict[str, str]
    """Those of them that are second names, each with the first."""
    original: WeakIdKeyDictionary
    """The user's own parameter objects -> all their names: optimizers may have been built from them."""
    complaint: str = ""
    """What is wrong with the values of parameters unless a checkpoint is loaded."""
    loose: tensor_parallel.LooseParameters | None = None
    """What a step is run in, so that it may compute with cut parameters."""
    _has_stepped: bool = False

    @classmethod
    def of(cls, module: nn.Module) -> Assembly | None:
        """The assembly of a module that was laid out before, by this strategy or another."""
        assembly = vars(module).get(_ATTRIBUTE)
        return assembly if isinstance(assembly, cls) and assembly.stage.module is module else None

    def refuse_unset(self) -> None:
        """Before a step: refuse parameters that neither the module's code nor a checkpoint has given values.

        Before the first one also hooks on parameters that nothing would call.

        Raises:
            ConfigError: naming them.
        """
        if self.complaint:
            raise ConfigError(self.complaint)
        if self.sharding.shards is not None and not self._has_stepped:
            refuse_late_hooks(self.stage.module, self.sharding.shards.parameters)
        self._has_stepped = True

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the module is laid out by nobody."""
        return

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def borrowed(self, buffers: Iterable[str]) -> frozenset[str]:
        """Those of the named buffers that another stage keeps up to date: it runs their module last."""
        cut = self.stage.cut
        last = {name: max(cut.chunks.chunks_of(name.rpartition(".")[0])) for name in buffers}
        return frozenset(name for name, chunk in last.items() if chunk not in cut.owned)

    def refuse_replaced(self) -> None:
        """After a backward: refuse a step that has computed with parameters that others now stand for.

        Raises:
            ConfigError: naming them; their gradients would be lost, and they would never change.
        """
        lost = [
            names[0]
            for parameter, names in self.original.items()
            if parameter.grad is not None and self.current_parameter(parameter) is not parameter
        ]
        if lost:
            raise ConfigError(
                "The step computes with parameters that it kept from before the module was laid out:"
                f" {', '.join(lost)}. Since then others stand in their place (shards, or those of another stage), so"
                " what it kept is never trained. Read parameters from their module when they are used"
                " (self.head.weight), or keep them in a list, tuple or dict that is an attribute of a module."
            )

    def current_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """What stands in the module now for a parameter of the user's; a placeholder if only other stages hold it."""
        names = self.original.get(parameter)
        if names is None:
            return parameter
        now = [self.stage.module.get_parameter(name) for name in names]
        return next((candidate for candidate in now if not is_placeholder(candidate)), now[0])


def assemble(
    module: pl.LightningModule,
    config: ParallelConfig,
    mesh: Mesh,
    precision: ThreeDPrecision,
    check: tensor_parallel.BlockCheck = tensor_parallel.check_block,
    blueprint: Blueprint | None = None,
) -> Assembly:
    """Cut, shard and move ``module`` for this rank.

    Collective. ``module`` is changed in place; its names, structure and attributes stay. Parameters that have a recipe
    instead of memory (see ``initialization``) get memory for what this rank keeps of them, once that is known.
    ``check`` compares blocks that tensor parallelism cuts with whole ones. ``blueprint`` is drawn unless it is given.

    Raises:
        ConfigError, PlanError, StageError: if the module cannot be laid out as asked; raised on every rank.
    """
    held = Assembly.of(module)
    if held is not None:
        return _again(held, config, mesh, precision.rule)
    wishes = unwrap(module) if blueprint is None else blueprint.wishes
    if mesh.world.size > 1:
        refuse_views(module)
    own_memory(module)
    share_random_state(mesh)
    complaint = rebuild(module) or missing_values(module)
    share_weights(module, mesh)
    materialise(module, torch.device("cpu"), parameters=False)  # small beside parameters, and every stage has them
    with following():
        precision.convert_module(module)

    if blueprint is None:
        profile = profiler(module, config, mesh.device, precision)
        blueprint = draw(module, config, mesh.sizes, wishes, profile, partial(tell_all, module, mesh))
    plan, chunks = blueprint.plan, blueprint.chunks
    shared = find_shared(module, chunks, mesh.pp.size)
    keys, ties = state_dict_keys(module)
    layout = describe(module, chunks, config, mesh.sizes)
    names_of = names_by_parameter(module)
    ids = {id(parameter): names[0] for parameter, names in names_of}
    hooks = ParameterHooks(module)

    owned_chunks = [chunk for chunk in range(chunks.num_chunks) if chunk % mesh.pp.size == mesh.pp.rank]
    cut = Cut(module, chunks, owned_chunks, mesh.device)
    to_device(module, mesh.device)
    applied = tensor_parallel.apply(module, plan, mesh, cut.owns, cut.twins, check)
    hooks.refuse_cut(module, applied.partial, mesh)
    original = WeakIdKeyDictionary()
    # Parameters that tensor parallelism has made are seen by user code too: it finds them where it kept the others.
    for parameter, names in [*names_of, *names_by_parameter(module)]:
        original[parameter] = names
    del names_of, parameter

    stage = Stage(module, cut)
    blocks = [block for chunk in stage.blocks.values() for block in chunk]
    compile_parts(module, choose_parts(module, chunks.blocks, config.compile, wishes.compiled))
    recompute_wrapped(module, wishes.recomputed)
    recompute_blocks(blocks, config.activation_checkpointing)
    sharding = build_sharding(
        stage,
        stage.blocks,
        mesh,
        config,
        compute_dtype=precision.compute_dtype,
        partial=applied.partial,
        ties=make_ties([(item.names, item.stages) for item in shared], module, mesh),
    )
    hooks.refuse_sharded(module, mesh)
    streams = StepStreams(mesh, sequence_parallel=config.sequence_parallel)
    if mesh.world.size > 1:
        owned_blocks = {name: module.get_submodule(name) for name in chunks.blocks if cut.owns(name)}
        give_streams(owned_blocks, streams, cut.name_of_call)
    cut.install()
    if mesh.world.size > 1:
        KeptParameters(module, original, ids).install(stage)
    bind_metrics(module, mesh)
    engine = Engine(stage, mesh, config.schedule, config.virtual_stages, sharding)
    assembly = Assembly(
        config, mesh, precision.rule, stage, engine, sharding, streams, applied, layout, keys, ties, original
    )
    assembly.complaint = complaint
    if mesh.tp.size > 1 and not config.compile:
        assembly.loose = tensor_parallel.LooseParameters(module, applied.cuts, applied.partial, applied.blocks, mesh.tp)
    if mesh.pp.size > 1:
        refuse_lost_writes()
    object.__setattr__(module, _ATTRIBUTE, assembly)
    return assembly


def _again(held: Assembly, config: ParallelConfig, mesh: Mesh, precision: PrecisionRule) -> Assembly:
    """The assembly of a module that an earlier Trainer laid out, if the layout asked for now is the same.

    Raises:
        ConfigError: naming what differs.
    """
    before, sharded = held.precision, held.sharding.shards is not None
    differences = [(name, getattr(config, name), getattr(held.config, name)) for name in _SHAPING]
    differences += [("sizes", mesh.sizes, held.topology.sizes), ("device", mesh.device, held.topology.device)]
    differences += [("dtype of parameters", precision.kept, before.kept)]
    differences += [("dtype of computation", precision.computed, before.computed)] if sharded else []
    changed = [f"{name}={now!r}, was {was!r}" for name, now, was in differences if now != was]
    if changed:
        raise ConfigError(
            f"This module was laid out by an earlier Trainer for another layout ({'; '.join(changed)}), and each rank"
            " now holds only its part. Use the same options, or build the module anew and load a checkpoint of the"
            " first."
        )
    held.config = config
    count = _num_micro_batches(held.stage.module, config, mesh.sizes)
    held.layout = replace(held.layout, num_micro_batches=count, micro_batch_size=config.micro_batch_size)
    return held


def _num_micro_batches(module: nn.Module, config: ParallelConfig, sizes: Sizes) -> int | None:
    trainer = getattr(module, "_trainer", None)
    return expected_micro_batches(config, sizes, accumulated_batches(trainer) or 1)


def describe(module: nn.Module, chunks: ChunkMap, config: ParallelConfig, sizes: Sizes) -> Layout:
    """The layout of a run of the whole ``module``."""
    modules = dict(module.named_modules(remove_duplicate=False))
    outside = tuple(
        tuple(name for name, owners in chunks.outside.items() if owners == (chunk,))
        for chunk in range(chunks.num_chunks)
    )
    parameters = tuple(
        sum(p.numel() for name in chunks.blocks_of(chunk) for p in modules[name].parameters())
        + sum(p.numel() for name in outside[chunk] for p in modules[name].parameters(recurse=False))
        for chunk in range(chunks.num_chunks)
    )
    return Layout(
        pipeline_parallel=sizes.pp,
        data_parallel=sizes.dp,
        tensor_parallel=sizes.tp,
        zero_stage=config.zero_stage,
        schedule=config.schedule,
        virtual_stages=config.virtual_stages,
        num_micro_batches=_num_micro_batches(module, config, sizes),
        micro_batch_size=config.micro_batch_size,
        chunks=tuple(chunks.blocks_of(chunk) for chunk in range(chunks.num_chunks)),
        outside=outside,
        parameters=parameters,
        costs=chunks.costs.of_chunks(chunks.starts) if chunks.costs is not None else (),
        cost_source=chunks.costs.source if chunks.costs is not None else "",
        sequence_parallel=config.sequence_parallel,
        activation_checkpointing=config.activation_checkpointing,
    )


def to_device(module: nn.Module, device: torch.device) -> None:
    """Move what this rank holds to ``device``; placeholders are there already, and recipes are carried out later."""
    for child in module.modules():
        for parameter in child._parameters.values():
            if parameter is None or is_placeholder(parameter) or is_deferred(parameter):
                continue
            if parameter.device != device:
                parameter.data = parameter.data.to(device)  # the same object: user code may hold it
        for key, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[key] = buffer.to(device)


def names_by_parameter(module: nn.Module) -> list[tuple[nn.Parameter, tuple[str, ...]]]:
    """Every parameter with all its names."""
    names: dict[int, tuple[nn.Parameter, tuple[str, ...]]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)] = (parameter, (*names.get(id(parameter), (parameter, ()))[1], name))
    return list(names.values())


def give_streams(blocks: Mapping[str, nn.Module], streams: StepStreams, name_of_call: Callable[[str], str]) -> None:
    """Let every block draw its random numbers from its own stream; ``name_of_call`` tells calls of one block apart."""
    for name, block in blocks.items():
        left: list[States | None] = []

        def enter(module: nn.Module, args: Any, name: str = name, left: list[States | None] = left) -> None:
            left.append(streams.enter_block(name_of_call(name)) if module.training else None)

        def leave(module: nn.Module, args: Any, output: Any, left: list[States | None] = left) -> None:
            streams.leave_block(left.pop())
            left.clear()  # of calls that an exception ended

        block.register_forward_pre_hook(enter, prepend=True)
        block.register_forward_hook(leave)
