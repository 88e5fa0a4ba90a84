"""Who is slow, and who merely waits: from figures of ranks alone."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_3d.events import Event, Phase, StepEvents
from lightning_3d.monitor import stragglers
from lightning_3d.monitor.own_time import seconds_by_phase, spread, summarize, times_of
from lightning_3d.monitor.record import Place, RankWindow, Spread

STEP = 0.2


def places(pp: int, dp: int, tp: int) -> list[Place]:
    return [
        Place(rank=rank, host=f"node{rank // 8}", pp=rank // (dp * tp), dp=rank // tp % dp, tp=rank % tp)
        for rank in range(pp * dp * tp)
    ]


def windows(mesh: list[Place], seconds: Callable[[Place, random.Random], dict[str, float]], steps: int = 20) -> list:
    dice = random.Random(4)
    result = []
    for place in mesh:
        rows = [seconds(place, dice) for _ in range(steps)]
        values = {name: spread([row[name] for row in rows]) for name in rows[0]}
        reading = spread([row.get("loader", 0.0) for row in rows])
        result.append(RankWindow(rank=place.rank, steps=steps, step_s=STEP, seconds=values, reading=reading))
    return result


def noisy(seconds: float, dice: random.Random) -> float:
    return seconds * dice.uniform(0.97, 1.03)


def test_the_slow_rank_is_named_and_not_those_that_wait_for_it() -> None:
    mesh = places(2, 2, 1)

    def seconds(place: Place, dice: random.Random) -> dict[str, float]:
        slow = place.rank == 3
        return {"forward": noisy(0.08 if slow else 0.03, dice), "pp_wait": 0.0 if slow else noisy(0.05, dice)}

    found = stragglers.stragglers(windows(mesh, seconds), mesh)
    assert [(one.place.rank, one.phase) for one in found] == [(3, "forward")]
    assert found[0].excess == pytest.approx(0.05, rel=0.1) and found[0].score > stragglers.LIMIT
    assert "rank 3 (pp1 dp1 tp0) on node0" in stragglers.message(found)


@pytest.mark.parametrize("sizes", [(1, 1, 2), (1, 8, 1), (4, 2, 2)])
def test_noise_names_nobody(sizes: tuple[int, int, int]) -> None:
    mesh = places(*sizes)

    def seconds(place: Place, dice: random.Random) -> dict[str, float]:
        # Idle ranks: little work with much scatter, and stages of very different size.
        return {
            "forward": noisy(0.01 * (1 + place.pp), dice),
            "optimizer": 1e-4 * dice.random(),
            "other": 2e-3 * dice.random(),
            "tp": 1e-3 * dice.random(),
        }

    assert stragglers.stragglers(windows(mesh, seconds), mesh) == []


def test_a_slow_rank_is_named_on_hosts_where_single_steps_scatter_and_some_are_very_long() -> None:
    mesh = places(1, 4, 1)

    def seconds(place: Place, dice: random.Random) -> dict[str, float]:
        long = 2.0 if dice.random() < 0.1 else 0.0
        return {"forward": (0.09 if place.rank == 1 else 0.038) * dice.uniform(0.4, 1.6), "other": long}

    noisy_hosts = [
        dataclasses.replace(one, step_s=0.45, usual_s=0.1)
        for one in windows(mesh, seconds)  # mean and median
    ]
    found = stragglers.stragglers(noisy_hosts, mesh)
    assert [(one.place.rank, one.phase) for one in found] == [(1, "forward")]
    assert found[0].step_s == 0.1


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 1.0, 1.5, 2.0, 9.0]), st.sampled_from([0.0, 0.1, 0.2])), max_size=9),
    st.sampled_from([0.0, 0.5]),
)
def test_every_rank_is_held_against_the_medians_of_all_others(values: list[tuple[float, float]], floor: float) -> None:
    found = {one.rank: one for one in stragglers.outliers([Spread(0.0, *value) for value in values], 20, floor)}
    for rank, (own, mad) in enumerate(values):
        others = [*values[:rank], *values[rank + 1 :]]
        if not others:
            continue
        usual = statistics.median(other for other, _ in others)
        between = statistics.median(abs(other - usual) for other, _ in others)
        error = math.sqrt(math.pi / 2 / 20) * math.hypot(mad, statistics.median(other for _, other in others))
        spread = max(1.4826 * between, 1.4826 * error, floor / stragglers.LIMIT)
        score = (own - usual) / spread if spread else 0.0
        if abs(score - stragglers.LIMIT) > 1e-6:
            assert (rank in found) == (score > stragglers.LIMIT)
        if rank in found:
            assert (found[rank].usual, found[rank].score) == pytest.approx((usual, score))


def test_thousands_of_replicas_are_looked_at_within_the_time_of_a_step() -> None:
    dice = random.Random(3)
    values = [Spread(0.0, dice.uniform(0.9, 1.1) + (index % 2), 0.01) for index in range(8192)]
    began = time.process_time()
    stragglers.outliers(values, 20, 0.05)
    assert time.process_time() - began < 1.0  # it was minutes when each median sorted the others anew


def test_two_slow_ranks_among_eight_are_both_named_worst_first() -> None:
    mesh = places(1, 8, 1)

    def seconds(place: Place, dice: random.Random) -> dict[str, float]:
        return {"backward": noisy({2: 0.09, 5: 0.12}.get(place.rank, 0.06), dice)}

    found = stragglers.stragglers(windows(mesh, seconds), mesh)
    assert [one.place.rank for one in found] == [5, 2]


def test_stages_of_one_rank_are_held_against_their_share_of_the_model() -> None:
    mesh = places(4, 1, 1)
    shares = (0.2, 0.2, 0.2, 0.4)

    def seconds(slow: int) -> Callable[[Place, random.Random], dict[str, float]]:
        return lambda place, dice: {"forward": noisy(0.1 * shares[place.pp] * (2 if place.rank == slow else 1), dice)}

    assert stragglers.stragglers(windows(mesh, seconds(-1)), mesh, shares) == []
    found = stragglers.stragglers(windows(mesh, seconds(1)), mesh, shares)
    assert [(one.place.rank, one.phase) for one in found] == [(1, "forward")]


def test_who_comes_late_to_collectives_without_own_work_is_named_for_that() -> None:
    mesh = places(1, 4, 1)

    def seconds(place: Place, dice: random.Random) -> dict[str, float]:
        return {"forward": noisy(0.03, dice), "dp": noisy(0.002 if place.rank == 2 else 0.05, dice)}

    found = stragglers.stragglers(windows(mesh, seconds), mesh)
    assert [(one.place.rank, one.phase) for one in found] == [(2, "entry")]


def test_a_slow_loader_of_one_replica_is_named_though_all_wait_for_it() -> None:
    mesh = places(1, 2, 2)
    plain = windows(mesh, lambda place, dice: {"forward": noisy(0.03, dice)})
    ranks = [
        RankWindow(
            rank=one.rank,
            steps=one.steps,
            step_s=STEP,
            seconds={**one.seconds, "loader": spread([0.06])},
            reading=spread([{0: 0.01, 2: 0.06}.get(one.rank, 0.0)]),
        )
        for one in plain
    ]
    found = stragglers.stragglers(ranks, mesh)
    assert [(one.place.rank, one.phase) for one in found] == [(2, "loader")]


def test_a_window_of_few_steps_names_nobody() -> None:
    mesh = places(1, 2, 1)
    found = windows(mesh, lambda place, dice: {"forward": 0.1 * (1 + place.rank)}, steps=stragglers.FEWEST_STEPS - 1)
    assert stragglers.stragglers(found, mesh) == []


def test_every_moment_counts_once_for_the_innermost_event() -> None:
    def event(phase: Phase, start: float, end: float, label: str = "") -> Event:
        return Event(phase, -1, -1, start, end, label, 0)

    step = StepEvents(
        step=0,
        begin=10.0,
        end=20.0,
        wall=0.0,
        events=(
            event(Phase.LOADER, 10.0, 11.0, "read"),
            event(Phase.PIPELINE, 11.0, 18.0),
            event(Phase.FORWARD, 11.0, 14.0),
            event(Phase.TP, 12.0, 13.0),
            event(Phase.BACKWARD, 14.0, 17.0),
            event(Phase.DP, 16.0, 17.5),  # goes on after the backward that it began in
            event(Phase.OPTIMIZER, 18.0, 19.0),
        ),
    )
    found = seconds_by_phase(step)
    expected = {"loader": 1, "forward": 2, "tp": 1, "backward": 2, "dp": 1.5, "optimizer": 1, "other": 1.5}
    assert found == pytest.approx(expected)
    window = summarize(0, [times_of(step)] * 2)
    assert window.step_s == pytest.approx(10.0) and window.reading.median == pytest.approx(1.0)
