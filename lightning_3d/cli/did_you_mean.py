"""Turn a parser's message about an unknown name into one that says which name is nearest."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
from collections.abc import Iterable
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.strategies import StrategyRegistry

from lightning_3d.errors import ConfigError

ENV_PREFIX = "PL"
"""What names of environment variables for options begin with; LightningCLI's own."""

OF_LIGHTNING = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "PL_DEEPSPEED_CONFIG_PATH")
"""Variables that begin alike, and are Lightning's for other purposes."""

_UNKNOWN = re.compile(r"(?:option '|[Oo]ption '|Key ['\"]|unrecognized arguments: --)(?P<key>[\w.]+)")
_IN_CLASS = re.compile(
    r"class_path '(?P<path>[\w.]+)':\s+(?:Group '\w+' does not accept option|Option|Key) '(?P<key>[\w.]+)'"
)
_NO_CLASS = re.compile(r"module '(?P<module>[\w.]+)' has no attribute '(?P<name>\w+)'")
_NO_COMMAND = re.compile(
    r"argument subcommand: invalid choice: '(?P<name>[^']*)'|^expected \"subcommand\" to be one of"
)
_NO_MODULE = re.compile(r"class_path '(?P<path>[\w.]+)':\s+No module named '(?P<module>[\w.]+)'")
_NO_PATH = re.compile(r"Expected a dot import path string: (?P<name>.*)")
_MISSING = re.compile(r"the following arguments are required: (?:\w+\.)?(?P<key>[\w.]+)$")
_CLASS = re.compile(r"<class '(?P<path>[\w.]+)'>")
_KEY = re.compile(r'Parser key "(?P<key>[\w.]+)":')
_KEY_IN_CLASS = re.compile(
    r"class_path '(?P<path>[\w.]+)':\s+Parser key \"(?P<key>[\w.]+)\":"
    r"(?P<rest>.*?)(?=\n\s+- |\n\s+Given value type|\Z)",
    re.S,
)
_EXPECTED = re.compile(r"Expected an? (?P<kind>[^\n]*?)(?:\. Got value: (?P<value>[^\n]*))?$", re.M)
_GIVEN = re.compile(r"Given value: (?P<value>[^\n]*)")
_SPECIFICATION = ("class_path", "init_args", "dict_kwargs")


def explain(message: str, parser: Any, commands: Iterable[str] = ()) -> str:
    """Return ``message``, shorter and with a suggestion where it is about a name or a value that is not known.

    Args:
        message: What jsonargparse says.
        parser: The parser that says it; the names that it and its subcommands know are candidates.
        commands: Names of all commands.
    """
    commands = list(commands)
    if found := _NO_COMMAND.search(message):
        said = f"{found['name']!r} is not a command." if found["name"] else "No command was given."
        return f"{said}{suggest(found['name'] or '', commands, '')} There are: {', '.join(commands)}."
    if found := _IN_CLASS.search(message):
        known = options_of(found["path"])
        name = found["path"].rpartition(".")[2]
        first = found["key"].partition(".")[0]
        if first != found["key"] and (hint := suggest(first, _SPECIFICATION, "")):
            return f"{first!r} is not a part of what names a {name}.{hint}"
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
        if (command := key.partition(".")[0]) in commands:
            return f"{command!r} is a command. A file with such keys is given before it: --config FILE {command}"
        return f"{prefix + name!r} is not an option.{suggest(name, siblings, prefix)}"
    if found := _MISSING.search(message):
        return (
            f"{found['key']!r} is missing. Give it as --{found['key']} or in a file named by --config; a model or data"
            " is given as package.module.Class."
        )
    return _explain_value(message)


def _explain_value(message: str) -> str:
    """Shorten a message about a value: the parser lists every type that it has tried, and why each did not fit."""
    outer = _KEY.search(message)
    if outer is None:
        return message
    key = outer["key"]
    if found := _NO_MODULE.search(message):
        return (
            f"{key}={found['path']!r}: there is no package or module {found['module']!r} on the path. Is it installed,"
            " or its folder in PYTHONPATH?"
        )
    given = _GIVEN.search(message)
    if given is not None and (hint := _misspelt_specification(given["value"])):
        return f"{key}: {hint}"
    if found := _NO_PATH.search(message):
        name = found["name"].strip()
        if "NestedArg" in message:
            return (
                f"{key}={name!r} is a name, which takes no options of its own. Give {key}.class_path and"
                f" {key}.init_args instead."
            )
        known = sorted({name for path in _CLASS.findall(message) for name in _subclasses(path)})
        return f"{key}={name!r} is neither package.module.Class nor a known short name.{suggest(name, known, '')}"
    if found := _KEY_IN_CLASS.search(message):
        return _explain_expected(f"{found['path'].rpartition('.')[2]}.{found['key']}", found["rest"], None)
    return _explain_expected(key, message[outer.end() :], given["value"] if given else None) or message


def _explain_expected(key: str, said: str, value: str | None) -> str:
    kinds: list[str] = []
    literals: list[str] = []
    for found in _EXPECTED.finditer(said):
        value = value if value is not None else found["value"]
        kind = re.sub(r"<class '([\w.]+)'>", r"\1", found["kind"]).replace("typing.", "")
        if kind.startswith("Literal["):
            literals += re.findall(r"'([^']*)'", kind)
        kinds.append("null" if kind == "NoneType" else kind)
    if not kinds or value is None:
        return f"{key}: {' '.join(said.split())}"
    return f"{key}={value!r} is not valid: expected {' or '.join(dict.fromkeys(kinds))}.{suggest(value, literals, '')}"


def _misspelt_specification(value: str) -> str:
    """What to say of a dict that was to name a class and has other keys; empty if it is none."""
    keys = re.findall(r"[{,] ?'(\w+)': ", value) if value.startswith("{") else []
    if not keys or "class_path" in keys:
        return ""
    hint = next((hint for key in keys if (hint := suggest(key, _SPECIFICATION, ""))), "")
    wrong = next((key for key in keys if suggest(key, _SPECIFICATION, "")), keys[0])
    return f"{wrong!r} does not belong where a class is named; its keys are class_path and init_args.{hint}"


def _subclasses(class_path: str) -> list[str]:
    """Short names of all classes known so far that derive from the one at ``class_path``."""
    module, _, name = class_path.rpartition(".")
    try:
        pending = [getattr(importlib.import_module(module or "builtins"), name)]
    except (ImportError, AttributeError):
        return []
    names = []
    while pending and pending[0] is not type(None):
        for child in type.__subclasses__(pending.pop()):
            pending.append(child)
            if not child.__name__.startswith("_"):
                names.append(child.__name__)
    return names


def check_strategy(name: str) -> None:
    """Refuse a strategy's name that Lightning does not know.

    Raises:
        ConfigError: with the nearest name, or why a class cannot be found.
    """
    known = ["auto", *StrategyRegistry.available_strategies()]
    if name.lower() in known:
        return
    nearest = suggest(name, known, "")
    if "." in name:
        module, _, kind = name.rpartition(".")
        try:
            nearest = suggest(kind, dir(importlib.import_module(module)), module + ".")
        except ImportError:
            nearest = f" There is no module {module!r}."
    raise ConfigError(
        f"strategy={name!r} is neither the name of a strategy nor the path of its class.{nearest} By name there are"
        " '3d', '3d_zero2', '3d_zero3' and Lightning's own."
    )


def check_environment(parser: Any, commands: Iterable[str]) -> None:
    """Refuse environment variables that look like options of the command and are none, such as ``PL_FIT__TRANER``.

    Names that begin alike and are near to no option may be somebody else's: of those a line is printed.

    Raises:
        ConfigError: with the nearest variable.
    """
    known = {key.replace(".", "__").upper() for key in keys_of(parser)}
    read_by_all = {f"{ENV_PREFIX}_{action.dest.upper()}" for action in parser._actions}
    for variable in sorted(os.environ):
        if not variable.startswith(f"{ENV_PREFIX}_") or variable in (*OF_LIGHTNING, *read_by_all):
            continue
        rest = variable.removeprefix(f"{ENV_PREFIX}_")
        command = next((name for name in commands if rest.startswith(f"{name.upper()}_")), None)
        if command is not None:
            _check_option(variable, command, rest, known)
        elif "__" in rest or difflib.get_close_matches(rest, known, n=1, cutoff=0.8):
            nearest = suggest(rest, known, f"{ENV_PREFIX}_FIT__")
            raise ConfigError(
                f"The environment variable {variable} does not name the command that is to read it.{nearest}"
            )
        else:
            rank_zero_info(f"The environment variable {variable} is not an option, and nothing is read from it.")


def _check_option(variable: str, command: str, rest: str, known: set[str]) -> None:
    prefix = f"{command.upper()}__"
    if not rest.startswith(prefix) or rest.removeprefix(prefix) not in known:
        nearest = suggest(rest.removeprefix(command.upper()).lstrip("_"), known, f"{ENV_PREFIX}_{prefix}")
        raise ConfigError(f"The environment variable {variable} is not an option of {command}.{nearest}")


def options_of(class_path: str) -> list[str]:
    """Return the names of the arguments of the class at ``class_path``; empty when it cannot be imported."""
    module, _, name = class_path.rpartition(".")
    try:
        signature = inspect.signature(getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError, TypeError, ValueError):
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind in named and name not in ("params", "optimizer")  # what the Trainer's side fills in
    ]


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
