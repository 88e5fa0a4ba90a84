"""What a check of equal copies says when there are many."""

from __future__ import annotations

from lightning_3d.config import Sizes
from lightning_3d.trainer.step.sanity import _ranks


def test_of_hundreds_of_replicas_that_agree_some_are_named() -> None:
    text = _ranks({rank: int(rank == 7) for rank in range(512)}, Sizes(pp=1, dp=512, tp=1))
    assert text.startswith("rank 7 (pp0 dp7 tp0) differ from rank 0 (pp0 dp0 tp0), rank 1 ")
    assert text.endswith("rank 8 (pp0 dp8 tp0) and 503 more")
