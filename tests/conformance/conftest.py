"""The cases of a module are played together, once for each layout, when the first of them is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.case import Case
from tests.conformance.compare import check
from tests.conformance.play import play_here, play_on_ranks
from tests.conformance.record import Happened
from tests.dist.lightning_modules import Mesh


def cases(*tables: Case) -> pytest.MarkDecorator:
    """Parametrise a test with cases and their layouts; it takes ``case``, ``mesh`` and the fixture ``conforms``."""
    meshes = dict.fromkeys(mesh for case in tables for mesh in case.layouts)
    pairs = [(case, mesh) for mesh in meshes for case in tables if mesh in case.layouts]
    return pytest.mark.parametrize(("case", "mesh"), [_parameters(case, mesh) for case, mesh in pairs])


def _parameters(case: Case, mesh: Mesh) -> Any:
    large = mesh[0] * mesh[1] * mesh[2] > 4 and not case.replicas
    name = "{}-pp{}.dp{}.tp{}".format(case, *mesh)
    return pytest.param(case, mesh, id=name, marks=[pytest.mark.long] if large else [])


@pytest.fixture(scope="module")
def conforms(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case, Mesh], None]:
    """Assert that a case goes at a layout as in one process."""
    items = [item for item in request.session.items if item.path == request.path]
    asked = [item.callspec.params for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    expected: dict[str, Happened] = {}
    played: dict[Mesh, dict[str, list[Happened] | str]] = {}
    folder: Path = tmp_path_factory.mktemp("conformance")

    def conform(case: Case, mesh: Mesh) -> None:
        if mesh not in played:
            together = [params["case"] for params in asked if params.get("mesh") == mesh]
            below = folder / "pp{}.dp{}.tp{}".format(*mesh)
            below.mkdir()
            played[mesh] = play_on_ranks(together, mesh, below)
        if case.name not in expected:
            expected[case.name] = play_here(case, folder / "one" / case.name)
        check(case, mesh, expected[case.name], played[mesh][case.name])

    return conform
