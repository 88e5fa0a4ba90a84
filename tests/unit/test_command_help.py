"""``fit --help`` offers what can be given, under headings that can be read."""

from __future__ import annotations

import pytest
from jsonargparse import ArgumentParser

import lightning_3d.checkpoint.importing  # whatever it defines, the command may have imported
from lightning_3d import ThreeDStrategy
from lightning_3d.cli.command import GIVEN_BY_TRAINER, main


def test_the_help_offers_nothing_internal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert lightning_3d.checkpoint.importing
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert not [name for name in GIVEN_BY_TRAINER if f"--trainer.strategy.{name}" in text]
    assert "--trainer.strategy.cluster_environment" in text
    assert "<class" not in text
    assert "\nThe learning rate scheduler, to go with --optimizer:\n" in text
    optimizers = next(
        line for line in text.splitlines() if "known subclasses: torch.optim." in line and "AdamW" in line
    )
    assert "torch.optim.AdamW" in optimizers
    assert "lightning_3d." not in optimizers


@pytest.mark.parametrize(
    ("option", "given", "arrives"),
    [
        ("activation_checkpointing", "2", 2),
        ("activation_checkpointing", "full", "full"),
        ("pipeline_split", "[3, 4]", [3, 4]),
        ("compile", "true", True),
        ("tensor_parallel", "2", 2),
    ],
)
def test_options_that_may_be_numbers_arrive_as_numbers(option: str, given: str, arrives: object) -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(ThreeDStrategy, "it")
    assert parser.parse_args([f"--it.{option}={given}"]).it[option] == arrives
