"""Data parallelism: what replicas share out (ZeRO) and how gradients and optimizer steps become those of one model."""

from lightning_3d.sharding.gradients import (
    OwnedParameter,
    agree_on_max,
    clip_by_norm,
    clip_by_value,
    global_norm,
    has_nonfinite,
    nonfinite_gradients,
    sharded_axes,
)
from lightning_3d.sharding.sharding import Sharding, build_sharding
from lightning_3d.sharding.ties import Tie, make_ties
from lightning_3d.sharding.zero import ZERO_RULES, ZeroRule

__all__ = [
    "ZERO_RULES",
    "OwnedParameter",
    "Sharding",
    "Tie",
    "ZeroRule",
    "agree_on_max",
    "build_sharding",
    "clip_by_norm",
    "clip_by_value",
    "global_norm",
    "has_nonfinite",
    "make_ties",
    "nonfinite_gradients",
    "sharded_axes",
]
