"""What a rank is doing right now, for those who watch it from another thread."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """Written by the thread that trains, read by others; a write costs two assignments and no clock."""

    count: int = 0
    """Grows with everything that is begun."""
    phase: str = ""
    """What Lightning has asked for, such as ``"training batch 12"``."""
    action: object = None
    """The pipeline's action within it, if any."""

    def enter(self, phase: str) -> None:
        """A new phase begins."""
        self.phase = phase
        self.action = None
        self.count += 1

    def act(self, action: object) -> None:
        """The next action of the pipeline begins."""
        self.action = action
        self.count += 1

    def __str__(self) -> str:
        return self.phase + (f", pipeline action {self.action}" if self.action is not None else "")
