"""Which numbers of a vocabulary are a rank's own."""

from __future__ import annotations

import torch
from torch import Tensor


def is_own(index: Tensor, start: int, length: int, total: int) -> Tensor:
    """Whether numbers are among the ``length`` from ``start`` on, of ``total``.

    A number outside of the vocabulary counts as own at the end beyond which it lies. So it reaches the look-up there,
    which fails as that of a whole table does: on a GPU by an assertion of the kernel, with nothing read back to see it.
    """
    after = index >= start if start else None
    before = index < start + length if start + length < total else None
    if after is None or before is None:
        return next((own for own in (after, before) if own is not None), torch.ones_like(index, dtype=torch.bool))
    return after & before
