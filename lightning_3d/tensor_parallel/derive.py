"""From what was observed in a block to ways of cutting it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace

from torch import nn

from lightning_3d.errors import ConfigError, PlanError
from lightning_3d.tensor_parallel.attention import is_parallelizable
from lightning_3d.tensor_parallel.convert import region_module
from lightning_3d.tensor_parallel.layers import features, is_linear
from lightning_3d.tensor_parallel.layout import (
    Alternatives,
    ColumnLayout,
    HeadSlice,
    HeadView,
    Position,
    RegionLayout,
    Rules,
)
from lightning_3d.tensor_parallel.observe import OUTPUT, LayerUse, Observation, ancestors
from lightning_3d.tensor_parallel.region import Entry
from lightning_3d.tensor_parallel.sizes import division_choices, head_counts, head_fault, sizes_read
from lightning_3d.tensor_parallel.structure import find_groups
from lightning_3d.tensor_parallel.weights import weight_regions


@dataclass
class Skeleton:
    """Column layers and the row layer that reads them, before anything else is known."""

    columns: list[LayerUse]
    row: LayerUse
    source: str
    parts: dict[str, int] = field(default_factory=dict)
    """Number of packed parts that a plan names, by column layer."""
    gathered: bool = False
    """Whether a plan wants all that is between the layers to run whole."""
    more_rows: list[LayerUse] = field(default_factory=list)
    """Further layers that read just what the row layer reads."""
    ways: list[RegionLayout] = field(default_factory=list)
    """Ways of cutting it, where they are known from the start."""


@dataclass
class BlockCuts:
    """What can be cut in a block."""

    regions: list[tuple[Skeleton, Alternatives]] = field(default_factory=list)
    attentions: dict[str, str] = field(default_factory=dict)
    """Attention modules, and the source of the decision."""
    columns: dict[str, str] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    """Why a layer stays whole."""
    odd: list[str] = field(default_factory=list)
    """Layers whose sizes alone forbid that they are cut."""
    uneven_heads: list[str] = field(default_factory=list)
    """What to say of attentions whose heads cannot be shared evenly."""
    attends: bool = False
    """Whether the heads of some attention can be shared."""


def find_cuts(
    name: str,
    block: nn.Module,
    seen: Observation,
    rules: Rules,
    tp: int,
    derive: bool,
    sequence: bool,
    width: int,
    loose: Container[int],
) -> BlockCuts:
    """All that can be cut in a block: what ``rules`` say, and if ``derive``, what the structure says of the rest.

    Args:
        name: Full name of the block, for messages.
        block: The block.
        seen: What one call of it showed.
        rules: Rules by name relative to the block.
        tp: Ranks to cut over.
        derive: Whether layers without a rule are looked at.
        sequence: Whether hidden states are scattered along the sequence between regions.
        width: Features of the hidden states.
        loose: ``id`` of parameters that are read outside the layer which holds them.

    Raises:
        PlanError: when the rules cannot be right.
        ConfigError: when heads or features of layers that the user wants cut do not divide.
    """
    cuts = BlockCuts()
    skeletons = _from_gathering_rules(seen, rules)
    paired = {use.name for skeleton in skeletons for use in (*skeleton.columns, skeleton.row)}
    for layer, rule in rules.items():
        if layer in paired:
            continue
        if rule.style == "colwise_gather":
            cuts.columns[layer] = rule.source
        elif rule.style == "rowwise_split":
            _check_even(name, block, layer, features(block.get_submodule(layer))[0], tp)
            cuts.rows[layer] = rule.source
    skeletons += _from_rules(name, seen, rules)
    if derive:
        taken = set(rules) | {use.name for s in skeletons for use in (*s.columns, s.row, *s.more_rows)}
        skeletons += _from_structure(block, seen, taken)
        for layer in seen.layers:
            module = block.get_submodule(layer)
            if isinstance(module, nn.MultiheadAttention):
                uneven = head_fault(f"{name}.{layer}", module.num_heads, module.num_heads, tp)
                if uneven:
                    cuts.uneven_heads.append(uneven)
                    cuts.notes[layer] = f"{module.num_heads} attention heads do not divide by tensor_parallel={tp}"
                elif is_parallelizable(module):
                    cuts.attentions[layer] = "derived"
                    cuts.attends = True
                else:
                    cuts.notes[layer] = "add_bias_kv, add_zero_attn and own forwards are not cut"
        skeletons += _from_weights(block, seen, tp, sequence, width, cuts)
    if derive and not skeletons and not cuts.attentions and not cuts.columns and not cuts.rows and not sequence:
        skeletons += _alone(block, seen, set(rules), tp, loose)
    for skeleton in skeletons:
        alternatives = Alternatives(
            skeleton.ways or list(_alternatives(name, block, seen, skeleton, tp, sequence, cuts))
        )
        if alternatives.layouts:
            more = tuple(use.name for use in skeleton.more_rows)
            alternatives.layouts = [replace(way, more_rows=more) for way in alternatives.layouts]
            cuts.regions.append((skeleton, alternatives))
    return cuts


def _from_rules(name: str, seen: Observation, rules: Rules) -> list[Skeleton]:
    columns = {layer for layer, rule in rules.items() if rule.style == "colwise" and layer in seen.layers}
    rows = [layer for layer in seen.layers if layer in rules and rules[layer].style == "rowwise"]
    closed: set[str] = set()
    skeletons = []
    for row in rows:
        reads = seen.layers[row].reads
        whole = sorted(reads - columns)
        if whole or seen.layers[row].reads_hidden or not reads:
            read = ", ".join(repr(f"{name}.{other}") for other in whole) or "the hidden states of the block"
            raise PlanError(
                f"{_said(rules, row)} makes {name}.{row} rowwise, so all that it reads must be cut; but it reads"
                f" {read}, which the plan leaves whole. Make those layers colwise, or this one 'replicate'."
            )
        closed |= reads
        used = [use for use in seen.layers.values() if use.name in reads]
        parts = {use.name: rules[use.name].parts for use in used}
        skeletons.append(Skeleton(used, seen.layers[row], rules[row].source, parts))
    for column in sorted(columns):
        others = seen.readers[column] - set(rows)
        if column not in closed or others:
            where = ", ".join(
                "the output of the block" if other == OUTPUT else f"{name}.{other}" for other in sorted(others)
            )
            raise PlanError(
                f"{_said(rules, column)} makes {name}.{column} colwise, so each rank holds a piece of its output; but"
                f" that goes to {where or 'no rowwise layer'}, which needs all of it. Make the layer that reads it"
                " rowwise, or this one 'replicate'."
            )
    return skeletons


def _from_gathering_rules(seen: Observation, rules: Rules) -> list[Skeleton]:
    """Pairs of layers that gather their output and of one that splits what it reads of just them."""
    gathering = {layer for layer, rule in rules.items() if rule.style == "colwise_gather"}
    skeletons = []
    for row, use in seen.layers.items():
        if row not in rules or rules[row].style != "rowwise_split" or use.reads_hidden or not use.reads:
            continue
        if use.reads <= gathering and all(seen.readers[column] == {row} for column in use.reads):
            columns = [other for other in seen.layers.values() if other.name in use.reads]
            skeletons.append(Skeleton(columns, use, rules[row].source, gathered=True))
    return skeletons


def _said(rules: Rules, layer: str) -> str:
    rule = rules[layer]
    return f"tp_plan[{rule.pattern!r}]" if rule.source == "user" else f"The model's own plan ({rule.pattern})"


def _from_structure(block: nn.Module, seen: Observation, taken: set[str]) -> list[Skeleton]:
    groups = find_groups(block, seen, taken)
    return [Skeleton(group.columns, group.row, "derived", more_rows=group.more_rows) for group in groups]


def _alone(block: nn.Module, seen: Observation, taken: set[str], tp: int, loose: Container[int]) -> list[Skeleton]:
    """Large layers of a block of which no two can be cut together (a state space): each gathers or splits alone."""
    skeletons = []
    sizes = {layer: math.prod(features(block.get_submodule(layer))) for layer in seen.layers if layer not in taken}
    for layer, size in sizes.items():
        part, use = block.get_submodule(layer), seen.layers[layer]
        if size * 8 < max(sizes.values()) or not is_linear(part) or id(part.weight) in loose:
            continue
        width, out = features(part)
        if out >= width and out % tp == 0:
            way = RegionLayout((ColumnLayout(layer, (out,)),), "", gathered=True)
            skeletons.append(Skeleton([use], LayerUse("", 0), "derived", ways=[way]))
        elif width % tp == 0:
            skeletons.append(Skeleton([], use, "derived", ways=[RegionLayout((), layer, gathered=True)]))
    return skeletons


def _from_weights(
    block: nn.Module, seen: Observation, tp: int, sequence: bool, width: int, cuts: BlockCuts
) -> list[Skeleton]:
    """Modules that hold the matrices of many experts themselves."""
    skeletons = []
    for path, module in block.named_modules():
        if not path or path not in seen.called:
            continue
        ways, why = weight_regions(path, module, width, tp, seen.sizes.get(path, {}))
        if sequence and ways:
            ways, why = [], "experts stay whole under sequence parallelism"
        if ways:
            skeletons.append(Skeleton([], LayerUse(path, 0), "derived", ways=ways))
        elif why:
            cuts.notes[path] = why
    return skeletons


def _alternatives(
    name: str, block: nn.Module, seen: Observation, skeleton: Skeleton, tp: int, sequence: bool, cuts: BlockCuts
) -> Iterator[RegionLayout]:
    """Ways to cut a region, likeliest first."""
    row = skeleton.row
    width = features(block.get_submodule(row.name))[0]
    outs = {use.name: features(block.get_submodule(use.name))[1] for use in skeleton.columns}
    derived = skeleton.source == "derived"
    inner = tuple(sorted(row.parameters.union(*(use.parameters for use in skeleton.more_rows))))
    plain = RegionLayout(tuple(ColumnLayout(use.name, (outs[use.name],)) for use in skeleton.columns), row.name)
    around = region_module(plain)
    heads, kv_heads, head_dim = head_counts(block, around, width, seen)
    own = skeleton.gathered and skeleton.source == "user"
    fault = head_fault(f"{name}.{around}".rstrip("."), heads, kv_heads, tp) if heads and not own else ""
    if fault and skeleton.source == "user":
        raise ConfigError(fault)
    if fault and not skeleton.gathered:
        cuts.uneven_heads.append(fault)
        said = f"{heads} query and {kv_heads} key/value heads cannot be shared by tensor_parallel={tp}"
        cuts.notes.update(dict.fromkeys((*outs, row.name), said))
        return
    cuts.attends = cuts.attends or bool(heads)
    odd = [f"{layer} ({size})" for layer, size in (*outs.items(), (row.name, width)) if size % tp]
    if odd and not (heads and kv_heads < tp):
        message = f"features of {', '.join(odd)} do not divide by tensor_parallel={tp}"
        if skeleton.source == "user":
            raise ConfigError(
                f"{name}: {message}, so {row.name} and the layers it reads cannot be cut. Choose a tensor_parallel size"
                " that divides them, or make them 'replicate'."
            )
        cuts.notes.update(dict.fromkeys((*outs, row.name), message))
        cuts.odd.append(message)
        return
    few, kv_width = bool(heads and kv_heads < tp), kv_heads * head_dim
    shared = {layer for layer, size in outs.items() if few and size == kv_width and size < width}
    packed = {layer for layer, size in outs.items() if few and size == width + 2 * kv_width and kv_width < width}
    sections = [
        [(outs[use.name],)]
        if use.name in shared
        else [(width, kv_width, kv_width)]
        if use.name in packed
        else _section_choices(use, outs[use.name], width, skeleton.parts)
        for use in skeleton.columns
    ]
    shared |= packed
    sizes = sizes_read(seen, around)
    widths = {width, *outs.values(), *(size for choices in sections for parts in choices for size in parts)}
    divisions = list(division_choices(sizes, widths, width, tp, heads, kv_heads, bool(shared)))
    entries = list(_entries(seen, skeleton, sequence))
    showings = list(_showings(block, seen, skeleton, around, heads, width))
    # Sections change fastest: what is wrong in them shows in the numbers only.
    for (slices, copies, views), divided, (entry, stand_ins, gathers, modes), chosen in itertools.product(
        showings, divisions, entries, list(itertools.product(*sections))
    ):
        uneven = (size % tp for parts, use in zip(chosen, skeleton.columns, strict=True) for size in parts)
        if own or fault or (not shared and any(uneven)):
            continue
        columns = tuple(
            ColumnLayout(
                use.name,
                parts,
                modes[use.name],
                kv_heads if use.name in shared else 0,
                (1, 2) if use.name in packed else (0,),
            )
            for use, parts in zip(skeleton.columns, chosen, strict=True)
        )
        yield RegionLayout(
            columns,
            row.name,
            divided,
            entry,
            stand_ins,
            gathers,
            inner=inner,
            around=around,
            slices=slices,
            copies=copies,
            views=views,
        )
    if (derived or skeleton.gathered) and not odd:
        for entry, stand_ins, gathers, modes in entries:
            if not stand_ins:
                columns = tuple(replace(c, entry=modes[c.name]) for c in plain.columns)
                yield replace(plain, columns=columns, entry_module=entry, gathers=gathers, gathered=True)


def _showings(
    block: nn.Module, seen: Observation, skeleton: Skeleton, around: str, heads: int, width: int
) -> Iterator[tuple[tuple[HeadSlice, ...], tuple[Position, ...], tuple[HeadView, ...]]]:
    """What the module around a region may have to be shown differently: arguments, and tensors it holds."""
    if not around or (skeleton.gathered and not heads):
        yield (), (), ()
        return
    sources = {use.source for use in skeleton.columns}
    feeding = {place for place, (source, _) in seen.inputs.get(around, {}).items() if source in sources}
    slices = []
    hidden = {seen.shapes[around][place] for place in feeding}  # a residual looks like these
    for place, shape in seen.shapes.get(around, {}).items():
        # [batch, heads, ...] or [batch * heads, ...]
        dim = {4: 1, 3: 0}.get(len(shape), -1)
        fits = dim >= 0 and (shape[dim] == heads or (dim == 0 and shape[0] > 0 and shape[0] % max(1, heads) == 0))
        if heads > 1 and fits and shape not in hidden:
            slices.append(HeadSlice(place, dim, heads))
    copies = tuple(place for place in seen.trained.get(around, ()) if place not in feeding)
    views = tuple(_views(block, skeleton, around, heads)) if heads > 1 else ()
    wide = tuple(_views(block, skeleton, around, width)) if not heads else ()
    slicings = dict.fromkeys((tuple(slices), *((one,) for one in slices if len(slices) < 4), ()))
    for sliced, copied, viewed in itertools.product(
        slicings, dict.fromkeys(((), copies)), dict.fromkeys((views, wide, ()))
    ):
        left = {part.place for part in sliced}
        yield sliced, tuple(place for place in copied if place not in left), viewed


def _views(block: nn.Module, skeleton: Skeleton, around: str, size: int) -> Iterator[HeadView]:
    """Parameters read between the layers of a region, and buffers there, with a dim of ``size``."""
    for path, module in block.get_submodule(around).named_modules():
        full = f"{around}.{path}".rstrip(".")
        if is_linear(module) or isinstance(module, nn.modules.batchnorm._NormBase):
            continue  # running statistics would be those of one rank's piece
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or (key in module._parameters and f"{full}.{key}" not in skeleton.row.parameters):
                continue
            dims = [dim for dim, length in enumerate(tensor.shape) if length == size]
            if dims:
                yield HeadView(full, key, dims[-1])


def _section_choices(use: LayerUse, out: int, width: int, named: dict[str, int]) -> list[tuple[int, ...]]:
    if use.name in named:
        parts = named[use.name]
        return [(out // parts,) * parts if out % parts == 0 else (out,)]
    splits = use.splits
    if len(splits) == 1 and out % splits[0] == 0:
        splits = splits * (out // splits[0])
    elif splits and sum(splits) != out:
        splits = (*splits[:-1], out - sum(splits[:-1]))
    choices = [splits] if len(splits) > 1 and all(size > 0 for size in splits) else []
    ratio = out // width if out % width == 0 else 0
    if ratio > 1:
        choices.append((width,) * ratio)
    elif width < out < 3 * width and (out - width) % 2 == 0:
        choices.append((width, (out - width) // 2, (out - width) // 2))
    choices.append((out,))
    return list(dict.fromkeys(choices))


def _entries(
    seen: Observation, skeleton: Skeleton, sequence: bool
) -> Iterator[tuple[str | None, tuple[Position, ...], tuple[Position, ...], dict[str, Entry]]]:
    """Where the region is entered: the module whose arguments change, and how each column layer takes its input."""
    mode: Entry = "gather" if sequence else "copy"
    at_layers: dict[str, Entry] = {use.name: mode if use.depends_on_hidden else "copy" for use in skeleton.columns}
    at_module: dict[str, Entry] = {
        use.name: "none" if sequence and use.depends_on_hidden else "copy" for use in skeleton.columns
    }
    common = _common([use.name for use in skeleton.columns])
    modules = [module for module in (common, *ancestors(common)) if module and seen.inputs.get(module)]
    if not sequence:
        yield None, (), (), at_layers
    for module in modules[:2]:
        sources = {use.source for use in skeleton.columns}
        fed = tuple(place for place, (source, _) in seen.inputs[module].items() if source in sources)
        hidden = tuple(place for place, (_, depends) in seen.inputs[module].items() if depends)
        if sequence and hidden:
            yield module, (), hidden, at_module
        if fed:
            yield module, fed, hidden if sequence else (), at_module if sequence else at_layers
    if sequence:
        yield None, (), (), at_layers


def _common(names: list[str]) -> str:
    parts = [name.split(".")[:-1] for name in names]
    shared = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared)


def _check_even(name: str, block: nn.Module, layer: str, size: int, tp: int) -> None:
    if size % tp:
        raise ConfigError(
            f"{name}.{layer} reads {size} features, which do not divide by tensor_parallel={tp}. Choose a size that"
            " divides them, or make the layer 'replicate'."
        )
