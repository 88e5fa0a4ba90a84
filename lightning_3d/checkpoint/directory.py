"""The checkpoint as a directory: what lies in it, and how it appears all at once or not at all."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_3d.checkpoint.form import complaint
from lightning_3d.checkpoint.integrity import refuse_foreign_link, share, verify
from lightning_3d.checkpoint.leftovers import LINK, OLD, REMOVING, SAVING, claim, hidden, release, sweep
from lightning_3d.errors import CheckpointError

FORMAT = "lightning_3d"
VERSION = 1
MANIFEST = "layout.json"
"""Layout, step, names: written last, so a directory without it was never finished."""
INDEX = "tensors.json"
"""Where every piece of every tensor lies."""
TENSORS = ".distcp"
"""Suffix of the files that hold tensors."""
TRAINER = "trainer.pt"
"""The rest of Lightning's checkpoint dict."""
HYPER_PARAMETERS = "hyper_parameters.pt"
"""Arguments of the user's classes, which may be objects that only full unpickling can read."""

_CHECKSUM = "checksum"
"""Key in the manifest: of everything else in it."""
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What ``layout.json`` says."""

    layout: Mapping[str, Any]
    """Sizes ``pp``, ``dp``, ``tp`` and what else described the run that wrote the checkpoint."""
    epoch: int
    global_step: int
    keys: Sequence[str]
    """Keys of the module's state dict, in order."""
    ties: Mapping[str, str]
    """Second names of tied parameters, each with the name under which the tensor lies."""
    optimizers: Sequence[Mapping[str, Any]] = ()
    """Per optimizer: ``class``, ``groups`` (``names`` and ``options``) and ``scalars`` by parameter name."""
    copies: Sequence[Mapping[str, Any]] = ()
    """Further copies of the weights: ``path``, where each stood in Lightning's checkpoint, and the ``keys`` it has."""
    files: Mapping[str, int] = field(default_factory=dict)
    """Size in bytes of every other file of the checkpoint."""
    checksums: Mapping[str, int] = field(default_factory=dict)
    """CRC-32 of those files that the index does not describe piece by piece."""
    written_by: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write it into ``folder``, after the files that it lists."""
        text = signed({"format": FORMAT, "version": VERSION, **asdict(self)})
        write_file(folder / MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))


def signed(content: Mapping[str, Any]) -> str:
    """``content`` as the text of a manifest, with its checksum."""
    plain = {key: value for key, value in json.loads(json.dumps(content)).items() if key != _CHECKSUM}
    return json.dumps({**plain, _CHECKSUM: _checksum(plain)}, indent=1)


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())


def rank_file(rank: int) -> str:
    """Name of the file with what only rank ``rank`` can use."""
    return f"rank_{rank:05d}.pt"


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a finished checkpoint directory of this package, of whatever version."""
    try:
        return _format_of(located(path)) == FORMAT
    except CheckpointError:
        return False


def read_manifest(path: str | os.PathLike[str], rank: int = 0, size: int = 1) -> tuple[Path, Manifest]:
    """The directory to read and what its ``layout.json`` says.

    Args:
        path: A checkpoint.
        rank: Of the files that it lists, the share of one of ``size`` ranks is looked at: thousands of ranks that ask
            for thousands of files stop a file system.
        size: Number of ranks that do so.

    Raises:
        CheckpointError: The directory is missing, foreign, unfinished, truncated or of a newer version.
    """
    folder = located(path)
    if folder.is_file():
        raise CheckpointError(
            f"{folder} is a file, not a checkpoint directory. If the stock Trainer wrote it, fit(ckpt_path=...) reads"
            f" it as it is, and `lightning-3d convert {folder} DIRECTORY --to 3d` makes a directory of it."
        )
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist or is not a directory, so it is not a checkpoint to load.")
    inside(folder, MANIFEST)
    if _format_of(folder) != FORMAT:
        raise CheckpointError(
            f"{folder} is not a checkpoint of lightning_3d, or writing it was never finished: {folder / MANIFEST} is"
            f" {'foreign' if (folder / MANIFEST).exists() else 'missing'}. {origin_of(folder)}"
        )
    content = read_json(folder / MANIFEST)
    version = content.get("version")
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: its format version is {version!r}; the first was 1.")
    if version > VERSION:
        raise CheckpointError(
            f"{folder / MANIFEST} has format version {version}; this lightning_3d reads versions up to {VERSION}."
            " Upgrade lightning_3d."
        )
    expected = content.pop(_CHECKSUM, None)
    if expected != (found := _checksum(content)):
        raise CheckpointError(
            f"{folder / MANIFEST} is damaged: its content has the checksum {found}, {expected} was written. Take"
            " another checkpoint, or restore this file."
        )
    if wrong := complaint(content):
        raise CheckpointError(f"{folder / MANIFEST} is damaged: {wrong}.")
    known = Manifest.__dataclass_fields__
    manifest = Manifest(**{key: value for key, value in content.items() if key in known})
    for name, num_bytes in [*manifest.files.items()][rank::size]:
        file = inside(folder, name)
        actual = file.stat().st_size if file.is_file() else None
        if actual != num_bytes:
            found_text = "is missing" if actual is None else f"has {actual} bytes"
            raise CheckpointError(f"{file} {found_text}, {num_bytes} bytes were written: the checkpoint is incomplete.")
    return folder, manifest


def check_exists(path: str | os.PathLike[str]) -> None:
    """Look whether a checkpoint can be read, as far as its ``layout.json`` tells; a file of the stock Trainer passes.

    Raises:
        CheckpointError: There is none, or a part of it is missing.
    """
    if not local_path(path).is_file():
        read_manifest(path)


def verify_files(folder: Path, manifest: Manifest, rank: int = 0, size: int = 1) -> None:
    """Compare the files that hold no tensors with their checksums: all, or the share of one of ``size`` ranks.

    Raises:
        CheckpointError: One has changed.
    """
    sizes = [(name, num_bytes) for name, num_bytes in manifest.files.items() if not name.endswith(TENSORS)]
    for name in share(sizes, rank, size):
        verify(inside(folder, name), manifest.checksums.get(name))


def origin_of(folder: Path) -> str:
    """What a directory that is no checkpoint of this package seems to be, and what to do with it."""
    if (folder / "meta.pt").is_file() and (folder / ".metadata").is_file():
        return (
            "It looks like a sharded checkpoint of Lightning's FSDPStrategy or ModelParallelStrategy: make one file of"
            f" it with `python -m lightning.pytorch.utilities.consolidate_checkpoint {folder}` and give that."
        )
    if (folder / "zero_to_fp32.py").is_file() or any(folder.glob("*/*model_states.pt")):
        return (
            "It looks like a checkpoint of DeepSpeed: make one file of it with"
            " lightning.pytorch.utilities.deepspeed.convert_zero_checkpoint_to_fp32_state_dict and give that."
        )
    if (folder / "config.json").is_file():
        return "It looks like a model of Hugging Face: load it with from_pretrained when the module is built."
    return "Give the directory that the Trainer wrote, or a .ckpt file of the stock Trainer."


def inside(folder: Path, name: str) -> Path:
    """The file ``name`` directly in ``folder``.

    Raises:
        CheckpointError: ``name`` leads anywhere else, or is a link that does.
    """
    file = named(folder, name)
    refuse_foreign_link(file)
    return file


def named(folder: Path, name: str) -> Path:
    """The file ``name`` directly in ``folder``; it is not looked at.

    Raises:
        CheckpointError: ``name`` leads anywhere else.
    """
    if not isinstance(name, str) or not name or name in (".", "..") or name != os.path.basename(name) or "\\" in name:
        raise CheckpointError(f"{folder} names the file {name!r}, which is outside of the checkpoint: not read.")
    return folder / name


def located(path: str | os.PathLike[str]) -> Path:
    """``path``, or the former checkpoint set aside if a kill struck between the two renames of a replacement."""
    folder = local_path(path)
    aside = _aside(folder)
    return aside if not folder.exists() and aside.is_dir() else folder


def local_path(path: str | os.PathLike[str]) -> Path:
    """``path`` as an absolute local path.

    Raises:
        CheckpointError: It is a URL.
    """
    text = os.fspath(path)
    if text.startswith("file://"):
        text = text[len("file://") :]
    if "://" in text:
        raise CheckpointError(f"{text!r} is a URL; checkpoints are read and written on file systems only. Give a path.")
    return Path(os.path.abspath(text))


def begin(path: Path) -> None:
    """Make the empty hidden directory beside ``path`` in which the checkpoint is written.

    Raises:
        CheckpointError: ``path`` is a directory with something else in it.
    """
    aside, folder = _aside(path), staging(path)
    if aside.exists():
        if path.exists():
            _remove(aside)
        else:
            os.rename(aside, path)
    if path.is_dir() and not path.is_symlink() and any(path.iterdir()) and not is_checkpoint(path):
        raise CheckpointError(
            f"{path} is a directory that is no checkpoint of lightning_3d; saving there would delete what it holds."
            " Choose another path or remove it."
        )
    _make(path.parent)
    sweep(path.parent)
    _remove(folder)
    claim(path)
    folder.mkdir()


def staging(path: Path) -> Path:
    """The directory in which the checkpoint for ``path`` is written."""
    return hidden(path, SAVING)


def discard(path: Path) -> None:
    """Delete what was written for ``path`` and will not be finished."""
    shutil.rmtree(staging(path), ignore_errors=True)
    release(path)


def publish(path: Path) -> None:
    """Put the finished staging directory in the place of ``path``; what was there is deleted afterwards."""
    folder = staging(path)
    _sync(folder)  # who wrote a file has brought it to the disk
    if not path.exists() and not path.is_symlink():
        os.rename(folder, path)
    elif _exchange(folder, path):
        _sync(path.parent)
        _remove(folder)
    else:
        aside = _aside(path)
        os.rename(path, aside)
        os.rename(folder, path)
        _sync(path.parent)
        _remove(aside)
    release(path)
    _sync(path.parent)


def link(target: Path, path: Path) -> None:
    """Make ``path`` a relative link to ``target``, in the place of a link, file or checkpoint that may be there.

    At every moment something loadable has the name, where the file system can swap two paths.
    """
    fresh = hidden(path, LINK)
    _remove(fresh)
    os.symlink(os.path.relpath(target, path.parent), fresh)
    if not path.is_dir() or path.is_symlink():
        os.replace(fresh, path)
    elif _exchange(fresh, path):
        _sync(path.parent)
        _remove(fresh)
    else:
        remove(path)
        os.rename(fresh, path)
    _sync(path.parent)


def links_to(path: Path) -> list[Path]:
    """The links beside ``path`` that lead to it."""
    siblings = path.parent.iterdir() if path.parent.is_dir() else ()
    return [entry for entry in siblings if entry.is_symlink() and entry.resolve() == path.resolve()]


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint, directory or file; an absent one is no error."""
    folder = local_path(path)
    doomed = folder
    if is_checkpoint(folder) and not folder.is_symlink():
        # A kill in the middle must not leave a directory that still looks like a checkpoint.
        doomed = hidden(folder, REMOVING)
        _remove(doomed)
        os.rename(folder, doomed)
    _remove(doomed)


def write_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Let ``write`` make the file ``path`` and bring it to the disk."""
    write(path)
    _sync(path)


def _make(folder: Path) -> None:
    """A directory with those above it, on the disk."""
    if not folder.exists():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def _aside(path: Path) -> Path:
    return hidden(path, OLD)


def _format_of(folder: Path) -> object:
    manifest = folder / MANIFEST
    return read_json(manifest).get("format") if manifest.is_file() else None


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: The file cannot be read or holds something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is damaged: it holds a {type(content).__name__}, not an object.")
    return content


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two paths in one step, where the system can: there is then no moment without a checkpoint."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if rename is None:
        return False
    return rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0
