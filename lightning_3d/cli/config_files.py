"""What can be wrong with a YAML file before anybody knows what its keys mean: found with file and line."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_3d.cli.did_you_mean import suggest
from lightning_3d.errors import ConfigError


def check_config_files(args: Sequence[str]) -> None:
    """Look through the configuration files that ``args`` name.

    Raises:
        ConfigError: if one is missing, is no YAML, holds no keys, or gives a key twice, of which the parser would drop
            the first without a word.
    """
    for given in config_files(args):
        path = Path(given)
        if not path.exists() and ("{" in given or "\n" in given):  # the configuration itself, not the name of a file
            continue
        _check_exists(given)
        if path.suffix != ".json":
            _check_yaml(path)


def read_recipe(given: str, purpose: str) -> dict[str, Any]:
    """The content of a recipe, for a command that takes what it needs of it.

    Args:
        given: Value of ``--config``.
        purpose: What the command does with the model, such as ``"to run"``.

    Raises:
        ConfigError: as `check_config_files`, or if it has no model.
    """
    _check_exists(given)
    _check_yaml(Path(given))
    content: dict[str, Any] = yaml.safe_load(Path(given).read_text())
    if "model" not in content:
        raise ConfigError(f"--config {given} has no 'model' entry, so there is nothing {purpose}.")
    return content


def config_files(args: Sequence[str]) -> Iterator[str]:
    """The values of ``-c`` and ``--config`` among ``args``."""
    for index, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name == "--config" and equals:
            yield value
        elif arg in ("-c", "--config") and index + 1 < len(args):
            yield args[index + 1]


def _check_exists(given: str) -> None:
    path = Path(given)
    if path.is_dir():
        raise ConfigError(f"--config {given} is a folder. Give the path of a YAML file.")
    if not path.exists():
        parent = path.parent
        beside = sorted(item.name for item in parent.glob("*") if item.suffix in (".yaml", ".yml", ".json"))
        hint = suggest(path.name, beside, f"{parent}/" if given != path.name else "")
        raise ConfigError(f"--config {given}: there is no such file, seen from {os.getcwd()}.{hint}")


def _check_yaml(path: Path) -> None:
    try:
        text = path.read_text()
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text ({error.reason} at byte {error.start}). Give a YAML file.") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        line = text.splitlines()[mark.line].strip() if mark is not None and mark.line < len(text.splitlines()) else ""
        shown = f", at {line!r}" if line else ""
        raise ConfigError(
            f"{path}{place} is not YAML: {error.problem}{shown}. Look for tabs, a missing colon, and indentation in"
            " this line and the one before."
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if root is None:
        raise ConfigError(f"{path} is empty. A configuration has keys such as trainer, model and data.")
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            f"{path} holds no keys at its top; a configuration is a mapping with keys such as trainer and model."
        )
    _refuse_repeated(path, root)


def _refuse_repeated(path: Path, node: yaml.Node) -> None:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeated(path, item)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in lines and name != "<<":
            raise ConfigError(
                f"{path}:{line} gives {name!r} again, which line {lines[name]} has given already: the second would"
                " replace all of the first. Join them."
            )
        lines[name] = line
        _refuse_repeated(path, value)
