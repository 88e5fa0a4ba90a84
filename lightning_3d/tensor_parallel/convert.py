"""Carries out the layout of a block on the block itself, or on a copy of it for a trial."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_3d.collectives import chunk_sizes
from lightning_3d.placeholder import Placeholder
from lightning_3d.tensor_parallel.adapters import share_adapter_dropout
from lightning_3d.tensor_parallel.attention import AttentionSettings, to_parallel_attention
from lightning_3d.tensor_parallel.collectives import gather_from_sequence, reduce_scatter_to_sequence
from lightning_3d.tensor_parallel.heads import changed, show_own_heads
from lightning_3d.tensor_parallel.layers import (
    ColumnSettings,
    RowSettings,
    features,
    to_column,
    to_row,
    weight_dims,
)
from lightning_3d.tensor_parallel.layout import BlockLayout, ColumnLayout, Position, RegionLayout
from lightning_3d.tensor_parallel.parameters import ParameterCut
from lightning_3d.tensor_parallel.region import Regions
from lightning_3d.tensor_parallel.weights import convert_weights

Cut = Callable[[str, nn.Parameter, ParameterCut], None]
"""Cuts a parameter, given its name, in place."""


def convert_block(
    block: nn.Module, layout: BlockLayout, regions: Regions, cut: Cut, sequence_dim: int | None = None
) -> None:
    """Turn the layers named in ``layout`` into parallel ones, and divide the sizes that code reads.

    Args:
        block: Changed in place.
        layout: What to cut; names are relative to ``block``.
        regions: Shared state of all layers, with the axis to cut over.
        cut: How parameters are cut.
        sequence_dim: Dim of the hidden states along which they are scattered between regions; ``None`` without
            sequence parallelism.
    """
    for region in layout.regions:
        _convert_region(block, region, regions, cut, sequence_dim)
    for name in layout.attentions:
        _convert_attention(block, name, regions, cut, sequence_dim)
    for name in layout.columns:
        module = block.get_submodule(name)
        convert_column(
            module, name, regions, cut, gather=True, entry="copy" if sequence_dim is None else "gather", alone=True
        )
    for name in layout.rows:
        convert_row(block.get_submodule(name), name, regions, cut, split=True, scatter_dim=sequence_dim)
    for module in block.modules():
        _close_fast_paths(module)


def shape_hooks(block: nn.Module, layout: BlockLayout, regions: Regions, sequence_dim: int) -> None:
    """Let a block of another stage, whose layers stay whole, map shapes as its sequence-parallel original does."""

    def enter(places: tuple[Position, ...] | None) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            chosen = _tensors(args, kwargs) if places is None else places
            return changed(
                args,
                kwargs,
                chosen,
                lambda x: gather_from_sequence(x, regions.axis, sequence_dim, reduce_gradient=True),
            )

        return hook

    def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (reduce_scatter_to_sequence(output[0], regions.axis, sequence_dim), *output[1:])
        return reduce_scatter_to_sequence(output, regions.axis, sequence_dim)

    for region in layout.regions:
        if region.entry_module is not None:
            module = block.get_submodule(region.entry_module)
            module.register_forward_pre_hook(enter(region.gathers), with_kwargs=True)
        else:
            for column in region.columns:
                if column.entry == "gather":
                    module = block.get_submodule(column.name)
                    module.register_forward_pre_hook(enter((0,)), with_kwargs=True)
        for row in region.rows:
            block.get_submodule(row).register_forward_hook(leave)
    for name in layout.attentions:
        module = block.get_submodule(name)

        def attend(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            query = args[0] if args else kwargs["query"]
            places = [place for place in _tensors(args, kwargs) if _get(args, kwargs, place) is query]
            return changed(
                args,
                kwargs,
                places,
                lambda x: gather_from_sequence(x, regions.axis, sequence_dim, reduce_gradient=True),
            )

        module.register_forward_pre_hook(attend, with_kwargs=True)
        module.register_forward_hook(leave)


def convert_column(
    module: nn.Module,
    name: str,
    regions: Regions,
    cut: Cut,
    sections: tuple[int, ...] | None = None,
    gather: bool = False,
    **settings: Any,
) -> None:
    """Make one layer a column layer, alone or as part of a region."""
    _, out = features(module)
    sections = sections or (out,)
    _cut(module, name, "weight", weight_dims(module)[1], sections, regions, cut)
    _cut(module, name, "bias", 0, sections, regions, cut)
    sizes = chunk_sizes(out, regions.axis.size) if gather else None
    to_column(module, ColumnSettings(regions=regions, gather=sizes, **settings))


def convert_row(module: nn.Module, name: str, regions: Regions, cut: Cut, **settings: Any) -> None:
    """Make one layer a row layer."""
    _cut(module, name, "weight", weight_dims(module)[0], (features(module)[0],), regions, cut)
    to_row(module, RowSettings(regions=regions, **settings))


def draws_random_numbers(module: nn.Module) -> bool:
    """Whether ``module`` or a part of it drops out at random when it trains."""
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            return True
        for name, value in vars(part).items():
            if "drop" in name.lower() and isinstance(value, (int, float)) and value > 0:
                return True
    return False


def region_module(region: RegionLayout) -> str:
    """The innermost module that holds all layers of a region."""
    if region.weights:
        return region.row
    names = [*(column.name for column in region.columns), region.row]
    parts = [name.split(".")[:-1] for name in names]
    shared = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared)


def _convert_region(
    block: nn.Module, region: RegionLayout, regions: Regions, cut: Cut, sequence_dim: int | None
) -> None:
    if region.weights:
        part = block.get_submodule(region.row)
        for weight in region.weights:
            _cut(part, region.row, weight.name, weight.dim, weight.sections, regions, cut)
        convert_weights(part, region, regions, draws_random_numbers(part))
        for division in region.divisions:
            _divide(block.get_submodule(division.module), division.attribute, division.value)
        return
    random = not region.gathered and draws_random_numbers(block.get_submodule(region_module(region)))
    for column in region.columns:
        module = block.get_submodule(column.name)
        if column.shared_heads:
            share = _share(column, regions)
            to_column(module, ColumnSettings(regions=regions, entry=column.entry, share=share, random=random))
        else:
            convert_column(
                module,
                column.name,
                regions,
                cut,
                None if region.gathered else column.sections,
                region.gathered,
                entry=column.entry,
                random=random,
                alone=len(region.columns) == 1,
            )
    for row in region.rows:
        convert_row(block.get_submodule(row), row, regions, cut, split=region.gathered, scatter_dim=sequence_dim)
    if random:
        share_adapter_dropout(block, region, regions)
    for division in region.divisions:
        _divide(block.get_submodule(division.module), division.attribute, division.value)
    if region.slices or region.copies or region.views or region.exits:
        show_own_heads(block.get_submodule(region.around), region, regions.axis)
    if region.entry_module is not None:
        _hook_entry(block.get_submodule(region.entry_module), region, regions, sequence_dim)


def _share(column: ColumnLayout, regions: Regions) -> tuple[tuple[int, int], ...]:
    rank, size = regions.axis.rank, regions.axis.size
    share, offset = [], 0
    for index, section in enumerate(column.sections):
        if index in column.shared_sections:
            length = section // column.shared_heads
            start = rank * column.shared_heads // size * length
        else:
            length = section // size
            start = rank * length
        share.append((offset + start, length))
        offset += section
    return tuple(share)


def _divide(module: nn.Module, attribute: str, value: int) -> None:
    if attribute.startswith("config."):
        # The configuration is shared by the whole model, so this module gets one of its own.
        module.config = copy.copy(module.config)
        setattr(module.config, attribute.removeprefix("config."), value)
    else:
        setattr(module, attribute, value)


def _hook_entry(module: nn.Module, region: RegionLayout, regions: Regions, sequence_dim: int | None) -> None:
    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        regions.drop_stand_ins()
        if sequence_dim is not None:
            done: dict[int, Tensor] = {}

            def gather(x: Tensor) -> Tensor:
                if id(x) not in done:
                    done[id(x)] = regions.gather(x, sequence_dim)
                return done[id(x)]

            args, kwargs = changed(args, kwargs, region.gathers, gather)
        if region.stand_ins:
            args, kwargs = changed(args, kwargs, region.stand_ins, regions.stand_in)
        return args, kwargs

    module.register_forward_pre_hook(enter, with_kwargs=True)
    if region.stand_ins:
        module.register_forward_hook(lambda *_: regions.drop_stand_ins())


def _convert_attention(block: nn.Module, name: str, regions: Regions, cut: Cut, sequence_dim: int | None) -> None:
    module = block.get_submodule(name)
    assert isinstance(module, nn.MultiheadAttention)
    size = module.embed_dim
    if module._qkv_same_embed_dim:
        _cut(module, name, "in_proj_weight", 0, (size,) * 3, regions, cut)
    else:
        for weight in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
            _cut(module, name, weight, 0, (size,), regions, cut)
    _cut(module, name, "in_proj_bias", 0, (size,) * 3, regions, cut)
    _cut(module.out_proj, f"{name}.out_proj", "weight", 1, (size,), regions, cut)
    to_parallel_attention(module, AttentionSettings(regions=regions, scatter_dim=sequence_dim))


def _cut(
    module: nn.Module, name: str, parameter: str, dim: int, sections: tuple[int, ...], regions: Regions, cut: Cut
) -> None:
    tensor = module._parameters.get(parameter)
    if tensor is None:
        return
    # A tied weight arrives once for every layer that uses it, cut by the first.
    full = f"{name}.{parameter}".lstrip(".")
    cut(full, tensor, ParameterCut(dim, tuple(tensor.shape), sections, regions.axis.size))


def _close_fast_paths(module: nn.Module) -> None:
    """PyTorch's fused inference paths read whole weights."""
    if isinstance(module, nn.TransformerEncoderLayer):
        module.activation_relu_or_gelu = 0
    if isinstance(module, nn.TransformerEncoder):
        module.use_nested_tensor = False


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Position]:
    places: list[tuple[Position, Any]] = [*enumerate(args), *kwargs.items()]
    return [place for place, x in places if isinstance(x, (Tensor, Placeholder)) and x.is_floating_point()]


def _get(args: tuple[Any, ...], kwargs: dict[str, Any], place: Position) -> Any:
    return args[place] if isinstance(place, int) else kwargs[place]
