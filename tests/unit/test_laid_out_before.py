"""A module that an earlier Trainer laid out: taken as it is where the layout is the same, else refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_3d import ThreeDStrategy
from lightning_3d.errors import ConfigError
from lightning_3d.events import Phase, StepEvents


def trainer(precision: Any = "32-true", **options: Any) -> Trainer:
    return Trainer(
        strategy=ThreeDStrategy(**options),
        accelerator="cpu",
        devices=1,
        precision=precision,
        max_epochs=1,
        limit_train_batches=2,
        limit_test_batches=2,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.fixture
def module() -> BoringModel:
    module = BoringModel()
    trainer(global_batch_size=2).fit(module)
    return module


def test_options_that_shape_nothing_may_differ(module: BoringModel) -> None:
    later = trainer(nonfinite="skip", num_micro_batches=1, sanity_checks=5, hang_timeout_s=60.0)
    later.test(module, verbose=False)
    assert later.strategy.layout.num_micro_batches == 1  # type: ignore[attr-defined]
    trainer("bf16-mixed").test(module, verbose=False)  # nothing is sharded, so nothing is gathered in another type


@pytest.mark.parametrize(
    ("precision", "options", "told"),
    [
        ("32-true", {"zero_stage": 2}, "zero_stage=2, was 1"),
        ("32-true", {"activation_checkpointing": "full"}, "activation_checkpointing='full', was None"),
        ("64-true", {}, "dtype of parameters=torch.float64, was torch.float32"),
    ],
)
def test_what_shapes_the_module_must_be_the_same(
    module: BoringModel, precision: Any, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match="earlier Trainer") as caught:
        trainer(precision, **options).test(module, verbose=False)
    assert told in str(caught.value)


def test_who_listens_to_the_later_trainer_hears_of_its_steps(module: BoringModel) -> None:
    later = trainer()
    steps: list[StepEvents] = []
    later.strategy.connect(module)
    later.strategy.setup_environment()
    later.strategy.events.listen(steps.append)  # type: ignore[attr-defined]
    later.fit(module)
    assert len(steps) == 2
    assert {Phase.FORWARD, Phase.BACKWARD} <= {event.phase for event in steps[0].events}


def test_the_mesh_of_one_rank_is_made_once(module: BoringModel) -> None:
    later = trainer()
    later.test(module, verbose=False)
    try:
        mesh = later.strategy.mesh  # type: ignore[attr-defined]
        assert mesh is later.strategy.mesh and mesh.mesh_dim_names == ("pp", "dp", "tp")  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()
