"""Which layout is taken when there are more or fewer ranks than were planned for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_3d.config import ParallelConfig, Sizes
from lightning_3d.errors import ConfigError
from lightning_3d.trainer.processes.elastic import World, fit_layout


def wishes(tp: int, pp: int, dp: int | str = "auto", **options: Any) -> ParallelConfig:
    options = {"global_batch_size": 64, **options}
    return ParallelConfig(elastic=True, tensor_parallel=tp, pipeline_parallel=pp, data_parallel=dp, **options)


@pytest.mark.parametrize(
    ("tp", "pp", "world", "per_node", "expected"),
    [
        (2, 2, 8, 4, (2, 2, 2)),  # the full world
        (2, 2, 4, 4, (2, 2, 1)),  # replicas go first
        (2, 2, 12, 4, (2, 2, 3)),  # and come
        (2, 2, 6, 2, (2, 1, 3)),  # then stages
        (2, 4, 4, 2, (2, 2, 1)),
        (2, 6, 6, 2, (2, 3, 1)),  # the largest divisor
        (2, 2, 2, 2, (2, 1, 1)),
        (2, 2, 3, 1, (1, 1, 3)),  # then tensor parallelism
        (4, 2, 6, 2, (2, 1, 3)),
        (4, 1, 4, 2, (2, 1, 2)),  # not across nodes
        (1, 3, 4, 1, (1, 1, 4)),
        (2, 2, 1, 1, (1, 1, 1)),
    ],
)
def test_replicas_follow_the_world_then_stages_then_layers(
    tp: int, pp: int, world: int, per_node: int, expected: tuple[int, int, int]
) -> None:
    fit = fit_layout(wishes(tp, pp), world, per_node)
    assert (fit.sizes.tp, fit.sizes.pp, fit.sizes.dp) == expected
    assert fit.replanned == (expected[:2] != (tp, pp))
    assert bool(fit.changes) == fit.replanned
    assert fit.config.sizes(world, per_node) == fit.sizes


@given(
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(1, 8),
    st.booleans(),
    st.sampled_from((1, 2, 3)),
)
def test_any_world_has_a_layout(tp: int, pp: int, nodes: int, per_node: int, across: bool, virtual: int) -> None:
    options: dict[str, Any] = {"allow_tp_across_nodes": across}
    if virtual > 1 and pp > 1:
        options |= {"schedule": "interleaved_1f1b", "virtual_stages": virtual}
    config = wishes(tp, pp, **options)
    fit = fit_layout(config, nodes * per_node, per_node)
    assert fit.config.sizes(nodes * per_node, per_node) == fit.sizes
    assert tp % fit.sizes.tp == 0 and pp % fit.sizes.pp == 0
    assert fit.sizes.pp * fit.config.virtual_stages <= pp * config.virtual_stages  # never more chunks than blocks
    if (nodes * per_node) % (tp * pp) == 0 and (across or per_node % tp == 0):
        assert (fit.sizes.tp, fit.sizes.pp) == (tp, pp)


def test_it_is_told_what_was_taken_and_why() -> None:
    fit = fit_layout(wishes(2, 2, 4), 6, 2)
    assert (
        "There are 6 ranks, 2 on each node. Wished for: tensor_parallel=2, pipeline_parallel=2, data_parallel=4."
        in (fit.changes)
    )
    assert "Taken: tensor_parallel=2, pipeline_parallel=1, data_parallel=3, because 2 x 2 ranks per replica do not" in (
        fit.changes
    )
    assert "A rank now holds 2 times as much of the model; the global batch stays 64 samples" in fit.changes
    across = fit_layout(wishes(4, 1), 4, 2).changes
    assert "without tensor parallelism across nodes of 2" in across
    assert fit_layout(wishes(2, 2, 2), 8, 4).changes == ""


def test_micro_batches_keep_their_size() -> None:
    assert fit_layout(wishes(1, 2, 4, num_micro_batches=8), 4, 4).config.num_micro_batches == 16
    assert fit_layout(wishes(1, 2, 4), 6, 4).config.num_micro_batches == 11  # 8 by default, for 4/3 of the samples
    assert fit_layout(wishes(1, 1, 4), 2, 2).config.num_micro_batches == 2
    assert fit_layout(wishes(1, 2, 4, micro_batch_size=1), 4, 4).config.num_micro_batches is None
    assert fit_layout(wishes(1, 2, num_micro_batches=8), 4, 4).config.num_micro_batches == 8  # nothing is known
    assert fit_layout(wishes(1, 2, 2, num_micro_batches=8), 8, 4).config.num_micro_batches == 8


def test_fewer_stages_get_a_schedule_and_a_split() -> None:
    interleaved = {"schedule": "interleaved_1f1b", "virtual_stages": 2}
    one = fit_layout(wishes(1, 2, pipeline_split=[1, 2, 3, 4], **interleaved), 1, 1).config
    assert (one.schedule, one.virtual_stages, one.pipeline_split) == ("1f1b", 1, [10])
    two = fit_layout(wishes(1, 4, pipeline_split=[1, 2, 3, 4, 5, 6, 7, 8], **interleaved), 2, 2).config
    assert (two.schedule, two.virtual_stages, two.pipeline_split) == ("interleaved_1f1b", 2, [3, 7, 11, 15])


def test_more_ranks_than_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="8 ranks cannot share global_batch_size=4"):
        fit_layout(wishes(1, 1, global_batch_size=4), 8, 8)
    assert fit_layout(wishes(1, 1, global_batch_size=8), 3, 1).sizes == Sizes(pp=1, dp=3, tp=1)  # not divided evenly


def test_the_world_is_what_torchrun_says() -> None:
    told = {
        "TORCHELASTIC_RUN_ID": "job",
        "GROUP_WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "6",
    }
    assert World.of_torchrun({}) is None
    world = World.of_torchrun(told)
    assert world == World(3, 2) and world.size == 6
    with pytest.raises(ConfigError, match="3 nodes have 5 ranks"):
        World.of_torchrun(told | {"WORLD_SIZE": "5"})


def test_the_global_batch_must_be_known() -> None:
    with pytest.raises(ConfigError, match="elastic=True needs global_batch_size"):
        ParallelConfig(elastic=True)
    for wrong in (0, -1.0, True, "soon"):
        with pytest.raises(ConfigError, match="preemption_grace_s"):
            ParallelConfig(preemption_grace_s=wrong)  # type: ignore[arg-type]
