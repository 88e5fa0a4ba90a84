"""Running something on several ranks without a cluster: as forks of this process, which hold the model already."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_3d.config import Sizes
from lightning_3d.dry_run.forks import ForkError, in_forks
from lightning_3d.errors import ThreeDError
from lightning_3d.mesh import Mesh, build_mesh

Result = TypeVar("Result")


def on_tensor_parallel_ranks(count: int, work: Callable[[Mesh], Result], limit_s: float = 120.0) -> Result:
    """Run ``work`` on ``count`` tensor-parallel ranks on the CPU, and give the answer of the first.

    Args:
        count: Ranks; they are forks, so ``work`` need not be picklable, but what it returns has to be.
        work: Called on every rank with its mesh.
        limit_s: Seconds after which the ranks are ended.

    Raises:
        ThreeDError: what ``work`` raised on a rank.
        ForkError: if a rank died, failed otherwise, or did not answer in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        works = [partial(_rank, rank, count, Path(folder), work) for rank in range(count)]
        return in_forks(works, count, limit_s, _name)[0]


def _name(rank: int) -> str:
    return f"Simulated rank {rank}"


def _rank(rank: int, count: int, folder: Path, work: Callable[[Mesh], Result]) -> Result:
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=count)
        return work(build_mesh(Sizes(pp=1, dp=1, tp=count), torch.device("cpu")))
    except ThreeDError:
        raise
    except Exception as error:  # without a traceback: people read it who want to know of their model
        raise ForkError(f"{_name(rank)} failed: {type(error).__name__}: {error}") from error
