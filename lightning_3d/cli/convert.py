"""The command ``lightning-3d convert``: a checkpoint directory as a form that other programs read, and back."""

from __future__ import annotations

import argparse
import json
import pickle
import sys
from typing import Any

from lightning_3d.checkpoint import (
    Imported,
    export_hugging_face,
    import_hugging_face,
    import_lightning,
    is_checkpoint,
    write_lightning,
)
from lightning_3d.cli.paths import given_path
from lightning_3d.errors import CheckpointError, ConfigError

DESCRIPTION = """
Turn a checkpoint directory of lightning_3d, written at any layout, into a Hugging Face folder (--to hf: safetensors and
config.json, for from_pretrained) or into one file of the stock Lightning Trainer (--to ckpt); or such a file, or the
weights of a Hugging Face folder, into a checkpoint directory that runs of any layout load (--to 3d). One process, on
the CPU.
"""


def convert(args: list[str]) -> int:
    """Run ``convert`` with the arguments after its name and return the exit code.

    Raises:
        CheckpointError, ConfigError: The source cannot be read, or an argument does not fit.
    """
    parser = argparse.ArgumentParser("lightning-3d convert", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("source", help="checkpoint directory; --to 3d: .ckpt file or Hugging Face folder")
    parser.add_argument("target", help="directory (--to 3d), folder (--to hf) or file (--to ckpt) to write")
    parser.add_argument("--to", choices=["3d", "hf", "ckpt"], required=True, help="form of the target")
    parser.add_argument("--name", help="hf: submodule of the model, where the module has several")
    parser.add_argument("--dtype", help="hf: type of the weights, such as bfloat16; by default as in the checkpoint")
    parser.add_argument(
        "--prefix",
        metavar="model.",
        help="3d, of a Hugging Face folder: name of the model in the LightningModule, put before the names of weights",
    )
    parser.add_argument("--max-shard-size", default="5GB", help="hf: bytes per file at most (default: %(default)s)")
    parser.add_argument("--adapters-only", action="store_true", help="hf: leave out the base model")
    parser.add_argument(
        "--trust", action="store_true", help="unpickle whatever objects the checkpoint holds; can run any code in it"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(args)
    given.source, given.target = given_path(given.source), given_path(given.target)
    write = {"ckpt": _to_file, "hf": _to_folder, "3d": _to_directory}[given.to]
    try:
        done = write(given, False if given.trust else None)
    except CheckpointError as error:
        if isinstance(error.__cause__, pickle.UnpicklingError):
            raise CheckpointError(f"{error} For this command that is --trust.") from error
        raise
    for text in done["left_out"] if given.to == "3d" else ():
        sys.stderr.write(f"left out: {text}\n")
    if done.get("optimizers_by_order"):
        sys.stderr.write(
            "note: the file numbers the parameters of its optimizer, and their names were found by order and shape."
            " That is right if it was given them in the order of the module (self.parameters()); if not, let the run"
            " read the file itself with fit(ckpt_path=FILE).\n"
        )
    if given.json:
        print(json.dumps(done))
    else:
        width = max(map(len, done))
        for key, value in done.items():
            print(f"{key.replace('_', ' '):{width}}  {', '.join(value) or '-' if isinstance(value, list) else value}")
    return 0


def _to_directory(given: argparse.Namespace, weights_only: bool | None) -> dict[str, Any]:
    _refuse(given, "hf", "name", "dtype", "adapters_only")
    if is_checkpoint(given.source):
        raise ConfigError(f"{given.source} is a checkpoint directory already, which runs of any layout load as it is.")
    if given.source.is_dir() or given.source.suffix == ".safetensors":
        done: Imported = import_hugging_face(given.source, given.target, given.prefix or "")
    else:
        if given.prefix is not None:
            raise ConfigError("--prefix: only with a Hugging Face folder. A .ckpt file has the names of the module.")
        done = import_lightning(given.source, given.target, weights_only)
    return {
        "target": str(done.folder),
        "values": done.num_values,
        "step": done.global_step,
        "optimizers": done.optimizers,
        "optimizers_by_order": done.by_order,
        "left_out": list(done.left_out),
    }


def _refuse(given: argparse.Namespace, form: str, *options: str) -> None:
    if wrong := [f"--{option.replace('_', '-')}" for option in options if getattr(given, option)]:
        raise ConfigError(f"{', '.join(wrong)}: only with --to {form}.")


def _to_folder(given: argparse.Namespace, weights_only: bool | None) -> dict[str, Any]:
    _refuse(given, "3d", "prefix")
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
    _refuse(given, "hf", "name", "dtype", "adapters_only")
    _refuse(given, "3d", "prefix")
    if given.target.is_dir():
        raise ConfigError(f"{given.target} is a directory; --to ckpt writes one file. Give its name.")
    done = write_lightning(given.source, given.target, weights_only)
    return {"target": str(done.file), "values": done.num_values, "step": done.global_step}
