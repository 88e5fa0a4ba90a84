"""Steps that succeed on every rank or fail on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from lightning_3d.collectives import all_gather_object, all_reduce
from lightning_3d.errors import CheckpointError
from lightning_3d.mesh import Mesh, where
from lightning_3d.waiting import waiting, working

T = TypeVar("T")


def together(mesh: Mesh, what: str, action: Callable[[], T]) -> T:
    """The result of ``action``, if it succeeds on all ranks.

    Raises:
        CheckpointError: On every rank, when it failed on any: says where and why. On those that have waited too long
            for another: says for which, and what it is at.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        with working(mesh, what), waiting(mesh, what, CheckpointError):
            result = action()
    except Exception as error:
        failure = error
    own = None if failure is None else describe(failure)
    failed = torch.tensor(failure is not None)
    try:
        with waiting(mesh, what, CheckpointError):
            if not all_reduce(failed, mesh.control_world, "max"):  # one bit of each rank, and most often that is all
                return result  # type: ignore[return-value]
            texts_by_rank = all_gather_object(own, mesh.control_world)
    except (RuntimeError, CheckpointError) as broken:
        if failure is None:
            raise
        raise failure from broken  # what this rank knows says more than that the others cannot be reached
    failures = {rank: text for rank, text in enumerate(texts_by_rank) if text is not None}
    texts = list(dict.fromkeys(failures.values()))
    if len(texts) == 1 and isinstance(failure, CheckpointError) and len(failures) == mesh.world.size:
        raise failure
    lines = []
    for text in texts[:4]:
        ranks = [rank for rank, other in failures.items() if other == text]
        more = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
        lines.append(f"on {where(ranks[0], mesh.sizes)}{more}: {text}")
    raise CheckpointError(f"{what} failed " + "; ".join(lines)) from failure


def describe(error: BaseException) -> str:
    """The text of an error, with its type where the text alone may say too little."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
