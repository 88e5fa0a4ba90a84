"""Options that cannot work are refused with what was given and what fits, whatever their type."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_3d.config import MICRO_BATCHES_PER_STAGE, ParallelConfig, default_micro_batches, micro_batch_count
from lightning_3d.errors import ConfigError


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("pipeline_split", None),
        ("pipeline_split", 3),
        ("pipeline_split", []),
        ("pipeline_split", [3, True]),
        ("pipeline_split", [3, 0]),
        ("pipeline_split", ["3", "4"]),
        ("pipeline_blocks", None),
        ("pipeline_blocks", 3),
        ("pipeline_blocks", []),
        ("pipeline_blocks", ["layers", 3]),
        ("tp_plan", None),
        ("tp_plan", ["*.q_proj"]),
        ("tp_plan", {"*.q_proj": 2}),
    ],
)
def test_values_of_another_type_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=option):
        ParallelConfig(**{option: value})


@pytest.mark.parametrize(
    ("tp", "pp", "fit"),
    [
        (3, 2, "tensor_parallel=2 with pipeline_parallel=2 (data_parallel=2)"),
        (3, 5, "tensor_parallel=4 with pipeline_parallel=2 (data_parallel=1)"),
    ],
)
def test_sizes_that_do_not_fit_the_world_come_with_some_that_do(tp: int, pp: int, fit: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelConfig(tensor_parallel=tp, pipeline_parallel=pp).sizes(8, 8)
    assert fit in str(caught.value)


def test_a_pipeline_has_four_micro_batches_per_stage_and_never_more_than_samples() -> None:
    assert [default_micro_batches(stages) for stages in (1, 2, 8)] == [1, 2 * MICRO_BATCHES_PER_STAGE, 32]
    assert [micro_batch_count(ParallelConfig(), 4, samples) for samples in (0, 5, 64)] == [1, 5, 16]
