"""What differs between a run in one process and what a rank of a mesh saw of it, line by line."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from typing import Any

from tests.conformance.case import FIRST, Case
from tests.conformance.record import Happened
from tests.dist.lightning_modules import Mesh

TOLERANCE = 1e-10

PER_MICRO_BATCH = ("module.backward",)
"""Called on the ranks where the work is: the cut of the batch is what the strategy is for."""
PER_NODE = ("module.prepare_data", "data.prepare_data")
"""On one rank per node, as under every strategy."""


def differences(expected: Happened, got: Happened, rank: int) -> list[str]:
    """Lines such as ``only in one process: callback.on_fit_end()``; none where both saw the same."""
    lines = []
    if expected.error != got.error:
        lines.append(f"error: {expected.error!r} in one process, {got.error!r} here")
    lines += _of_calls(expected, got, rank)
    first = {} if rank == 0 else {key: None for key in expected.notes if key.startswith(FIRST)}
    notes = [{key: value for key, value in one.notes.items() if key not in first} for one in (expected, got)]
    lines += _of_values("note", *notes)
    if rank == 0:  # the others are quiet, as under every strategy
        lines += _of_lists("message", expected.messages, got.messages)
        lines += _of_lists("file", expected.files, got.files)
    return lines


def unexpected(case: Case, lines: list[str]) -> list[str]:
    """The differences that no limit of the case accounts for."""
    return [line for line in lines if not any(re.search(pattern, line) for pattern in case.known)]


def found(case: Case, lines: list[str]) -> set[str]:
    """The limits of the case that these differences show."""
    return {pattern for pattern in case.known if any(re.search(pattern, line) for line in lines)}


def _of_calls(expected: Happened, got: Happened, rank: int) -> Iterator[str]:
    skipped = PER_MICRO_BATCH if rank == 0 else PER_MICRO_BATCH + PER_NODE
    ours, theirs = ([e for e in one.events if not e.call.startswith(skipped)] for one in (got, expected))
    matcher = difflib.SequenceMatcher(None, [e.call for e in theirs], [e.call for e in ours], autojunk=False)
    for kind, i, j, k, n in matcher.get_opcodes():
        if kind != "equal":
            after = f" (after {theirs[i - 1].call})" if i else ""
            yield from (f"only in one process: {event.call}{after}" for event in theirs[i:j])
            yield from (f"only here: {event.call}{after}" for event in ours[k:n])
            continue
        for one, other in zip(theirs[i:j], ours[k:n], strict=True):
            yield from (f"at {one.call}: {line}" for line in _of_values("", one.state, other.state))


def _of_values(what: str, expected: dict[str, Any], got: dict[str, Any]) -> Iterator[str]:
    for key in {**expected, **got}:
        name = f"{what}.{key}" if what else key
        if key not in got or key not in expected:
            yield f"{name} only {'here' if key in got else 'in one process'}: {got.get(key, expected.get(key))}"
        elif isinstance(expected[key], dict) and isinstance(got[key], dict):
            yield from _of_values(name, expected[key], got[key])
        elif not _same(expected[key], got[key]):
            yield f"{name} is {expected[key]!r} in one process, {got[key]!r} here"


def _of_lists(what: str, expected: list[str], got: list[str]) -> Iterator[str]:
    yield from (f"{what} only in one process: {line}" for line in sorted(set(expected) - set(got)))
    yield from (f"{what} only here: {line}" for line in sorted(set(got) - set(expected)))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return not [*_of_values("", one, other)]
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE) or (one != one and other != other)
    return type(one) is type(other) and bool(one == other)


def check(case: Case, mesh: Mesh, expected: Happened, played: list[Happened] | str) -> None:
    """Assert that a case went at a layout as in one process, but for what it says is known.

    Raises:
        AssertionError: with the differences, by rank.
    """
    assert not isinstance(played, str), f"{case} brought the ranks of {mesh} down:\n{played}"
    lines = {rank: differences(expected, happened, rank) for rank, happened in enumerate(played)}
    new = {rank: unexpected(case, some) for rank, some in lines.items()}
    text = "\n".join(f"rank {rank}: {line}" for rank, some in new.items() for line in some[:30])
    assert not text, f"{case} at {mesh}:\n{text}"
    gone = set(case.known) - found(case, [line for some in lines.values() for line in some])
    assert not gone, f"{case}: no longer different from one process: {gone}"
