"""Files of tokens, mapped instead of read: for corpora that fit into no memory."""

from __future__ import annotations

import glob
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

DTYPES = {"uint16": np.uint16, "uint32": np.uint32, "int32": np.int32, "int64": np.int64}


class TokenWindows(Dataset[Tensor]):
    """Windows of ``length + 1`` tokens, each starting where the one before in its file ends.

    Args:
        files: Files of tokens: ``.npy`` arrays of one dim, or anything else as raw numbers of type ``dtype``.
        length: Tokens to predict per window.
        dtype: Type of the numbers in raw files.

    Raises:
        ValueError: If a file is missing or holds something else than tokens, or all of them less than one window.
    """

    def __init__(self, files: Sequence[Path], length: int, dtype: str) -> None:
        self.files = tuple(files)
        self.length = length
        self.dtype = dtype
        self.arrays = [_mapped(path, dtype) for path in self.files]
        self.ends = list(accumulate(max(0, (len(array) - 1) // length) for array in self.arrays))
        if not self.ends or not self.ends[-1]:
            held = sum(len(array) for array in self.arrays)
            raise ValueError(
                f"{', '.join(map(str, files))}: {held} tokens, less than one sample of sequence_length={length}. Give"
                " longer files, or a shorter sequence_length."
            )

    def __getstate__(self) -> dict[str, Any]:
        # A mapped array pickles as all that is in its file; processes that start anew map the files themselves.
        return {**vars(self), "arrays": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, arrays=[_mapped(path, state["dtype"]) for path in state["files"]])

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Tensor:
        """Return window ``index`` as ``int64`` tokens of shape ``[length + 1]``."""
        if not 0 <= index < len(self):
            raise IndexError(f"Window {index} of {len(self)}.")
        file = bisect_right(self.ends, index)
        start = (index - (self.ends[file - 1] if file else 0)) * self.length
        return torch.from_numpy(self.arrays[file][start : start + self.length + 1].astype(np.int64))


class Shuffled(Sampler[int]):
    """Every index once, in an order that depends on the seed and the pass; the order is computed, never stored.

    Samplers of torch hold a list of all indices, several gigabytes for a corpus of 10^8 samples. This one takes indices
    through a permutation of the next power of four (a Feistel network of four rounds) and leaves out what is too large.

    Args:
        count: Number of indices.
        seed: Decides the order.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self.seed = seed
        self.epoch = 0
        self._half = max(1, math.ceil(math.log2(max(count, 2)) / 2))

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of pass ``epoch``; Lightning calls it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        keys = np.random.default_rng((self.seed, self.epoch)).integers(2**32, size=4, dtype=np.uint64)
        for start in range(0, 1 << 2 * self._half, 65536):
            stop = min(start + 65536, 1 << 2 * self._half)
            permuted = self._permute(np.arange(start, stop, dtype=np.uint64), keys)
            yield from permuted[permuted < self.count].tolist()

    def _permute(self, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        half, mask = np.uint64(self._half), np.uint64((1 << self._half) - 1)
        left, right = values >> half, values & mask
        for key in keys:
            mixed = (right ^ key) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
            mixed *= np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ (mixed >> np.uint64(32)) & mask
        return (left << half) | right


class TokenFiles(LightningDataModule):
    """Tokens from files on disk: raw numbers (as nanoGPT and many tokenizers write them) or ``.npy`` arrays.

    Args:
        train: Files to train on: paths or patterns such as ``"data/train-*.bin"``.
        validation: Files to validate on; none: no validation.
        sequence_length: Tokens to predict per sample.
        batch_size: Samples per batch in each replica, unless the strategy is given a ``global_batch_size``.
        dtype: Type of the numbers in raw files: ``"uint16"`` (vocabularies up to 65,536), ``"uint32"``, ``"int32"`` or
            ``"int64"``. The ``.npy`` files know their own.
        num_workers: Processes that read, per replica; 0 reads in the training process.
        seed: Decides the order of the training samples, and nothing else.

    Raises:
        FileNotFoundError: If no file matches a pattern.
        ValueError: If a file holds no tokens.
    """

    def __init__(
        self,
        train: str | list[str],
        validation: str | list[str] | None = None,
        sequence_length: int = 2048,
        batch_size: int = 1,
        dtype: str = "uint16",
        num_workers: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r} is not known: choose from {', '.join(map(repr, DTYPES))}.")
        self.train = train
        self.validation = validation
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.dtype = dtype
        self.num_workers = num_workers
        self.seed = seed
        self.training_windows: TokenWindows | None = None
        self.validation_windows: TokenWindows | None = None

    def setup(self, stage: str) -> None:
        """Map the files."""
        if self.training_windows is None and stage == "fit":
            self.training_windows = self._windows(self.train)
        if self.validation_windows is None and self.validation is not None:
            self.validation_windows = self._windows(self.validation)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return the training batches, in an order that depends on ``seed`` and the epoch alone."""
        assert self.training_windows is not None
        order = Shuffled(len(self.training_windows), self.seed)
        return self._loader(self.training_windows, sampler=order, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor] | list[DataLoader[Tensor]]:
        """Return the validation batches, in the order of the files; none without validation files."""
        return [] if self.validation_windows is None else self._loader(self.validation_windows)

    def test_dataloader(self) -> DataLoader[Tensor] | list[DataLoader[Tensor]]:
        """Return the validation batches: there is no third part."""
        return self.val_dataloader()

    def _loader(
        self, windows: TokenWindows, sampler: Sampler[int] | None = None, drop_last: bool = False
    ) -> DataLoader[Tensor]:
        return DataLoader(
            windows,
            batch_size=self.batch_size,
            sampler=sampler,
            drop_last=drop_last,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )

    def _windows(self, patterns: str | list[str]) -> TokenWindows:
        files: list[Path] = []
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            found = sorted(glob.glob(pattern, recursive=True))
            if not found:
                raise FileNotFoundError(
                    f"No file matches {pattern!r} (seen from {Path.cwd()}): give a path or a pattern."
                )
            files += map(Path, found)
        return TokenWindows(files, self.sequence_length, self.dtype)


def _mapped(path: Path, dtype: str) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r") if path.suffix == ".npy" else np.memmap(path, DTYPES[dtype], mode="r")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as tokens of type {dtype}: {error}.") from error
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{path} holds an array of {array.dtype} {list(array.shape)}, not whole numbers in one dim. Write the"
            " tokens of all documents one after another."
        )
    return array
