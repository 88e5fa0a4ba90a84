"""Where the timings of a run come from, for callbacks."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_3d.errors import ConfigError
from lightning_3d.events import EventSource
from lightning_3d.mesh import Mesh


def source_of(trainer: Trainer, name: str) -> tuple[EventSource, Mesh]:
    """The timings of the strategy, and its mesh.

    Raises:
        ConfigError: The Trainer has another strategy; ``name`` is who asks.
    """
    events = getattr(trainer.strategy, "events", None)
    if not isinstance(events, EventSource):
        raise ConfigError(
            f"{name} reads the timings of ThreeDStrategy, but the Trainer has {type(trainer.strategy).__name__}. Use"
            " strategy='3d', or leave it out."
        )
    return events, mesh_of(trainer)


def mesh_of(trainer: Trainer) -> Mesh:
    """The mesh of a run under ThreeDStrategy."""
    mesh = trainer.strategy.topology  # type: ignore[attr-defined]
    assert isinstance(mesh, Mesh)
    return mesh
