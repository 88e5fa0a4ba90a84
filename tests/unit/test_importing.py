"""``convert --to 3d``: files of the stock Trainer and Hugging Face folders become directories that runs resume from."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import RandomDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy
from lightning_3d.checkpoint import consolidate, import_lightning, to_lightning
from lightning_3d.checkpoint.stock_optimizer import names_of_groups
from lightning_3d.cli.command import main
from lightning_3d.errors import CheckpointError


class Module(pl.LightningModule):
    """Two layers of one shape, tied ones, batch norm; groups and names as asked for."""

    def __init__(self, kind: str = "groups") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.kind = kind
        self.model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8))
        self.model[3].weight = self.model[0].weight

    def training_step(self, batch: Tensor) -> Tensor:
        return self.model(batch).square().mean()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(RandomDataset(8, 32), batch_size=4)

    def configure_optimizers(self) -> Any:
        if self.kind == "names":
            optimizer: Any = torch.optim.AdamW(self.model.named_parameters(), lr=0.1)
        elif self.kind == "reversed":
            optimizer = torch.optim.AdamW(list(self.parameters())[::-1], lr=0.1)
        else:
            decayed = [value for value in self.parameters() if value.dim() > 1]
            rest = [value for value in self.parameters() if value.dim() < 2]
            groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
            optimizer = torch.optim.AdamW(groups, lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def trainer(folder: Path, **kwargs: Any) -> pl.Trainer:
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(default_root_dir=folder, enable_checkpointing=False, **options, **kwargs)


def fitted(folder: Path, ckpt: Path | None, kind: str, steps: int, **kwargs: Any) -> Module:
    pl.seed_everything(1)
    module = Module(kind)
    trainer(folder, max_steps=steps, **kwargs).fit(module, ckpt_path=ckpt)
    return module


@pytest.fixture
def stock(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    pl.seed_everything(1)
    first = trainer(tmp_path, max_steps=3)
    first.fit(Module(getattr(request, "param", "groups")))
    first.save_checkpoint(tmp_path / "stock.ckpt")
    return tmp_path / "stock.ckpt"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stock", ["groups", "names"], indirect=True)
def test_a_run_goes_on_from_the_converted_file_as_from_the_file(
    stock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "c"
    assert main(["convert", str(stock), str(target), "--to", "3d", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["step"] == 3 and printed["optimizers"] == 1 and printed["left_out"] == []
    assert main(["inspect", str(target), "--verify"]) == 0
    assert "model.3.weight is model.0.weight" in capsys.readouterr().out
    saved, back = torch.load(stock), to_lightning(target)
    assert set(back) == set(saved)
    torch.testing.assert_close(back["state_dict"], saved["state_dict"], rtol=0, atol=0)
    states = [content["optimizer_states"][0]["state"] for content in (back, saved)]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    kind = saved["hyper_parameters"]["kind"]
    expected = fitted(tmp_path, stock, kind, 6)
    strategy = ThreeDStrategy(pipeline_parallel=1, tensor_parallel=1)
    resumed = fitted(tmp_path, target, kind, 6, strategy=strategy)
    torch.testing.assert_close(resumed.state_dict(), expected.state_dict(), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stock", ["reversed"], indirect=True)
def test_state_without_certain_names_is_left_out_and_told(
    stock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(stock), str(tmp_path / "c"), "--to", "3d", "--json"]) == 0
    printed = capsys.readouterr()
    (text,) = json.loads(printed.out)["left_out"]
    assert "do not come in the order" in text and text in printed.err
    strategy = ThreeDStrategy(pipeline_parallel=1, tensor_parallel=1)
    with pytest.warns(UserWarning, match="starts from zero, with the saved options"):
        module = fitted(tmp_path, tmp_path / "c", "reversed", 4, strategy=strategy)
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**4)
    assert all(state["step"] == 1 for state in module.trainer.optimizers[0].state.values())


def test_names_are_given_only_where_there_is_one_way() -> None:
    tensors = {name: torch.zeros(shape) for name, shape in {"a": (2,), "b": (2,), "c": (3,)}.items()}

    def named(*groups: list[Any], **more: Any) -> list[list[str]] | str:
        numbers = iter(range(9))
        params = [[next(numbers) for _ in own] for own in groups]
        shapes = [shape for own in groups for shape in own]
        state = {number: {"exp_avg": torch.zeros(shape)} for number, shape in enumerate(shapes) if shape}
        return names_of_groups({"state": state, "param_groups": [{"params": own, **more} for own in params]}, tensors)

    assert named([2, 2, 3]) == [["a", "b", "c"]]
    assert named([None, None, None]) == [["a", "b", "c"]]
    assert named([3], [2, 2]) == [["c"], ["a", "b"]]
    assert "several ways" in named([2, 3])
    assert "several ways" in named([2], [2, 3])
    assert "do not come in the order" in named([3, 2, 2])
    assert named([2, 3], param_names=["b", "c"]) == [["b", "c"]]
    assert "has the shape" in named([3, 2], param_names=["b", "c"])
    assert "not in the state dict" in named([2, 3], param_names=["b", "z"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sharded", [False, True])
def test_a_run_begins_from_a_hugging_face_folder(tmp_path: Path, sharded: bool) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    pl.seed_everything(2)
    weights = {key: value.clone() for key, value in Module().model.state_dict().items() if key != "3.weight"}
    source = tmp_path / "hf"
    source.mkdir()
    if sharded:
        names = {key: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, key in enumerate(weights)}
        for file in set(names.values()):
            own = {key: value for key, value in weights.items() if names[key] == file}
            safetensors.save_file(own, source / file)
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    else:
        safetensors.save_file(weights, source / "model.safetensors")
    target = tmp_path / "c"
    assert main(["convert", str(source), str(target), "--to", "3d", "--prefix", "model"]) == 0
    torch.testing.assert_close(consolidate(target), {f"model.{key}": value for key, value in weights.items()})
    strategy = ThreeDStrategy(pipeline_parallel=1, tensor_parallel=1)
    resumed = fitted(tmp_path, target, "groups", 2, strategy=strategy)
    pl.seed_everything(1)
    expected = Module()
    expected.model.load_state_dict(weights, strict=False)
    trainer(tmp_path, max_steps=2).fit(expected)
    assert resumed.trainer.global_step == 2
    torch.testing.assert_close(resumed.state_dict(), expected.state_dict())


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_converted_or_inspected_is_said_in_one_line(
    stock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    assert main(["convert", str(stock), str(tmp_path / "c"), "--to", "3d"]) == 0
    text, empty, c = str(tmp_path / "notes.txt"), str(tmp_path / "empty"), str(tmp_path / "c")
    capsys.readouterr()
    for words, message in (
        (["convert", str(stock), str(stock), "--to", "3d"], "is a file; a directory is to be written"),
        (["convert", str(stock), text + "/x", "--to", "3d"], "notes.txt"),
        (["convert", c, text + "/x.ckpt", "--to", "ckpt"], "notes.txt"),
        (["convert", c, "/proc/nowhere/x.ckpt", "--to", "ckpt"], "/proc/nowhere"),
        (["convert", c, c + "2", "--to", "3d"], "is a checkpoint directory already"),
        (["convert", empty, c + "2", "--to", "3d"], "holds neither model.safetensors"),
        (["convert", text, c + "2", "--to", "3d"], "notes.txt"),
        (["convert", str(stock), c + "2", "--to", "3d", "--prefix", "m"], "only with a Hugging Face folder"),
        (["convert", str(stock), c + "2", "--to", "ckpt"], "is a file, not a checkpoint directory"),
        (["inspect", text], "is a file, not a checkpoint directory"),
        (["inspect", str(stock), "--verify"], "only checkpoint directories have checksums"),
        (["inspect", "http://a/b"], "'http://a/b' is a URL"),
        (["inspect", ""], "An empty path"),
    ):
        assert main(words) == 2, words
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error and error.count("\n") == 1, error
    assert torch.load(stock)["global_step"] == 3
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["inspect", "~/c"]) == 0
    assert main(["inspect", "~/stock.ckpt"]) == 0
    shown = capsys.readouterr().out
    assert "file of the stock Trainer" in shown and "model.1.running_mean" in shown and "0.0729" in shown
    assert main(["inspect", str(stock), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["global_step"] == 3 and content["tensors"]["model.0.weight"]["shape"] == [8, 8]


def test_objects_of_user_classes_need_trust(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "odd.ckpt"
    torch.save({"state_dict": {"w": torch.ones(2)}, "hyper_parameters": {"path": tmp_path}}, file)
    with pytest.raises(CheckpointError, match="more than tensors"):
        import_lightning(file, tmp_path / "c")
    assert main(["convert", str(file), str(tmp_path / "c"), "--to", "3d"]) == 2
    assert "--trust" in capsys.readouterr().err and not (tmp_path / "c").exists()
    assert main(["convert", str(file), str(tmp_path / "c"), "--to", "3d", "--trust"]) == 0
    assert torch.equal(consolidate(tmp_path / "c")["w"], torch.ones(2))


@pytest.mark.filterwarnings("ignore")
def test_a_reader_that_leaves_ends_the_command_quietly(
    stock: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        assert main(["inspect", str(stock), "--json"]) == 141
    assert capsys.readouterr().err == ""
