"""Checkpoints in one process: what is kept, what is refused, and that there is never half of one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from lightning_3d import ThreeDStrategy
from lightning_3d.checkpoint import (
    ModelState,
    consolidate,
    directory,
    gather,
    is_checkpoint,
    load,
    original_name,
    read,
    remove,
    save,
    state_dict_keys,
    to_lightning,
    write_lightning,
)
from lightning_3d.checkpoint.integrity import checksum, share
from lightning_3d.checkpoint.layout import Shard, local_chunks
from lightning_3d.checkpoint.options import decode_options, encode_options
from lightning_3d.checkpoint.reader import read_index
from lightning_3d.checkpoint.state import Entry
from lightning_3d.checkpoint.writer import _ChunkPlanner, share_out
from lightning_3d.config import Sizes
from lightning_3d.errors import CheckpointError
from lightning_3d.mesh import build_mesh
from tests.checkpoint_model import Model, build

MESH = build_mesh(Sizes(pp=1, dp=1, tp=1), torch.device("cpu"))


def state_of(module: nn.Module, *optimizers: torch.optim.Optimizer) -> ModelState:
    keys, ties = state_dict_keys(module)
    buffers = {name: buffer for name, buffer in module.named_buffers() if original_name(name) in keys}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return ModelState(parameters=parameters, buffers=buffers, keys=keys, ties=ties, optimizers=optimizers)


def trained(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 0.1 + step)
        optimizer.step(lambda: torch.tensor(1.0))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    built = build(Sizes(pp=1, dp=1, tp=1))
    save(tmp_path / "c", {"global_step": 1, "optimizer_states": []}, built.state, built.mesh)
    return tmp_path / "c"


def test_consolidation_gives_the_state_dict_of_the_plain_module(tmp_path):
    model = Model(dtype=torch.bfloat16)
    model.blocks[0].norm.half()
    save(tmp_path / "c", {}, state_of(model), MESH)
    full = consolidate(tmp_path / "c")
    assert list(full) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert full[name].dtype == tensor.dtype and torch.equal(full[name], tensor)
    assert full["head.weight"] is full["embed.weight"]
    assert not any("scratch" in name for name in full)


def test_a_plain_dcp_reader_understands_the_directory(saved):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(saved, saved.parent / "plain.pt")
    plain = torch.load(saved.parent / "plain.pt")
    assert torch.equal(plain["model.embed.weight"], consolidate(saved)["embed.weight"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.complex64, torch.bool, torch.int8, torch.uint16])
def test_types_and_odd_shapes_are_kept(tmp_path, dtype):
    module = nn.Module()
    for name, shape in {"scalar": (), "empty": (0, 3), "odd": (3, 1, 5)}.items():
        module.register_buffer(name, torch.arange(torch.Size(shape).numel()).view(shape).to(dtype))
    module.register_buffer("strided", torch.arange(12).view(3, 4).to(dtype).t())
    save(tmp_path / "c", {}, state_of(module), MESH)
    write_lightning(tmp_path / "c", tmp_path / "file.ckpt")
    for values in (consolidate(tmp_path / "c"), torch.load(tmp_path / "file.ckpt", mmap=True)["state_dict"]):
        for name, tensor in values.items():
            assert torch.equal(tensor, getattr(module, name)) and tensor.dtype == dtype


def test_compiled_and_wrapped_modules_have_plain_names_both_ways(tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def make(wrapped: bool) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        if not wrapped:
            return model
        inner = nn.Sequential(checkpoint_wrapper(model[0]), torch.compile(model[1], backend="eager"))
        return torch.compile(inner, backend="eager")

    for wrapped in (True, False):
        source, target = make(wrapped), make(not wrapped)
        save(tmp_path / "c", {}, state_of(source), MESH)
        assert list(consolidate(tmp_path / "c")) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        load(tmp_path / "c", state_of(target), MESH)
        assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))


def test_two_parameters_of_one_plain_name_are_refused():
    parameters = {"a.weight": torch.zeros(1), "_orig_mod.a.weight": torch.ones(1)}
    with pytest.raises(CheckpointError, match=r"a\.weight"):
        ModelState(parameters=parameters, keys=("a.weight",))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), betas=(0.8, 0.9), amsgrad=True),
        lambda p: torch.optim.Adafactor(p, lr=0.1),
        lambda p: torch.optim.Rprop(p, lr=0.1),
        lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
    ],
    ids=["sgd", "momentum", "adam", "adafactor", "rprop", "lbfgs"],
)
def test_state_and_options_of_optimizers_are_kept(tmp_path, make):
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    optimizer, fresh = make(model.parameters()), make(other.parameters())
    trained(model, optimizer)
    optimizer.param_groups[0]["lr"] *= 0.5
    save(tmp_path / "c", {"optimizer_states": [optimizer.state_dict()]}, state_of(model, optimizer), MESH)
    load(tmp_path / "c", state_of(other, fresh), MESH)
    torch.testing.assert_close(fresh.state_dict(), optimizer.state_dict(), rtol=0, atol=0)
    trained(model, optimizer)
    trained(other, fresh)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_float32_moments_of_bfloat16_parameters_keep_their_digits(tmp_path):
    model, other = nn.Linear(4, 3).bfloat16(), nn.Linear(4, 3).bfloat16()
    optimizer, fresh = (torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (model, other))
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.rand(parameter.shape)
    save(tmp_path / "c", {"optimizer_states": []}, state_of(model, optimizer), MESH)
    load(tmp_path / "c", state_of(other, fresh), MESH)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        kept, loaded = optimizer.state[a]["momentum_buffer"], fresh.state[b]["momentum_buffer"]
        assert loaded.dtype == torch.float32 and torch.equal(kept, loaded)


def test_options_follow_the_parameters_into_other_groups(tmp_path):
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    one = torch.optim.AdamW([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.25}])
    swapped = torch.optim.AdamW([{"params": [other.bias]}, {"params": [other.weight]}])
    joined = torch.optim.AdamW(other.parameters())
    trained(model, one)
    save(tmp_path / "c", {"optimizer_states": []}, state_of(model, one), MESH)
    load(tmp_path / "c", state_of(other, swapped), MESH)
    assert [group["lr"] for group in swapped.param_groups] == [0.25, 0.5]
    assert torch.equal(swapped.state[other.weight]["exp_avg"], one.state[model.weight]["exp_avg"])
    with pytest.raises(CheckpointError, match=r"options .* differ"):
        load(tmp_path / "c", state_of(other, joined), MESH)


def test_options_return_as_they_were():
    group = {
        "params": [1],
        "lr": 0.1,
        "betas": (0.9, float("inf")),
        "maximize": None,
        "names": ["a"],
        "t": torch.tensor(2),
    }
    plain, other = encode_options({**group, "schedule": print})
    assert other == {"schedule": print}
    decoded = decode_options(json.loads(json.dumps(plain)))
    assert decoded == {key: value for key, value in group.items() if key != "params"}


def test_names_that_do_not_fit_are_listed(saved):
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(1001, 12)
            self.fresh = nn.Linear(2, 2)

    other = Other()
    with pytest.raises(CheckpointError) as error:
        load(saved, state_of(other), MESH)
    assert "lacks 'fresh.weight', 'fresh.bias'" in str(error.value) and "and 21 more" in str(error.value)
    before = other.fresh.weight.clone()
    load(saved, state_of(other), MESH, strict=False)
    assert torch.equal(other.fresh.weight, before)
    assert torch.equal(other.embed.weight, consolidate(saved)["embed.weight"])


def test_a_shape_that_does_not_fit_is_named(saved):
    with pytest.raises(CheckpointError, match=r"'embed.weight' has shape \(1001, 12\) in the checkpoint and \(7, 12\)"):
        load(saved, state_of(nn.ModuleDict({"embed": nn.Embedding(7, 12)})), MESH, strict=False)


def test_a_parameter_new_to_the_optimizer_is_named(tmp_path):
    model = nn.Linear(2, 2)
    part, whole = torch.optim.AdamW([model.weight]), torch.optim.AdamW(model.parameters())
    trained(model, part)
    save(tmp_path / "c", {"optimizer_states": []}, state_of(model, part), MESH)
    with pytest.raises(CheckpointError, match="no state of optimizer 0 for 'bias'"):
        load(tmp_path / "c", state_of(model, whole), MESH)
    load(tmp_path / "c", state_of(model, whole), MESH, strict=False)
    assert whole.state[model.weight] and not whole.state[model.bias]


def test_hooks_may_drop_replace_and_add_entries_of_the_state_dict(tmp_path):
    model = nn.Linear(2, 2)
    values = {"weight": model.weight.detach() + 1, "extra": torch.arange(3)}
    save(tmp_path / "c", {"state_dict": values}, state_of(model), MESH)
    full = consolidate(tmp_path / "c")
    assert list(full) == ["weight", "extra"]
    assert torch.equal(full["weight"], model.weight + 1) and full["extra"].tolist() == [0, 1, 2]
    checkpoint = read(tmp_path / "c", MESH)
    assert checkpoint["state_dict"]["weight"].shape == (2, 2)


def test_a_model_without_optimizers_in_the_dict_is_saved_alone(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer)
    save(tmp_path / "c", {"state_dict": model.state_dict()}, state_of(model, optimizer), MESH)
    assert "optimizer_states" not in read(tmp_path / "c", MESH)
    assert "exp_avg" not in (tmp_path / "c" / "tensors.json").read_text()


def test_extra_state_of_modules_is_kept(tmp_path):
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self):
            return {"count": self.count}

        def set_extra_state(self, state):
            self.count = state["count"]

    model, other = nn.Sequential(Counting(2, 2), nn.Linear(2, 2)), nn.Sequential(Counting(2, 2), nn.Linear(2, 2))
    model[0].count = 5
    save(tmp_path / "c", {"state_dict": model.state_dict()}, state_of(model), MESH)
    full = consolidate(tmp_path / "c")
    assert list(full) == list(model.state_dict()) and full["0._extra_state"] == {"count": 5}
    load(tmp_path / "c", dataclasses.replace(state_of(other), module=other), MESH)
    assert other[0].count == 5
    with pytest.raises(CheckpointError, match=r"'0\._extra_state' is extra state"):
        load(tmp_path / "c", state_of(other), MESH)


# What must not be loaded


def test_a_truncated_file_is_named(saved):
    file = next(saved.glob("*.distcp"))
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=rf"{file.name} has \d+ bytes, \d+ bytes were written"):
        read(saved, MESH)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{file.name} is missing"):
        read(saved, MESH)


def test_damage_inside_a_file_is_found(saved):
    file = next(saved.glob("*.distcp"))
    data = file.read_bytes()
    file.write_bytes(b"\0" * len(data))
    for use in (consolidate, to_lightning, lambda path: read(path, MESH)):
        with pytest.raises(CheckpointError, match=rf"{file.name} is damaged where .* checksum"):
            use(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "format version 2; this lightning_3d reads versions up to 1. Upgrade"),
        ({"format": "other"}, "not a checkpoint of lightning_3d"),
        ({"files": {"../../etc/passwd": 1}}, "outside of the checkpoint"),
        ({"keys": ["nobody"]}, "lists 'nobody' but holds no tensor"),
        ("{", "cannot be read"),
    ],
    ids=["newer", "foreign", "escape", "names", "json"],
)
def test_a_manifest_that_cannot_be_right_is_refused(saved, change, message):
    file = saved / "layout.json"
    text = change if isinstance(change, str) else directory.signed({**json.loads(file.read_text()), **change})
    file.write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read(saved, MESH)


def sign(folder: Path) -> None:
    """Make sizes and checksums fit what the files hold now."""
    content = json.loads((folder / "layout.json").read_text())
    content["files"] = {name: (folder / name).stat().st_size for name in content["files"]}
    content["checksums"] = {name: checksum(folder / name) for name in content["checksums"]}
    (folder / "layout.json").write_text(directory.signed(content))


def test_an_index_that_leads_out_of_the_directory_is_refused(saved):
    file = saved / "tensors.json"
    text = file.read_text()
    name = next(saved.glob("*.distcp")).name
    file.write_text(text.replace(name, "../" + name[3:]))
    sign(saved)
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        consolidate(saved)


def test_foreign_paths_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="does not exist"):
        read(tmp_path / "nothing", MESH)
    with pytest.raises(CheckpointError, match="not a checkpoint of lightning_3d"):
        read(tmp_path, MESH)
    with pytest.raises(CheckpointError, match=r"notes.txt cannot be loaded|more than tensors"):
        read(tmp_path / "notes.txt", MESH)
    with pytest.raises(CheckpointError, match="would delete what it holds"):
        save(tmp_path, {}, state_of(nn.Linear(1, 1)), MESH)
    with pytest.raises(CheckpointError, match="is a URL"):
        save("s3://bucket/x", {}, state_of(nn.Linear(1, 1)), MESH)
    torch.save({"weight": torch.zeros(1)}, tmp_path / "bare.pt")
    with pytest.raises(CheckpointError, match="no 'state_dict'"):
        read(tmp_path / "bare.pt", MESH)
    assert (tmp_path / "notes.txt").read_text() == "mine"


class Setting:
    """A user's class in the hyper-parameters."""


def test_objects_of_user_classes_do_not_keep_a_run_from_resuming(tmp_path):
    model = nn.Linear(1, 1)
    save(tmp_path / "c", {"hyper_parameters": {"setting": Setting()}, "epoch": 3}, state_of(model), MESH)
    with pytest.warns(UserWarning, match=r"Hyper-parameters are left out.*Setting.*weights_only=False"):
        checkpoint = read(tmp_path / "c", MESH)
    assert checkpoint["epoch"] == 3 and "hyper_parameters" not in checkpoint
    trusted = read(tmp_path / "c", MESH, weights_only=False)
    assert isinstance(trusted["hyper_parameters"]["setting"], Setting)
    save(tmp_path / "c", {"callbacks": {"mine": Setting()}}, state_of(model), MESH)
    with pytest.raises(CheckpointError, match=r"Setting.*weights_only=False"):
        read(tmp_path / "c", MESH)


# The stock Trainer


def trainer(folder: Path, **kwargs) -> pl.Trainer:
    return pl.Trainer(
        default_root_dir=folder,
        max_steps=kwargs.pop("max_steps", 3),
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **kwargs,
    )


class Small(BoringModel):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def test_from_the_stock_trainer_and_back(tmp_path):
    pl.seed_everything(1)
    first = trainer(tmp_path, enable_checkpointing=False)
    first.fit(Small())
    first.save_checkpoint(tmp_path / "stock.ckpt")
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())
    rest = load(tmp_path / "stock.ckpt", state_of(model, optimizer), MESH)
    save(
        tmp_path / "c",
        {**rest, "state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]},
        state_of(model, optimizer),
        MESH,
    )
    written = write_lightning(tmp_path / "c", tmp_path / "back.ckpt")
    assert written.global_step == 3 and not list(tmp_path.glob(".*.part"))
    stock, back = torch.load(tmp_path / "stock.ckpt"), torch.load(tmp_path / "back.ckpt")
    assert set(stock) == set(back)
    torch.testing.assert_close(back["state_dict"], stock["state_dict"], rtol=0, atol=0)
    torch.testing.assert_close(back["optimizer_states"], stock["optimizer_states"], rtol=0, atol=0)
    assert torch.equal(Small.load_from_checkpoint(tmp_path / "back.ckpt").layer.weight, first.model.layer.weight)
    second = trainer(tmp_path, max_steps=5, enable_checkpointing=False)
    second.fit(Small(), ckpt_path=tmp_path / "back.ckpt")
    assert second.global_step == 5


# All at once or not at all


def test_saving_replaces_a_checkpoint_a_file_and_leaves_nothing_beside(saved):
    model = nn.Linear(1, 1)
    for _ in range(2):
        save(saved, {"global_step": 9}, state_of(model), MESH)
        assert read(saved, MESH)["global_step"] == 9
    file = saved.parent / "old.ckpt"
    file.write_text("a stock checkpoint")
    save(file, {"global_step": 2}, state_of(model), MESH)
    assert is_checkpoint(file)
    assert sorted(path.name for path in saved.parent.iterdir()) == ["c", "old.ckpt"]
    remove(file)
    remove(file)
    assert not file.exists()


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("stop", range(12))
def test_a_kill_at_any_step_of_the_replacement_leaves_a_checkpoint(tmp_path, monkeypatch, exchange, stop):
    """The n-th change of the file system never happens, nor anything after it."""
    model = nn.Linear(1, 1)
    path = tmp_path / "c"
    save(path, {"global_step": 1}, state_of(model), MESH)

    class Killed(BaseException):
        pass

    left = [stop]

    def counted(function):
        def call(*args, **kwargs):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return function(*args, **kwargs)

        return call

    if not exchange:
        monkeypatch.setattr(directory, "_exchange", lambda first, second: False)
    monkeypatch.setattr(directory.os, "rename", counted(os.rename))
    monkeypatch.setattr(directory.shutil, "rmtree", counted(shutil.rmtree))
    monkeypatch.setattr(directory, "_sync", counted(directory._sync))
    with contextlib.suppress(Killed):
        save(path, {"global_step": 2}, state_of(model), MESH)
    monkeypatch.undo()
    assert is_checkpoint(path)
    assert read(path, MESH)["global_step"] in (1, 2)
    save(path, {"global_step": 3}, state_of(model), MESH)
    assert read(path, MESH)["global_step"] == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_a_checkpoint_without_its_manifest_was_never_finished(saved):
    shutil.copytree(saved, saved.parent / "copy")
    (saved.parent / "copy" / "layout.json").unlink()
    assert is_checkpoint(saved) and not is_checkpoint(saved.parent / "copy")
    with pytest.raises(CheckpointError, match="never finished"):
        read(saved.parent / "copy", MESH)


def test_pieces_are_shared_out_evenly():
    holders = [{("a", (0,)): 8, ("b", (0,)): 4}, {("a", (0,)): 8, ("c", (0,)): 8}, {("a", (0,)): 8}]
    assert share_out(holders) == {("b", (0,)): 0, ("c", (0,)): 1, ("a", (0,)): 2}
    assert share_out(holders, prefer=0)[("a", (0,))] == 0


def test_what_ranks_send_each_other_of_their_pieces_is_short_and_goes_to_rank_zero():
    entries = [
        Entry(f"model.{name}", (8, 2), local_chunks((8, 2), shard=Shard(0, 0, 2)), torch.zeros(4, 2))
        for name in range(100)
    ]
    plans = [_ChunkPlanner(entries).create_local_plan(), _ChunkPlanner([]).create_local_plan()]
    assert len(pickle.dumps(plans[0])) < 60 * len(entries)
    chief = _ChunkPlanner(entries)
    with pytest.raises(CheckpointError, match=r"'model.0' \(8 of 16 values\)"):
        chief.create_global_plan(plans)
    other = [dataclasses.replace(entry, chunks=local_chunks((8, 2), shard=Shard(0, 1, 2))) for entry in entries]
    plans[1] = _ChunkPlanner(other).create_local_plan()
    back, metadata = chief.create_global_plan(plans)
    assert not metadata.state_dict_metadata and len(chief.metadata.state_dict_metadata) == 100
    assert [len(plan.planner_data) for plan in back] == [100, 100]
    assert len(chief.finish_plan(back[0]).items) == 100


def test_ranks_look_at_their_share_of_the_files_only(saved, monkeypatch):
    names = json.loads((saved / "layout.json").read_text())["files"]
    looked: list[str] = []
    original = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: (looked.append(path.name), original(path))[1])
    monkeypatch.setattr(Path, "is_symlink", lambda path: bool(looked.append(path.name)))
    for rank in range(4):
        directory.read_manifest(saved, rank, 4)
    assert {name: looked.count(name) for name in names} == dict.fromkeys(names, 2)
    looked.clear()
    assert len(read_index(saved)) > 10
    assert not looked  # a stored tensor is looked at by who reads it


def test_thousands_of_ranks_share_many_pieces_out_at_once():
    items = [(place, 1 + place * 7919 % 1000) for place in range(20_000)]
    begin = time.perf_counter()
    shares = [share(items, rank, 8192) for rank in (0, 8191)]
    assert time.perf_counter() - begin < 5.0
    assert all(shares) and not set(shares[0]) & set(shares[1])
    assert sorted(item for rank in range(7) for item in share(items[:50], rank, 7)) == list(range(50))


def test_files_of_other_ranks_are_not_read_again(tmp_path):
    """What a rank says of a file is what the manifest says: nobody asks thousands of them."""
    content = gather({"optimizer_states": []}, state_of(nn.Linear(2, 2)), MESH)
    save(tmp_path / "c", {}, state_of(nn.Linear(2, 2)), MESH)
    content.finish(tmp_path / "c", {"rank_00007.pt": (5, 6), "layout.json": (0, 0)})
    manifest = json.loads((tmp_path / "c" / "layout.json").read_text())
    assert (manifest["files"]["rank_00007.pt"], manifest["checksums"]["rank_00007.pt"]) == (5, 6)
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "c").iterdir() if file.name != "layout.json"}
    assert {name: manifest["files"][name] for name in sizes} == sizes
    assert {name for name in manifest["files"] if name not in manifest["checksums"]} == {"__0_0.distcp"}


MEMORY = """
import resource, sys, torch
from pathlib import Path
from typing import Any
from torch import nn
sys.path.insert(0, {root!r})
from tests.unit.test_checkpoint import MESH, state_of
from lightning_3d.checkpoint import load, save, write_lightning

def peak():  # kilobytes that are not file pages
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0])

model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range({count})))
state = state_of(model)
import threading, time
high, stop = [0], threading.Event()
def watch():
    while not stop.is_set():
        high[0] = max(high[0], peak()); time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
saving, loading = lambda: save({path!r}, {{}}, state, MESH), lambda: load({path!r}, state, MESH)
for action in (saving, loading, lambda: write_lightning({path!r}, {path!r} + ".ckpt")):
    time.sleep(0.1); base = peak(); high[0] = 0
    action()
    print((high[0] - base) // 1024, flush=True)
stop.set()
"""


@pytest.mark.slow
def test_c18_saving_loading_and_conversion_need_memory_for_a_few_tensors_only(tmp_path):
    """160 MB in 40 tensors of 4 MB."""
    root = str(Path(__file__).parents[2])
    code = MEMORY.format(root=root, count=40, path=str(tmp_path / "c"))
    at_once = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # else the C library keeps 32 MB of what was freed
    result = subprocess.run(
        [sys.executable, "-c", code], env=at_once, capture_output=True, text=True, timeout=100, check=True
    )
    saving, loading, writing = map(int, result.stdout.split())
    assert saving < 24 and loading < 24 and writing < 24, result.stdout


def test_the_stock_trainer_resumes_in_mid_epoch_from_a_converted_checkpoint(tmp_path: Path) -> None:
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    quiet |= {"accelerator": "cpu", "devices": 1, "limit_val_batches": 0, "enable_checkpointing": False}
    trainer = pl.Trainer(strategy=ThreeDStrategy(), max_steps=3, **quiet)
    trainer.fit(BoringModel())
    trainer.save_checkpoint(tmp_path / "c")
    write_lightning(tmp_path / "c", tmp_path / "c.ckpt")
    stock = pl.Trainer(max_steps=5, **quiet)
    stock.fit(BoringModel(), ckpt_path=tmp_path / "c.ckpt")
    assert stock.global_step == 5


class Pair(BoringModel):
    """Two layers that may be one."""

    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.second = torch.nn.Linear(32, 2)
        if tie:
            self.second.weight = self.layer.weight


@pytest.mark.parametrize("strategy", ["auto", "3d"])
def test_of_two_entries_for_what_is_tied_here_the_last_counts_as_in_torch(tmp_path: Path, strategy: str) -> None:
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    quiet |= {"accelerator": "cpu", "devices": 1, "limit_val_batches": 1}
    apart = Pair(tie=False)
    saver = pl.Trainer(**quiet, max_steps=1, enable_checkpointing=False)
    saver.fit(apart)
    saver.save_checkpoint(tmp_path / "apart.ckpt")
    tied = Pair(tie=True)
    pl.Trainer(strategy=strategy, **quiet).validate(tied, ckpt_path=tmp_path / "apart.ckpt", verbose=False)
    assert torch.equal(tied.layer.weight, apart.second.weight)
