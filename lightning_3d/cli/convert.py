"""The command ``lightning-3d convert``: a checkpoint directory as another form that other programs read."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from lightning_3d.checkpoint import export_hugging_face, write_lightning
from lightning_3d.errors import ConfigError

DESCRIPTION = """
Turn a checkpoint directory of lightning_3d, written at any layout, into a Hugging Face folder (--to hf: safetensors and
config.json, for from_pretrained) or into one file of the stock Lightning Trainer (--to ckpt). One process, on the CPU.
"""


def convert(args: list[str]) -> int:
    """Run ``convert`` with the arguments after its name and return the exit code.

    Raises:
        CheckpointError, ConfigError: The source cannot be read, or an argument does not fit.
    """
    parser = argparse.ArgumentParser("lightning-3d convert", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("source", type=Path, help="checkpoint directory")
    parser.add_argument("target", type=Path, help="folder (--to hf) or file (--to ckpt) to write")
    parser.add_argument("--to", choices=["hf", "ckpt"], required=True, help="form of the target")
    parser.add_argument("--name", help="hf: submodule of the model, where the module has several")
    parser.add_argument("--dtype", help="hf: type of the weights, such as bfloat16; by default as in the checkpoint")
    parser.add_argument("--max-shard-size", default="5GB", help="hf: bytes per file at most (default: %(default)s)")
    parser.add_argument("--adapters-only", action="store_true", help="hf: leave out the base model")
    parser.add_argument(
        "--trust", action="store_true", help="unpickle whatever objects the checkpoint holds; can run any code in it"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(args)
    weights_only = False if given.trust else None
    done = _to_file(given, weights_only) if given.to == "ckpt" else _to_folder(given, weights_only)
    if given.json:
        print(json.dumps(done))
    else:
        width = max(map(len, done))
        for key, value in done.items():
            print(f"{key.replace('_', ' '):{width}}  {', '.join(value) if isinstance(value, list) else value}")
    return 0


def _to_folder(given: argparse.Namespace, weights_only: bool | None) -> dict[str, Any]:
    done = export_hugging_face(
        given.source,
        given.target,
        name=given.name,
        dtype=given.dtype,
        max_shard_size=given.max_shard_size,
        adapters_only=given.adapters_only,
        weights_only=weights_only,
    )
    return {
        "target": str(done.folder),
        "model": done.model,
        "values": done.num_values,
        "files": list(done.files),
        "left_out": list(done.left_out),
    }


def _to_file(given: argparse.Namespace, weights_only: bool | None) -> dict[str, Any]:
    others = {"--name": given.name, "--dtype": given.dtype, "--adapters-only": given.adapters_only}
    if wrong := [option for option, value in others.items() if value]:
        raise ConfigError(f"{', '.join(wrong)}: only with --to hf.")
    if given.target.is_dir():
        raise ConfigError(f"{given.target} is a directory; --to ckpt writes one file. Give its name.")
    done = write_lightning(given.source, given.target, weights_only)
    return {"target": str(done.file), "values": done.num_values, "step": done.global_step}
