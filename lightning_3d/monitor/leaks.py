"""Memory that grows though the shapes do not change, and the allocation that grew, as far as the allocator tells.

Numbers alone are looked at in every step; only once they have grown over a window are the living allocations counted,
and again a window later, so that a run that is well pays nothing. What is counted: on a GPU the allocator's snapshot by
line of code, where its history is on (``torch.cuda.memory._record_memory_history()``); everywhere the tensors that
Python holds, by type, shape and holder, and Python's other objects by type; and ``tracemalloc`` where it runs.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import itertools
import os
import statistics
import sys
import tracemalloc
import types
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_3d.monitor.record import Growth, Leak, Place

_PARTS = 3
"""Parts of a window of which each must hold more than the one before: what grew once and stays is no leak."""
FEWEST_STEPS = 2 * _PARTS
"""Steps that a window needs; of fewer, growth says nothing."""
LEAST_DEVICE = 1 << 20
"""Bytes that a device must gain in a window; its allocator counts to the byte, and small caches settle."""
LEAST_PROCESS = 8 << 20
"""Bytes that a process must gain in a window: malloc and the page tables breathe."""
_LEAST_OF_ALL = 0.002
_SHOWN = 5
_HOLDERS = 16
_NO_HOLDERS = (types.FrameType, types.CellType, types.FunctionType, types.MethodType, types.GeneratorType, type)
_FEWEST_OBJECTS = 100


def growth(sizes: Sequence[float], least: float) -> float | None:
    """Bytes per step by which memory grows, or ``None`` where it does not.

    The window is cut into parts; the least of every part must exceed the least of the one before, and the slope is the
    median of the slopes between all pairs of steps (Theil-Sen), which single peaks do not bend.

    Args:
        sizes: Bytes in use at the end of every step.
        least: Bytes by which the last part must exceed the first.
    """
    length = len(sizes) // _PARTS
    if length < 2:
        return None
    lows = [min(sizes[part * length : (part + 1) * length]) for part in range(_PARTS - 1)]
    lows.append(min(sizes[(_PARTS - 1) * length :]))
    gained = [after - before for before, after in itertools.pairwise(lows)]
    # The last part alone must gain its share too, or the growth has come to an end.
    if lows[-1] - lows[0] < max(least, _LEAST_OF_ALL * lows[0]) or min(gained) < least / (2 * _PARTS):
        return None
    stride = max(1, len(sizes) // 64)
    picked = list(enumerate(sizes))[::stride]
    slopes = [
        (later - earlier) / (j - i) for index, (i, earlier) in enumerate(picked) for j, later in picked[index + 1 :]
    ]
    slope = statistics.median(slopes)
    return slope if slope > 0 else None


def memory_in_use(device: torch.device) -> int:
    """Bytes that the allocator of the device has given out, or that the process has resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass
class Census:
    """What is alive, by kind."""

    counts: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    where: dict[str, str] = field(default_factory=dict)
    """Who holds the newest of a kind, or the line that made it."""

    def more_than(self, before: Census, what: str) -> tuple[int, int]:
        """Bytes and number by which a kind has grown."""
        return self.bytes[what] - before.bytes[what], self.counts[what] - before.counts[what]

    def grown_since(self, before: Census, expected: float = 0.0) -> tuple[Growth, ...]:
        """What has become more, largest first.

        Args:
            before: An earlier count.
            expected: Bytes that are looked for; kinds whose size is not known are left out where others explain half.
        """
        found = [
            Growth(what, more, size, self.where.get(what, ""))
            for what in self.counts
            for size, more in (self.more_than(before, what),)
            if more > 0
        ]
        found.sort(key=lambda grown: (-grown.bytes, -grown.more))
        if sum(grown.bytes for grown in found) > expected / 2:
            found = [grown for grown in found if grown.bytes]
        return tuple(found[:_SHOWN])


def take_census(device: torch.device, before: Census | None = None) -> Census:
    """Count what is alive; a fraction of a second in a process with a million objects.

    Args:
        device: Whose allocator is asked, if its history is on.
        before: An earlier one: who holds what has become more since is looked up.
    """
    census = Census()
    newest: dict[str, Tensor] = {}
    storages: set[int] = set()
    objects: Counter[str] = Counter()
    alive = gc.get_objects()
    for thing in alive:
        kind = type(thing)
        if not issubclass(kind, Tensor):
            objects[f"{kind.__module__}.{kind.__qualname__}"] += 1
            continue
        with contextlib.suppress(Exception):  # parameters that wait for their shape, and classes of users
            what = f"{kind.__name__} {str(thing.dtype).removeprefix('torch.')} {list(thing.shape)} on {thing.device}"
            census.counts[what] += 1
            newest[what] = thing
            census.bytes[what] += _own_bytes(thing, storages)
    for name, count in objects.items():
        if name != "builtins.cell" and count >= _FEWEST_OBJECTS:
            census.counts[f"Python objects {name}"] = count
    if before is not None:
        own = {id(alive), id(newest)}
        # To find a holder is to look at all objects: only for those that will be shown.
        grown = [what for what in newest if census.counts[what] > before.counts[what]]
        for what in heapq.nlargest(_SHOWN, grown, key=lambda what: census.more_than(before, what)):
            with contextlib.suppress(Exception):  # objects of users may refuse to be looked at
                census.where[what] = held_by(newest[what], own)
    del alive
    _add_device_history(census, device)
    _add_tracemalloc(census)
    return census


def held_by(thing: object, ours: set[int]) -> str:
    """Names who keeps ``thing`` alive: ``"list in Model.kept"``; empty where that cannot be told.

    Args:
        thing: Any object that the garbage collector knows.
        ours: ``id`` of containers of this module's own.
    """
    seen = {id(thing), *ours}
    border: deque[tuple[object, str, str | None]] = deque([(thing, "", None)])  # with the key in a dict just passed
    for _ in range(_HOLDERS):
        if not border:
            return ""
        held, path, key = border.popleft()
        through = "" if key is None else f"dict[{key!r}] of "
        for holder in gc.get_referrers(held):
            if id(holder) in seen or isinstance(holder, _NO_HOLDERS):
                continue
            seen.add(id(holder))
            if isinstance(holder, dict):
                name = next((name for name, value in holder.items() if value is held), None)
                if "__spec__" in holder and isinstance(name, str):
                    return f"{path}{through}{holder['__name__']}.{name}"
                border.append((holder, path + through, str(name)))
            elif isinstance(holder, (list, tuple, set, deque)):
                border.append((holder, f"{path}{through}{type(holder).__name__} of {len(holder)} in ", None))
            else:
                owner, names = type(holder).__qualname__, getattr(holder, "__dict__", {})
                if names is held:
                    return f"{path}{owner}.{key}"
                name = next((name for name, value in names.items() if value is held), None)
                return f"{path}{through}{owner}" + (f".{name}" if name else "")
    return ""


class LeakWatch:
    """Watches the memory of one rank over windows of steps at constant shapes.

    Args:
        place: The rank.
        device: Its device.
        window: Steps over which memory must grow.
        skip: Steps at the start that do not count: optimizer states, caches and compiled code come in these.
    """

    def __init__(self, place: Place, device: torch.device, window: int = 30, skip: int = 3) -> None:
        self.place = place
        self._device = device
        self._window = window
        self._skip = skip
        self._sizes: list[int] = []
        self._shapes: object = None
        self._others = 0
        self._first = 0
        self._suspected: Census | None = None

    def step(self, step: int, shapes: object) -> Leak | None:
        """A step has ended.

        Args:
            step: Its number.
            shapes: Whatever equals itself while the batches have the same shapes. Steps of others are left out; where
                they come to be more, the window begins again with them.

        Returns:
            A leak, when memory has grown over two windows in a row: what has grown in the second is named.
        """
        if self._skip > 0:
            self._skip -= 1
            return None
        if shapes != self._shapes:
            # The last batch of an epoch may be smaller: such steps are left out, while those of one shape prevail.
            self._others += 1
            if self._others <= len(self._sizes):
                return None
            self._shapes, self._suspected, self._others = shapes, None, 0
            self._sizes.clear()
        if not self._sizes:
            self._first = step
        self._sizes.append(memory_in_use(self._device))
        if len(self._sizes) < self._window:
            return None
        sizes, self._sizes, self._others = self._sizes, [], 0
        on_device = self._device.type == "cuda"
        slope = growth(sizes, LEAST_DEVICE if on_device else LEAST_PROCESS)
        before, self._suspected = self._suspected, None
        if slope is None:
            return None
        self._suspected = take_census(self._device, before)
        if before is None:
            return None
        return Leak(
            place=self.place,
            kind="device" if on_device else "process",
            bytes_per_step=slope,
            bytes=sizes[-1],
            first_step=self._first,
            last_step=step,
            grown=self._suspected.grown_since(before, slope * self._window),
        )


def message(leak: Leak) -> str:
    """What a person reads about a leak."""
    kind = "memory of its device" if leak.kind == "device" else "memory of its process"
    text = (
        f"{leak.place}: {kind} grows by {leak.bytes_per_step / 1e6:.2f} MB per step at constant shapes (steps"
        f" {leak.first_step} to {leak.last_step}, now {leak.bytes / 1e6:,.0f} MB)"
    )
    left = leak.place.memory_bytes - leak.bytes
    if leak.kind == "device" and left > 0:
        text += f"; it is full in about {left / leak.bytes_per_step:,.0f} steps"
    for grown in leak.grown:
        held = f", held by {grown.where}" if grown.where else ""
        size = f", {grown.bytes / 1e6:,.2f} MB" if grown.bytes else ""
        text += f"\n  {grown.more:,} more of {grown.what}{size}{held}"
    return text


def _own_bytes(tensor: Tensor, storages: set[int]) -> int:
    """Bytes of the tensor's storage, unless another tensor has been counted with it."""
    try:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors, wrappers and the like have no storage of their own
        return 0
    if address == 0 or address in storages:
        return 0
    storages.add(address)
    return storage.nbytes()


def _add_device_history(census: Census, device: torch.device) -> None:
    if device.type != "cuda":
        return
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    for segment in torch.cuda.memory._snapshot(device)["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and (line := _line_of(block.get("frames", ()))):
                # without the history, blocks have no frames
                sizes[line].append(int(block.get("requested_size", block["size"])))
    for line, found in sizes.items():
        census.counts[f"allocations at {line}"] = len(found)
        census.bytes[f"allocations at {line}"] = sum(found)


def _line_of(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost line of Python that is not torch's own."""
    for frame in frames:
        file = str(frame.get("filename", ""))
        if file.endswith(".py") and f"{os.sep}torch{os.sep}" not in file:
            return f"{file}:{frame.get('line')} ({frame.get('name')})"
    return ""


def _add_tracemalloc(census: Census) -> None:
    if not tracemalloc.is_tracing():
        return
    for entry in tracemalloc.take_snapshot().statistics("lineno"):
        frame = entry.traceback[0]
        what = f"Python memory of {frame.filename}:{frame.lineno}"
        census.counts[what], census.bytes[what] = entry.count, entry.size
