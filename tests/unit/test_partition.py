"""Splits of blocks: the optimum, proven against all splits; and what is refused."""

from __future__ import annotations

import random
import time
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_3d.errors import ConfigError
from lightning_3d.partition import balance, explicit, uniform


def part_costs(costs: list[int], sizes: list[int], first_extra: int, last_extra: int) -> list[int]:
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    parts = [sum(costs[a:b]) for a, b in pairwise(ends)]
    parts[0] += first_extra
    parts[-1] += last_extra
    return parts


def all_splits(num_blocks: int, parts: int) -> list[list[int]]:
    return [
        [b - a for a, b in pairwise((0, *cuts, num_blocks))] for cuts in combinations(range(1, num_blocks), parts - 1)
    ]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    costs = draw(st.lists(st.integers(0, 3) | st.integers(0, 40), min_size=1, max_size=9))
    extra = st.sampled_from([0, 1, 20])
    return costs, draw(st.integers(1, len(costs))), draw(extra), draw(extra)


@settings(max_examples=300, deadline=None)
@given(problems())
def test_balance_finds_the_least_maximum_and_among_those_the_most_even_split(
    problem: tuple[list[int], int, int, int],
) -> None:
    costs, parts, first, last = problem
    goal = uniform(len(costs), parts)

    def merit(sizes: list[int]) -> tuple[int, int, int]:
        loads = part_costs(costs, sizes, first, last)
        away = sum(abs(sum(sizes[:i]) - sum(goal[:i])) for i in range(parts))
        return max(loads), sum(load * load for load in loads), away

    sizes = balance(costs, parts, first, last)
    assert len(sizes) == parts and sum(sizes) == len(costs) and min(sizes) >= 1
    assert merit(sizes) == min(map(merit, all_splits(len(costs), parts)))


@settings(max_examples=100, deadline=None)
@given(problems(), st.sampled_from([0.1, 1 / 3, 1e15, 1e-9]))
def test_balance_does_not_depend_on_the_unit_of_the_costs(
    problem: tuple[list[int], int, int, int], unit: float
) -> None:
    costs, parts, first, last = problem
    # Powers of two scale without rounding; any other unit must still give a split that is as good to rounding.
    assert balance([c * 0.25 for c in costs], parts, first * 0.25, last * 0.25) == balance(costs, parts, first, last)
    scaled = balance([c * unit for c in costs], parts, first * unit, last * unit)
    best = max(part_costs(costs, balance(costs, parts, first, last), first, last))
    assert max(part_costs(costs, scaled, first, last)) == best


@pytest.mark.parametrize(("num_blocks", "parts"), [(1, 1), (7, 2), (10, 4), (12, 5), (24, 8), (100, 64)])
@pytest.mark.parametrize("cost", [0.0, 0.1, 1.0, 12345.678])
def test_equal_costs_are_split_uniformly(num_blocks: int, parts: int, cost: float) -> None:
    assert balance([cost] * num_blocks, parts) == uniform(num_blocks, parts)


def test_costs_around_the_blocks_make_the_ends_lighter() -> None:
    assert balance([1.0] * 14, 4, first_extra=0.5, last_extra=2.0) == [4, 4, 4, 2]
    assert balance([1.0] * 4, 4, last_extra=100.0) == [1, 1, 1, 1]


def test_a_thousand_blocks_over_64_parts_take_well_under_a_second() -> None:
    draw = random.Random(0)
    for costs in ([draw.random() for _ in range(1000)], [1e15] + [draw.random() for _ in range(999)], [0.0] * 1000):
        start = time.process_time()
        assert sum(balance(costs, 64, 3.3, 100.0)) == 1000
        assert time.process_time() - start < 1.0


@pytest.mark.parametrize(
    ("num_blocks", "parts", "sizes"),
    [
        (8, 2, [4, 4]),
        (7, 2, [4, 3]),
        (10, 4, [2, 3, 3, 2]),
        (9, 4, [2, 3, 2, 2]),
        (11, 4, [3, 3, 3, 2]),
        (3, 3, [1, 1, 1]),
    ],
)
def test_uniform_puts_surplus_blocks_in_the_middle(num_blocks: int, parts: int, sizes: list[int]) -> None:
    assert uniform(num_blocks, parts) == sizes


def test_explicit_returns_what_was_asked_for() -> None:
    assert explicit((3, 4), 7, 2) == [3, 4]


@pytest.mark.parametrize(
    ("sizes", "num_blocks", "parts", "says"),
    [
        ([3, 4, 1], 8, 2, "3 sizes.*2 pipeline chunks.*such as"),
        ([3, 4], 8, 2, "places 7 blocks of a model of 8.*such as"),
        ([8, 0], 8, 2, "at least 1"),
        ([4.0, 4], 8, 2, "whole number"),
        ([True, 7], 8, 2, "whole number"),
        ([1, 1, 1], 2, 3, "More stages than blocks.*3 chunks.*2 pipeline blocks.*at most 2"),
    ],
)
def test_explicit_refuses_what_does_not_fit(sizes: list[int], num_blocks: int, parts: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        explicit(sizes, num_blocks, parts)


def test_more_stages_than_blocks_are_refused_with_numbers_and_remedy() -> None:
    for split in (lambda: uniform(3, 4), lambda: balance([1.0] * 3, 4)):
        with pytest.raises(ConfigError, match=r"More stages than blocks.*4 chunks.*3 pipeline blocks.*at most 3"):
            split()
    with pytest.raises(ConfigError, match="0 chunks"):
        uniform(3, 0)


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_no_costs_are_refused(cost: float) -> None:
    with pytest.raises(ConfigError, match="finite and not negative"):
        balance([1.0, cost], 1)
