"""How huge models start small: large tensors are recorded while a model is built, and computed where they are kept."""

from __future__ import annotations

from lightning_3d.initialization.agreement import Recipes
from lightning_3d.initialization.deferral import LARGE, deferring, following, paused
from lightning_3d.initialization.pretrained import reading_late
from lightning_3d.initialization.rebuild import rebuild
from lightning_3d.initialization.recipes import value_of
from lightning_3d.initialization.values import is_deferred, materialise, missing_values, parameters_from

__all__ = [
    "LARGE",
    "Recipes",
    "deferring",
    "following",
    "is_deferred",
    "materialise",
    "missing_values",
    "parameters_from",
    "paused",
    "reading_late",
    "rebuild",
    "value_of",
]
