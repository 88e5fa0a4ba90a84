"""The GPU check with tiny models, on the GPU."""

from __future__ import annotations

import pytest

from benchmarks import gpu_check


@pytest.mark.timeout(200)
def test_losses_of_every_layout_on_one_card_are_those_of_the_stock_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    code = gpu_check.check("cuda", tiny=True, steps=5, limit_s=180.0)
    table = capsys.readouterr().out
    assert code == 0, table
    assert table.count(" ok") == len(gpu_check.TINY) * len(gpu_check.RUNS)
