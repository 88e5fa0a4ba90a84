"""A started script ends with the process that started it, from its first moment.

Also a script: ``python tether.py PID STARTED COMMAND...`` turns into the command, tied to the process that was named.
It runs before everything else in a rank, so it imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

_SET, _GET = 1, 2  # PR_SET_PDEATHSIG, PR_GET_PDEATHSIG


@dataclass(frozen=True)
class Holder:
    """The process that another one is not to outlive."""

    pid: int
    started: str
    """When it started, because numbers are used again; empty where the system does not say."""

    @classmethod
    def of(cls, pid: int) -> Holder:
        """The process of that number."""
        return cls(pid, started(pid) or "")

    @property
    def has_ended(self) -> bool:
        """Whether it is no more. Need not be the parent: a server, or a wrapper around Python, may stand between."""
        if os.getppid() == self.pid:
            return False
        if self.started or sys.platform == "linux":
            return started(self.pid) != self.started
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False


def started(pid: int) -> str | None:
    """When a process started; None if it is no more, or waits to be collected, or if this is not Linux."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]


def tethered(command: list[str]) -> list[str]:
    """``command``, to be started so that it is killed when this process ends, however that happens.

    Elsewhere than on Linux the kernel offers no such thing, and the command is returned as it is.
    """
    if sys.platform != "linux":
        return command
    me = Holder.of(os.getpid())
    # A process between, not a function between fork and exec: this process has threads.
    return [sys.executable, "-I", "-S", __file__, str(me.pid), me.started, *command]


def release() -> None:
    """In a command that was started so: from now on it looks itself whether the other process is still there."""
    if sys.platform == "linux" and _signal() == signal.SIGKILL:
        ctypes.CDLL(None).prctl(_SET, 0)


def _signal() -> int:
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(_GET, ctypes.byref(number))
    return number.value


def main(pid: str, start: str, *command: str) -> None:
    """Turn into the command, unless the process that started it has ended already."""
    # Not SIGTERM, which asks ranks to finish their step together. The kernel keeps the wish over exec.
    ctypes.CDLL(None).prctl(_SET, int(signal.SIGKILL))
    if Holder(int(pid), start).has_ended:  # between fork and the line above
        os._exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
