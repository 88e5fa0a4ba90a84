"""Token files are read where they lie, every window once, in an order that a seed decides."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_3d.models import TokenFiles
from lightning_3d.models.tokens import Shuffled


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.arange(0, 103, dtype=np.uint16).tofile(tmp_path / "train-0.bin")
    np.save(tmp_path / "train-1.npy", np.arange(70_000, 70_041, dtype=np.uint32))
    np.arange(5, dtype=np.uint16).tofile(tmp_path / "short.bin")
    return tmp_path


def data(folder: Path, **options: object) -> TokenFiles:
    made = TokenFiles(f"{folder}/train-*", sequence_length=10, batch_size=2, num_workers=0, **options)  # type: ignore[arg-type]
    made.setup("fit")
    return made


def test_windows_of_several_files_and_types_hold_every_token_in_its_order(folder: Path) -> None:
    windows = data(folder).training_windows
    assert windows is not None
    assert len(windows) == 14
    assert torch.equal(windows[0], torch.arange(11))
    assert torch.equal(windows[9], torch.arange(90, 101))
    assert torch.equal(windows[10], torch.arange(70_000, 70_011))
    assert torch.equal(windows[13], torch.arange(70_030, 70_041))
    with pytest.raises(IndexError):
        windows[14]


def test_an_epoch_has_every_window_once_in_the_order_of_its_seed(folder: Path) -> None:
    def order(seed: int) -> list[int]:
        return [int(row[0]) for batch in data(folder, seed=seed).train_dataloader() for row in batch]

    assert sorted(order(0)) == [*range(0, 100, 10), *range(70_000, 70_040, 10)]
    assert order(0) == order(0) != order(1)


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 1000, 70_000])
def test_a_computed_order_is_a_permutation(count: int) -> None:
    assert sorted(Shuffled(count, seed=3)) == list(range(count))


def test_a_computed_order_is_another_in_every_epoch_and_far_from_sorted() -> None:
    sampler = Shuffled(4096, seed=0)
    first = np.array(list(sampler))
    sampler.set_epoch(1)
    second = np.array(list(sampler))
    places = np.arange(4096)
    for order in (first, second):
        assert abs(np.corrcoef(places, order)[0, 1]) < 0.06
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.06
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.06


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": "nothing-*.bin"}, "No file matches 'nothing-\\*.bin'"),
        ({"train": "short.bin"}, "5 tokens, less than one sample of sequence_length=10"),
        ({"train": "matrix.npy"}, "float64 \\[2, 2\\], not whole numbers in one dim"),
        ({"train": "odd.bin", "dtype": "uint32"}, "odd.bin cannot be read as tokens of type uint32"),
        ({"train": "x", "dtype": "uint8"}, "dtype='uint8' is not known"),
    ],
)
def test_what_holds_no_tokens_is_refused(
    options: dict[str, str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    np.save("matrix.npy", np.zeros((2, 2)))
    Path("odd.bin").write_bytes(b"123")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        TokenFiles(sequence_length=10, **options).setup("fit")  # type: ignore[arg-type]


def test_windows_travel_to_other_processes_without_the_tokens(folder: Path) -> None:
    windows = data(folder).training_windows
    assert windows is not None
    sent = pickle.dumps(windows)
    assert len(sent) < 1000 + sum(len(str(path)) for path in windows.files)
    np.arange(3, 106, dtype=np.uint16).tofile(windows.files[0])
    assert torch.equal(pickle.loads(sent)[0], torch.arange(3, 14))
