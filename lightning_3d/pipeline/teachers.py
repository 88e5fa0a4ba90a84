"""Models that stand beside the one that trains and are only asked: teachers, reference models, slow copies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from lightning_3d.pipeline.observe import call_order


def teachers_among(module: nn.Module, lists: Mapping[str, nn.Module]) -> set[str]:
    """The lists of layers in ``lists`` that belong to a teacher, not to the model that trains.

    A frozen list is a teacher's if ``forward`` does not call it but calls another; if nothing is known of ``forward``,
    if its layers are of the class of layers that train.
    """
    frozen = {name for name, child in lists.items() if _is_frozen(child)}
    trained = [child for name, child in lists.items() if name not in frozen]
    if not frozen or not trained:
        return set()
    order = call_order(module)
    called = {name for name in lists if order is not None and _calls(order, name)}
    if called - frozen:
        return frozen - called
    classes = {type(child) for item in trained for child in item.children()}
    return {name for name in frozen if {type(child) for child in lists[name].children()} <= classes}


def asked_last(module: nn.Module, blocks: Collection[str], order: Sequence[str] | None) -> tuple[str, ...]:
    """Names of frozen models whose answer only the loss needs, so that only the last chunk holds them.

    Taken for one is a frozen model of the same class as the one that holds ``blocks``, which ``forward`` does not
    call. Anything else that ``forward`` does not call may be wanted in any chunk, such as an encoder of inputs.
    """
    if order is None:
        return ()
    modules = dict(module.named_modules())
    holders = {block[:place] for block in blocks for place in range(len(block)) if block[place] == "."} | {""}
    kinds = {kind for name in holders for kind in type(modules[name]).__mro__ if not _is_generic(kind)}
    found: list[str] = []
    for name, child in modules.items():
        within = name.startswith(tuple(f"{other}." for other in (*found, *blocks)))
        if within or name in holders or type(child) not in kinds or _calls(order, name) or not _is_frozen(child):
            continue
        found.append(name)
    return tuple(found)


def _is_generic(kind: type) -> bool:
    """Whether models of this class need not resemble each other."""
    return kind is object or kind.__module__.partition(".")[0] in ("torch", "lightning", "pytorch_lightning")


def _is_frozen(module: nn.Module) -> bool:
    return not any(parameter.requires_grad for parameter in module.parameters())


def _calls(order: Sequence[str], name: str) -> bool:
    return any(called == name or called.startswith(f"{name}.") for called in order)
