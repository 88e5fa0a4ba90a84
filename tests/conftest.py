"""Set-up shared by all tests."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

# Before anything loads an OpenMP runtime: the ranks of a test share the machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# No test may go out to a hub: models are built from their configuration.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

_GPU_TESTS = Path(__file__).parent / "gpu"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark everything in tests/gpu, and leave it out on a machine without a GPU. What takes longest comes first."""
    gpu = [item for item in items if _GPU_TESTS in item.path.parents]
    for item in gpu:
        item.add_marker(pytest.mark.gpu)
    if gpu and not _has_gpu():
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]
    # A worker runs whole files: one that got a long file last would keep the others waiting.
    slow = {item.path for item in items if item.get_closest_marker("slow") and not item.get_closest_marker("long")}
    items.sort(key=lambda item: (item.path not in slow, item.path.parent.name == "unit"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what has been imported out of every later garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _speaks_as_rank_zero() -> None:
    """What Lightning says on rank 0 alone is heard here, whichever rank an earlier test took this process for."""
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    rank_zero_only.rank = 0  # type: ignore[attr-defined]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
