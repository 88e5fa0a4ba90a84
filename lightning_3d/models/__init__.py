"""Models and data as a user of Lightning writes them: nothing in here knows that it will run in parallel."""

from lightning_3d.models.gpt import GPT
from lightning_3d.models.text import ByteText

__all__ = ["GPT", "ByteText"]
