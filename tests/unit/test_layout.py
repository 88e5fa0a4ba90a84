"""What rank 0 prints of a layout holds for the options that were given."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_3d.config import ParallelConfig, Sizes
from lightning_3d.trainer.setup.layout import Layout, expected_micro_batches

SIZES = Sizes(pp=4, dp=2, tp=1)


@pytest.mark.parametrize(
    ("options", "accumulated", "expected"),
    [
        ({}, 1, 16),
        ({"num_micro_batches": 6}, 1, 6),
        ({"micro_batch_size": 2}, 1, None),
        ({"micro_batch_size": 2, "global_batch_size": 48}, 1, 12),
        ({"micro_batch_size": 2, "global_batch_size": 48}, 3, 4),
        ({"num_micro_batches": 6, "global_batch_size": 8}, 1, 4),
        ({"global_batch_size": 64}, 2, 16),
    ],
)
def test_micro_batches_follow_from_the_options(options: dict[str, Any], accumulated: int, expected: int | None) -> None:
    assert expected_micro_batches(ParallelConfig(**options), SIZES, accumulated) == expected


@pytest.mark.parametrize(
    ("known", "text"),
    [
        ({"num_micro_batches": 12, "micro_batch_size": 2}, "12 micro-batches, bubble 20.0% of the step"),
        ({"num_micro_batches": None, "micro_batch_size": 2}, "1f1b, micro-batches of 2"),
    ],
)
def test_a_bubble_is_named_where_it_is_known(known: dict[str, Any], text: str) -> None:
    layout = Layout(
        pipeline_parallel=4,
        data_parallel=2,
        tensor_parallel=1,
        zero_stage=1,
        schedule="1f1b",
        virtual_stages=1,
        chunks=tuple((f"blocks.{chunk}",) for chunk in range(4)),
        outside=((),) * 4,
        parameters=(1,) * 4,
        **known,
    )
    assert str(layout).splitlines()[0].endswith(text)
    assert (layout.bubble is None) == (known["num_micro_batches"] is None)
