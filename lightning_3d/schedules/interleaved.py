"""Interleaved 1F1B: several chunks per rank divide the bubble (Narayanan et al. 2021, arXiv:2104.04473)."""

from __future__ import annotations

from lightning_3d.schedules.actions import Action, Kind


def round_sizes(stages: int, micro_batches: int) -> list[int]:
    """Cut the micro-batches into rounds; each round visits all chunks of a rank before the next one starts.

    The paper's rounds have p micro-batches, so m must be a multiple of p. Here m need not be: a round may be longer,
    never shorter (a shorter one would wait for its own data), as few as possible are, and those come first (a later
    longer one would wait for forwards that the warm-up did not run). Fewer micro-batches than stages make one round.
    """
    rounds = max(1, micro_batches // stages)
    size, longer = divmod(micro_batches, rounds)
    return [size + 1] * longer + [size] * (rounds - longer)


def order(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> list[Action]:
    """Compute order of one pipeline rank, which holds the chunks ``rank, rank + p, rank + 2p, ...``."""
    sizes = round_sizes(stages, micro_batches)
    chunks = [rank + stages * local for local in range(virtual_stages)]
    forwards, backwards, first = [], [], 0
    for size in sizes:
        members = range(first, first + size)
        forwards += [Action(Kind.F, chunk, i) for chunk in chunks for i in members]
        backwards += [Action(Kind.B, chunk, i) for chunk in reversed(chunks) for i in members]
        first += size
    # Before the first backward: the other chunks' share of a round, then there and back over the ranks behind.
    warm_up = min(len(forwards), (virtual_stages - 1) * sizes[0] + 2 * (stages - 1 - rank))
    steady = [action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair]
    return forwards[:warm_up] + steady + backwards[len(forwards) - warm_up :]


def in_flight(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> int:
    """Most activations that ``rank`` keeps, in chunks x micro-batches: ``min(mv, 2(p - rank - 1) + (v - 1)s + 1)``.

    s is the longest round, p where p divides m (Korthikanti et al. 2022, arXiv:2205.05198), less than 2p always.
    """
    longest = round_sizes(stages, micro_batches)[0]
    return min(micro_batches * virtual_stages, 2 * (stages - rank - 1) + (virtual_stages - 1) * longest + 1)
