"""What the user's patterns, or the model's own plan, say of every layer."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Mapping

from torch import nn

from lightning_3d.config import parse_plan_value
from lightning_3d.errors import ConfigError
from lightning_3d.tensor_parallel.embedding import is_embedding
from lightning_3d.tensor_parallel.layers import is_linear
from lightning_3d.tensor_parallel.layout import Rule

# Values of Hugging Face plans and the names they have here. Layers with others are planned by their structure.
_MODEL_STYLES = {
    "colwise": ("colwise", 1),
    "rowwise": ("rowwise", 1),
    "packed_colwise": ("colwise", 2),
    "colwise_gather_output": ("colwise_gather", 1),
    "colwise_rep": ("colwise_gather", 1),
    "rowwise_split_input": ("rowwise_split", 1),
    "rowwise_rep": ("rowwise_split", 1),
    "embedding_rowwise": ("vocab", 1),
    "replicated_with_grad_allreduce": ("whole", 1),
    "replicate": ("whole", 1),
}


def user_rules(module: nn.Module, patterns: Mapping[str, str]) -> dict[str, Rule]:
    """The rule of every layer that a pattern of the user matches; later patterns win.

    Raises:
        ConfigError: for a value that is not known, a pattern that matches no layer, or one that names something which
            cannot be cut like that.
    """
    names = [name for name, _ in module.named_modules() if name]
    rules: dict[str, Rule] = {}
    for pattern, value in patterns.items():
        style, parts = parse_plan_value(pattern, value)
        style = "whole" if style == "replicate" else style
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise ConfigError(_no_match(pattern, module))
        for name in matched:
            _check_class(module.get_submodule(name), name, pattern, style)
            rules[name] = Rule(style, parts, "user", pattern)
    return rules


def model_rules(module: nn.Module) -> dict[str, Rule]:
    """The rules of the plans that parts of ``module`` carry as ``_tp_plan``, as Hugging Face models do."""
    rules: dict[str, Rule] = {}
    covered: list[str] = []
    for prefix, part in module.named_modules():
        plan = getattr(part, "_tp_plan", None)
        if not isinstance(plan, Mapping) or not plan or any(prefix.startswith(outer) for outer in covered):
            continue
        covered.append(f"{prefix}." if prefix else "")
        inner = dict(part.named_modules())
        for pattern, style in plan.items():
            regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+") + r"$")
            for name, layer in inner.items():
                if not regex.match(name):
                    continue
                known, parts = _MODEL_STYLES.get(style, ("", 1))
                cuttable = is_linear(layer) or (known == "vocab" and is_embedding(layer))
                if known and cuttable:  # of others the structure tells
                    full = f"{prefix}.{name}".lstrip(".")
                    rules[full] = Rule(known, parts, "model plan", f"{pattern}: {style}")
    return rules


def _check_class(layer: nn.Module, name: str, pattern: str, style: str) -> None:
    if style == "whole":
        return
    wanted = "nn.Embedding" if style == "vocab" else "nn.Linear (or Conv1D)"
    fits = is_embedding(layer) if style == "vocab" else is_linear(layer)
    if not fits:
        raise ConfigError(
            f"tp_plan[{pattern!r}] asks for {style!r} on {name!r}, which is a {type(layer).__name__}, but {style!r} is"
            f" for {wanted} with its ordinary forward. Make the pattern match such a layer, or use 'replicate'."
        )


def _no_match(pattern: str, module: nn.Module) -> str:
    layers = [name for name, part in module.named_modules() if is_linear(part) or isinstance(part, nn.Embedding)]
    short = {re.sub(r"\.\d+(?=\.|$)", ".*", name): name for name in layers}
    tail = pattern.rpartition(".")[2] or pattern
    near = difflib.get_close_matches(pattern, short, n=3, cutoff=0.3)
    near += [name for name in short if difflib.SequenceMatcher(None, tail, name.rpartition(".")[2]).ratio() > 0.6]
    nearest = list(dict.fromkeys(near))[:4] or list(short)[:4]
    return (
        f"tp_plan pattern {pattern!r} matches no layer of {type(module).__name__}. Nearest names:"
        f" {', '.join(repr(name) for name in nearest)}. Patterns are matched against whole names, '*' matches anything."
    )
