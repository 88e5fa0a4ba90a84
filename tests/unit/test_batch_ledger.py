"""What is known of the batches on their way from the loaders to the steps."""

from __future__ import annotations

import warnings

import pytest
import torch

from lightning_3d.trainer.batches import BatchFacts, BatchLedger


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
