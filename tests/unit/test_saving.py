"""A save that is struck at any change of the file system leaves the old checkpoint or the new one, nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import filesystem

from lightning_3d.checkpoint import (
    BackgroundSaves,
    Content,
    ModelState,
    directory,
    gather,
    hugging_face,
    leftovers,
    link,
    links_to,
    read,
    save,
    state_dict_keys,
)
from lightning_3d.checkpoint.full import consolidate
from lightning_3d.config import Sizes
from lightning_3d.errors import CheckpointError
from lightning_3d.mesh import build_mesh
from lightning_3d.trainer.saving import Saving

MESH = build_mesh(Sizes(pp=1, dp=1, tp=1), torch.device("cpu"))
CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.truncate", "os.link"}


class Killed(BaseException):
    """Nothing that catches errors catches this, as nothing outlives a kill."""


class Strike:
    """Before the n-th change of the file system, raises; and for a kill, before every later one too."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.error: Callable[[], BaseException] = Killed
        sys.addaudithook(self._heard)  # for good, hence one for all tests

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if self.left is not None and (event in CHANGES or (event == "open" and _writes(args))):
            self.count()

    def count(self) -> None:
        if self.left is None:
            return
        self.left -= 1
        if self.left < 0 and (self.left == -1 or self.error is Killed):
            raise self.error()

    @contextlib.contextmanager
    def at(self, number: int, error: Callable[[], BaseException]) -> Iterator[None]:
        self.left, self.error = number, error
        try:
            yield
        finally:
            self.left = None


def _writes(args: tuple[Any, ...]) -> bool:
    return isinstance(args[0], str | bytes) and bool(args[2] & (os.O_WRONLY | os.O_RDWR))


STRIKE = Strike()


@pytest.fixture
def strike(monkeypatch: pytest.MonkeyPatch) -> Strike:
    """Also before what no audit event tells of."""
    for name in ("_sync", "_exchange"):
        original = getattr(directory, name)

        def call(*args: Any, original: Callable[..., Any] = original) -> Any:
            STRIKE.count()
            result = original(*args)
            STRIKE.count()
            return result

        monkeypatch.setattr(directory, name, call)
    return STRIKE


def state_at(step: int) -> tuple[dict[str, Any], ModelState]:
    """A model whose every value is ``step``."""
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, step)
    keys, ties = state_dict_keys(model)
    state = ModelState(parameters=dict(model.named_parameters()), keys=keys, ties=ties)
    return {"global_step": step}, state


def step_of(path: Path) -> int:
    """Reads all of a checkpoint: the step at which it was saved."""
    step = read(path, MESH)["global_step"]
    for value in consolidate(path).values():
        assert torch.equal(value, torch.full_like(value, step))
    return step


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [Killed, full_disk], ids=["killed", "full"])
def test_a_save_struck_anywhere_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, strike: Strike, error: Callable[[], BaseException]
) -> None:
    path, base = tmp_path / "runs" / "c", tmp_path / "base"
    save(base / "c", *state_at(1), MESH)
    seen = []
    for number in range(200):
        shutil.rmtree(path.parent, ignore_errors=True)
        shutil.copytree(base, path.parent)
        new = state_at(2)
        struck = ""
        with strike.at(number, error):
            try:
                save(path, *new, MESH)
            except (CheckpointError, Killed) as caught:
                struck = str(caught) or "killed"
            untouched = strike.left is not None and strike.left >= 0
        seen.append(step_of(path))
        if error is full_disk and struck:
            assert "No space left" in struck
        if number % 4 == 0 or not struck:
            save(path.parent / "other", *state_at(3), MESH)  # the next save, elsewhere, clears up
            assert {entry.name for entry in path.parent.iterdir()} <= {"c", "other", ".c.owner", ".c.saving"}
            save(path, *state_at(4), MESH)
            assert {entry.name for entry in path.parent.iterdir()} == {"c", "other"}
            assert step_of(path) == 4
        if untouched:
            break
        elif not struck:
            assert error is full_disk and seen[-1] == 2  # it did without what it could not do
    assert seen[0] == 1 and seen[-1] == 2 and len(seen) > 12
    if error is Killed:
        assert seen == sorted(seen)  # old up to one moment, new from then on


def test_last_always_leads_to_a_complete_checkpoint(tmp_path: Path, strike: Strike) -> None:
    """The order of ModelCheckpoint(save_top_k=1, save_last="link"): save, remove the former, link."""
    base = tmp_path / "base"
    save(base / "step=1", *state_at(1), MESH)
    link(base / "step=1", base / "last")
    trainer: Any = SimpleNamespace(is_global_zero=True, strategy=SimpleNamespace(barrier=lambda: None), loggers=[])
    folder = tmp_path / "runs"
    for number in range(200):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base, folder, symlinks=True)
        saving, new = Saving(), state_at(2)
        with strike.at(number, Killed):
            with contextlib.suppress(Killed):
                saving.save(folder / "step=2", lambda new=new: gather(*new, MESH), MESH)
                saving.delete(folder / "step=1")
                saving._link(trainer, str(folder / "step=2"), str(folder / "last"))
            untouched = strike.left is not None and strike.left >= 0
        assert step_of((folder / "last").resolve()) in (1, 2)
        if untouched:
            break
    assert sorted(entry.name for entry in folder.iterdir()) == ["last", "step=2"]
    assert os.readlink(folder / "last") == "step=2"


def test_a_link_takes_the_place_of_a_checkpoint_and_a_checkpoint_that_of_a_link(tmp_path: Path) -> None:
    save(tmp_path / "last", *state_at(1), MESH)
    save(tmp_path / "two", *state_at(2), MESH)
    link(tmp_path / "two", tmp_path / "last")
    assert links_to(tmp_path / "two") == [tmp_path / "last"] and step_of(tmp_path / "last") == 2
    save(tmp_path / "last", *state_at(3), MESH)
    assert not (tmp_path / "last").is_symlink()
    assert [step_of(tmp_path / name) for name in ("last", "two")] == [3, 2]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["last", "two"]


def test_leftovers_are_cleared_but_neither_saves_under_way_nor_what_others_put_there(tmp_path: Path) -> None:
    def leave(name: str, owner: dict[str, Any] | None, file: str = "__0_0.distcp") -> None:
        leftovers.hidden(tmp_path / name, ".saving").mkdir()
        (leftovers.hidden(tmp_path / name, ".saving") / file).touch()
        if owner is not None:
            leftovers.hidden(tmp_path / name, ".owner").write_text(json.dumps(owner))

    leftovers.claim(tmp_path / "own")
    own = json.loads((tmp_path / ".own.owner").read_text())
    leave("alive", own)
    leave("elsewhere", {**own, "host": "another"})
    leave("long ago", {**own, "host": "another"})
    os.utime(tmp_path / ".long ago.owner", (0, 0))
    leave("killed", {**own, "started": "0"})
    leave("unclaimed", None)
    leave("foreign", None, "thesis.tex")
    (tmp_path / ".gone.removing").mkdir()
    save(tmp_path / "c", *state_at(1), MESH)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(
        [".alive.owner", ".alive.saving", ".elsewhere.owner", ".elsewhere.saving", ".foreign.saving", ".own.owner", "c"]
    )


def test_a_save_in_the_background_holds_the_state_of_its_moment(tmp_path: Path, monkeypatch: Any) -> None:
    gate = threading.Event()
    begin = directory.begin
    monkeypatch.setattr(directory, "begin", lambda path: (gate.wait(20.0), begin(path)))
    saves = BackgroundSaves(MESH, MESH)
    checkpoint, state = state_at(1)
    checkpoint["mine"] = {"list": [1]}
    saves.start(tmp_path / "c", gather(checkpoint, state, MESH))
    done: list[str] = []
    assert saves.then(lambda: done.append("then"))
    with torch.no_grad():
        for parameter in state.parameters.values():
            parameter.fill_(7)
    checkpoint["mine"]["list"].append(2)
    saves.look()
    assert saves.target == tmp_path / "c" and not (tmp_path / "c").exists() and not done
    gate.set()
    saves.wait()
    assert saves.target is None and done == ["then"]
    assert step_of(tmp_path / "c") == 1 and read(tmp_path / "c", MESH)["mine"] == {"list": [1]}
    assert not saves.then(lambda: done.append("nothing under way"))


def test_a_failure_in_the_background_is_raised_once_and_removes_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    saving = Saving(BackgroundSaves(MESH, MESH), training=True)

    def content(step: int) -> Callable[[], Content]:
        return lambda: gather(*state_at(step), MESH)

    saving.save(tmp_path / "one", content(1), MESH)
    saving.wait()

    def fail(path: Path) -> None:
        raise full_disk()

    monkeypatch.setattr(directory, "publish", fail)
    saving.save(tmp_path / "two", content(2), MESH)
    saving.delete(tmp_path / "one")
    with pytest.raises(CheckpointError, match=r"two.*No space left"):
        saving.wait()
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == ["one"]
    saving.save(tmp_path / "three", content(3), MESH)
    saving.delete(tmp_path / "one")
    saving.wait()
    assert [entry.name for entry in tmp_path.iterdir()] == ["three"] and step_of(tmp_path / "three") == 3


def test_the_thread_of_a_background_save_works_on_the_device_of_its_rank(tmp_path: Path, monkeypatch: Any) -> None:
    """A new thread begins on the first GPU, where the threads of all ranks of a node would take memory."""
    saves = BackgroundSaves(MESH, MESH)
    saves._mesh = dataclasses.replace(MESH, device=torch.device("cuda", 3))
    chosen: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((threading.current_thread().name, device))
    )
    saves.start(tmp_path / "c", gather(*state_at(1), MESH))
    saves.wait()
    assert chosen == [("lightning-3d-save", torch.device("cuda", 3))] and step_of(tmp_path / "c") == 1


def test_copies_in_host_memory_are_not_waited_for_on_a_gpu(tmp_path: Path, monkeypatch: Any) -> None:
    """DCP would wait for all that the GPU was given, once for every piece; in the background that is training."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(filesystem, "_OverlappingCpuLoader", None)
    save(tmp_path / "c", *state_at(1), MESH)
    assert step_of(tmp_path / "c") == 1


def test_what_is_said_of_the_model_is_said_when_the_save_begins(tmp_path: Path, monkeypatch: Any) -> None:
    """Asked for later, from the thread, a sharded model would free what a training step computes with."""
    asked: list[str] = []

    def describe(module: nn.Module) -> list[Any]:
        asked.append(threading.current_thread().name)
        return []

    monkeypatch.setattr(hugging_face, "describe", describe)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace())
    checkpoint, state = state_at(1)
    saves = BackgroundSaves(MESH, MESH)
    saves.start(tmp_path / "c", gather(checkpoint, dataclasses.replace(state, module=nn.Linear(1, 1)), MESH))
    saves.wait()
    assert asked == [threading.main_thread().name]
