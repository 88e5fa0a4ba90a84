"""The documents name what exists."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from lightning_3d import ThreeDStrategy

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
IDS = [str(path.relative_to(ROOT)) for path in DOCUMENTS]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    text = document.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        assert file.exists(), f"{target} leads nowhere"
        if anchor:
            assert anchor in anchors(file.read_text()), f"{target} names no heading of {file.name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_code_that_is_named_exists(document: Path) -> None:
    text = document.read_text()
    for path, name in re.findall(r"`([\w/]+\.py): (\w+(?:\.\w+)*)`", text):
        scope: list[ast.stmt] = ast.parse((ROOT / "lightning_3d" / path).read_text()).body
        for part in name.split("."):
            found = [node for node in scope if part in _names(node)]
            assert found, f"{path} has no {name}"
            scope = getattr(found[-1], "body", [])
    for path in re.findall(r"`((?:tests|benchmarks|recipes|docs)/[\w/]+\.\w+)`", text):
        assert (ROOT / path).exists(), f"{path} does not exist"


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_python_examples_are_python(document: Path) -> None:
    for code in re.findall(r"^```python\n(.*?)^```", document.read_text(), flags=re.MULTILINE | re.DOTALL):
        ast.parse(code)


def test_every_option_of_the_strategy_is_documented_with_its_default() -> None:
    text = (ROOT / "docs" / "strategy.md").read_text()
    rows = dict(re.findall(r"^\| (?:\[)?`(\w+)`\S* \| [^|]+ \| ([^|]+?) \|", text, flags=re.MULTILINE))
    by_the_trainer = {"accelerator", "parallel_devices", "precision_plugin"}
    for name, parameter in inspect.signature(ThreeDStrategy).parameters.items():
        if name in by_the_trainer:
            assert f"`{name}`" in text
            continue
        default = f'"{parameter.default}"' if isinstance(parameter.default, str) else str(parameter.default)
        assert rows[name].replace("`", "").split(" (")[0] == default, name
    assert rows.keys() <= inspect.signature(ThreeDStrategy).parameters.keys()


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}
