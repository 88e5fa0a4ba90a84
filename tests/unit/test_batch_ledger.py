"""What is known of the batches on their way from the loaders to the steps."""

from __future__ import annotations

import warnings

import pytest
import torch

from lightning_3d.trainer.data.ledger import BatchFacts, BatchLedger


def test_a_batch_of_several_loaders_counts_by_the_first_part_that_counts_and_tells_of_repeated_samples() -> None:
    ledger = BatchLedger(2)
    first, second = torch.zeros(2, 1), torch.ones(1, 1)
    ledger.record(first, BatchFacts(2, 4))
    ledger.record(second, BatchFacts(1, 1, filler=True))
    with pytest.warns(UserWarning, match="drop_last=True"):
        assert ledger.take({"a": first, "b": second}) == BatchFacts(2, 4)
    ledger.record(second, BatchFacts(1, 1, filler=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ledger.take([None, second]).filler


def test_a_batch_of_several_loaders_knows_where_the_part_of_each_is_and_how_many_samples_it_has() -> None:
    ledger = BatchLedger(2)
    first, second = torch.zeros(3, 1), torch.ones(2, 1)
    ledger.record(first, BatchFacts(3, 6, smallest=3))
    ledger.record(second, BatchFacts(2, 3, smallest=1))
    facts = ledger.take({"a": first, "b": [second]})
    assert [path for path, _ in facts.parts] == [("a",), ("b", 0)]
    assert (facts.samples, facts.global_samples, facts.most_pieces, facts.is_uneven) == (5, 9, 1, True)
    assert facts.share == 5 / 9
    ledger.record(first, BatchFacts(3, 6))
    assert ledger.take(first).parts == ()
