"""The form that the content of a manifest must have, so that a wrong one is named when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_3d.checkpoint.options import decode_options

_GROUP = {"names": [str], "options": {str: object}}
_OPTIMIZER = {"class": str, "groups": [_GROUP], "scalars": {str: {str: object}}}
_MANIFEST: dict[str, Any] = {
    "layout": {str: object},
    "epoch": int,
    "global_step": int,
    "keys": [str],
    "ties": {str: str},
    "optimizers": [_OPTIMIZER],
    "copies": [{"path": [str], "keys": [str]}],
    "files": {str: int},
    "checksums": {str: int},
    "written_by": {str: str},
}
"""A list holds items of one form; a dict either values of one form by ``str``, or the forms of its fields."""
_NAMES = {str: "a text", int: "a whole number", list: "a list", dict: "an object"}


def complaint(content: Mapping[str, Any]) -> str | None:
    """What is wrong with the content of a manifest, if anything is."""
    wrong = _complaint(dict(content), _MANIFEST, "")
    if wrong is not None:
        return wrong
    for optimizer in content["optimizers"]:
        for group in optimizer["groups"]:
            try:
                decode_options(group["options"])
            except Exception as error:  # JSON can say anything here
                return f"the options of a parameter group cannot be read ({type(error).__name__}: {error})"
    return None


def _complaint(value: Any, form: Any, where: str) -> str | None:
    if form is object:
        return None
    kind: Any = form if isinstance(form, type) else type(form)
    if type(value) is not kind:
        shown = repr(value)
        return f"{where} is {shown if len(shown) < 60 else shown[:60] + '...'}, not {_NAMES[kind]}"
    parts: list[tuple[Any, Any, str]] = []
    if kind is list:
        parts = [(item, form[0], f"{where}[{place}]") for place, item in enumerate(value)]
    elif kind is dict and str in form:
        parts = [(item, form[str], f"{where}[{key!r}]") for key, item in value.items()]
    elif kind is dict:
        missing = [name for name in form if name not in value]
        if missing:
            return f"{where or 'it'} lacks {missing[0]!r}"
        parts = [(value[name], inner, f"{where}.{name}" if where else name) for name, inner in form.items()]
    found = (_complaint(*part) for part in parts)
    return next((text for text in found if text is not None), None)
