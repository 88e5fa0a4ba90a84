"""Shapes of published models by name."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lightning_3d.errors import ConfigError
from lightning_3d.planner.shape import ModelShape


def _gpt(layers: int, hidden: int, heads: int, **others: Any) -> ModelShape:
    return ModelShape(layers=layers, hidden=hidden, heads=heads, **others)


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, seq: int, **others: Any
) -> ModelShape:
    return ModelShape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn_hidden=ffn, vocab=vocab, seq_len=seq,
        gated_mlp=True, tied_embeddings=False, **others,
    )  # fmt: skip


PRESETS: Mapping[str, ModelShape] = MappingProxyType(
    {
        "gpt2": _gpt(12, 768, 12, vocab=50257, seq_len=1024),
        "gpt2-medium": _gpt(24, 1024, 16, vocab=50257, seq_len=1024),
        "gpt2-large": _gpt(36, 1280, 20, vocab=50257, seq_len=1024),
        "gpt2-xl": _gpt(48, 1600, 25, vocab=50257, seq_len=1024),
        "gpt3-175b": _gpt(96, 12288, 96),
        "gpt-22b": _gpt(48, 6144, 64),
        "gpt-530b": _gpt(105, 20480, 128),
        "gpt-1t": _gpt(128, 25600, 160),
        "mt-nlg-530b": _gpt(105, 20480, 128, vocab=50304),
        "bloom-176b": _gpt(70, 14336, 112, vocab=250880, learned_positions=False, embedding_norm=True, scores=True),
        "gpt-neox-20b": _gpt(44, 6144, 64, vocab=50432, tied_embeddings=False, learned_positions=False),
        "opt-175b": _gpt(96, 12288, 96, vocab=50272),
        "llama-7b": _llama(32, 4096, 32, 32, 11008, 32000, 2048),
        "llama-13b": _llama(40, 5120, 40, 40, 13824, 32000, 2048),
        "llama-33b": _llama(60, 6656, 52, 52, 17920, 32000, 2048),
        "llama-65b": _llama(80, 8192, 64, 64, 22016, 32000, 2048),
        "llama2-7b": _llama(32, 4096, 32, 32, 11008, 32000, 4096),
        "llama2-13b": _llama(40, 5120, 40, 40, 13824, 32000, 4096),
        "llama2-70b": _llama(80, 8192, 64, 8, 28672, 32000, 4096),
        "llama3-8b": _llama(32, 4096, 32, 8, 14336, 128256, 8192),
        "llama3-70b": _llama(80, 8192, 64, 8, 28672, 128256, 8192),
        "llama3-405b": _llama(126, 16384, 128, 8, 53248, 128256, 8192),
        "mistral-7b": _llama(32, 4096, 32, 8, 14336, 32000, 8192),
        "mixtral-8x7b": _llama(32, 4096, 32, 8, 14336, 32000, 8192, experts=8),
        "mixtral-8x22b": _llama(56, 6144, 48, 8, 16384, 32768, 8192, experts=8),
    }
)
"""Published models; their parameters are the published counts (tested)."""


_GENERATION = re.compile(r"llama-?([23])(\.1)?(?=-)")
"""Of a Llama, as people write it: Llama-2, Llama 3.1."""


def preset(name: str, **changes: Any) -> ModelShape:
    """The shape of a published model, with ``changes`` such as ``seq_len=8192``.

    Raises:
        ConfigError: If the name is not known.
    """
    key = name.lower().replace("_", "-")
    if key not in PRESETS:  # llama-33b is of the first generation
        key = _GENERATION.sub(r"llama\1", key)
    if key not in PRESETS:
        near = difflib.get_close_matches(key, PRESETS, n=3)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise ConfigError(f"model={name!r} is not a known shape.{hint} Known: {', '.join(PRESETS)}.")
    return dataclasses.replace(PRESETS[key], **changes)
