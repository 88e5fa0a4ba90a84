"""Whatever happens to a file of a checkpoint, loading names it and changes nothing, or loads what was saved."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_3d.checkpoint import consolidate, directory, load, read, save, write_lightning
from lightning_3d.checkpoint.contents import contents_of
from lightning_3d.config import Sizes
from lightning_3d.errors import CheckpointError
from lightning_3d.mesh import build_mesh
from tests.checkpoint_model import Built, build
from tests.harness import run_ranks

ONE = Sizes(pp=1, dp=1, tp=1)
MESH = build_mesh(ONE, torch.device("cpu"))
FILES = (
    "layout.json",
    "tensors.json",
    "trainer.pt",
    "hyper_parameters.pt",
    "rank_00000.pt",
    ".metadata",
    "__0_0.distcp",
)


def save_all(folder: Path) -> Built:
    built = build(ONE, steps=2)
    rest = {"global_step": 7, "epoch": 1, "optimizer_states": [], "callbacks": {"mine": [1.5, torch.ones(3)]}}
    hyper = {"hyper_parameters": {"lr": 0.1}, "hparams_name": "kwargs"}
    save(folder, {**rest, **hyper}, built.state, built.mesh, rank_state={"seed": torch.arange(4)})
    return built


def tensors_of(built: Built) -> dict[str, torch.Tensor]:
    optimizer = built.state.optimizers[0]
    names = {id(parameter): name for name, parameter in built.model.named_parameters()}
    values = dict(built.model.state_dict())
    for parameter, state in optimizer.state.items():
        values.update({f"{names[id(parameter)]}/{key}": value for key, value in state.items()})
    return {name: value.clone() for name, value in values.items()}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("good") / "c"
    return folder, tensors_of(save_all(folder))


def _flip(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def _cut(file: Path, rng: random.Random) -> None:
    file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size)])


def _grow(file: Path, rng: random.Random) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def _noise(file: Path, rng: random.Random) -> None:
    file.write_bytes(rng.randbytes(file.stat().st_size))


def _zeros(file: Path, rng: random.Random) -> None:
    """As a file system leaves a file whose data had not reached the disk."""
    file.write_bytes(bytes(file.stat().st_size))


def _delete(file: Path, rng: random.Random) -> None:
    file.unlink()


def _folder(file: Path, rng: random.Random) -> None:
    file.unlink()
    file.mkdir()


def _link_out(file: Path, rng: random.Random) -> None:
    """The right content, from somewhere else."""
    elsewhere = file.parent.parent / f"elsewhere_{file.name}"
    shutil.move(file, elsewhere)
    file.symlink_to(elsewhere)


DAMAGE: dict[Callable[[Path, random.Random], None], int] = {
    _flip: 12,
    _cut: 4,
    _grow: 1,
    _noise: 1,
    _zeros: 1,
    _delete: 1,
    _folder: 1,
    _link_out: 1,
}


@pytest.mark.parametrize("name", FILES)
def test_damage_to_any_file_is_named_before_anything_is_changed(
    tmp_path: Path, good: tuple[Path, dict[str, torch.Tensor]], name: str
) -> None:
    source, expected = good
    assert sorted(file.name for file in source.iterdir()) == sorted(FILES), "a new kind of file: give it a place here"
    rng = random.Random(name)
    built = build(ONE, seed=1, steps=1)
    before = tensors_of(built)
    for place, (damage, times) in enumerate(DAMAGE.items()):
        for attempt in range(times):
            folder = tmp_path / f"{place}_{attempt}"
            shutil.copytree(source, folder)
            damage(folder / name, rng)
            for use in (_load_into(built), consolidate, lambda path: write_lightning(path, tmp_path / "out.ckpt")):
                try:
                    use(folder)
                except CheckpointError as error:
                    assert name in str(error), (damage.__name__, str(error))
                else:
                    # Unused bytes, or files that this use does not read.
                    assert use is consolidate or name == "__0_0.distcp", (damage.__name__, name)
            now = tensors_of(built)
            wanted = before if all(torch.equal(now[key], before[key]) for key in before) else expected
            assert all(torch.equal(now[key], wanted[key]) for key in wanted), damage.__name__
            assert not (tmp_path / "out.ckpt").exists() or name == "__0_0.distcp"


def _load_into(built: Built) -> Callable[[Path], Any]:
    return lambda path: load(path, built.state, built.mesh)


def flipped(rank: int, world: int, folder: Path, names: list[str]) -> list[tuple[str, bool]]:
    """What every rank hears of a flipped bit in each file, and whether its part of the model is untouched."""
    built = build(Sizes(pp=1, dp=2, tp=1), seed=1, steps=1)
    before = {name: tensor.detach().clone() for name, tensor in built.state.held}
    heard = []
    for name in names:
        try:
            load(folder / name / "c", built.state, built.mesh)
            text = "nothing"
        except CheckpointError as error:
            text = str(error)
        same = all(torch.equal(tensor, before[key]) for key, tensor in built.state.held)
        heard.append((text, same))
    return heard


def test_damage_is_told_on_every_rank(tmp_path: Path, good: tuple[Path, dict[str, torch.Tensor]]) -> None:
    names = [name for name in FILES if name != "__0_0.distcp"]
    for name in names:
        shutil.copytree(good[0], tmp_path / name / "c")
        _flip(tmp_path / name / "c" / name, random.Random(1))
    for rank in run_ranks(flipped, 2, tmp_path, names):
        for name, (text, untouched) in zip(names, rank, strict=True):
            assert name in text and untouched, (name, text)


def test_directories_of_others_are_recognised(tmp_path: Path) -> None:
    for place, (files, hint) in enumerate(
        [
            (("meta.pt", ".metadata", "__0_0.distcp"), "consolidate_checkpoint"),
            (("latest", "zero_to_fp32.py"), "DeepSpeed"),
            (("config.json", "model.safetensors"), "from_pretrained"),
            (("notes.txt",), "a .ckpt file"),
        ]
    ):
        folder = tmp_path / str(place)
        folder.mkdir()
        for name in files:
            (folder / name).write_text("x")
        with pytest.raises(CheckpointError, match=hint):
            read(folder, MESH)
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "layout.json").write_text(json.dumps({"format": "theirs"}))
    with pytest.raises(CheckpointError, match="foreign"):
        read(tmp_path / "json", MESH)


class Runs:
    """An object that does something when it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('ran')",)


@pytest.mark.parametrize("name", ["trainer.pt", "rank_00000.pt", "hyper_parameters.pt"])
def test_nothing_is_run_by_what_a_file_holds(tmp_path: Path, name: str) -> None:
    """A file whose author has also made its checksum fit."""
    from tests.unit.test_checkpoint import sign

    save_all(tmp_path / "c")
    torch.save({"rank_state": Runs(), "callbacks": Runs()}, tmp_path / "c" / name)
    sign(tmp_path / "c")
    if name == "hyper_parameters.pt":
        with pytest.warns(UserWarning, match="Hyper-parameters are left out"):
            read(tmp_path / "c", MESH)
    else:
        with pytest.raises(CheckpointError, match=rf"{name} holds objects .*weights_only=False"):
            read(tmp_path / "c", MESH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": 5}, "keys is 5, not a list"),
        ({"keys": [7]}, r"keys\[0\] is 7, not a text"),
        ({"layout": 3}, "layout is 3, not an object"),
        ({"optimizers": [{}]}, r"optimizers\[0\] lacks 'class'"),
        ({"optimizers": [{"class": "A", "groups": [{"names": []}], "scalars": {}}]}, r"groups\[0\] lacks 'options'"),
        (
            {"optimizers": [{"class": "A", "groups": [{"names": [], "options": {"lr": {}}}], "scalars": {}}]},
            "the options of a parameter group cannot be read",
        ),
        ({"checksums": []}, r"checksums is \[\], not an object"),
        ({"files": {"a": "b"}}, r"files\['a'\] is 'b', not a whole number"),
        ({"copies": [{"path": "x", "keys": []}]}, r"copies\[0\].path is 'x', not a list"),
        ({"ties": [1]}, r"ties is \[1\], not an object"),
        ({"global_step": "x"}, "global_step is 'x', not a whole number"),
        ({"epoch": True}, "epoch is True, not a whole number"),
        ({"written_by": None}, "written_by is None, not an object"),
        ({"version": 0}, "format version is 0"),
        ({"version": -1}, "format version is -1"),
        ({"version": "1"}, "format version is '1'"),
    ],
    ids=str,
)
def test_a_manifest_of_the_wrong_form_is_named_with_the_reason(good, tmp_path, change, message):
    folder = shutil.copytree(good[0], tmp_path / "c")
    file = folder / "layout.json"
    file.write_text(directory.signed({**json.loads(file.read_text()), **change}))
    for action in (contents_of, consolidate, lambda path: read(path, MESH)):
        with pytest.raises(CheckpointError, match=f"layout.json is damaged: .*{message}"):
            action(folder)


def test_a_manifest_that_lacks_a_field_is_named(good, tmp_path):
    folder = shutil.copytree(good[0], tmp_path / "c")
    file = folder / "layout.json"
    content = json.loads(file.read_text())
    for name in content.keys() - {"format", "version", "checksum"}:
        file.write_text(directory.signed({key: value for key, value in content.items() if key != name}))
        with pytest.raises(CheckpointError, match=f"layout.json is damaged: it lacks '{name}'"):
            contents_of(folder)
