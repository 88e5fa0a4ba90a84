"""A world of one rank changes nothing: every bit of a run is that of the stock Trainer, dropout included."""

from __future__ import annotations

import pytest

from tests.parity.record import compare
from tests.parity.table import Row, reference, run_row

ROWS = [
    "gpt  -  -  -  -  64-true     dropout",
    "gpt  -  -  -  3  32-true     dropout tied acc2 clip ragged",
    "gpt  -  -  -  -  bf16-mixed  dropout clipvalue recompute",
    "padded -  -  -  1  32-true   dropout clip lone",
    "gpt2 -  -  -  -  32-true",
]


@pytest.mark.parametrize("row", [Row.parse(line) for line in ROWS], ids=str)
def test_a_world_of_one_rank_equals_the_stock_trainer_bit_for_bit(row: Row) -> None:
    differences = compare(reference(row.reference()), run_row(row))
    del differences["norm"]  # the norms are taken by this test's own formula and by the strategy's
    assert {kind: difference for kind, difference in differences.items() if difference.value} == {}
