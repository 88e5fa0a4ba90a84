"""Models that stand beside the one that trains and are only asked: teachers, reference models, slow copies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import nn

from lightning_3d.pipeline.repeated import repeated_layers


def teachers_among(lists: Mapping[str, nn.Module], seen: Callable[[], Sequence[str] | None]) -> set[str]:
    """The lists of layers in ``lists`` that belong to a teacher, not to the model that trains.

    A frozen list is a teacher's if ``forward`` does not call it but calls another; if nothing is known of ``forward``,
    if its layers are of a class of layers that train in another part of the whole.

    Args:
        lists: The lists of repeated layers, by name.
        seen: Gives names of modules in the order of their calls, if known; asked only if it matters.
    """
    frozen = {name for name, child in lists.items() if is_frozen(child)}
    if not frozen or len(frozen) == len(lists):
        return set()
    order = seen()
    called = {name for name in lists if order is not None and _calls(order, name)}
    return frozen - called if called - frozen else _beside_others(lists, frozen)


def teacher_parts(module: nn.Module) -> set[str]:
    """Names of the children of ``module`` that are frozen, and made of layers as they train in another child."""
    lists = repeated_layers(module)
    frozen = {name for name, child in lists.items() if is_frozen(child)}
    parts = {name.partition(".")[0] for name in _beside_others(lists, frozen)} if frozen else set()
    return {name for name in parts if is_frozen(module.get_submodule(name))}


def asked_last(module: nn.Module, blocks: Collection[str], order: Sequence[str] | None) -> tuple[str, ...]:
    """Names of frozen models whose answer only the loss needs, so that only the last chunk holds them.

    Taken for one is a frozen model of the same class as the one that holds ``blocks``, which ``forward`` does not
    call. Anything else that ``forward`` does not call may be wanted in any chunk, such as an encoder of inputs. If
    nothing is known of ``forward``, only what :func:`teacher_parts` gives is looked at.
    """
    modules = dict(module.named_modules())
    candidates = list(modules) if order is not None else sorted(teacher_parts(module))
    holders = {block[:place] for block in blocks for place in range(len(block)) if block[place] == "."} | {""}
    kinds = {kind for name in holders for kind in type(modules[name]).__mro__ if not _is_generic(kind)}
    found: list[str] = []
    for name in candidates:
        child = modules[name]
        within = name.startswith(tuple(f"{other}." for other in (*found, *blocks)))
        called = order is not None and _calls(order, name)
        if within or called or name in holders or type(child) not in kinds or not is_frozen(child):
            continue
        found.append(name)
    return tuple(found)


def is_frozen(module: nn.Module) -> bool:
    """Whether nothing in ``module`` trains."""
    return not any(parameter.requires_grad for parameter in module.parameters())


def _beside_others(lists: Mapping[str, nn.Module], frozen: Collection[str]) -> set[str]:
    """The frozen lists of which the classes of layers train in another part of the whole.

    A ``ModuleList`` alone is no part that could be called, so such lists belong to one model.
    """
    trained: dict[str, set[type]] = {}
    for name, child in lists.items():
        if name not in frozen:
            trained.setdefault(_part(name, child), set()).update(type(layer) for layer in child.children())
    found = set()
    for name in frozen:
        kinds = {type(layer) for layer in lists[name].children()}
        part = _part(name, lists[name])
        elsewhere = [others for other, others in trained.items() if other != part]
        if not kinds <= trained.get(part, set()) and any(kinds <= others for others in elsewhere):
            found.add(name)
    return found


def _part(name: str, child: nn.Module) -> str:
    part, _, rest = name.partition(".")
    return part if rest or isinstance(child, nn.Sequential) else ""


def _is_generic(kind: type) -> bool:
    """Whether models of this class need not resemble each other."""
    return kind is object or kind.__module__.partition(".")[0] in ("torch", "lightning", "pytorch_lightning")


def _calls(order: Sequence[str], name: str) -> bool:
    return any(called == name or called.startswith(f"{name}.") for called in order)
