"""``lightning-3d inspect``: what a checkpoint holds, as a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lightning_3d.checkpoint import save
from lightning_3d.cli.command import main
from lightning_3d.config import Sizes
from tests.checkpoint_model import Model, build


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    built = build(Sizes(pp=1, dp=1, tp=1))
    save(tmp_path / "c", {"global_step": 1234, "epoch": 5, "optimizer_states": []}, built.state, built.mesh)
    return tmp_path / "c"


def test_the_table_names_layout_step_tensors_and_files(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(saved), "--verify"]) == 0
    text = capsys.readouterr().out
    for part in ("pp1 x dp1 x tp1", "5, 1234", "embed.weight", "1001 x 12", "head.weight is embed.weight", "AdamW"):
        assert part in text
    assert "every byte" in text and "tensors.json" in text


def test_json_is_one_object(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(saved), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["keys"] == list(Model().state_dict())
    assert content["layout"]["dp"] == 1 and content["global_step"] == 1234 and not content["verified"]
    assert content["tensors"]["embed.weight"] == {"shape": [1001, 12], "dtype": "float32", "bytes": 1001 * 12 * 4}
    values = {id(value): value.numel() for value in Model().state_dict(keep_vars=True).values()}
    assert content["num_values"] == sum(values.values())
    (optimizer,) = content["optimizers"]
    assert optimizer["class"] == "AdamW" and [group["lr"] for group in optimizer["groups"]] == [0.01, 0.01]
    assert content["written_by"]["torch"] == str(torch.__version__)


def test_what_is_no_checkpoint_is_refused_with_the_reason(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(saved.parent)]) == 2
    assert "is not a checkpoint of lightning_3d" in capsys.readouterr().err
    file = next(saved.glob("*.distcp"))
    file.write_bytes(b"\0" * file.stat().st_size)
    assert main(["inspect", str(saved)]) == 0
    assert main(["inspect", str(saved), "--verify"]) == 2
    assert "is damaged where" in capsys.readouterr().err
