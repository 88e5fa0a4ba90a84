"""Names of the plain module: without what wrappers add, with every tied name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.errors import CheckpointError

T = TypeVar("T")

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def original_name(name: str) -> str:
    """``name`` without the parts that ``torch.compile`` and checkpoint wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def by_original_name(values: Mapping[str, T], what: str) -> dict[str, T]:
    """``values`` under the names of the plain module.

    Raises:
        CheckpointError: Two different values would get one name.
    """
    plain: dict[str, T] = {}
    for name, value in values.items():
        key = original_name(name)
        if key in plain and plain[key] is not value:
            raise CheckpointError(
                f"Two different {what} are both called {key!r} once compile and checkpoint wrappers are taken out of"
                " their names. One would overwrite the other in the checkpoint: rename one of the modules."
            )
        plain[key] = value
    return plain


def state_dict_keys(module: nn.Module) -> tuple[tuple[str, ...], dict[str, str]]:
    """Keys of the whole module's state dict in order, and which of them are second names of another.

    Call it before any parameter is replaced: ties are found by identity.

    Returns:
        The keys, and for every tied key the first key of the same parameter.
    """
    keys: dict[str, None] = {}
    ties: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        key = original_name(name)
        if key in keys:
            continue
        keys[key] = None
        if isinstance(value, Tensor) and first.setdefault(id(value), key) != key:
            ties[key] = first[id(value)]
    return tuple(keys), ties


def group_names(
    optimizers: Iterable[Optimizer], parameters: Mapping[str, Any]
) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Names of the parameters in every group of every optimizer, in the optimizer's order.

    Args:
        optimizers: Their groups may hold placeholders.
        parameters: Every parameter that may stand in a group, by name.

    Raises:
        CheckpointError: An optimizer holds a parameter that is not among ``parameters``.
    """
    names: dict[int, str] = {}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), original_name(name))
    result = []
    for index, optimizer in enumerate(optimizers):
        groups = []
        for group in optimizer.param_groups:
            unknown = [tuple(parameter.shape) for parameter in group["params"] if id(parameter) not in names]
            if unknown:
                raise CheckpointError(
                    f"Optimizer {index} ({type(optimizer).__name__}) updates tensors of shapes {unknown[:5]} that are"
                    " not parameters of the LightningModule, so their state has no name to be saved under. Register"
                    " them as parameters of the module."
                )
            groups.append(tuple(names[id(parameter)] for parameter in group["params"]))
        result.append(tuple(groups))
    return tuple(result)


def listed(names: Sequence[str], limit: int = 8) -> str:
    """Some of ``names`` for a message."""
    shown = ", ".join(repr(name) for name in list(names)[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
