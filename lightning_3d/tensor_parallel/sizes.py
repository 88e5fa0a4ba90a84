"""Numbers of heads and other sizes that the code of a block reads, and which of them are smaller on a rank."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from lightning_3d.tensor_parallel.layers import is_linear
from lightning_3d.tensor_parallel.layout import Division
from lightning_3d.tensor_parallel.observe import Observation

_HEADS = re.compile(r"(config\.)?(n|num|nb|nr)?_?(attention|attn|query|q)?_?heads?|nhead|h")
_KV_HEADS = re.compile(r"(config\.)?(n|num)?_?(kv|key_value)_?heads?|multi_query_group_num")
_GROUPS = re.compile(r"(config\.)?(num_key_value_groups|n_?rep|num_queries_per_kv|kv_groups|q_per_kv|n_groups)")
_PER_HEAD = re.compile(
    r".*(head_?dim|head_?size|d_?head|d_?k|d_?kv|head_features|value_proj_dim)|.*layer_?(idx|id|number)|.*window.*"
)


def sizes_read(seen: Observation, around: str) -> dict[tuple[str, str], int]:
    """Whole numbers read by the module around a region and the modules in it."""
    prefix = f"{around}." if around else ""
    return {
        (module, attribute): value
        for module, attributes in seen.sizes.items()
        if module == around or (module.startswith(prefix) and prefix)
        for attribute, value in attributes.items()
    }


def division_choices(
    sizes: dict[tuple[str, str], int],
    widths: set[int],
    width: int,
    tp: int,
    heads: int,
    kv_heads: int,
    shared: bool,
) -> Iterator[tuple[Division, ...]]:
    """Ways to divide the sizes that code reads, likeliest first.

    Args:
        sizes: What was read, by module and attribute.
        widths: Numbers of features that are cut.
        width: Features that the row layer reads.
        tp: Ranks to cut over.
        heads: Attention heads; 0 if there are none.
        kv_heads: Key/value heads.
        shared: Whether ranks share key/value heads.
    """
    local_kv = max(1, kv_heads // tp)
    by_heads, by_width, other = [], [], []
    for (module, attribute), value in sizes.items():
        if _PER_HEAD.fullmatch(attribute) or value <= 1:
            continue
        if _KV_HEADS.fullmatch(attribute):
            by_heads.append(Division(module, attribute, max(1, value // tp)))
        elif _GROUPS.fullmatch(attribute):
            if shared:
                by_heads.append(Division(module, attribute, heads // tp // local_kv))
        elif value % tp:
            continue
        elif _HEADS.fullmatch(attribute):
            by_heads.append(Division(module, attribute, value // tp))
        elif value in widths:
            by_width.append(Division(module, attribute, value // tp))
        elif width % value == 0:
            other.append(Division(module, attribute, value // tp))
    choices = [(*by_heads, *by_width), tuple(by_heads), tuple(by_width), (*by_heads, *by_width, *other), ()]
    yield from dict.fromkeys(choices)


def head_counts(block: nn.Module, around: str, width: int, seen: Observation) -> tuple[int, int, int]:
    """``(heads, kv_heads, head_dim)`` of the attention in a region; zeros when it does not look like attention."""
    module = block.get_submodule(around)
    holders = [vars(part) for _, part in module.named_modules() if not is_linear(part)]
    config = getattr(module, "config", None)
    like_attention = "att" in f"{around} {type(module).__name__}".lower() or hasattr(module, "head_dim")
    if config is not None and like_attention:
        holders.append(dict(whole_numbers(config)))
    heads = _first(holders, _HEADS)
    if not heads or width % heads:
        return 0, 0, 0
    kv_heads = _first(holders, _KV_HEADS) or heads
    head_dim = next((h["head_dim"] for h in holders if type(h.get("head_dim")) is int), width // heads)
    if head_dim * heads != width:
        return 0, 0, 0
    return heads, kv_heads, head_dim


def whole_numbers(config: object) -> Iterator[tuple[str, int]]:
    """Numbers of heads that a configuration names."""
    for name in ("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads", "head_dim"):
        value = getattr(config, name, None)
        if type(value) is int:
            yield name, value


def _first(holders: list[dict[str, object]], pattern: re.Pattern[str]) -> int:
    for holder in holders:
        for name, value in holder.items():
            if type(value) is int and value > 0 and pattern.fullmatch(name):
                return value
    return 0


def head_fault(name: str, heads: int, kv_heads: int, tp: int) -> str:
    """Why heads cannot be shared; empty if they can."""
    if heads % tp:
        fitting = [size for size in range(1, heads + 1) if heads % size == 0]
        return (
            f"{name} has {heads} attention heads, which cannot be shared evenly by tensor_parallel={tp} ranks. Choose"
            f" tensor_parallel from {fitting}, or a number of heads that divides by {tp}."
        )
    if kv_heads % tp and tp % kv_heads:
        fitting = [size for size in range(1, heads + 1) if heads % size == 0 and (kv_heads % size == 0)]
        return (
            f"{name} has {kv_heads} key/value heads for {heads} query heads, and tensor_parallel={tp} neither divides"
            f" nor is a multiple of {kv_heads}. Choose tensor_parallel from {fitting}."
        )
    return ""
