"""Agents of torchrun that come, go and are killed, each with the ranks it has started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
QUICK = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=120"


class Agents:
    """The agents of one job on this machine.

    Args:
        folder: Where the job and the agents write.
        endpoint: Where the agents meet.
        job: The script and its arguments.
        nodes: Agents at most.
        ranks: Ranks of an agent.
    """

    def __init__(self, folder: Path, endpoint: str, job: Sequence[object], nodes: int, ranks: int) -> None:
        self.folder = folder
        self.agents: list[subprocess.Popen[bytes]] = []
        self._endpoint = endpoint
        self._job = [str(word) for word in job]
        self._nodes, self._ranks = nodes, ranks

    def start(self, prefix: Sequence[str] = (), address: str = "127.0.0.1") -> int:
        """Start one more agent, through a command that begins with ``prefix``; its number."""
        number = len(self.agents)
        quick = f"{QUICK},is_host={int(number == 0)}"  # agents that start together would all try to be the host
        command = [*prefix, sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{self._nodes}"]
        command += [f"--nproc-per-node={self._ranks}", "--max-restarts=4", "--rdzv-backend=c10d"]
        command += [f"--rdzv-endpoint={self._endpoint}", f"--rdzv-id={self.folder.name}", f"--rdzv-conf={quick}"]
        command += [f"--local-addr={address}", *self._job]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with Path(self.folder, f"agent{number}").open("wb") as output:
            agent = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        self.agents.append(agent)
        return number

    def kill(self, number: int) -> None:
        """End an agent as the kernel would that runs out of memory."""
        self.agents[number].kill()
        self.agents[number].wait(10)

    def children(self, number: int) -> list[psutil.Process]:
        """The processes below an agent."""
        try:
            return psutil.Process(self.agents[number].pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def steps(self) -> list[dict[str, Any]]:
        """What the job has written about its steps."""
        path = Path(self.folder, "steps")
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, condition: Callable[[list[dict[str, Any]]], bool], seconds: float) -> list[dict[str, Any]]:
        """The steps once a condition holds of them."""
        deadline = time.monotonic() + seconds
        while not condition(steps := self.steps()):
            assert time.monotonic() < deadline, f"{steps[-3:]}\n{self.text()[-6000:]}"
            assert any(agent.poll() is None for agent in self.agents), self.text()[-6000:]
            time.sleep(0.2)
        return steps

    def text(self) -> str:
        """What the agents and ranks have printed."""
        parts = [path.read_text(errors="replace") for path in sorted(self.folder.glob("agent*"))]
        return "\n----- next agent\n".join(parts)

    def processes(self) -> list[psutil.Process]:
        """All processes of the job, whoever is their parent now."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if str(self.folder) in (process.info["cmdline"] or ()):
                found.append(process)
        return found

    def stop(self) -> None:
        """Leave nothing behind."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        for agent in self.agents:
            agent.wait(10)


class Hosts:
    """Two machines, as far as a network can tell: namespaces joined by a virtual cable.

    Raises:
        OSError: Namespaces cannot be made here.
    """

    addresses = ("10.87.0.1", "10.87.0.2")

    def __init__(self, name: str) -> None:
        self.names = (f"{name}a", f"{name}b")
        self._links = tuple(f"v{name}" for name in self.names)
        try:
            for host in self.names:
                _ip("netns", "add", host)
            _ip("link", "add", self._links[0], "type", "veth", "peer", "name", self._links[1])
            for host, link, address in zip(self.names, self._links, self.addresses, strict=True):
                _ip("link", "set", link, "netns", host)
                _ip("-n", host, "addr", "add", f"{address}/24", "dev", link)
                _ip("-n", host, "link", "set", "lo", "up")
                _ip("-n", host, "link", "set", link, "up")
        except BaseException:
            self.remove()
            raise

    def prefix(self, host: int) -> list[str]:
        """What a command begins with that is to run on a host."""
        return ["ip", "netns", "exec", self.names[host], "env", f"GLOO_SOCKET_IFNAME={self._links[host]}"]

    def cable(self, plugged: bool) -> None:
        """Plug or pull it."""
        _ip("-n", self.names[1], "link", "set", self._links[1], "up" if plugged else "down")

    def remove(self) -> None:
        """Leave nothing behind; cables go with their namespaces."""
        for host in self.names:
            with contextlib.suppress(OSError):
                _ip("netns", "delete", host)
        with contextlib.suppress(OSError):
            _ip("link", "delete", self._links[0])


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
