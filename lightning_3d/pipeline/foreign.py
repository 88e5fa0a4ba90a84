"""Refusing values of other stages that cannot come: what they are, why they are not here, and what to do."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_3d.errors import StageError
from lightning_3d.placeholder import Placeholder, is_placeholder, leaves_of, try_bind, user_line
from lightning_3d.provenance import kept_inside

ORDER_REMEDY = (
    "give the LightningModule an `example_input_array` and a `forward` that calls the modules in the order of the step"
)
_WITHOUT = ", or use pipeline_parallel=1."


class _Calls:
    """What the cut of the running model rests on."""

    order_known: bool = True


_calls = _Calls()


def order_of_calls(known: bool) -> None:
    """Whether the order of calls of the model that runs from now on was seen, for messages."""
    _calls.order_known = known


def refuse_foreign(value: object, what: str) -> None:
    """Refuse a value of a step that only other stages could compute.

    Args:
        value: What the user's code gave.
        what: Its role, to begin the message with.

    Raises:
        StageError: if it is a placeholder whose tensor has not arrived.
    """
    if isinstance(value, Placeholder) and is_placeholder(value) and not try_bind(value):
        begin = f"{what} needs values that another pipeline stage holds (of {value.origin!r}, at {user_line()})."
        raise StageError(f"{begin} {_why(value)}")


def refuse_unbound(tree: Any, where: str) -> None:
    """Raise if ``tree`` holds a placeholder whose tensor has not arrived.

    Raises:
        StageError: naming the module the value comes from and ``where`` it is needed.
    """
    missing = next((leaf for leaf in leaves_of(tree) if isinstance(leaf, Placeholder)), None)
    if missing is not None:
        kept = _origin(missing)[0]
        raise StageError(
            f"{where!r} needs a value of shape {tuple(missing.shape)} that comes from {missing.origin!r} on another"
            f" pipeline stage, which has not computed it by then or does not hand it on (at {user_line()}). "
            + (
                kept_inside(kept)
                if kept
                else f"So that each module runs on the stage that calls it, {ORDER_REMEDY};"
                " use the same modules for all batches of one structure; or use pipeline_parallel=1."
            )
        )


def _why(value: Placeholder) -> str:
    inside, parameter = _origin(value)
    if inside:
        return kept_inside(inside)
    if parameter:
        return (
            f"It is made of the parameter {parameter!r}. Parameters of other stages are not sent, nor what a module"
            " keeps on itself; what modules return is. Leave the parameters of other stages out of it (let the"
            " optimizer's weight_decay regularise them), return the value from its module" + _WITHOUT
        )
    if not _calls.order_known:
        return (
            "The order in which the step calls all modules is not known here, so they were placed by the order in which"
            f" they are registered: {ORDER_REMEDY}{_WITHOUT}"
        )
    return (
        "Parameters of other stages are not sent; what modules return is, if the first batch of the same structure"
        " needed it too. Leave the parameters of other stages out of it (let the optimizer's weight_decay regularise"
        f" them), use the same values in every batch; where the step does not call the modules as `forward` does,"
        f" {ORDER_REMEDY}{_WITHOUT}"
    )


def _origin(value: Placeholder) -> tuple[str, str]:
    """The block within which it was made, or the parameter that it is made of, where that is known."""
    waiting, seen = [value], set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, nn.Parameter):
            return "", item.origin
        if isinstance(item.source, tuple):
            recipe = item.source[0]
            if recipe.inside:
                return recipe.inside, ""
            waiting += [leaf for leaf in recipe.leaves if isinstance(leaf, Placeholder) and leaf.bound is None]
    return "", ""
