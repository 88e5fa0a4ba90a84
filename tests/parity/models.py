"""The models of the parity table, each with its data: ours, and such as people bring, without a line changed for us."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.demos.transformer import LightningTransformer, Transformer
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lightning_3d.models import GPT

LENGTH, VOCAB, WIDTH, HEADS = 8, 24, 16, 4
IGNORED = -100


# --- data -----------------------------------------------------------------------------------------------------------


def tokens(num: int) -> list[Tensor]:
    """Token rows ``[LENGTH + 1]``."""
    generator = torch.Generator().manual_seed(7)
    return list(torch.randint(VOCAB, (num, LENGTH + 1), generator=generator))


def padded(num: int) -> list[dict[str, Tensor]]:
    """Rows of very different length; the targets of what is padded are ignored, in some rows all of them."""
    rows = []
    for index, row in enumerate(tokens(num)):
        targets = row[1:].clone()
        targets[(1, 8, 0, 3, 8, 2)[index % 6] :] = IGNORED
        rows.append({"tokens": row[:-1], "targets": targets})
    return rows


def pairs(num: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets as a tuple."""
    return [(row[:-1], row[1:]) for row in tokens(num)]


def points(num: int) -> list[tuple[Tensor, Tensor]]:
    """Features ``[WIDTH]`` and a class."""
    features = torch.randn(num, WIDTH, generator=torch.Generator().manual_seed(7))
    return [(x, y[0] % 4) for x, y in zip(features, tokens(num), strict=True)]


def floats(num: int) -> list[Tensor]:
    """What the BoringModel reads."""
    return list(torch.randn(num, 32, generator=torch.Generator().manual_seed(7)))


# --- models ---------------------------------------------------------------------------------------------------------


def gpt(**options: Any) -> LightningModule:
    """The GPT of this package; four layers."""
    return GPT(**_gpt_options(options))


def _gpt_options(options: dict[str, Any]) -> dict[str, Any]:
    sizes = dict(num_layers=4, width=WIDTH, num_heads=HEADS, sequence_length=LENGTH, vocab_size=VOCAB, warmup_steps=1)
    return {**sizes, **options}


class PaddedGPT(GPT):
    """Its loss is a mean over the target tokens that count."""

    def loss(self, batch: Any) -> Tensor:
        logits = self(batch["tokens"])
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED)

    def micro_batch_weight(self, batch: Any) -> Tensor:
        return (batch["targets"] != IGNORED).sum()


class SummedGPT(GPT):
    """Its loss is a sum over tokens."""

    def loss(self, batch: Any) -> Tensor:
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, reduce_fx="sum")
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), reduce_fx="sum")


def padded_gpt(**options: Any) -> LightningModule:
    return PaddedGPT(**_gpt_options(options))


def summed_gpt(**options: Any) -> LightningModule:
    return SummedGPT(**_gpt_options(options))


class Task(LightningModule):
    """Next-token or class prediction with any network: what a user writes around a model."""

    def __init__(self, network: nn.Module, pick: Callable[[Any], Tensor] = lambda output: output) -> None:
        super().__init__()
        self.network = network
        self.pick = pick

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        logits = self.pick(self.network(inputs))
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


class EncoderClassifier(nn.Module):
    """``nn.TransformerEncoder`` over learned positions."""

    def __init__(self, norm_first: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.0, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device, dtype=x.dtype)
        return self.head(self.encoder(x, mask=mask, is_causal=True))


class CausalSelfAttention(nn.Module):
    """As in nanoGPT: queries, keys and values in one matrix with biases, sizes from attributes."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.n_head = n_head
        self.n_embd = n_embd

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(torch.ones(T, T, device=x.device).tril() == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class NanoBlock(nn.Module):
    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.ModuleDict(
            dict(c_fc=nn.Linear(n_embd, 4 * n_embd), act=nn.GELU(), c_proj=nn.Linear(4 * n_embd, n_embd))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp.c_proj(self.mlp.act(self.mlp.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    """Layers in a ``ModuleDict``, learned positions, the embedding as output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(VOCAB, WIDTH),
                wpe=nn.Embedding(LENGTH, WIDTH),
                h=nn.ModuleList([NanoBlock(WIDTH, HEADS) for _ in range(4)]),
                ln_f=nn.LayerNorm(WIDTH),
            )
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor) -> Tensor:
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


def encoder(**options: Any) -> LightningModule:
    return Task(EncoderClassifier(**options))


def nano() -> LightningModule:
    return Task(NanoGPT())


def mlp() -> LightningModule:
    """A plain stack of layers, nothing that says transformer."""
    hidden = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return Task(nn.Sequential(*hidden, nn.Linear(WIDTH, 4)))


def _logits(output: Any) -> Tensor:
    return output.logits


def llama() -> LightningModule:
    """Hugging Face's Llama with half as many key/value heads as heads."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return Task(LlamaForCausalLM(config), _logits)


def gpt2() -> LightningModule:
    """Hugging Face's GPT-2: Conv1D layers, packed queries, keys and values, tied."""
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=4,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return Task(GPT2LMHeadModel(config), _logits)


class SmallDemo(LightningTransformer):
    """Lightning's demo of ``nn.Transformer``, small, without dropout and download."""

    def __init__(self) -> None:
        super().__init__(vocab_size=2)
        self.model = Transformer(vocab_size=VOCAB, ninp=WIDTH, nhead=HEADS, nhid=32, nlayers=2, dropout=0.0)

    def prepare_data(self) -> None:
        pass


@dataclass(frozen=True)
class Model:
    """A model of the table."""

    make: Callable[..., LightningModule]
    data: Callable[[int], Sequence[Any]]


MODELS = {
    "gpt": Model(gpt, tokens),
    "padded": Model(padded_gpt, padded),
    "summed": Model(summed_gpt, tokens),
    "encoder": Model(encoder, pairs),
    "nano": Model(nano, pairs),
    "mlp": Model(mlp, points),
    "llama": Model(llama, pairs),
    "gpt2": Model(gpt2, pairs),
    "boring": Model(BoringModel, floats),
    "demo": Model(SmallDemo, pairs),
}
