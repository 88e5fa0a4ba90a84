"""Text as bytes: the files of a folder, split into training and validation files, as fixed-length windows."""

from __future__ import annotations

import math
import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
"""Folders inside Python's library folder that are not the library: other people's packages, and tests."""


class Windows(Dataset[Tensor]):
    """Windows of ``length + 1`` bytes of one long byte tensor, each starting where the one before ends.

    Args:
        data: Bytes, ``uint8`` of shape ``[num_bytes]``.
        length: Tokens to predict per window.
        count: Take only this many windows, evenly spaced over the data; all when None.
    """

    def __init__(self, data: Tensor, length: int, count: int | None = None) -> None:
        available = (len(data) - 1) // length
        self.data = data
        self.length = length
        self.count = available if count is None else min(count, available)
        self.available = available

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        """Return window ``index`` as ``int64`` tokens of shape ``[length + 1]``."""
        if not 0 <= index < self.count:
            raise IndexError(f"Window {index} of {self.count}.")
        start = index * self.available // self.count * self.length
        return self.data[start : start + self.length + 1].long()


class ByteText(LightningDataModule):
    """The bytes of all text files under a folder; some files train, the others validate.

    A file belongs to training or validation by a hash of its path, so that the split is the same on every machine with
    the same files, and stays the same for all other files when one is added.

    Args:
        folder: Where to look for files; by default the sources of Python's own standard library (without tests).
        pattern: Which files to take, searched in all sub-folders.
        sequence_length: Tokens to predict per sample.
        batch_size: Samples per batch in each replica, unless the strategy is given a ``global_batch_size``.
        validation_share: Share of the files that is kept for validation.
        num_validation_samples: Validation uses this many samples, evenly spaced over the validation files.
        seed: Decides the order of the training samples, and nothing else.

    Raises:
        ValueError: ``folder`` is not there.
    """

    def __init__(
        self,
        folder: str | None = None,
        pattern: str = "*.py",
        sequence_length: int = 128,
        batch_size: int = 16,
        validation_share: float = 0.05,
        num_validation_samples: int = 256,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"folder={folder!r} is not a folder: give the path of one that holds text files.")
        self.folder = folder
        self.pattern = pattern
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.validation_share = validation_share
        self.num_validation_samples = num_validation_samples
        self.seed = seed
        self.training: Windows | None = None
        self.validation: Windows | None = None
        self.unigram_entropy = math.nan

    def setup(self, stage: str) -> None:
        """Read the files once; ``unigram_entropy`` (nats per byte) is then known.

        Raises:
            ValueError: The files hold too little text for one sample.
        """
        if self.training is not None:
            return
        training_files, validation_files = self.split()
        training, validation = _read(training_files), _read(validation_files)
        self.unigram_entropy = entropy(torch.cat([training, validation]))
        self.training = Windows(training, self.sequence_length)
        self.validation = Windows(validation, self.sequence_length, self.num_validation_samples)
        for name, windows in (("training", self.training), ("validation", self.validation)):
            if len(windows) == 0:
                raise ValueError(
                    f"The {name} files hold {len(windows.data)} bytes, less than one sample of "
                    f"sequence_length={self.sequence_length}: give a folder with more text, or a shorter length."
                )

    def split(self) -> tuple[list[Path], list[Path]]:
        """Return the training files and the validation files, each sorted by path.

        Raises:
            ValueError: One of the two would be empty.
        """
        root = Path(self.folder or sysconfig.get_paths()["stdlib"])
        excluded = NOT_LIBRARY if self.folder is None else frozenset()
        training: list[Path] = []
        validation: list[Path] = []
        for path in sorted(root.rglob(self.pattern)):
            relative = path.relative_to(root)
            if not path.is_file() or excluded.intersection(relative.parts):
                continue
            share = zlib.crc32(relative.as_posix().encode()) / 2**32
            (validation if share < self.validation_share else training).append(path)
        if not training or not validation:
            raise ValueError(
                f"{str(root)!r} has {len(training)} training and {len(validation)} validation files that match "
                f"pattern={self.pattern!r}: both need at least one. Give a folder with more files, another pattern, "
                f"or another validation_share than {self.validation_share}."
            )
        return training, validation

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return the training batches, in an order that depends on ``seed`` alone."""
        assert self.training is not None
        order = torch.Generator().manual_seed(self.seed)
        return DataLoader(self.training, batch_size=self.batch_size, shuffle=True, generator=order, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Return the validation batches."""
        assert self.validation is not None
        return DataLoader(self.validation, batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader[Tensor]:
        """Return the validation batches: there is no third part."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Tensor]:
        """Return the validation batches."""
        return self.val_dataloader()


def entropy(data: Tensor) -> float:
    """Return the entropy in nats of the frequencies of the values in ``data``: the loss of knowing no context."""
    counts = torch.bincount(data.int()).double()
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log()).sum())


def _read(files: Sequence[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8)
