"""The plan of embeddings, heads and single layers outside the blocks."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_3d.errors import ConfigError, PlanError
from lightning_3d.tensor_parallel.embedding import is_embedding
from lightning_3d.tensor_parallel.layers import features, is_linear
from lightning_3d.tensor_parallel.layout import LayerPlan, Rules

_POSITION_TABLE = re.compile(r"(^|[._])(wpe|w?pos|position|token_type|segment|type)", re.IGNORECASE)


@dataclass(frozen=True)
class OutsideCut:
    """A layer outside the blocks that is cut."""

    name: str
    kind: str
    """``"vocab"``, ``"colwise_gather"`` or ``"rowwise_split"``."""
    source: str
    is_head: bool = False
    """Whether its output are the logits."""


def plan_outside(
    module: nn.Module, blocks: Sequence[str], rules: Rules, derive: bool, loose: Container[int], tp: int
) -> tuple[list[OutsideCut], list[LayerPlan]]:
    """Which layers outside ``blocks`` are cut, and which stay whole for which reason.

    Args:
        module: The whole model.
        blocks: Names of the blocks.
        rules: What the user or the model says.
        derive: Whether layers without a rule are looked at.
        loose: ``id`` of parameters that are read outside the layer which holds them.
        tp: Ranks to cut over.

    Raises:
        ConfigError: for features that do not divide.
        PlanError: for cuts by the user that cannot be right.
    """
    cuts: list[OutsideCut] = []
    whole: list[LayerPlan] = []
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
        kind = ""
        if rule is not None and rule.style in ("vocab", "colwise", "colwise_gather", "rowwise", "rowwise_split"):
            kind = {"colwise": "colwise_gather", "rowwise": "rowwise_split"}.get(rule.style, rule.style)
        elif rule is None and derive:
            if name in heads:
                kind = "colwise_gather"
            elif name in tables and _is_vocabulary(name, part, tables, vocabularies):
                kind = "vocab"
        if kind == "rowwise_split" and features(part)[0] % tp:
            raise ConfigError(f"{name} reads {features(part)[0]} features, which do not divide by {tp} ranks.")
        note = ""
        if kind and id(part.weight) in loose:
            note = "its weight is also read outside the layer itself"
            if rule is not None and rule.source == "user":
                raise PlanError(
                    f"tp_plan[{rule.pattern!r}] cuts {name}, but {note}, where a cut weight has no meaning."
                )
        if kind and not note:
            cuts.append(OutsideCut(name, kind, "derived" if rule is None else rule.source, name in heads))
        else:
            note = note or _why_whole(part)
            whole.append(LayerPlan(name, "replicated", "replicated", note))
    for name, part in outside.items():
        if name not in tables and name not in linears and is_large(part):
            whole.append(LayerPlan(name, "replicated", "replicated", f"{type(part).__name__} is not cut"))
    _untangle(module, cuts, whole)
    return cuts, whole


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


def _untangle(module: nn.Module, cuts: list[OutsideCut], whole: list[LayerPlan]) -> None:
    """A weight that several layers share is cut the same way by all of them, or by none."""
    users: dict[int, set[str]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, nn.Embedding) or is_linear(part):
            users.setdefault(id(part.weight), set()).add(name)
    kinds = {cut.name: cut.kind for cut in cuts}
    for names in users.values():
        found = {kinds.get(name, "whole") for name in names}
        if len(names) > 1 and "whole" in found and len(found) > 1:
            for cut in [cut for cut in cuts if cut.name in names]:
                if cut.source == "user":
                    other = next(name for name in names if name not in kinds)
                    raise PlanError(
                        f"{cut.name} shares its weight with {other}, which the plan leaves whole. Cut both."
                    )
                cuts.remove(cut)
                whole.append(LayerPlan(cut.name, "replicated", "replicated", "shares its weight with a whole layer"))


def is_large(module: nn.Module) -> bool:
    """Whether ``module`` itself holds matrices, so that it matters that they stay whole."""
    return any(parameter is not None and parameter.dim() > 1 for parameter in module._parameters.values())


def _why_whole(part: nn.Module) -> str:
    if isinstance(part, nn.Embedding):
        return "it is not the vocabulary, or that is small and no head of its size was found"
    return "it stands alone outside the repeated layers"
