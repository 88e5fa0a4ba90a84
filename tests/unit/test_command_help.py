"""``fit --help`` offers what can be given, under headings that can be read."""

from __future__ import annotations

import pytest

import lightning_3d.checkpoint.importing  # whatever it defines, the command may have imported
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
