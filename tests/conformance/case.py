"""A case of the conformance suite, and the scene that it plays in: one process, or a rank of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from tests.conformance.record import Recorder
from tests.dist.lightning_modules import Mesh, Tokens, loader, make_trainer, rows, seeded

LAYOUTS: tuple[Mesh, ...] = ((2, 1, 2), (2, 2, 2))


FIRST = "on rank 0:"
"""Begins the names of notes that other ranks cannot have."""

LOADED_LATER = {
    r"(on_fit_start|configure_optimizers|on_load_checkpoint)\(\) \(after": "weights are loaded when the module is laid"
    " out, after configure_optimizers, as under Lightning's own sharded strategies",
}
"""The limit of cases that resume from a checkpoint."""


class Scene:
    """What a case has at hand; the same code runs under the stock Trainer and at a layout.

    Args:
        mesh: The layout, or ``None`` for one process.
        folder: Of the case; shared by all ranks.
        recorder: Writes down what happens.
    """

    def __init__(self, mesh: Mesh | None, folder: Path, recorder: Recorder) -> None:
        self.mesh = mesh
        self.folder = folder
        self.recorder = recorder

    def note(self, name: str, value: Any) -> None:
        """Write down a value, to be the same on every rank as in one process."""
        self.recorder.note(name, value)

    def module(self, kind: type[LightningModule] = Tokens, *args: Any, **kwargs: Any) -> Any:
        """A module of a recorded subclass of ``kind``, from the seed that all runs share."""
        return seeded(self.recorder.module(kind), *(args or (2,)), **kwargs)

    def loader(self, num: int = 12, batch: int = 4, **options: Any) -> DataLoader[Any]:
        """``num`` rows of tokens; ``batch`` samples over all replicas."""
        return loader(rows(num), batch, self.mesh, **options)

    def trainer(self, strategy: Mapping[str, Any] | None = None, **flags: Any) -> Trainer:
        """A quiet Trainer in float64 with a recording callback in front; ``strategy`` are options of ours."""
        callbacks = [self.recorder.callback()(), *flags.pop("callbacks", ())]
        flags = {"default_root_dir": str(self.folder), "callbacks": callbacks, **flags}
        return make_trainer(self.mesh, dict(strategy or {}), **flags)


@dataclass(frozen=True)
class Case:
    """A line of a table.

    ``known`` names the differences to one process that docs/limits.md gives a reason for: a regular expression that
    finds them among the lines of :func:`~tests.conformance.compare.differences`, and the reason. A difference that no
    expression finds fails the test, and so does an expression that finds none: the limit is gone.
    """

    name: str
    play: Callable[..., None]
    """A module-level function that gets the scene and ``options``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    known: Mapping[str, str] = field(default_factory=dict)
    layouts: tuple[Mesh, ...] = LAYOUTS
    replicas: bool = False
    """Whether replicas are where it may go wrong; at eight ranks the other cases are left to ``make test-long``."""

    def __str__(self) -> str:
        return self.name


def at(hook: str, what: Callable[[Trainer, LightningModule], Any], nth: int = 1) -> Callback:
    """A callback that does something when ``hook`` is called for the ``nth`` time."""
    count = 0

    def act(self: Callback, trainer: Trainer, module: LightningModule, *args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        if count == nth:
            what(trainer, module)

    return type("Acting", (Callback,), {hook: act})()
