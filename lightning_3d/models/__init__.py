"""Models and data as a user of Lightning writes them: nothing in here knows that it will run in parallel."""

from lightning_3d.models.causal_lm import CausalLM
from lightning_3d.models.gpt import GPT
from lightning_3d.models.text import ByteText
from lightning_3d.models.tokens import TokenFiles

__all__ = ["GPT", "ByteText", "CausalLM", "TokenFiles"]
