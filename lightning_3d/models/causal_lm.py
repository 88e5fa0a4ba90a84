"""Any causal language model of Hugging Face as a LightningModule: Llama, Bloom, Qwen, Mistral, GPT-NeoX and others."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_3d.models.optimization import adamw_with_cosine


class CausalLM(LightningModule):
    """Trains a causal language model of Hugging Face's transformers from its configuration, or from its weights.

    A batch is an integer tensor ``[batch, length + 1]``: the first ``length`` tokens are read, the last ``length``
    are predicted.

    Args:
        config: The configuration: ``model_type`` and what differs from its defaults, such as
            ``{"model_type": "llama", "hidden_size": 8192}``, or a folder or name that transformers knows.
        pretrained: Folder or name of weights to start from; they bring their configuration.
        learning_rate: Peak learning rate of AdamW.
        weight_decay: Weight decay of the matrices; norms, biases and embeddings have none.
        warmup_steps: Optimizer steps over which the learning rate grows to its peak.
        min_lr_ratio: Learning rate at the last step, as a share of the peak (cosine in between).

    Raises:
        ValueError: If not exactly one of ``config`` and ``pretrained`` is given, or ``config`` names no model type.
    """

    model: nn.Module

    def __init__(
        self,
        config: dict[str, Any] | str | None = None,
        pretrained: str | None = None,
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
        warmup_steps: int = 2000,
        min_lr_ratio: float = 0.1,
    ) -> None:
        super().__init__()
        if (config is None) == (pretrained is None):
            raise ValueError(f"Give one of config and pretrained, not config={config!r} and pretrained={pretrained!r}.")
        if isinstance(config, dict) and "model_type" not in config:
            raise ValueError(f"config={config!r} does not say what it is: add model_type, such as 'llama'.")
        self.save_hyperparameters()
        self.config = config
        self.pretrained = pretrained
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.min_lr_ratio = min_lr_ratio

    def configure_model(self) -> None:
        """Build the model; here rather than in ``__init__``, so that a rank gets memory for its own part only."""
        if hasattr(self, "model"):
            return
        from transformers import AutoConfig, AutoModelForCausalLM

        # Many checkpoints and configurations say bfloat16. In what type weights are kept is for the Trainer's precision
        # to say, which has set the default type: float32 in the mixed modes, or small updates would be lost.
        dtype = torch.get_default_dtype()
        if self.pretrained is not None:
            self.model = AutoModelForCausalLM.from_pretrained(self.pretrained, dtype=dtype)
        elif isinstance(self.config, str):
            self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.config), dtype=dtype)
        else:
            self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(self.config or {})))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens ``[batch, length]`` to logits ``[batch, length, vocab_size]``."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits

    def loss(self, batch: Tensor) -> Tensor:
        """Return the mean negative log-likelihood in nats per token of ``batch`` ``[batch, length + 1]``."""
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of one batch and log it."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the validation loss of one batch."""
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> Any:
        """Return AdamW and a cosine schedule with warm-up, moved once a step."""
        embeddings = {f"{name}.weight" for name, module in self.named_modules() if isinstance(module, nn.Embedding)}
        return adamw_with_cosine(
            self,
            lambda name, parameter: parameter.ndim > 1 and name not in embeddings,
            self.learning_rate,
            self.weight_decay,
            self.warmup_steps,
            self.min_lr_ratio,
        )
