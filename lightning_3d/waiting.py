"""Ranks that wait for one that works alone: it says so when it takes long, and who waits too long says for whom."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from lightning_3d.errors import ThreeDError
from lightning_3d.mesh import Mesh, where

_BUSY = "lightning_3d/busy"
_WAITED = "lightning_3d/waited"
_COLLECTIVE = (
    "Perhaps they never come: what all ranks do together (trainer.save_checkpoint, validation, barriers) must be called"
    " on every rank, not under `if trainer.is_global_zero`"
)
_SLOW_S = 2.0
"""From how many seconds on a rank's work is known to the others."""
_TELL_S = 60.0
"""From how many seconds on it is printed."""
_ANSWER_S = 2.0
"""How long the others have, after a time-out of one, to say that they have waited as well."""
_ASKED_AT_MOST = 64
"""Of how many absent ranks it is asked what they are at: every rank that has waited asks, and four are named."""


@contextlib.contextmanager
def working(mesh: Mesh, what: str) -> Iterator[None]:
    """While this rank does what the others will wait for; ``what`` is how a message calls it."""
    if mesh.world.size == 1:
        yield
        return
    ended = threading.Event()
    start = time.monotonic()

    def tell() -> None:
        if ended.wait(_SLOW_S):
            return
        store = _store()
        with contextlib.suppress(Exception):
            store.set(f"{_BUSY}/{mesh.rank}", what)
        if not ended.wait(_TELL_S - _SLOW_S):
            text = f"{mesh.where} has been at this for {_TELL_S:g} s, and others may wait for it: {what}. {_COLLECTIVE}"
            sys.stderr.write(f"\n[lightning_3d] {text}\n")
        ended.wait()
        with contextlib.suppress(Exception):
            store.set(f"{_BUSY}/{mesh.rank}", "")

    thread = threading.Thread(target=tell, name="lightning-3d-working", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        if time.monotonic() - start > _SLOW_S:
            thread.join(_ANSWER_S)  # so that no later question finds this rank still busy


@contextlib.contextmanager
def waiting(mesh: Mesh, what: str, error_class: type[ThreeDError] = ThreeDError) -> Iterator[None]:
    """Around a collective that waits for others; ``what`` is how a message calls it.

    Raises:
        ThreeDError: (or ``error_class``) if the limit of the group has passed: names the ranks that did not come, and
            what they are known to be at.
    """
    start = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if mesh.world.size == 1 or "imed out" not in str(error):
            raise
        seconds = time.monotonic() - start
        raise error_class(f"{what}: {mesh.where} has waited {seconds:.0f} s for {_missing(mesh)}") from error


def _missing(mesh: Mesh) -> str:
    others = [rank for rank in range(mesh.world.size) if rank != mesh.rank]
    store = _store()
    try:
        store.append(_WAITED, f"{mesh.rank} ")  # one list: thousands of ranks write it, and read it, at once
        time.sleep(_ANSWER_S)
        waited = {int(rank) for rank in _read(store, _WAITED).split()}
        absent = [rank for rank in others if rank not in waited]
        busy = {rank: _read(store, f"{_BUSY}/{rank}") for rank in absent[:_ASKED_AT_MOST]}
    except Exception:  # the store is gone, and with it rank 0
        absent, busy = [], {}
    named = [f"{where(rank, mesh.sizes)}, which is at: {doing}" for rank, doing in busy.items() if doing]
    named = named or [f"{where(rank, mesh.sizes)}, which did not say what it is at" for rank in absent]
    text = "; ".join(named[:4]) if named else "other ranks, none of which can be named"
    if any(not doing for doing in busy.values()):
        text += f". {_COLLECTIVE}"
    return text + ". If that work is meant to take so long, raise wait_timeout_s of ThreeDStrategy."


def _read(store: Any, key: str) -> str:
    return str(store.get(key).decode(errors="replace")) if store.check([key]) else ""


def _store() -> Any:
    """A connection of its own: the main thread may wait inside the other one."""
    store = dist.distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store
