"""Every model of the zoo, unmodified, trains at every layout with the numbers of one process."""

from __future__ import annotations

import pytest

from tests.zoo import table
from tests.zoo.models import MODELS
from tests.zoo.run import WHOLE_BATCH, attempt, tolerance

AT_EIGHT = ("llama", "gpt2", "bert", "t5", "nanoGPT")
"""Models that the suite trains on 2 x 2 x 2 ranks as well; ``make zoo`` trains all, at every layout."""

ALIKE = {"mistral", "qwen2", "gemma3", "gptj", "opt", "roberta", "nn.TransformerEncoder, sequence first", "MLP"}
"""Models that others stand for in the suite; ``make zoo`` and ``make test-long`` train them."""

# No head and no pair of layers that could be shared out: these train with PP and ZeRO, and are listed as whole.
NOT_CUT = {"LSTM stack", "U-Net"}

LONG = (pytest.mark.slow, pytest.mark.long)
ROWS = [
    *(pytest.param(name, layout, marks=LONG) for name in MODELS for layout in ("tp2", "pp2")),
    *(pytest.param(name, "pp2.tp2", marks=LONG if name in ALIKE else ()) for name in MODELS),
    *((name, "pp2.dp2.tp2") for name in AT_EIGHT),
]


@pytest.mark.parametrize(("name", "layout"), ROWS)
def test_a_model_trains_as_in_one_process(name: str, layout: str) -> None:
    outcome = attempt(name, layout)
    assert outcome.drift == {}, f"ranks that hold the same parameters differ in them: {outcome.drift}"
    wrong = [
        f"{kind}: {d:.1e} ({outcome.where[kind]})" for kind, d in outcome.differences.items() if d > tolerance(name)
    ]
    assert not wrong, f"more than {tolerance(name):.0e} apart: " + "; ".join(wrong)
    if "pp2" in layout:
        assert len(outcome.blocks) == 2 and min(outcome.blocks) > 0
    if "tp2" in layout:
        assert (outcome.cut > 0.25) == (name not in NOT_CUT), f"cut {outcome.cut:.2f}; whole: {outcome.whole}"


def test_the_table_in_the_readme_shows_the_last_results() -> None:
    results = table.load()
    assert set(results) == set(MODELS)
    for name, row in results.items():
        skipped = {"pp2.dp2.tp2"} if name in WHOLE_BATCH else set()
        assert set(row) == set(table.LAYOUTS) - skipped
        assert all(cell["worst"] <= tolerance(name) for cell in row.values()), name
    assert table.render(results) in table.README.read_text()
