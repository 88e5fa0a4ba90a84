"""Which run of consecutive blocks goes to which chunk: even, balanced by cost, or as the user says."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

from lightning_3d.errors import ConfigError

_FEW_SPLITS = 20_000
"""Ways to cut up to which all of them are compared."""


def uniform(num_blocks: int, parts: int) -> list[int]:
    """Cut ``num_blocks`` into ``parts`` runs that differ by one block at most.

    Runs with a block more stand in the middle, because the ends also carry what comes before the first block
    (embedding) and after the last one (head, loss): 10 blocks over 4 parts are ``[2, 3, 3, 2]``.

    Returns:
        The number of blocks in each part.

    Raises:
        ConfigError: If there are more parts than blocks, or a size is below one.
    """
    _check_parts(num_blocks, parts)
    size, longer = divmod(num_blocks, parts)
    first = (parts - longer) // 2
    return [size + (first <= part < first + longer) for part in range(parts)]


def explicit(sizes: Sequence[int], num_blocks: int, parts: int) -> list[int]:
    """Check a split that the user gave: one size per part, each at least one, together all blocks.

    Returns:
        The sizes as a list.

    Raises:
        ConfigError: If it is not such a split.
    """
    _check_parts(num_blocks, parts)
    given = list(sizes)
    remedy = f"Give {parts} sizes that add up to {num_blocks}, such as {uniform(num_blocks, parts)}."
    if len(given) != parts:
        raise ConfigError(
            f"pipeline_split={given} has {len(given)} sizes, but there are {parts} pipeline chunks"
            f" (pipeline_parallel × virtual_stages). {remedy}"
        )
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in given):
        raise ConfigError(f"pipeline_split={given}: every chunk needs a whole number of blocks, at least 1. {remedy}")
    if sum(given) != num_blocks:
        raise ConfigError(f"pipeline_split={given} places {sum(given)} blocks of a model of {num_blocks}. {remedy}")
    return given


def balance(costs: Sequence[float], parts: int, first_extra: float = 0.0, last_extra: float = 0.0) -> list[int]:
    """Cut blocks into consecutive parts so that the most expensive part is as cheap as possible.

    Among all such splits it takes the most even one (least sum of squared part costs), among these the one nearest to
    `uniform`; so equal costs give exactly `uniform`. Costs are compared exactly, without rounding.

    Args:
        costs: Cost of each block, in any unit, not negative.
        parts: Number of parts, each of at least one block.
        first_extra: Cost of what comes before the first block, added to the first part.
        last_extra: Cost of what comes after the last block, added to the last part.

    Returns:
        The number of blocks in each part.

    Raises:
        ConfigError: If there are more parts than blocks, or a cost is negative or not finite.
    """
    num_blocks = len(costs)
    _check_parts(num_blocks, parts)
    values = _exact([*costs, first_extra, last_extra])
    values, (first, last) = values[:-2], values[-2:]
    # Every split has the first block in its first part and the last block in its last part.
    values[0] += first
    values[-1] += last
    prefix = [0]
    for value in values:
        prefix.append(prefix[-1] + value)
    return _most_even(prefix, parts, _least_maximum(prefix, parts))


def balance_ranks(costs: Sequence[float], ranks: int, virtual_stages: int = 1) -> list[int]:
    """Cut blocks into ``ranks * virtual_stages`` consecutive chunks, of which rank r runs r, r + ranks, r + 2·ranks...

    With one chunk per rank this is `balance`, the optimum. With several, a rank alternates between its chunks, and in
    the steady part of a step nothing waits for a long chunk as long as its rank has a short one beside it: the step
    lasts as long as the rank with the most work in all. So the objective is, in this order, the least maximum *over
    ranks* of the sum of their chunks, then even ranks, then even chunks (which keep the fill and drain of the pipeline
    short). Where there are at most 20,000 ways all are tried; beyond that, starting from `balance`, blocks are handed
    from chunk to chunk (those between slide by one) while that improves it. For blocks of equal cost that too finds the
    least maximum, whatever the ends carry.

    Args:
        costs: Cost of each block with what runs around it, in any unit, not negative.
        ranks: Pipeline ranks.
        virtual_stages: Chunks per rank.

    Returns:
        The number of blocks in each chunk.

    Raises:
        ConfigError: If there are more chunks than blocks, or a cost is negative or not finite.
    """
    sizes = balance(costs, ranks * virtual_stages)
    if virtual_stages == 1:
        return sizes
    prefix = [0, *itertools.accumulate(_exact(list(costs)))]

    def loads(sizes: list[int]) -> tuple[list[int], list[int]]:
        ends = [0, *itertools.accumulate(sizes)]
        chunks = [prefix[b] - prefix[a] for a, b in itertools.pairwise(ends)]
        return [sum(chunks[rank::ranks]) for rank in range(ranks)], chunks

    def merit(sizes: list[int]) -> tuple[int, int, int, int]:
        of_ranks, of_chunks = loads(sizes)
        squares = (sum(load * load for load in found) for found in (of_ranks, of_chunks))
        return max(of_ranks), next(squares), max(of_chunks), next(squares)

    if math.comb(len(costs) - 1, len(sizes) - 1) <= _FEW_SPLITS:
        cuts = itertools.combinations(range(1, len(costs)), len(sizes) - 1)
        ways = ([b - a for a, b in itertools.pairwise((0, *cut, len(costs)))] for cut in cuts)
        return min(ways, key=merit)
    best = merit(sizes)
    while True:
        of_ranks, _ = loads(sizes)
        # Only what a rank with the most work gives away can lower the maximum.
        givers = [c for c, size in enumerate(sizes) if size > 1 and of_ranks[c % ranks] == best[0]]
        moves = [(giver, taker) for giver in givers for taker in range(len(sizes)) if giver != taker]
        tried = [[size - (c == giver) + (c == taker) for c, size in enumerate(sizes)] for giver, taker in moves]
        found = min(tried, key=merit, default=sizes)
        if merit(found) >= best:
            return sizes
        sizes, best = found, merit(found)


def _least_maximum(prefix: list[int], parts: int) -> int:
    """The cost of the most expensive part in the best split of ``prefix`` (running sums of the block costs)."""
    num_blocks = len(prefix) - 1
    # best[i]: least maximum over splits of the first i blocks; it cannot fall with i, the cost of the last part
    # start..i cannot rise with its start: the best start is where the two cross.
    best = list(prefix)
    for part in range(2, parts + 1):
        start, longer = part - 1, best[:]
        for end in range(part, num_blocks - (parts - part) + 1):
            while start < end - 1 and best[start] < prefix[end] - prefix[start]:
                start += 1
            longer[end] = max(best[start], prefix[end] - prefix[start])
            if start >= part:
                longer[end] = min(longer[end], prefix[end] - prefix[start - 1])
        best = longer
    return best[num_blocks]


def _most_even(prefix: list[int], parts: int, limit: int) -> list[int]:
    """The split with no part above ``limit`` that has the least sum of squared part costs.

    Squares of sums of consecutive costs obey the quadrangle inequality, so the best start of the last part moves only
    forwards as its end does: divide and conquer over the ends, O(parts x blocks x log blocks).
    """
    num_blocks = len(prefix) - 1
    goal = [0]
    for size in uniform(num_blocks, parts):
        goal.append(goal[-1] + size)
    # One whole number compares (sum of squares, distance to `uniform`) in that order.
    unit = parts * num_blocks + 1

    # Starts that a part may have for each end, and ends that can be reached from the left and left from the right.
    earliest, start = [0] * (num_blocks + 1), 0
    for end in range(1, num_blocks + 1):
        while prefix[end] - prefix[start] > limit:
            start += 1
        earliest[end] = start
    low = [num_blocks] * (parts + 1)
    for part in range(parts, 0, -1):
        low[part - 1] = min(earliest[low[part]], low[part] - 1)
    high = [0] * (parts + 1)
    for part in range(1, parts + 1):
        end = high[part - 1] + 1
        while end < num_blocks - (parts - part) and earliest[end + 1] <= high[part - 1]:
            end += 1
        high[part] = end

    least = {0: 0}
    starts: list[dict[int, int]] = []
    for part in range(1, parts + 1):
        first, last = max(low[part], part), high[part]
        found: dict[int, int] = {}
        chosen: dict[int, int] = {}
        pending = [(first, last, max(low[part - 1], part - 1), high[part - 1])]
        while pending:
            from_end, to_end, from_start, to_start = pending.pop()
            if from_end > to_end:
                continue
            end = (from_end + to_end) // 2
            candidates = range(max(from_start, earliest[end]), min(to_start, end - 1) + 1)
            value, start = min((least[s] + (prefix[end] - prefix[s]) ** 2 * unit, s) for s in candidates)
            found[end], chosen[end] = value + abs(end - goal[part]), start
            pending += [(from_end, end - 1, from_start, start), (end + 1, to_end, start, to_start)]
        least = found
        starts.append(chosen)

    sizes, end = [], num_blocks
    for chosen in reversed(starts):
        sizes.append(end - chosen[end])
        end = chosen[end]
    return sizes[::-1]


def _exact(costs: list[float]) -> list[int]:
    """The costs as whole numbers in a common unit."""
    for cost in costs:
        if not math.isfinite(cost) or cost < 0:
            raise ConfigError(f"A block or its surroundings cost {cost}. Costs must be finite and not negative.")
    fractions = [Fraction(cost) for cost in costs]
    unit = math.lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * unit) for fraction in fractions]


def _check_parts(num_blocks: int, parts: int) -> None:
    if parts < 1:
        raise ConfigError(f"A pipeline of {parts} chunks is not possible. Use 1 or more.")
    if parts > num_blocks:
        raise ConfigError(
            f"More stages than blocks: pipeline_parallel × virtual_stages asks for {parts} chunks, but the model has"
            f" {num_blocks} pipeline block{'s' * (num_blocks != 1)}, and every chunk needs at least one. Use at most"
            f" {num_blocks} chunks (a smaller pipeline_parallel or virtual_stages), or name a longer list of blocks"
            " with pipeline_blocks."
        )
