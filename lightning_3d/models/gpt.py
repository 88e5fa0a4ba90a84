"""A GPT over bytes, written as anyone would write it: plain modules and a LightningModule, with no parallel code."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_3d.models.optimization import adamw_with_cosine


class Rotary(nn.Module):
    """Rotary positions: cosines and sines of position times frequency, one frequency per pair of head channels."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_length: int, base: float = 10_000.0) -> None:
        super().__init__()
        frequencies = base ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(max_length), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the first ``length`` positions, each ``[length, head_dim / 2]``."""
        return self.cos[:length], self.sin[:length]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the channel pairs of ``x`` ``[..., length, head_dim]`` by the angles of their positions."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    """Causal self-attention with one packed projection for queries, keys and values."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = width // num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Map ``[batch, length, width]`` to the same shape; position t sees positions up to t."""
        q, k, v = (
            part.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers around a GELU, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, length, width]`` to the same shape."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A pre-norm transformer block: attention, then MLP, each added to the residual."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Map ``[batch, length, width]`` to the same shape."""
        x = x + self.dropout(self.attention(self.attention_norm(x), rotary))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(LightningModule):
    """A GPT that predicts the next byte.

    A batch is an integer tensor ``[batch, length + 1]``: the first ``length`` bytes are read, the last ``length``
    are predicted.

    Args:
        num_layers: Number of transformer blocks.
        width: Size of the residual stream; a multiple of ``num_heads``.
        num_heads: Attention heads per block.
        sequence_length: Longest context in tokens.
        vocab_size: Number of different tokens; 256 for bytes.
        dropout: Share of activations dropped in training.
        tie_weights: Use the embedding matrix as the output layer too.
        learning_rate: Peak learning rate of AdamW.
        weight_decay: Weight decay of the matrices inside the blocks; norms, biases and embeddings have none.
        warmup_steps: Optimizer steps over which the learning rate grows to its peak.
        min_lr_ratio: Learning rate at the last step, as a share of the peak (cosine in between).
        build_late: Make the layers in ``configure_model`` instead of at once: a rank then gets memory for its own part
            only. For models that fit on no single device.

    Raises:
        ValueError: If ``num_heads`` does not divide ``width``.
    """

    def __init__(
        self,
        num_layers: int = 4,
        width: int = 128,
        num_heads: int = 4,
        sequence_length: int = 128,
        vocab_size: int = 256,
        dropout: float = 0.0,
        tie_weights: bool = False,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 20,
        min_lr_ratio: float = 0.1,
        build_late: bool = False,
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(
                f"width={width} cannot be shared by num_heads={num_heads}: choose a width that is a multiple of it."
            )
        self.save_hyperparameters()
        self.sequence_length = sequence_length
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.min_lr_ratio = min_lr_ratio
        if not build_late:
            self.configure_model()

    def configure_model(self) -> None:
        """Make the layers, unless they are there."""
        if hasattr(self, "blocks"):
            return
        sizes: Any = self.hparams
        self.token_embedding = nn.Embedding(sizes.vocab_size, sizes.width)
        self.rotary = Rotary(sizes.width // sizes.num_heads, sizes.sequence_length)
        self.dropout = nn.Dropout(sizes.dropout)
        self.blocks = nn.ModuleList(Block(sizes.width, sizes.num_heads, sizes.dropout) for _ in range(sizes.num_layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocab_size, bias=False)
        self.apply(_initialise)
        for name, parameter in self.named_parameters():
            if name.endswith(("proj.weight", "down.weight")):  # the residual stream starts equally wide at any depth
                parameter.data /= math.sqrt(2 * sizes.num_layers)
        if sizes.tie_weights:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens ``[batch, length]`` to logits ``[batch, length, vocab_size]``."""
        rotary = self.rotary(tokens.shape[1])
        x = self.dropout(self.token_embedding(tokens))
        for block in self.blocks:
            x = block(x, rotary)
        return self.head(self.norm(x))

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

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the test loss of one batch."""
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the nats per token of every sequence of the batch, shape ``[batch]``."""
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none").mean(dim=1)

    def configure_optimizers(self) -> Any:
        """Return AdamW with two groups (decayed and not) and a cosine schedule with warm-up, moved once a step."""
        return adamw_with_cosine(
            self,
            lambda name, _: name.startswith("blocks.") and name.endswith("weight") and "norm" not in name,
            self.learning_rate,
            self.weight_decay,
            self.warmup_steps,
            self.min_lr_ratio,
        )

    @torch.no_grad()
    def generate(self, prompt: str, length: int = 400, temperature: float = 0.7, seed: int = 0) -> str:
        """Continue ``prompt`` by ``length`` bytes, drawn one by one, and return prompt and continuation.

        Needs the whole model in one process. The same seed gives the same text.
        """
        was_training = self.training
        self.eval()
        generator = torch.Generator(device=self.device).manual_seed(seed)
        tokens = torch.tensor([list(prompt.encode() or b"\n")], device=self.device)
        for _ in range(length):
            logits = self(tokens[:, -self.sequence_length :])[0, -1] / temperature
            token = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
            tokens = torch.cat([tokens, token.unsqueeze(0)], dim=1)
        self.train(was_training)
        return bytes(tokens[0].tolist()).decode(errors="replace")


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.5)
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
