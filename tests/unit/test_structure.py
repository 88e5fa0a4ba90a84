"""The rules of the tree: imports point downward, files stay short, names say something."""

from __future__ import annotations

import ast
import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "lightning_3d"
NAME = PACKAGE.name
LINES_AT_MOST = 500
NAMELESS = re.compile(r"(^|_)(utils?|helpers?|common|misc)$")

# Top first. An entry may import the entries below it, and itself; entries of one line do not know each other.
# A name stands for a module or a folder of lightning_3d; "trainer.data" takes one out of its folder.
LAYERS = """
    __main__
    __init__
    cli
    dry_run
    recipes  models
    strategy
    trainer.stepping  trainer.preemption
    trainer.step  trainer.state
    trainer.callbacks  trainer.saving
    trainer.setup
    trainer.logging
    trainer.processes
    trainer.module  trainer.replicas
    trainer.data
    trainer
    monitor
    precision
    planner.reading  planner.calibration
    checkpoint  planner
    pipeline
    sharding
    tensor_parallel
    random
    fingerprint
    initialization
    collectives  waiting  placeholder  example_inputs
    provenance  attributes
    mesh
    config  progress  events  lr_scaling  pictures
    schedules  partition
    errors
"""
LEVEL = {name: level for level, line in enumerate(reversed(LAYERS.split("\n"))) for name in line.split()}
NO_TORCH = ("schedules", "partition", "errors", "planner")  # plain data and pure functions
USER_CODE = ("models",)  # written as any user would: nothing of ours in it

FILES = sorted(PACKAGE.rglob("*.py"))


class Import(NamedTuple):
    line: int
    module: str  # dotted, absolute


def dotted(path: Path) -> str:
    """Name inside the package: ``pipeline.stage``; a folder's ``__init__`` bears the folder's name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports(path: Path) -> Iterator[Import]:
    """All imports of a file, those inside functions and for type checking too."""
    folder = [NAME, *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            for alias in node.names:
                yield Import(node.lineno, ".".join([*base, *filter(None, [node.module]), alias.name]))


def ours(module: str) -> str | None:
    """The part of an absolute import below the package; None for foreign modules."""
    top, _, rest = module.partition(".")
    return rest or "__init__" if top == NAME else None


def entry(module: str) -> str | None:
    """The entry of the table that a module of ours belongs to: the longest that fits."""
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in LEVEL), None)


def test_the_table_reads_as_it_looks() -> None:
    assert LEVEL["cli"] > LEVEL["strategy"] > LEVEL["pipeline"] > LEVEL["mesh"] > LEVEL["errors"]
    assert LEVEL["planner"] == LEVEL["checkpoint"]
    assert entry("pipeline.stage") == "pipeline"
    assert entry("unheard_of") is None


@pytest.mark.parametrize("path", FILES, ids=dotted)
def test_imports_point_downward(path: Path) -> None:
    me = entry(dotted(path))
    assert me is not None, f"{path.name} has no place in the table of layers: give it one"
    wrong = []
    for line, module in imports(path):
        inside = ours(module)
        if inside is None:
            continue
        # `from lightning_3d import X`: a module of the table, or a name that only the package's own __init__ knows
        other = entry(inside) or "__init__"
        if other != me and LEVEL[other] >= LEVEL[me] and not (me == "cli" and other == "__init__"):
            wrong.append(f"{path.relative_to(PACKAGE.parent)}:{line} imports {module}, but {other} is not below {me}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", [path for path in FILES if entry(dotted(path)) in NO_TORCH], ids=dotted)
def test_plain_data_needs_no_torch(path: Path) -> None:
    assert not [line for line, module in imports(path) if module.split(".")[0] in ("torch", "lightning")]


@pytest.mark.parametrize("path", [path for path in FILES if entry(dotted(path)) in USER_CODE], ids=dotted)
def test_models_are_ordinary_user_code(path: Path) -> None:
    inside = [ours(module) for _, module in imports(path)]
    assert not [module for module in inside if module is not None and entry(module) not in USER_CODE]


@pytest.mark.parametrize("path", FILES, ids=dotted)
def test_files_are_short_and_their_names_say_what_they_hold(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= LINES_AT_MOST, f"{path.relative_to(PACKAGE.parent)} has {lines} lines; {LINES_AT_MOST} at most"
    for part in path.relative_to(PACKAGE).with_suffix("").parts:
        assert not NAMELESS.search(part), (
            f"{path.relative_to(PACKAGE.parent)}: code lives where its noun lives, not in {part}"
        )


def test_every_folder_says_what_it_is_for() -> None:
    where_things_live = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    for folder in {path.parent for path in FILES}:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder
        assert folder == PACKAGE or f"`{folder.name}/`" in where_things_live, folder


def test_no_folder_of_tests_is_left_out(pytestconfig: pytest.Config) -> None:
    left_out = pytestconfig.getini("norecursedirs")
    folders = {path.parent.name for path in (PACKAGE.parent / "tests").rglob("test_*.py")}
    assert not [name for name in folders if any(fnmatch.fnmatch(name, pattern) for pattern in left_out)]
