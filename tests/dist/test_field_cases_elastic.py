"""C50 and its kin: ranks, agents and nodes disappear and come back, and the run is the one that nothing happened to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests import elastic_job
from tests.harness import free_port
from tests.torchrun import ROOT, Agents, Hosts

START_S = 120.0


@pytest.fixture
def agents(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Agents]:
    nodes, ranks, arguments = request.param
    job = [ROOT / "tests" / "elastic_job.py", tmp_path, *arguments]
    group = Agents(tmp_path, f"127.0.0.1:{free_port()}", job, nodes, ranks)
    yield group
    group.stop()


def undisturbed(folder: Path, steps: int) -> dict[int, float]:
    """Losses by step of one process."""
    folder.mkdir()
    elastic_job.train(str(folder), 1, 1, 1, steps, pause_s=0.0, elastic=False)
    return losses([json.loads(line) for line in (folder / "steps").read_text().splitlines()])


def losses(steps: list[dict[str, Any]]) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in steps}


def of(sizes: list[int], at_least: int = 1) -> Any:
    """Whether the newest steps, so many at least, ran at these sizes (pp, dp, tp)."""
    return lambda steps: len(steps) >= at_least and all(line["sizes"] == sizes for line in steps[-at_least:])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("agents", [(2, 1, (1, 1, 2, 40))], indirect=True)
def test_c50_a_killed_agent_costs_the_steps_since_the_last_checkpoint_and_its_return_none(
    agents: Agents, tmp_path: Path
) -> None:
    first, second = agents.start(), agents.start()
    agents.wait(of([1, 2, 1], elastic_job.EVERY + 2), START_S)
    orphans = agents.children(second)
    agents.kill(second)
    alone = agents.wait(of([1, 1, 1], 3), START_S)
    assert not [process for process in orphans if process.is_running()], "ranks outlived their agent"
    third = agents.start()
    agents.wait(of([1, 2, 1], 3), START_S)
    for number in (first, third):
        assert agents.agents[number].wait(START_S) == 0, agents.text()[-6000:]
    steps = agents.steps()
    expected = undisturbed(tmp_path / "undisturbed", 40)
    assert losses(steps).keys() == expected.keys()
    for line in steps:
        assert line["loss"] == pytest.approx(expected[line["step"]], rel=1e-6), line
    numbers = [line["step"] for line in steps]
    back = [(a, b) for a, b in pairwise(numbers) if b != a + 1]
    assert len(back) <= 1 and all(a - b < elastic_job.EVERY + 1 for a, b in back), numbers
    assert len(steps) > len(alone)
    assert "the process that launched rank" in agents.text()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    try:
        pair = Hosts(f"l{os.getpid()}")
    except OSError as error:  # neither root nor a namespace of one's own
        pytest.skip(str(error))
    yield pair
    pair.remove()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_c50_a_node_out_of_reach_is_left_behind_and_taken_in_again(hosts: Hosts, tmp_path: Path) -> None:
    """Two machines at tp2·dp2: the cable between them is pulled, and plugged again later."""
    job = [ROOT / "tests" / "elastic_job.py", tmp_path, 2, 1, 2, 60]
    agents = Agents(tmp_path, f"{hosts.addresses[0]}:29400", job, nodes=2, ranks=2)
    try:
        first, second = (agents.start(hosts.prefix(host), hosts.addresses[host]) for host in range(2))
        agents.wait(of([1, 2, 2], elastic_job.EVERY + 2), START_S)
        hosts.cable(plugged=False)
        agents.wait(of([1, 1, 2], 3), 2 * START_S)
        assert "(pp0 dp1 tp0), stage 0, does not answer" in agents.text()
        for process in agents.children(second):
            process.kill()
        agents.kill(second)  # the machine starts again
        hosts.cable(plugged=True)
        third = agents.start(hosts.prefix(1), hosts.addresses[1])
        agents.wait(of([1, 2, 2], 3), START_S)
        for number in (first, third):
            assert agents.agents[number].wait(START_S) == 0, agents.text()[-6000:]
        expected = undisturbed(tmp_path / "undisturbed", 60)
        assert losses(agents.steps()).keys() == expected.keys()
        for line in agents.steps():
            assert line["loss"] == pytest.approx(expected[line["step"]], rel=1e-6), line
    finally:
        agents.stop()
