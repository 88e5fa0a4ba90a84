"""Who waits too long says for whom, however many ranks ask at once."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import HashStore

from lightning_3d import waiting as module
from lightning_3d.config import Sizes
from lightning_3d.errors import ThreeDError
from lightning_3d.mesh import where

SIZES = Sizes(pp=8, dp=16, tp=8)


class Counting:
    """A store that knows how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0
        self._store = HashStore()

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self._store, name)


class Topology:
    """This rank's place, as far as messages want it."""

    rank = 3
    sizes = SIZES
    where = where(3, SIZES)

    class world:
        size = SIZES.world


def message(store: Counting) -> str:
    with pytest.raises(ThreeDError) as caught, module.waiting(Topology(), "Barrier"):  # type: ignore[arg-type]
        raise RuntimeError("Timed out waiting 5000ms")
    return str(caught.value)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Counting:
    store = Counting()
    monkeypatch.setattr(module, "_store", lambda: store)
    monkeypatch.setattr(module, "_ANSWER_S", 0.0)
    return store


def test_the_one_that_did_not_come_is_named_by_a_few_questions(store: Counting) -> None:
    for rank in range(SIZES.world):
        if rank not in (3, 700):
            store.append(module._WAITED, f"{rank} ")
    store.set(f"{module._BUSY}/700", "saving a checkpoint")
    store.calls = 0
    assert "for rank 700 (pp5 dp7 tp4), which is at: saving a checkpoint." in message(store)
    assert store.calls < 10


def test_few_questions_are_asked_where_most_ranks_are_gone(store: Counting) -> None:
    store.calls = 0
    text = message(store)
    assert text.count("which did not say what it is at") == 4 and "rank 0 (pp0 dp0 tp0)" in text
    assert store.calls < 200
