"""Turn a parser's message about an unknown name into one that says which name is nearest."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Iterable
from typing import Any

_UNKNOWN = re.compile(r"(?:option '|[Oo]ption '|Key ['\"]|unrecognized arguments: --)(?P<key>[\w.]+)")
_IN_CLASS = re.compile(
    r"class_path '(?P<path>[\w.]+)':\s+(?:Group '\w+' does not accept option|Option|Key) '(?P<key>[\w.]+)'"
)
_NO_CLASS = re.compile(r"module '(?P<module>[\w.]+)' has no attribute '(?P<name>\w+)'")


def explain(message: str, parser: Any) -> str:
    """Return ``message``, shorter and with a suggestion where it is about a name that is not known.

    Args:
        message: What jsonargparse says.
        parser: The parser that says it; the names that it and its subcommands know are candidates.
    """
    if found := _IN_CLASS.search(message):
        known = options_of(found["path"])
        name = found["path"].rpartition(".")[2]
        return f"{name} has no option {found['key']!r}.{suggest(found['key'], known, prefix='')}" + (
            f" It has: {', '.join(known)}." if known else ""
        )
    if found := _NO_CLASS.search(message):
        try:
            known = [name for name in dir(importlib.import_module(found["module"])) if not name.startswith("_")]
        except ImportError:
            known = []
        hint = suggest(found["name"], known, prefix=found["module"] + ".")
        return f"{found['module']!r} has no {found['name']!r}.{hint}"
    if found := _UNKNOWN.search(message):
        key = found["key"]
        parent, name = unknown_part(key, keys_of(parser))
        siblings = children_of(parent, keys_of(parser))
        prefix = parent + "." if parent else ""
        return f"{prefix + name!r} is not an option.{suggest(name, siblings, prefix)}"
    return message


def options_of(class_path: str) -> list[str]:
    """Return the names of the arguments of the class at ``class_path``; empty when it cannot be imported."""
    module, _, name = class_path.rpartition(".")
    try:
        signature = inspect.signature(getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError, TypeError, ValueError):
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, parameter in signature.parameters.items() if parameter.kind in named]


def keys_of(parser: Any) -> set[str]:
    """Return the dotted names of all options of ``parser`` and its subcommands."""
    keys: set[str] = set()
    pending = [parser]
    while pending:
        for action in pending.pop()._actions:
            choices = getattr(action, "choices", None)
            if isinstance(choices, dict):
                pending.extend(choices.values())
            elif action.dest:
                keys.add(action.dest)
    return keys


def unknown_part(key: str, known: Iterable[str]) -> tuple[str, str]:
    """Split a dotted ``key`` at its first part that is not known: ``("trainer", "max_step")``."""
    known = list(known)
    parts = key.split(".")
    parent = ""
    for part in parts[:-1]:
        if part not in children_of(parent, known):
            return parent, part
        parent = f"{parent}.{part}" if parent else part
    return parent, parts[-1]


def children_of(parent: str, known: Iterable[str]) -> list[str]:
    """Return the next parts of the dotted names in ``known`` that begin with ``parent``, sorted."""
    prefix = parent + "." if parent else ""
    return sorted({key[len(prefix) :].split(".")[0] for key in known if key.startswith(prefix)})


def suggest(name: str, known: Iterable[str], prefix: str) -> str:
    """Return a question whether the nearest of ``known`` was meant, after a space; empty if none is near."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {prefix + nearest[0]!r}?" if nearest else ""
