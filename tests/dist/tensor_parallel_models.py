"""Models written as users write them, for the tests of tensor parallelism. Each takes token ids and gives logits."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalSelfAttention(nn.Module):
    """Packed q/k/v, sizes read from attributes and from the input, as in nanoGPT."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.n_head = heads
        self.n_embd = width
        self.dropout = dropout
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class FusedAttention(nn.Module):
    """Packed q/k/v taken apart by a view, as in timm's ViT; a norm of every head and a bare scale."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.head_dim = width // heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_norm = nn.LayerNorm(self.head_dim)
        self.k_norm = nn.LayerNorm(self.head_dim)
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, N, _ = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q) * self.temperature, self.k_norm(k)
        attention = torch.einsum("bhnd,bhmd->bhnm", q, k).softmax(-1)
        return self.proj((attention @ v).transpose(1, 2).reshape(B, N, -1))


class GroupedAttention(nn.Module):
    """Separate q, k, v with fewer key/value heads, as in the llama reference code."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.n_heads = heads
        self.n_kv_heads = kv_heads
        self.n_rep = heads // kv_heads
        self.head_dim = width // heads
        self.wq = nn.Linear(width, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.wq(x).view(b, s, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(b, s, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(b, s, self.n_kv_heads, self.head_dim).transpose(1, 2)
        k = k.repeat_interleave(self.n_rep, 1)
        v = v.repeat_interleave(self.n_rep, 1)
        mask = torch.arange(s, device=x.device)[:, None] >= torch.arange(s, device=x.device)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(y.transpose(1, 2).contiguous().view(b, s, -1))


class MLP(nn.Module):
    def __init__(self, width: int, inner: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)
        self.inner_dropout = nn.Dropout(dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.fc2(self.inner_dropout(F.gelu(self.fc1(x)))))


class SwiGLU(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class PackedGate(nn.Module):
    """Gate and up in one matrix."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class NormedMLP(nn.Module):
    """A BatchNorm between the two layers, which has to see all features."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.norm = nn.BatchNorm1d(inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.fc1(x).transpose(1, 2)).transpose(1, 2)
        return self.fc2(torch.relu(y))


class PackedGroupedAttention(nn.Module):
    """Queries, keys and values of different widths in one matrix."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.q_size, self.kv_size = width, kv_heads * self.head_dim
        self.wqkv = nn.Linear(width, self.q_size + 2 * self.kv_size)
        self.wo = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.wqkv(x).split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (q, k, v))
        k, v = (part.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for part in (k, v))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MixedMLP(nn.Module):
    """Adds a buffer to the inner activation and multiplies it by a bare parameter, both of its full width."""

    shift: Tensor

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)
        self.gain = nn.Parameter(torch.ones(inner))
        self.register_buffer("shift", torch.linspace(-1, 1, inner))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.fc1(x) * self.gain + self.shift))


class Plain(nn.Module):
    """No repeated layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 24))
        self.head = nn.Linear(24, 64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.net(self.embed(ids)))


class Block(nn.Module):
    """Pre-norm, with a bare parameter on the residual."""

    def __init__(self, width: int, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = attention
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = mlp
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.scale * self.mlp(self.ln_2(x))


class Decoder(nn.Module):
    """Embedding, positions, blocks, norm, head."""

    def __init__(self, blocks: list[nn.Module], width: int, vocab: int, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LooseHead(Decoder):
    """Uses the weight of the embedding in a function instead of a layer."""

    def __init__(self, blocks: list[nn.Module], width: int, vocab: int) -> None:
        super().__init__(blocks, width, vocab)
        del self.head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


class EncoderDecoder(nn.Module):
    """PyTorch's own layers, with cross attention."""

    def __init__(self, width: int, heads: int, vocab: int, batch_first: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        encoder = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout, batch_first=batch_first)
        decoder = nn.TransformerDecoderLayer(width, heads, 2 * width, dropout, batch_first=batch_first, norm_first=True)
        self.encoder = nn.TransformerEncoder(encoder, 2)
        self.decoder = nn.TransformerDecoder(decoder, 2)
        self.batch_first = batch_first
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids if self.batch_first else ids.t())
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device, dtype=x.dtype)
        padding = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
        memory = self.encoder(x, src_key_padding_mask=padding)
        y = self.head(self.decoder(x, memory, tgt_mask=mask))
        return y if self.batch_first else y.transpose(0, 1)


class LogitsOnly(nn.Module):
    """A Hugging Face model whose logits are the output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits  # type: ignore[no-any-return]


def _decoder(make: Any, width: int = 32, vocab: int = 64, tied: bool = False, count: int = 2) -> Decoder:
    return Decoder([make(width) for _ in range(count)], width, vocab, tied)


def _llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
    return LogitsOnly(LlamaForCausalLM(LlamaConfig(**{**settings, **changes})))


def _qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=32,
    )
    return LogitsOnly(Qwen3ForCausalLM(config))


def _phi3() -> nn.Module:
    from transformers import Phi3Config, Phi3ForCausalLM

    config = Phi3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
        pad_token_id=0,
    )
    return LogitsOnly(Phi3ForCausalLM(config))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return LogitsOnly(GPT2LMHeadModel(config))


def _gpt_neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    return LogitsOnly(GPTNeoXForCausalLM(config))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return LogitsOnly(BertForMaskedLM(config))


MODELS: dict[str, Any] = {
    "nanogpt": lambda: _decoder(lambda w: Block(w, CausalSelfAttention(w, 4), MLP(w, 4 * w))),
    "nanogpt_tied": lambda: _decoder(lambda w: Block(w, CausalSelfAttention(w, 4), MLP(w, 4 * w)), tied=True),
    "nanogpt_1001": lambda: _decoder(lambda w: Block(w, CausalSelfAttention(w, 4), MLP(w, 4 * w)), vocab=1001),
    "nanogpt_1001_tied": lambda: _decoder(
        lambda w: Block(w, CausalSelfAttention(w, 4), MLP(w, 4 * w)), vocab=1001, tied=True
    ),
    "fused": lambda: _decoder(lambda w: Block(w, FusedAttention(w, 4), PackedGate(w, 48))),
    "grouped": lambda: _decoder(lambda w: Block(w, GroupedAttention(w, 4, 2), SwiGLU(w, 48))),
    "grouped_one": lambda: _decoder(lambda w: Block(w, GroupedAttention(w, 4, 1), SwiGLU(w, 48))),
    "batchnorm": lambda: _decoder(lambda w: Block(w, FusedAttention(w, 4), NormedMLP(w, 48))),
    "six_heads": lambda: _decoder(lambda w: Block(w, CausalSelfAttention(w, 6), MLP(w, 4 * w)), width=48),
    "three_kv_heads": lambda: _decoder(lambda w: Block(w, GroupedAttention(w, 6, 3), SwiGLU(w, 48)), width=48),
    "odd_inner": lambda: _decoder(lambda w: Block(w, CausalSelfAttention(w, 4), MLP(w, 50))),
    "packed_grouped": lambda: _decoder(lambda w: Block(w, PackedGroupedAttention(w, 4, 2), SwiGLU(w, 48))),
    "mixed": lambda: _decoder(lambda w: Block(w, CausalSelfAttention(w, 4), MixedMLP(w, 48))),
    "loose_head": lambda: LooseHead([Block(32, CausalSelfAttention(32, 4), MLP(32, 64)) for _ in range(2)], 32, 1100),
    "plain": Plain,
    "torch": lambda: EncoderDecoder(32, 4, 64),
    "torch_sequence_first": lambda: EncoderDecoder(32, 4, 64, batch_first=False),
    "llama": _llama,
    "llama_one_kv_head": lambda: _llama(num_key_value_heads=1),
    "llama_tied": lambda: _llama(tie_word_embeddings=True),
    "llama_eager": lambda: _llama(attn_implementation="eager"),
    "qwen3": _qwen3,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "bert": _bert,
}
BLOCKS: dict[str, tuple[str, ...]] = {
    "torch": ("encoder.layers", "decoder.layers"),
    "torch_sequence_first": ("encoder.layers", "decoder.layers"),
    "llama": ("model.model.layers",),
    "qwen3": ("model.model.layers",),
    "phi3": ("model.model.layers",),
    "gpt2": ("model.transformer.h",),
    "gpt_neox": ("model.gpt_neox.layers",),
    "bert": ("model.bert.encoder.layer",),
}


def build(name: str) -> nn.Module:
    """The model ``name`` in float64, the same on every rank, with no parameter at zero or one."""
    torch.manual_seed(0)
    model: nn.Module = MODELS[name]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1 / math.sqrt(max(1, parameter.dim())))
    return model


def blocks_of(name: str, model: nn.Module) -> list[list[str]]:
    """Names of the blocks, list by list."""
    if name == "plain":
        return []
    lists = BLOCKS.get(name) or BLOCKS.get(name.split("_")[0]) or ("blocks",)
    return [[f"{path}.{child}" for child, _ in model.get_submodule(path).named_children()] for path in lists]
