"""Models of plain torch, as people write them: each is the model with its loss, like those of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]

VOCAB, WIDTH, LENGTH = 30, 16, 8


@dataclass
class Output:
    """What every model here answers with."""

    loss: Tensor
    logits: Tensor


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(seed: int) -> Batch:
    ids = torch.randint(VOCAB, (LENGTH + 1,), generator=_random(seed))
    return {"ids": ids[:-1], "labels": ids[1:]}


def translation(seed: int) -> Batch:
    ids = torch.randint(VOCAB, (2 * LENGTH,), generator=_random(seed))
    return {"source": ids[:LENGTH], "target": ids[LENGTH:-1], "labels": ids[LENGTH + 1 :]}


def features(seed: int) -> Batch:
    generator = _random(seed)
    return {"x": torch.randn(WIDTH, generator=generator), "labels": torch.randint(5, (), generator=generator)}


def picture(seed: int) -> Batch:
    generator = _random(seed)
    return {
        "x": torch.randn(3, 16, 16, generator=generator),
        "labels": torch.randint(2, (16, 16), generator=generator),
    }


def _loss(logits: Tensor, labels: Tensor) -> Output:
    return Output(F.cross_entropy(logits.flatten(0, -2), labels.flatten()), logits)


class Translator(nn.Module):
    """``torch.nn.Transformer`` between embeddings and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCAB, WIDTH)
        self.target = nn.Embedding(VOCAB, WIDTH)
        self.transformer = nn.Transformer(
            WIDTH, 4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=32, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Output:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        mask = mask.to(target.device, self.head.weight.dtype)
        states = self.transformer(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True)
        return _loss(self.head(states), labels)


class Encoder(nn.Module):
    """``nn.TransformerEncoder``, with batch or sequence first."""

    def __init__(self, batch_first: bool, norm_first: bool = False) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=batch_first, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Output:
        states = self.embed(ids)
        if not self.batch_first:
            states = states.transpose(0, 1)
        states = self.encoder(states)
        if not self.batch_first:
            states = states.transpose(0, 1)
        return _loss(self.head(states), labels)


class LSTMStack(nn.Module):
    """Recurrent layers with residuals; each answers with its output and its state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(4)])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Output:
        states = self.embed(ids)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            out, _ = layer(norm(states))
            states = states + out
        return _loss(self.head(states), labels)


class Convolutions(nn.Module):
    """Two convolutions of a U-Net's level."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(2, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.second(F.silu(self.norm(self.first(x)))))


class UNet(nn.Module):
    """Three levels with skips that the parent keeps in a list."""

    def __init__(self, widths: tuple[int, ...] = (4, 8, 16)) -> None:
        super().__init__()
        self.down = nn.ModuleList([Convolutions(i, o) for i, o in zip((3, *widths), widths, strict=False)])
        self.middle = Convolutions(widths[-1], widths[-1])
        self.up = nn.ModuleList(
            [Convolutions(2 * w, n) for w, n in zip(widths[::-1], (*widths[-2::-1], 4), strict=True)]
        )
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for level in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = level(torch.cat([x, skips.pop()], dim=1))
        logits = self.head(x)
        return Output(F.cross_entropy(logits, labels), logits)


class PackedAttention(nn.Module):
    """Attention in nanoGPT's manner: one matrix for queries, keys and values."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.n_head = n_head
        self.n_embd = n_embd

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(batch, length, self.n_head, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, self.n_embd))


class NanoBlock(nn.Module):
    """A layer of :class:`NanoGPT`."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = PackedAttention(n_embd, n_head)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(n_embd, 4 * n_embd), "c_proj": nn.Linear(4 * n_embd, n_embd)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class NanoGPT(nn.Module):
    """A GPT in nanoGPT's manner, its head tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "h": nn.ModuleList([NanoBlock(WIDTH, 4) for _ in range(4)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Output:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.transformer["wte"](ids) + self.transformer["wpe"](positions)
        for block in self.transformer["h"].children():
            x = block(x)
        return _loss(self.lm_head(self.transformer["ln_f"](x)), labels)


class MixerBlock(nn.Module):
    """Mixes patches, then channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.patches = nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches))
        self.norm_2 = nn.LayerNorm(width)
        self.channels = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.patches(self.norm_1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm_2(x))


class Mixer(nn.Module):
    """An MLP-mixer over patches of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.blocks = nn.Sequential(*[MixerBlock(16, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        patches = self.stem(x).flatten(2).transpose(1, 2)
        return _loss(self.head(self.blocks(patches).mean(1)), labels[:, 0, 0])


class MLP(nn.Module):
    """A plain ``nn.Sequential``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 32),
            nn.ReLU(),
            nn.Linear(32, 32),
            nn.ReLU(),
            nn.Linear(32, 32),
            nn.ReLU(),
            nn.Linear(32, 5),
        )

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        return _loss(self.layers(x), labels)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "nn.Transformer": (Translator, translation),
    "nn.TransformerEncoder": (lambda: Encoder(batch_first=True, norm_first=True), tokens),
    "nn.TransformerEncoder, sequence first": (lambda: Encoder(batch_first=False), tokens),
    "LSTM stack": (LSTMStack, tokens),
    "U-Net": (UNet, picture),
    "nanoGPT": (NanoGPT, tokens),
    "MLP-mixer": (Mixer, picture),
    "MLP": (MLP, features),
}
