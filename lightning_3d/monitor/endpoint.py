"""The HTTP endpoint of a host that Prometheus scrapes."""

from __future__ import annotations

import errno
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lightning_3d.errors import ConfigError
from lightning_3d.monitor.gpu_counters import GpuCounters
from lightning_3d.monitor.metrics import families
from lightning_3d.monitor.noticeboard import Notice

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

_NEXT = 100
"""Ports after the wanted one that are tried."""
_GPU_S = 1.0
"""Scrapes that follow faster get the same counters of GPUs."""

_PATIENCE_S = 5.0
"""How long the end of a run waits for scrapes."""


class Endpoint:
    """Serves the notices of a host's ranks, in threads of its own that only read.

    Args:
        notices: By rank.
        port: To listen on; 0 takes any that is free.
        address: Of the interface.
        next_port: Where the port is taken: use the next free one and warn, instead of an error.
        stale_after_s: See :func:`lightning_3d.monitor.metrics.families`.
        gpus: Counters of GPUs, if they are wanted.

    Raises:
        ConfigError: The port is taken, or may not be used.
    """

    def __init__(
        self,
        notices: Mapping[int, Notice],
        port: int,
        address: str,
        next_port: bool,
        stale_after_s: float,
        gpus: GpuCounters | None = None,
    ) -> None:
        from prometheus_client import CollectorRegistry

        self._notices, self._stale_after_s, self._gpus = notices, stale_after_s, gpus
        self._lock = threading.Lock()
        self._counted: dict[str, tuple[float, Mapping[str, Any]]] = {}
        registry = CollectorRegistry()  # not the process's own: an application may export itself
        registry.register(self)  # type: ignore[arg-type,unused-ignore]
        self._server, self._thread = self._listen(registry, port, address, next_port)
        self.port: int = self._server.server_port
        """The port that it listens on."""
        if port and self.port != port:
            warnings.warn(
                f"Port {port} is taken; ThreeDPrometheus listens on {address}:{self.port} instead. A Prometheus with"
                " file_sd_configs on the file of targets finds it there; any other must be told.",
                stacklevel=2,
            )

    def collect(self) -> Iterator[Family]:
        """What a scrape is answered with; called by prometheus-client in a thread of the scrape."""
        with self._lock:
            read = {rank: notice.read() for rank, notice in self._notices.items()}
            posted = {rank: self._with_gpu(values) for rank, values in read.items() if values is not None}
        yield from families(posted, time.time(), self._stale_after_s)

    def describe(self) -> list[Family]:
        """Nothing: names are known only once ranks have posted."""
        return []

    def close(self) -> None:
        """Stop to listen; a scrape under way is answered or cut off."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=_PATIENCE_S)
        if not self._lock.acquire(timeout=_PATIENCE_S):
            return  # a scrape waits for a driver that does not answer: its thread ends with the process
        try:
            self._notices = {}  # their memory goes, and a scrape may still be under way
            if self._gpus is not None:
                self._gpus.close()
                self._gpus = None
        finally:
            self._lock.release()

    @staticmethod
    def _listen(registry: Any, port: int, address: str, next_port: bool) -> tuple[Any, threading.Thread]:
        from prometheus_client import start_http_server

        last = min(port + _NEXT, 65535) if next_port and port else port
        for candidate in range(port, last + 1):
            try:
                return start_http_server(candidate, address, registry)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or candidate == last:
                    raise ConfigError(
                        f"ThreeDPrometheus(port={port}, address={address!r}) cannot listen there:"
                        f" {error.strerror or error}. Give a port that is free on every host"
                        + ("." if next_port else ", or if_taken='next' to use the next free one.")
                    ) from error
        raise AssertionError("unreachable")

    def _with_gpu(self, notice: Mapping[str, Any]) -> Mapping[str, Any]:
        uuid = notice["labels"]["gpu_uuid"]
        if self._gpus is None or not uuid:
            return notice
        at, counters = self._counted.get(uuid, (-_GPU_S, {}))
        if time.monotonic() - at >= _GPU_S:
            counters = {
                name: [([key], one) for key, one in value.items()] if isinstance(value, dict) else value
                for name, value in self._gpus.read(uuid).items()
            }
            self._counted[uuid] = (time.monotonic(), counters)
        return {**notice, "values": {**notice["values"], **counters}}
