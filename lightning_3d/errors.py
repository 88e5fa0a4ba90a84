"""Every error that tells a user what to change."""

from __future__ import annotations


class ThreeDError(Exception):
    """Base of all errors that ``lightning_3d`` raises on purpose."""


class ConfigError(ThreeDError, ValueError):
    """Sizes, names or combinations of options that cannot work.

    Raised before any process starts wherever the fault can be known by then.
    """


class PlanError(ThreeDError):
    """A tensor-parallel plan that would change the numbers of the model."""


class StageError(ThreeDError):
    """A model that cannot be cut into pipeline stages as asked."""


class SanityError(ThreeDError):
    """Ranks that must hold the same do not: a fault found in training, by ``sanity_checks``."""


class CheckpointError(ThreeDError):
    """A checkpoint that cannot be written, or is not what it should be."""
