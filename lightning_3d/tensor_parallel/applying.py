"""Carries out a plan on the model: checks it with numbers, converts layers, cuts parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from lightning_3d.collectives import chunk_sizes
from lightning_3d.errors import PlanError
from lightning_3d.mesh import Mesh
from lightning_3d.placeholder import is_placeholder
from lightning_3d.tensor_parallel.check import FAILS, BlockCheck, Verdict, check_block
from lightning_3d.tensor_parallel.convert import convert_block, convert_column, convert_row, shape_hooks
from lightning_3d.tensor_parallel.embedding import VocabSettings, to_vocab_parallel
from lightning_3d.tensor_parallel.layers import is_linear
from lightning_3d.tensor_parallel.layout import BlockLayout, LayerPlan, Position, RegionLayout
from lightning_3d.tensor_parallel.outside import OutsideCut, is_large
from lightning_3d.tensor_parallel.parameters import ParameterCut, cut_parameter, replace_parameters
from lightning_3d.tensor_parallel.planning import BlockPlan, Plan
from lightning_3d.tensor_parallel.region import Regions
from lightning_3d.tensor_parallel.sequence import gather_after, scatter_before


@dataclass(frozen=True)
class Check:
    """What the numeric check of one kind of block gave."""

    block: str
    """Name of the block that was compared with its cut copy on random values."""
    count: int
    """Blocks of its kind, which are cut alike."""
    passed: bool
    """False when nothing of the kind is cut, because nothing could be checked or nothing kept the numbers."""
    result: str
    """In words, for a table."""


@dataclass
class AppliedPlan:
    """What was done to the model.

    For a report: ``layers`` says of every layer how it is cut (``kind``), who said so (``source``) and why it is whole
    (``note``); ``checks`` what the comparison of numbers gave for every kind of block; ``str()`` is both as a table.
    """

    tp: int
    layers: list[LayerPlan] = field(default_factory=list)
    """Every linear layer, embedding and attention of the model, and other layers with matrices, and what became of
    each."""
    checks: list[Check] = field(default_factory=list)
    """What the numeric check gave, one for every kind of block."""
    cuts: dict[str, ParameterCut] = field(default_factory=dict)
    """How the cut parameters of this rank's layers are cut, by full name (every name of a tied one)."""
    partial: frozenset[str] = frozenset()
    """Whole parameters whose gradients are to be summed over the tensor-parallel ranks, once per step."""
    sequence_parallel: bool = False
    """Whether hidden states between the blocks are pieces of the sequence."""
    blocks: tuple[str, ...] = ()
    """Names of the blocks."""

    @property
    def replicated(self) -> list[LayerPlan]:
        """Layers that every rank holds whole."""
        return [layer for layer in self.layers if layer.source == "replicated"]

    def __str__(self) -> str:
        """A table of kinds of layers: how each is cut, who said so, and why if it is whole."""
        rows: dict[tuple[str, str, str, str], int] = {}
        for layer in self.layers:
            name = ".".join("*" if part.isdigit() else part for part in layer.name.split("."))
            key = (name, layer.kind, layer.source, layer.note)
            rows[key] = rows.get(key, 0) + 1
        lines = [("layer", "count", "cut", "source", "note")]
        lines += [(name, str(n), kind, source, note) for (name, kind, source, note), n in rows.items()]
        widths = [max(len(line[column]) for line in lines) for column in range(4)]
        table = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(line[:4], widths, strict=True)), line[4]]).rstrip()
            for line in lines
        ]
        return "\n".join([*table, *(f"check of {c.block} (x{c.count}): {c.result}" for c in self.checks)])


def apply(
    module: nn.Module,
    plan: Plan,
    mesh: Mesh,
    owned: Callable[[str], bool],
    twins: Mapping[str, nn.Module] | None = None,
    check: BlockCheck = check_block,
) -> AppliedPlan:
    """Cut ``module`` as ``plan`` says.

    Collective over the tensor-parallel axis. Before anything is changed, one block of every kind is compared with its
    cut copy on random values, outputs and every gradient (see ``check.py``). Modules and names stay; cut parameters
    are replaced by DTensors on the ``"tp"`` mesh wherever the model refers to them.

    Args:
        module: The model that was planned, the same on every rank.
        plan: What to do.
        mesh: Where this rank stands.
        owned: Whether the module of a given name is this pipeline stage's own. Others are left as they are, except
            for hooks that map shapes under sequence parallelism.
        twins: Own blocks that have a stand-in for while another chunk of this stage runs, each with it: it gets those
            hooks too.
        check: Compares a cut block with the whole one; what has no values to compare gives a verdict without them.

    Raises:
        PlanError: when a block cut by the user's plan does not compute what it computed before.
    """
    twins = twins or {}
    applied = AppliedPlan(plan.tp, sequence_parallel=plan.sequence_parallel and plan.tp > 1)
    if plan.tp == 1:
        return applied
    applied.blocks = tuple(name for block in plan.blocks for name in block.names)
    regions = Regions(mesh.tp, mesh.device)
    cut = _Cutter(mesh)
    partial: set[str] = set()
    owned = _whole_owner(module, plan, owned)
    settled = [_settle(module, block, mesh, owned, check) for block in plan.blocks]
    for block, (layout, verdict) in zip(plan.blocks, settled, strict=True):
        applied.checks.append(_check_of(block, layout, verdict))
        shared = Regions(mesh.tp, mesh.device, block.sequence_dim or 0) if block.sequence_dim is not None else regions
        for name in block.names:
            part = module.get_submodule(name)
            _describe_block(applied, name, part, block, layout)
            if owned(name):
                convert_block(part, layout, shared, cut.inside(name), block.sequence_dim)
                partial |= {f"{name}.{parameter}" for parameter in verdict.partial}
            stand_in = twins.get(name, None if owned(name) else part)
            if stand_in is not None and block.sequence_dim is not None:
                shape_hooks(stand_in, layout, shared, block.sequence_dim)
    if plan.sequence_parallel:
        _wrap_chains(module, plan, mesh, twins)
    converted: set[int] = set()
    for outside in plan.outside:
        applied.layers.append(LayerPlan(outside.name, outside.kind, outside.source))
        # A layer may go by two names, such as a table that an adapter keeps at hand too.
        if owned(outside.name) and id(module.get_submodule(outside.name)) not in converted:
            converted.add(id(module.get_submodule(outside.name)))
            _convert_outside(module, outside, regions, cut, plan)
    applied.layers += plan.whole
    applied.partial = frozenset(_every_name(module, partial))
    applied.cuts = cut.finish(module)
    return applied


def _whole_owner(module: nn.Module, plan: Plan, owned: Callable[[str], bool]) -> Callable[[str], bool]:
    """Whether a module is this stage's own; a block that is none of the pipeline's, if all in it is."""
    chained = {name for chain in plan.lists for name in chain}
    others = {name for block in plan.blocks for name in block.names} - chained

    def own(name: str) -> bool:
        if name not in others:
            return owned(name)
        holders = (
            f"{name}.{path}".rstrip(".")
            for path, part in module.get_submodule(name).named_modules()
            if any(parameter is not None for parameter in part._parameters.values())
        )
        return all(owned(holder) for holder in holders)

    return own


def _check_of(block: BlockPlan, layout: BlockLayout, verdict: Verdict) -> Check:
    name, count = block.names[0], len(block.names)
    if layout.names:
        said = f"{verdict.compared} outputs and gradients equal those of the whole block"
    elif block.call is None:
        said = "not checked: no made-up input reached it, so nothing of it is cut"
    elif block.regions:
        said = "nothing is cut: see the notes of its layers"
    else:
        said = "nothing to cut"
    return Check(name, count, bool(layout.names), said)


def _settle(
    module: nn.Module, block: BlockPlan, mesh: Mesh, owned: Callable[[str], bool], compare: BlockCheck
) -> tuple[BlockLayout, Verdict]:
    """The first way of cutting every region that keeps the numbers."""
    # Another stage's block has lost its buffers here; it serves where this stage has none of the kind.
    name = next((name for name in block.names if owned(name)), block.names[0])
    choice = [0] * len(block.regions)
    if block.call is None:
        return block.fixed, Verdict()
    part, call = module.get_submodule(name), block.call
    first = ""

    def check(layout: BlockLayout) -> Verdict | None:
        return compare(part, call, layout, mesh.tp, mesh.device, block.sequence_dim)

    alone = block.sequence_dim is None and len(block.regions) > 1
    while True:
        layout = block.layout(choice)
        verdict = check(layout)
        if verdict is None:
            return _unchecked(block, name)
        if not verdict.fault:
            return layout, verdict
        if alone and not block.fixed.names:
            # What goes wrong in one region may show in another first.
            alone = False
            for each in range(len(choice)):
                _settle_alone(block, name, part, each, choice, check)
            continue
        region = _blame(block, choice, verdict, check)
        if region is None:
            what = f"{f'{name}.{verdict.layer}'.rstrip('.')} ({verdict.fault})"
            if block.sequence_dim is not None or not _leave_attentions_whole(block, what):
                raise PlanError(_refusal(block, name, what))
            continue
        source, ways = block.regions[region]
        first = first or _difference(name, verdict, ways.layouts[0])
        choice[region] += 1
        if choice[region] == len(ways.layouts) and not block.another(region, part):
            if source == "user" or block.sequence_dim is not None:
                raise PlanError(_refusal(block, name, first))
            _note_whole(block, region, f"no way of cutting it keeps {_difference(name, verdict, ways.layouts[0])}")
            choice[region] = -1


def _settle_alone(
    block: BlockPlan,
    name: str,
    part: nn.Module,
    region: int,
    choice: list[int],
    check: Callable[[BlockLayout], Verdict | None],
) -> None:
    """Choose the first way of cutting one region that keeps the numbers while the others are whole."""
    source, ways = block.regions[region]
    first = ""
    while True:
        verdict = check(block.layout([choice[region] if i == region else -1 for i in range(len(choice))]))
        if verdict is None or not verdict.fault:
            return
        first = first or _difference(name, verdict, ways.layouts[0])
        choice[region] += 1
        if choice[region] == len(ways.layouts) and not block.another(region, part):
            break
    if source == "user":
        raise PlanError(_refusal(block, name, first))
    choice[region] = -1
    _note_whole(block, region, f"no way of cutting it keeps {first}")


def _note_whole(block: BlockPlan, region: int, why: str) -> None:
    for way in block.regions[region][1].layouts:
        for layer in (*way.rows, *(column.name for column in way.columns)):
            block.notes[layer] = why
            block.sources.pop(layer, None)


def _leave_attentions_whole(block: BlockPlan, what: str) -> bool:
    """Cut no ``nn.MultiheadAttention`` of ``block``; False if nothing was cut but by order of the user."""
    derived = [layer for layer in block.fixed.attentions if block.sources.get(layer) != "user"]
    if not derived:
        return False
    kept = tuple(layer for layer in block.fixed.attentions if layer not in derived)
    block.fixed = replace(block.fixed, attentions=kept)
    for layer in derived:
        block.notes[layer] = f"cutting its heads changes {what}"
        block.sources.pop(layer, None)
    return True


def _difference(name: str, verdict: Verdict, region: RegionLayout) -> str:
    columns = ", ".join(f"{name}.{column.name}" for column in region.columns)
    return f"the {verdict.fault} of {f'{name}.{verdict.layer}'.rstrip('.')} (which closes {columns})"


def _blame(
    block: BlockPlan, choice: list[int], verdict: Verdict, try_alone: Callable[[BlockLayout], Verdict | None]
) -> int | None:
    """The region to cut in another way: the one whose row layer differs first, or that holds the parameter."""
    open_regions = [i for i, index in enumerate(choice) if index >= 0]
    if verdict.fault.startswith(FAILS) and len(open_regions) > 1:
        for i in open_regions:
            alone = [index if other == i else -1 for other, index in enumerate(choice)]
            found = try_alone(block.layout(alone))
            if found is not None and found.fault:
                return i
    for i in open_regions:
        layout = block.regions[i][1].layouts[choice[i]]
        if verdict.layer in (*layout.rows, *(column.name for column in layout.columns)):
            return i
    if any(f"{verdict.layer}.".startswith(f"{layer}.") for layer in block.fixed.names):
        return None
    return next(
        (i for i in open_regions if choice[i] + 1 < len(block.regions[i][1].layouts) or block.regions[i][1].untried),
        open_regions[0] if open_regions else None,
    )


def _unchecked(block: BlockPlan, name: str) -> tuple[BlockLayout, Verdict]:
    cut = [layer for layer, source in block.sources.items() if source == "user"]
    why = "the block does not run on made-up values, so a plan for it cannot be checked"
    if cut or block.sequence_dim is not None:
        raise PlanError(
            f"{'.'.join([name, *cut[:1]])}: {why}. Set example_input_array on the module, or make these layers"
            " 'replicate'."
        )
    block.notes.update(dict.fromkeys(block.sources, why))
    block.sources.clear()
    return BlockLayout(), Verdict()


def _refusal(block: BlockPlan, name: str, first: str) -> str:
    source = next((source for source in block.sources.values() if source != "derived"), "derived")
    whose = {"user": "tp_plan", "model plan": "model's own plan"}.get(source, "derived plan")
    option = " with sequence_parallel=True" if block.sequence_dim is not None else ""
    advice = "Check packed parts ('colwise:3') and head counts, or make the layers around it 'replicate'"
    if block.sequence_dim is not None:
        advice = "Use sequence_parallel=False, or a block that treats every token alike outside attention and MLP"
    return (
        f"The {whose}{option} for {name} changes its numbers: {first} differs from the whole block's on random values."
        f" {advice}."
    )


def _describe_block(applied: AppliedPlan, name: str, part: nn.Module, block: BlockPlan, layout: BlockLayout) -> None:
    kinds: dict[str, str] = {}
    for region in layout.regions:
        for column in region.columns:
            packed = f":{len(column.sections)}" if len(column.sections) > 1 and not region.gathered else ""
            kinds[column.name] = "colwise, gathered" if region.gathered else f"colwise{packed}"
            if column.shared_heads:
                kinds[column.name] = f"colwise, {column.shared_heads} heads shared"
        kinds.update(dict.fromkeys(region.rows, "rowwise, split" if region.gathered else "rowwise"))
        if region.weights:
            kinds[region.row] = "inner features of every expert"
    kinds.update(dict.fromkeys(layout.attentions, "attention heads"))
    kinds.update(dict.fromkeys(layout.columns, "colwise, gathered"))
    kinds.update(dict.fromkeys(layout.rows, "rowwise, split"))
    for layer, inner in part.named_modules():
        full = f"{name}.{layer}".rstrip(".")
        if layer in kinds:
            applied.layers.append(LayerPlan(full, kinds[layer], block.sources.get(layer, "derived"), block.remark))
        elif layer.rpartition(".")[0] in layout.attentions and layer:
            continue
        elif is_large(inner):
            note = block.notes.get(layer) or ("" if is_linear(inner) else f"{type(inner).__name__} is not cut")
            note = note or "no other layer reads it, and only it, in a way that can be cut"
            applied.layers.append(LayerPlan(full, "replicated", "replicated", note))


def _wrap_chains(module: nn.Module, plan: Plan, mesh: Mesh, twins: Mapping[str, nn.Module]) -> None:
    kinds = {name: block for block in plan.blocks for name in block.names}
    for chain in plan.lists:
        first, last = kinds[chain[0]], kinds[chain[-1]]
        if first.sequence_dim is None or last.sequence_dim is None or first.call is None:
            continue
        place, dims = _hidden_states(first)
        for block in (module.get_submodule(chain[0]), *_twin_of(chain[0], twins)):
            scatter_before(block, chain[0], mesh.tp, first.sequence_dim, place, dims)
        for block in (module.get_submodule(chain[-1]), *_twin_of(chain[-1], twins)):
            gather_after(block, mesh.tp, last.sequence_dim)


def _twin_of(name: str, twins: Mapping[str, nn.Module]) -> list[nn.Module]:
    return [twins[name]] if name in twins else []


def _hidden_states(block: BlockPlan) -> tuple[Position, int]:
    """Which argument holds the hidden states, and how many dims they have."""
    assert block.call is not None
    places: list[tuple[Position, object]] = [*enumerate(block.call.args), *block.call.kwargs.items()]
    for place, value in places:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() >= 2:
            return place, value.dim()
    return 0, 3


def _convert_outside(module: nn.Module, outside: OutsideCut, regions: Regions, cut: _Cutter, plan: Plan) -> None:
    layer = module.get_submodule(outside.name)
    if outside.kind == "vocab":
        assert isinstance(layer, nn.Embedding)
        rows, axis = layer.num_embeddings, regions.axis
        sizes = chunk_sizes(rows, axis.size)
        weight = layer._parameters["weight"]
        assert weight is not None
        cut(f"{outside.name}.weight", weight, ParameterCut(0, tuple(weight.shape), (rows,), axis.size))
        to_vocab_parallel(layer, VocabSettings(regions=regions, start=sum(sizes[: axis.rank]), length=sizes[axis.rank]))
    elif outside.kind == "colwise_gather":
        sharded = plan.loss_parallel and outside.is_head
        convert_column(layer, outside.name, regions, cut, gather=True, sharded_logits=sharded, alone=True)
    else:
        convert_row(layer, outside.name, regions, cut, split=True)


class _Cutter:
    """Cuts parameters for real, each once, whoever shares it."""

    def __init__(self, mesh: Mesh) -> None:
        assert mesh.device_mesh is not None
        self._mesh = mesh.device_mesh["tp"]
        self._rank = mesh.tp.rank
        self._cuts: dict[int, ParameterCut] = {}
        self._new: dict[int, nn.Parameter] = {}

    def inside(self, prefix: str) -> Callable[[str, nn.Parameter, ParameterCut], None]:
        """The same for names relative to ``prefix``."""
        return lambda name, parameter, how: self(f"{prefix}.{name}", parameter, how)

    def __call__(self, name: str, parameter: nn.Parameter, how: ParameterCut) -> None:
        if is_placeholder(parameter):
            return
        before = self._cuts.setdefault(id(parameter), how)
        if before != how:
            raise PlanError(
                f"{name} is shared with a layer that is cut in another way ({before} and {how}). Make one of them"
                " 'replicate'."
            )
        if id(parameter) not in self._new:
            self._new[id(parameter)] = cut_parameter(parameter, how, self._mesh, self._rank)

    def finish(self, module: nn.Module) -> dict[str, ParameterCut]:
        """Put the cut parameters into ``module``, and give the cut of every name."""
        cuts = {name: self._cuts[id(old)] for name, old in _named(module) if id(old) in self._cuts}
        replace_parameters(module, self._new)
        return cuts


def _named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(remove_duplicate=False))


def _every_name(module: nn.Module, names: set[str]) -> set[str]:
    """``names`` with all other names of the same parameters."""
    ids = {id(parameter) for name, parameter in _named(module) if name in names}
    return {name for name, parameter in _named(module) if id(parameter) in ids}
