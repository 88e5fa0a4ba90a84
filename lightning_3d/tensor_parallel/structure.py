"""Which layers of a block belong together: columns, and the rows that read all of them and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from lightning_3d.tensor_parallel.layers import features, is_linear
from lightning_3d.tensor_parallel.observe import LayerUse, Observation


class Group(NamedTuple):
    """Layers that can only be cut together."""

    columns: list[LayerUse]
    row: LayerUse
    more_rows: list[LayerUse]
    """Narrower layers beside ``row`` that read the same, such as the first of the two layers of an adapter."""


def find_groups(block: nn.Module, seen: Observation, taken: Iterable[str]) -> list[Group]:
    """The groups of linear layers in ``block``, in order of their calls; none has a layer that is ``taken``.

    Where two groups want one layer, that with the larger matrices gets it: of an adapter around a layer, its second
    layer then goes with the layers around it and not with its own first one.
    """
    readers: dict[frozenset[str], list[LayerUse]] = {}
    for use in seen.layers.values():
        if use.reads and not use.reads_hidden and not use.reads - set(seen.layers):
            readers.setdefault(use.reads, []).append(use)
    sized = []
    for sources, rows in readers.items():
        names = {row.name for row in rows}
        parts = [block.get_submodule(layer) for layer in (*sources, *names)]
        if names & sources or not all(map(is_linear, parts)) or any(seen.readers[each] != names for each in sources):
            continue
        rows.sort(key=lambda row: -features(block.get_submodule(row.name))[1])
        columns = [use for use in seen.layers.values() if use.name in sources]
        sized.append((sum(math.prod(features(part)) for part in parts), Group(columns, rows[0], rows[1:])))
    free, found = set(seen.layers) - set(taken), []
    for _, group in sorted(sized, key=lambda item: -item[0]):
        names = {use.name for use in (*group.columns, group.row, *group.more_rows)}
        if names <= free:
            free -= names
            found.append(group)
    order = list(seen.layers)
    return sorted(found, key=lambda group: order.index(group.row.name))
