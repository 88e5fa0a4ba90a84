"""The tensor-parallel plan of a model: which layers are cut and how. Pure: nothing is changed or sent."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor, nn

from lightning_3d.config import ParallelConfig
from lightning_3d.errors import ConfigError, PlanError
from lightning_3d.tensor_parallel.clone import Ground
from lightning_3d.tensor_parallel.derive import BlockCuts, find_cuts, whole_numbers
from lightning_3d.tensor_parallel.embedding import is_embedding
from lightning_3d.tensor_parallel.layers import features, is_linear
from lightning_3d.tensor_parallel.layout import Alternatives, BlockLayout, LayerPlan, Position, RegionLayout, Rule
from lightning_3d.tensor_parallel.observe import Observation, observe
from lightning_3d.tensor_parallel.probe import BlockCall, Calls, probe
from lightning_3d.tensor_parallel.rules import model_rules, user_rules
from lightning_3d.tensor_parallel.trial import Trial

_POSITION_TABLE = re.compile(r"(^|[._])(wpe|w?pos|position|token_type|segment|type)", re.IGNORECASE)


_REAL_UP_TO = 50_000_000
"""Parameters of a block up to which it is run with values where it cannot run without."""


@dataclass
class BlockPlan:
    """The plan of all blocks of one kind: same classes, same shapes, same rules."""

    names: tuple[str, ...]
    call: BlockCall | None
    """How such a block is called; ``None`` when no attempt to run the model reached one."""
    fixed: BlockLayout = field(default_factory=BlockLayout)
    """What has one way of being cut."""
    regions: list[tuple[str, Alternatives]] = field(default_factory=list)
    """Source and ways of cutting, of every region; each way fits the shapes."""
    sources: dict[str, str] = field(default_factory=dict)
    """Source of the decision, by cut layer of the block."""
    notes: dict[str, str] = field(default_factory=dict)
    """Why a layer stays whole."""
    sequence_dim: int | None = None
    """Dim along which hidden states are scattered."""
    remark: str = ""
    """Why the model's own plan was not followed."""
    uneven: list[str] = field(default_factory=list)
    """What to say if no attention of the model can be cut."""
    odd: list[str] = field(default_factory=list)
    """What to say if nothing of the model can be cut."""
    attends: bool = False
    """Whether the heads of some attention are cut."""

    def layout(self, choice: Sequence[int]) -> BlockLayout:
        """The layout with the ``choice[i]``-th way of cutting region i; -1 leaves the region whole."""
        chosen = (ways.layouts[index] for (_, ways), index in zip(self.regions, choice, strict=True) if index >= 0)
        return replace(self.fixed, regions=tuple(chosen))


@dataclass(frozen=True)
class OutsideCut:
    """A layer outside the blocks that is cut."""

    name: str
    kind: str
    """``"vocab"``, ``"colwise_gather"`` or ``"rowwise_split"``."""
    source: str
    is_head: bool = False
    """Whether its output are the logits."""


@dataclass
class Plan:
    """What :func:`plan` found and ``apply`` carries out."""

    tp: int
    lists: tuple[tuple[str, ...], ...] = ()
    """Names of the blocks, list by list."""
    blocks: list[BlockPlan] = field(default_factory=list)
    outside: list[OutsideCut] = field(default_factory=list)
    whole: list[LayerPlan] = field(default_factory=list)
    """Layers outside the blocks that stay whole."""
    sequence_parallel: bool = False
    loss_parallel: bool = False
    hidden: dict[str, Position] = field(default_factory=dict)
    """Which argument of a list's first block holds the hidden states."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is cut."""
        return not self.outside and not any(block.regions or block.fixed.names for block in self.blocks)


def plan(module: nn.Module, blocks: Sequence[Sequence[str]], config: ParallelConfig, tp_size: int) -> Plan:
    """Decide how ``module`` is cut over ``tp_size`` ranks.

    The user's patterns, when given, are the whole plan. Otherwise the model's own plan counts (``_tp_plan``), and where
    it has none the structure of the blocks, observed in a run on the meta device.

    Args:
        module: The whole model, before anything was changed; its parameters may be on the meta device.
        blocks: Names of the repeated layers, one list for each chain of them.
        config: The options ``tp_plan``, ``sequence_parallel`` and ``loss_parallel``.
        tp_size: Ranks that share a layer.

    Raises:
        ConfigError: for patterns or sizes that cannot work.
        PlanError: for a plan that cannot be right.
    """
    if tp_size == 1:
        return Plan(1)
    given = config.tp_plan
    if isinstance(given, str) and given != "auto":
        raise ConfigError(
            f"tp_plan={given!r} is not known. Choose 'auto' or a mapping of layer names to how each is cut."
        )
    rules = model_rules(module) if isinstance(given, str) else user_rules(module, given)
    derive = isinstance(given, str)
    made = Plan(
        tp_size,
        tuple(tuple(names) for names in blocks),
        sequence_parallel=config.sequence_parallel,
        loss_parallel=config.loss_parallel,
    )
    chained = {name for chain in blocks for name in chain}
    names = [*(name for chain in blocks for name in chain)]
    names += repeated(module, names)
    names = names or _bodies(module)
    if config.sequence_parallel and not blocks:
        raise ConfigError(
            "sequence_parallel=True scatters the sequence over a chain of blocks, and no repeated layers were found."
            " Name them with pipeline_blocks, or use sequence_parallel=False."
        )
    kinds = _kinds(module, names, rules, chained)
    # Batch and sequence both divide by the ranks and differ, so that a mix-up of the two shows.
    batch, length = tp_size, tp_size * max(2, -(-8 // tp_size))
    calls = probe(module, [kind[0] for kind in kinds], batch, length)
    for kind in kinds:
        sequence = config.sequence_parallel and kind[0] in chained
        made.blocks.append(_plan_kind(module, kind, calls, rules, tp_size, derive, sequence, (batch, length)))
    _plan_outside(module, names, rules, derive, calls, made)
    _refuse_sizes(made)
    return made


def _refuse_sizes(made: Plan) -> None:
    """Say which sizes would work, where those of the model and the ranks leave no attention, or nothing, to cut."""
    uneven = [message for block in made.blocks for message in block.uneven]
    if uneven and not any(block.attends for block in made.blocks):
        raise ConfigError(uneven[0])
    odd = [(block.names[0], block.odd) for block in made.blocks if block.odd]
    if odd and not any(block.regions or block.fixed.names for block in made.blocks):
        name, messages = odd[0]
        raise ConfigError(
            f"{name}: {'; '.join(messages)}, so nothing of this block can be shared by {made.tp} ranks. Choose a"
            " tensor_parallel size that divides them, or say in tp_plan which other layers to cut."
        )


def repeated(module: nn.Module, known: Sequence[str]) -> list[str]:
    """Layers with something to cut in lists outside the ``known`` blocks, not looking for lists inside of lists.

    A pipeline runs one chain of blocks, but layers of every list can be shared by tensor-parallel ranks.
    """
    found: list[str] = []
    taken = tuple(f"{name}." for name in known)
    for name, part in module.named_modules():
        inside = any(name.startswith(f"{other}.") for other in found)
        around = any(prefix.startswith(f"{name}.") for prefix in taken)
        if not isinstance(part, nn.ModuleList) or inside or around or name.startswith(taken):
            continue
        found += [f"{name}.{key}".lstrip(".") for key, child in part.named_children() if _cuttable(child)]
    return found


def _cuttable(block: nn.Module) -> bool:
    parts = list(block.modules())
    return sum(is_linear(part) for part in parts) > 1 or any(isinstance(p, nn.MultiheadAttention) for p in parts)


def _bodies(module: nn.Module) -> list[str]:
    """Parts of a model without repeated layers that can be treated like a block: they hold several linear layers."""
    return [name for name, part in module.named_children() if sum(is_linear(inner) for inner in part.modules()) > 1]


def _kinds(module: nn.Module, names: Sequence[str], rules: dict[str, Rule], chained: set[str]) -> list[tuple[str, ...]]:
    groups: dict[object, list[str]] = {}
    for name in names:
        block = module.get_submodule(name)
        facts: list[object] = [name in chained]
        for path, part in block.named_modules():
            heads = tuple((k, v) for k, v in sorted(vars(part).items()) if "head" in k and isinstance(v, int))
            heads += tuple(whole_numbers(vars(part).get("config")))
            shapes = tuple((k, None if p is None else tuple(p.shape)) for k, p in part._parameters.items())
            rule = rules.get(f"{name}.{path}") if path else None
            facts.append((path, type(part), shapes, heads, None if rule is None else (rule.style, rule.parts)))
        groups.setdefault(tuple(facts), []).append(name)
    return [tuple(group) for group in groups.values()]


def _plan_kind(
    module: nn.Module,
    names: tuple[str, ...],
    calls: Calls,
    rules: dict[str, Rule],
    tp: int,
    derive: bool,
    sequence: bool,
    made_up: tuple[int, int],
) -> BlockPlan:
    name = names[0]
    block = module.get_submodule(name)
    inside = {layer.removeprefix(f"{name}."): rule for layer, rule in rules.items() if layer.startswith(f"{name}.")}
    call, seen, ground, fault = _observed(block, calls.blocks.get(name) or calls.entered.get(name), *made_up)
    if call is None or seen is None:
        made = BlockPlan(names, call)
        _without_observation(name, block, inside, made, sequence, fault)
        return made
    look = partial(_plan_observed, module, names, call, seen, ground, tp, derive, sequence)
    if not any(rule.source == "model plan" for rule in inside.values()):
        return look(inside)
    try:
        return look(inside)
    except (PlanError, ConfigError) as error:
        made = look({})
        made.remark = f"the model's own plan cannot be followed: {error}"
        return made


def _plan_observed(
    module: nn.Module,
    names: tuple[str, ...],
    call: BlockCall,
    seen: Observation,
    ground: Ground,
    tp: int,
    derive: bool,
    sequence: bool,
    inside: dict[str, Rule],
) -> BlockPlan:
    name = names[0]
    block = module.get_submodule(name)
    made = BlockPlan(names, call)
    leaves = call.leaves()[0]
    width = leaves[call.hidden].shape[-1] if call.hidden >= 0 else 0
    cuts = find_cuts(name, block, seen, inside, tp, derive, sequence, width)
    made.notes, made.uneven, made.odd, made.attends = cuts.notes, cuts.uneven_heads, cuts.odd, cuts.attends
    if sequence:
        made.sequence_dim = _sequence_dim(block, call)
        found = leaves[call.hidden].shape[made.sequence_dim] if call.hidden >= 0 else 0
        if found == 0 or found % tp:
            raise PlanError(
                f"sequence_parallel cannot be checked for {name}: the example's sequence of {found} does not divide by"
                f" tensor_parallel={tp}. Make example_input_array as long as the sequences of the data, which have to"
                f" divide by {tp}, or use sequence_parallel=False."
            )
    made.fixed = BlockLayout((), tuple(cuts.attentions), tuple(cuts.columns), tuple(cuts.rows))
    made.sources = {**cuts.attentions, **cuts.columns, **cuts.rows}
    trial = Trial.of(block, call, ground, tp, made.sequence_dim)
    _fit_shapes(name, trial, cuts, made)
    if sequence:
        fault = trial.fault(made.layout([0] * len(made.regions)))
        if fault:
            raise PlanError(
                f"sequence_parallel cannot be used with {name}: with a piece of the sequence between its attention and"
                f" MLP the block fails ({fault}). A part of it that is not cut reads more than one token. Use"
                " sequence_parallel=False."
            )
    return made


def _observed(
    block: nn.Module, call: BlockCall | None, batch: int, length: int
) -> tuple[BlockCall | None, Observation | None, Ground, str]:
    """A call of the block and what it showed where; a made-up call if the model showed none; or what went wrong."""
    fault = ""
    small = sum(parameter.numel() for parameter in block.parameters()) <= _REAL_UP_TO
    grounds = [Ground(), *([Ground("cpu")] if small else []), Ground(narrow=True)]
    grounds += [Ground("cpu", narrow=True)] if small else []
    for candidate in [call] if call is not None else _guesses(block, batch, length):
        for ground in grounds:
            try:
                return candidate, observe(block, candidate, ground), ground, ""
            except Exception as error:
                fault = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None, None, Ground(), fault or "no linear layer tells the size of its hidden states"


def _guesses(block: nn.Module, batch: int, length: int) -> list[BlockCall]:
    import torch

    size = next((features(part)[0] for part in block.modules() if is_linear(part)), 0)
    if not size:
        return []
    state = torch.zeros(batch, length, size, device="meta", dtype=next(block.parameters()).dtype)
    return [BlockCall((state,), {}), BlockCall((state[:, 0],), {}), BlockCall((state, state), {})]


def _without_observation(
    name: str, block: nn.Module, inside: dict[str, Rule], made: BlockPlan, sequence: bool, fault: str
) -> None:
    cut = [layer for layer, rule in inside.items() if rule.style not in ("whole", "unknown")]
    advice = "Set example_input_array on the module, so that the block's inputs are known"
    why = f"no attempt to run the model on made-up inputs reached it ({fault})"
    if sequence:
        raise PlanError(f"sequence_parallel needs to know how {name} computes, but {why}. {advice}.")
    if cut and any(inside[layer].source == "user" for layer in cut):
        raise PlanError(f"The plan for {name}.{cut[0]} cannot be checked, because {why}. {advice}.")
    made.notes = {layer: f"{why}; {advice}" for layer, part in block.named_modules() if is_linear(part)}


def _fit_shapes(name: str, trial: Trial, cuts: BlockCuts, made: BlockPlan) -> None:
    """Keep the ways of cutting each region that fit the shapes of the block's code."""
    first = [ways.layouts[0] for _, ways in cuts.regions]
    found: dict[int, tuple[list[RegionLayout], str]] = {}
    missing, before = list(range(len(first))), 0
    while missing and len(missing) != before:
        before = len(missing)
        for index in missing:
            # Other regions stay whole here, which under sequence parallelism they cannot: tried with the first of each,
            # and once more when it is known which of theirs fit.
            others = [] if made.sequence_dim is None else [*first[:index], *first[index + 1 :]]
            found[index] = _fitting(trial, cuts.regions[index][1], others, made)
            first[index] = next(iter(found[index][0]), first[index])
        missing = [index for index in missing if not found[index][0]] if made.sequence_dim is not None else []
    for index, (skeleton, _) in enumerate(cuts.regions):
        fitting, fault = found[index]
        layers = tuple(use.name for use in (*skeleton.columns, skeleton.row, *skeleton.more_rows))
        said = "tp_plan" if skeleton.source == "user" else "model's own plan"
        if fitting:
            made.regions.append((skeleton.source, Alternatives(fitting)))
            made.sources.update(dict.fromkeys(layers, skeleton.source))
        elif skeleton.source == "derived":
            made.notes.update(dict.fromkeys(layers, f"its code does not run on a part of the features ({fault})"))
        else:
            raise PlanError(
                f"The {said} for {', '.join(f'{name}.{layer}' for layer in layers)} cannot be right: with one of"
                f" {trial.tp} ranks' share of their features the block fails ({fault}). Check packed parts"
                " ('colwise:3') and head counts, make these layers 'replicate', or use tp_plan='auto'."
            )


def _fitting(
    trial: Trial, ways: Alternatives, others: list[RegionLayout], made: BlockPlan
) -> tuple[list[RegionLayout], str]:
    """The first ways of cutting a region that fit, and what speaks against the first that does not."""
    fitting, fault = [], ""
    for way in ways.layouts:
        completed, problem = trial.complete(replace(made.fixed, regions=(*others, way)), len(others))
        if not problem:
            fitting.append(completed)
        fault = fault or problem
        if len(fitting) == 8:
            break
    return fitting, fault


def _sequence_dim(block: nn.Module, call: BlockCall) -> int:
    leaves, _ = call.leaves()
    if call.hidden < 0 or leaves[call.hidden].dim() < 3:
        return 0
    attention = [part for part in block.modules() if isinstance(part, nn.MultiheadAttention)]
    return 0 if attention and not attention[0].batch_first else 1


def _plan_outside(
    module: nn.Module, blocks: Sequence[str], rules: dict[str, Rule], derive: bool, calls: Calls, made: Plan
) -> None:
    prefixes = tuple(f"{name}." for name in blocks)
    outside = {
        name: part
        for name, part in module.named_modules(remove_duplicate=False)
        if not name.startswith(prefixes) and name not in blocks
    }
    tables: dict[str, nn.Module] = {name: part for name, part in outside.items() if isinstance(part, nn.Embedding)}
    linears = {name: part for name, part in outside.items() if is_linear(part)}
    heads = _heads(tables, linears)
    vocabularies = {features(part)[1] for part in heads.values()}
    for name, part in {**tables, **linears}.items():
        rule = rules.get(name)
        loose = id(part.weight) in calls.loose
        kind = ""
        if rule is not None and rule.style in ("vocab", "colwise", "colwise_gather", "rowwise", "rowwise_split"):
            kind = {"colwise": "colwise_gather", "rowwise": "rowwise_split"}.get(rule.style, rule.style)
        elif rule is None and derive:
            if name in heads:
                kind = "colwise_gather"
            elif name in tables and _is_vocabulary(name, part, tables, vocabularies):
                kind = "vocab"
        if kind == "rowwise_split" and features(part)[0] % made.tp:
            raise ConfigError(f"{name} reads {features(part)[0]} features, which do not divide by {made.tp} ranks.")
        note = ""
        if kind and loose:
            note = "its weight is also read outside the layer itself"
            if rule is not None and rule.source == "user":
                raise PlanError(
                    f"tp_plan[{rule.pattern!r}] cuts {name}, but {note}, where a cut weight has no meaning."
                )
        if kind and not note:
            made.outside.append(OutsideCut(name, kind, "derived" if rule is None else rule.source, name in heads))
        else:
            note = note or _why_whole(part)
            made.whole.append(LayerPlan(name, "replicated", "replicated", note))
    for name, part in outside.items():
        if name not in tables and name not in linears and is_large(part):
            made.whole.append(LayerPlan(name, "replicated", "replicated", f"{type(part).__name__} is not cut"))
    _untangle(module, made)


def _why_whole(part: nn.Module) -> str:
    if isinstance(part, nn.Embedding):
        return "it is not the vocabulary, or that is small and no head of its size was found"
    return "it stands alone outside the repeated layers"


def is_large(module: nn.Module) -> bool:
    """Whether ``module`` itself holds matrices, so that it matters that they stay whole."""
    return any(parameter is not None and parameter.dim() > 1 for parameter in module._parameters.values())


def _heads(tables: dict[str, nn.Module], linears: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Linear layers that give one output for every row of an embedding."""
    named = {name: part for name, part in tables.items() if not _POSITION_TABLE.search(name)}
    rows = {_rows(part) for part in named.values()}
    tied = {id(part.weight) for part in tables.values()}
    return {
        name: part
        for name, part in linears.items()
        if id(part.weight) in tied or (features(part)[1] in rows and features(part)[1] != features(part)[0])
    }


def _is_vocabulary(name: str, part: nn.Module, tables: dict[str, nn.Module], vocabularies: set[int]) -> bool:
    if not is_embedding(part) or _POSITION_TABLE.search(name):
        return False
    rows = _rows(part)
    return rows in vocabularies or (rows >= 1024 and rows == max(_rows(table) for table in tables.values()))


def _rows(table: nn.Module) -> int:
    weight = table.weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def _untangle(module: nn.Module, made: Plan) -> None:
    """A weight that several layers share is cut the same way by all of them, or by none."""
    users: dict[int, set[str]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, nn.Embedding) or is_linear(part):
            users.setdefault(id(part.weight), set()).add(name)
    kinds = {cut.name: cut.kind for cut in made.outside}
    for names in users.values():
        found = {kinds.get(name, "whole") for name in names}
        if len(names) > 1 and "whole" in found and len(found) > 1:
            for cut in [cut for cut in made.outside if cut.name in names]:
                if cut.source == "user":
                    whole = next(name for name in names if name not in kinds)
                    raise PlanError(
                        f"{cut.name} shares its weight with {whole}, which the plan leaves whole. Cut both."
                    )
                made.outside.remove(cut)
                made.whole.append(
                    LayerPlan(cut.name, "replicated", "replicated", "shares its weight with a whole layer")
                )
