"""How far the clocks of hosts are apart, so that what ranks have written down lies on one line of time."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from lightning_3d.collectives import all_gather_object
from lightning_3d.mesh import Axis

_ROUNDS = 7
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def machine() -> str:
    """The same text for all processes that read one clock: the boot of the kernel, or the name of the host."""
    import socket

    return _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()


def clock_offsets(world: Axis) -> list[float]:
    """What to add to ``time.time()`` of every rank to have that of rank 0, in seconds. Collective.

    All ranks leave a barrier at nearly the same moment and look at their clocks; the median over some barriers is right
    to about the time of one message. Ranks of one machine read one clock, so these get the median over them, and those
    of rank 0's machine exactly 0.

    Args:
        world: The control axis over all ranks.
    """
    if world.group is None:
        return [0.0]
    stamps = []
    for _ in range(_ROUNDS):
        dist.barrier(group=world.group)
        stamps.append(time.time())
    told = all_gather_object((machine(), stamps), world)
    return offsets([name for name, _ in told], [stamps for _, stamps in told])


def offsets(machines: Sequence[str], stamps: Sequence[Sequence[float]]) -> list[float]:
    """The offsets that follow from what every rank's clock showed after each barrier.

    Args:
        machines: Whose clock each rank reads.
        stamps: Of each rank, one after each barrier.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    for name, mine in zip(machines, stamps, strict=True):
        found[name].append(statistics.median(first - own for first, own in zip(stamps[0], mine, strict=True)))
    return [0.0 if name == machines[0] else statistics.median(found[name]) for name in machines]
