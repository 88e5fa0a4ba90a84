"""Which processes of this machine belong to the job, and whether they are still there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_3d.trainer.processes.tether import started


@dataclass(frozen=True)
class Identity:
    """A process, told from all others; plain values that can be sent."""

    machine: str
    """Where its number counts: a machine, or a container with processes of its own; empty if unknown."""
    pid: int
    started: str
    """When it started, because numbers are used again."""

    @classmethod
    def of_this_process(cls) -> Identity:
        """Of the process that asks."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        except OSError:
            machine = ""
        return cls(machine, os.getpid(), started(os.getpid()) or "")


class Siblings:
    """The other ranks on this machine.

    Args:
        everyone: All ranks, in order.
        rank: The one that asks.
    """

    def __init__(self, everyone: Sequence[Identity], rank: int) -> None:
        mine = everyone[rank]
        self._others = {
            other: identity
            for other, identity in enumerate(everyone)
            if other != rank and mine.machine and identity.machine == mine.machine
        }

    def gone(self) -> int | None:
        """A rank whose process has ended, if any has."""
        return next((rank for rank, it in self._others.items() if started(it.pid) != it.started), None)
