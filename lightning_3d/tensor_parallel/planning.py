"""The tensor-parallel plan of a model: which layers are cut and how. Pure: nothing is changed or sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import nn

from lightning_3d.config import ParallelConfig
from lightning_3d.errors import ConfigError, PlanError
from lightning_3d.tensor_parallel.clone import Ground
from lightning_3d.tensor_parallel.derive import BlockCuts, find_cuts
from lightning_3d.tensor_parallel.kinds import built_alike, computing_alike
from lightning_3d.tensor_parallel.layers import is_linear
from lightning_3d.tensor_parallel.layout import Alternatives, BlockLayout, LayerPlan, Position, RegionLayout, Rule
from lightning_3d.tensor_parallel.observe import Observation
from lightning_3d.tensor_parallel.outside import OutsideCut, plan_outside
from lightning_3d.tensor_parallel.probe import BlockCall, Calls, probe
from lightning_3d.tensor_parallel.rules import model_rules, user_rules
from lightning_3d.tensor_parallel.search import bodies, observed, repeated
from lightning_3d.tensor_parallel.trial import Trial

_ENOUGH = 8
"""Ways of cutting a region that are tried under sequence parallelism, where all regions have to be cut."""


@dataclass
class BlockPlan:
    """The plan of all blocks of one kind: same classes, shapes and rules, called alike, computing the same."""

    names: tuple[str, ...]
    call: BlockCall | None
    """How such a block is called; ``None`` when no attempt to run the model reached one."""
    fixed: BlockLayout = field(default_factory=BlockLayout)
    """What has one way of being cut."""
    regions: list[tuple[str, Alternatives]] = field(default_factory=list)
    """Source and ways of cutting, of every region."""
    trial: Trial | None = None
    """What further ways are tried on."""
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

    def another(self, region: int, part: nn.Module) -> bool:
        """Find one more way of cutting a region that fits the shapes of ``part``, a block of this kind."""
        ways = self.regions[region][1]
        if self.trial is None or self.sequence_dim is not None:
            return False
        found, _ = _fitting(replace(self.trial, block=part), Alternatives(ways.untried), [], self)
        ways.layouts += found.layouts
        ways.untried = found.untried
        return bool(found.layouts)


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
    if config.sequence_parallel and not blocks:
        raise ConfigError(
            "sequence_parallel=True scatters the sequence over a chain of blocks, and no repeated layers were found."
            " Name them with pipeline_blocks, or use sequence_parallel=False."
        )
    # Batch and sequence both divide by the ranks and differ, so that a mix-up of the two shows.
    batch, length = tp_size, tp_size * max(2, -(-8 // tp_size))
    names = names or bodies(module, batch, length)
    groups = built_alike(module, names, rules, chained)
    calls = probe(module, [group[0] for group in groups], batch, length, names)
    kinds = [kind for group in groups for kind in computing_alike(module, group, calls, batch, length)]
    for kind in kinds:
        sequence = config.sequence_parallel and kind[0] in chained
        block = _plan_kind(module, kind, calls, rules, tp_size, derive, sequence, (batch, length))
        made.blocks.append(block)
    made.outside, made.whole = plan_outside(module, names, rules, derive, calls.loose, tp_size)
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
    call, seen, ground, fault = observed(block, calls.blocks.get(name) or calls.entered.get(name), *made_up)
    if call is None or seen is None:
        made = BlockPlan(names, call)
        _without_observation(name, block, inside, made, sequence, fault)
        return made
    look = partial(_plan_observed, module, names, call, seen, ground, tp, derive, sequence, calls.loose)
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
    loose: set[int],
    inside: dict[str, Rule],
) -> BlockPlan:
    name = names[0]
    block = module.get_submodule(name)
    made = BlockPlan(names, call)
    leaves = call.leaves()[0]
    width = leaves[call.hidden].shape[-1] if call.hidden >= 0 else 0
    cuts = find_cuts(name, block, seen, inside, tp, derive, sequence, width, loose)
    made.notes, made.uneven, made.odd, made.attends = cuts.notes, cuts.uneven_heads, cuts.odd, cuts.attends
    if sequence:
        if call.hidden < 0 or leaves[call.hidden].dim() < 3:
            raise PlanError(
                f"sequence_parallel cannot be used with {name}: what it is called with has no dim of tokens"
                " ([batch, sequence, features]). Use sequence_parallel=False."
            )
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
    trial = made.trial = Trial.of(block, call, ground, tp, made.sequence_dim)
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
    found: dict[int, tuple[Alternatives, str]] = {}
    missing, before = list(range(len(first))), 0
    while missing and len(missing) != before:
        before = len(missing)
        for index in missing:
            # Other regions stay whole here, which under sequence parallelism they cannot: tried with the first of each,
            # and once more when it is known which of theirs fit.
            others = [] if made.sequence_dim is None else [*first[:index], *first[index + 1 :]]
            found[index] = _fitting(trial, cuts.regions[index][1], others, made)
            first[index] = next(iter(found[index][0].layouts), first[index])
        missing = [index for index in missing if not found[index][0].layouts] if made.sequence_dim is not None else []
    for index, (skeleton, _) in enumerate(cuts.regions):
        fitting, fault = found[index]
        layers = tuple(use.name for use in (*skeleton.columns, skeleton.row, *skeleton.more_rows))
        said = "tp_plan" if skeleton.source == "user" else "model's own plan"
        if fitting.layouts:
            made.regions.append((skeleton.source, fitting))
            made.sources.update(dict.fromkeys(layers, skeleton.source))
        elif skeleton.source == "derived":
            made.notes.update(dict.fromkeys(layers, f"its code does not run on a part of the features ({fault})"))
        else:
            raise PlanError(
                f"The {said} for {', '.join(f'{name}.{layer}' for layer in layers)} cannot be right: with one of"
                f" {trial.tp} ranks' share of their features the block fails ({fault}). Check packed parts"
                " ('colwise:3') and head counts, make these layers 'replicate', or use tp_plan='auto'."
            )


def _fitting(trial: Trial, ways: Alternatives, others: list[RegionLayout], made: BlockPlan) -> tuple[Alternatives, str]:
    """The first way of cutting a region that fits, or the first few where regions depend on each other.

    With it comes what speaks against the first that does not.
    """
    found, fault = Alternatives(untried=list(ways.layouts)), ""
    enough = 1 if made.sequence_dim is None else _ENOUGH
    while found.untried and len(found.layouts) < enough:
        way = found.untried.pop(0)
        completed, problem = trial.complete(replace(made.fixed, regions=(*others, way)), len(others))
        if not problem:
            found.layouts.append(completed)
        fault = fault or problem
    return found, fault


def _sequence_dim(block: nn.Module, call: BlockCall) -> int:
    leaves, _ = call.leaves()
    if call.hidden < 0 or leaves[call.hidden].dim() < 3:
        return 0
    attention = [part for part in block.modules() if isinstance(part, nn.MultiheadAttention)]
    return 0 if attention and not attention[0].batch_first else 1
