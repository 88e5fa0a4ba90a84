"""The command ``lightning-3d``."""

from lightning_3d.cli.command import main

__all__ = ["main"]
