"""Hugging Face's stores of keys and values, in blocks that are recomputed: a second run would append to them again."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_3d.errors import ConfigError


def without_caches(block: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """What to hand to a ``block`` that runs twice, in place of its keyword ``arguments``: no cache to fill.

    In training nobody reads what a cache would hold; the models themselves leave it out when they recompute.

    Raises:
        ConfigError: The cache holds keys and values of this block already, so that its result depends on them.
    """
    caches = [name for name, value in arguments.items() if is_cache(value)]
    for name in caches:
        _refuse_filled(block, arguments[name])
    changed: dict[str, Any] = dict.fromkeys(caches)
    if "use_cache" in arguments:
        changed["use_cache"] = False
    return {**arguments, **changed}


def _refuse_filled(block: nn.Module, cache: Any) -> None:
    places = {place for module in block.modules() if isinstance(place := vars(module).get("layer_idx"), int)}
    if any(cache.get_seq_length(place) for place in places):
        raise ConfigError(
            "activation_checkpointing runs blocks a second time, and these blocks are given keys and values of"
            " earlier tokens (past_key_values, as prefix tuning does), to which they would then append twice. Use"
            " activation_checkpointing=None, or train without past_key_values."
        )


def is_cache(value: object) -> bool:
    """Whether ``value`` is one of Hugging Face's stores of keys and values."""
    # Told by name, to import nothing.
    return any(kind.__name__ == "Cache" and kind.__module__.startswith("transformers.") for kind in type(value).__mro__)
