"""What is known of the batches on their way from the loaders to the steps."""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch

from lightning_3d.trainer.data.ledger import BatchFacts, BatchLedger


class Loader:
    """What hands out batches."""


A, B = Loader(), Loader()


def test_a_batch_of_several_loaders_counts_by_the_first_part_that_counts_and_tells_of_repeated_samples() -> None:
    ledger = BatchLedger(2)
    first, second = torch.zeros(2, 1), torch.ones(1, 1)
    ledger.record(first, BatchFacts(2, 4), A)
    ledger.record(second, BatchFacts(1, 1, filler=True), B)
    with pytest.warns(UserWarning, match="drop_last=True"):
        assert ledger.take({"a": first, "b": second}) == BatchFacts(2, 4)
    ledger.record(second, BatchFacts(1, 1, filler=True), B)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ledger.take([None, second]).filler


def test_a_batch_of_several_loaders_knows_where_the_part_of_each_is_and_how_many_samples_it_has() -> None:
    ledger = BatchLedger(2)
    first, second = torch.zeros(3, 1), torch.ones(2, 1)
    ledger.record(first, BatchFacts(3, 6, smallest=3), A)
    ledger.record(second, BatchFacts(2, 3, smallest=1), B)
    facts = ledger.take({"a": first, "b": [second]})
    assert [path for path, _ in facts.parts] == [("a",), ("b", 0)]
    assert (facts.samples, facts.global_samples, facts.most_pieces, facts.is_uneven) == (5, 9, 1, True)
    assert facts.share == 5 / 9
    ledger.record(first, BatchFacts(3, 6), A)
    assert ledger.take(first).parts == ()


def test_a_batch_of_many_loaders_knows_all_its_parts_and_batches_that_nobody_used_are_let_go() -> None:
    ledger = BatchLedger(1)
    loaders = [Loader() for _ in range(40)]
    batches = [[torch.full((2,), float(number)) for _ in loaders] for number in range(2)]
    for batch in batches:  # the second is taken before the first is used
        for part, loader in zip(batch, loaders, strict=True):
            ledger.record(part, BatchFacts(2, 2), loader)
    assert [len(ledger.take(batch).parts) for batch in batches] == [40, 40]
    unused = torch.zeros(1)
    gone = weakref.ref(unused)
    for batch in (unused, torch.ones(1), torch.ones(1)):
        ledger.record(batch, BatchFacts(1, 1), A)
    del unused, batch
    assert gone() is None
