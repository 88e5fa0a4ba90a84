"""The command ``lightning-3d inspect``: what lies in a checkpoint. Nothing of it is unpickled."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_3d.checkpoint.contents import Contents, contents_of
from lightning_3d.checkpoint.stock_contents import StockContents, stock_contents_of
from lightning_3d.cli.paths import given_path
from lightning_3d.errors import ConfigError

DESCRIPTION = """
Show the layout, step, tensors and files of a checkpoint directory of lightning_3d. Sizes are checked against
what was written; --verify also compares every byte with its checksum. Of a .ckpt file of the stock Trainer it shows
keys, types, step and optimizers.
"""


def inspect(args: list[str]) -> int:
    """Run ``inspect`` with the arguments after its name and return the exit code.

    Raises:
        CheckpointError: It is no checkpoint of lightning_3d, or a damaged one.
    """
    parser = argparse.ArgumentParser("lightning-3d inspect", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("path", help="checkpoint directory, or .ckpt file of the stock Trainer")
    parser.add_argument("--verify", action="store_true", help="read everything and compare it with its checksums")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(args)
    path = given_path(given.path)
    contents: Contents | StockContents
    if path.is_file():
        if given.verify:
            raise ConfigError(f"--verify: {path} is a file, and only checkpoint directories have checksums.")
        contents = stock_contents_of(path)
    else:
        contents = contents_of(path, verify=given.verify)
    if given.json:
        print(json.dumps(contents.as_dict()))
    else:
        print(_table(contents) if isinstance(contents, Contents) else _table_of_stock(contents))
    return 0


def _table_of_stock(contents: StockContents) -> str:
    dtypes = Counter(tensor["dtype"] for tensor in contents.tensors.values())
    facts = {
        "file": f"{contents.path} ({_bytes(contents.num_bytes)})",
        "kind": f"{contents.kind}: fit(ckpt_path=...) reads it; `lightning-3d convert --to 3d` makes a directory of it",
        "written by": ", ".join(f"{name} {version}" for name, version in contents.written_by.items()) or "unknown",
        "epoch, step": f"{contents.epoch}, {contents.global_step}",
        "model": f"{len(contents.tensors)} tensors ({_counted(dtypes)})",
        "optimizers": ", ".join(_rates(optimizer) for optimizer in contents.optimizers) or "none",
        "further": ", ".join(contents.entries),
    }
    lines = [f"{name:<13}{value}" for name, value in facts.items()]
    lines += ["", *_columns([(key, _shape(tensor), tensor["dtype"]) for key, tensor in contents.tensors.items()])]
    return "\n".join(lines)


def _table(contents: Contents) -> str:
    layout = dict(contents.layout)
    sizes = " x ".join(f"{axis}{layout.pop(axis)}" for axis in ("pp", "dp", "tp") if axis in layout)
    rest = ", ".join(f"{key} {value}" for key, value in layout.items())
    dtypes = Counter(tensor["dtype"] for tensor in contents.tensors.values())
    facts = {
        "checkpoint": contents.path,
        "written by": ", ".join(f"{name} {version}" for name, version in contents.written_by.items()),
        "layout": f"{sizes}{', ' if rest else ''}{rest}",
        "epoch, step": f"{contents.epoch}, {contents.global_step}",
        "model": f"{contents.num_values:,} values in {len(contents.tensors)} tensors ({_counted(dtypes)})",
        "optimizers": ", ".join(_optimizer(optimizer) for optimizer in contents.optimizers) or "none",
        "size": f"{_bytes(sum(contents.files.values()))} in {len(contents.files)} files",
        "verified": "every byte" if contents.verified else "sizes only; --verify compares checksums",
    }
    lines = [f"{name:<13}{value}" for name, value in facts.items()]
    lines += ["", *_columns([(key, _shape(tensor), tensor["dtype"]) for key, tensor in contents.tensors.items()])]
    if contents.ties:
        lines += ["", *(f"{alias} is {first}" for alias, first in contents.ties.items())]
    lines += ["", *_columns([(name, _bytes(size)) for name, size in contents.files.items()])]
    return "\n".join(lines)


def _optimizer(optimizer: Mapping[str, Any]) -> str:
    rates = _rates(optimizer)
    return f"{optimizer['class']} ({rates})" if rates else str(optimizer["class"])


def _rates(optimizer: Mapping[str, Any]) -> str:
    rates = ", ".join(f"{group['num_parameters']} at lr {group['lr']}" for group in optimizer["groups"])
    return f"{rates} parameters" if rates else ""


def _counted(dtypes: Counter[str]) -> str:
    return ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common())


def _shape(tensor: Mapping[str, Any]) -> str:
    return " x ".join(map(str, tensor["shape"])) or "scalar"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))] if rows else []
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _bytes(size: float) -> str:
    units = ["B", "KB", "MB", "GB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.4g} {units[0]}"
