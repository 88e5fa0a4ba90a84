"""Values for modules that were built on the meta device where nobody recorded what was done to them."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_3d.attributes import renew_hooks
from lightning_3d.errors import ConfigError
from lightning_3d.initialization.deferral import deferring
from lightning_3d.initialization.recipes import memory_of
from lightning_3d.initialization.values import never_written, some
from lightning_3d.placeholder import is_placeholder


def rebuild(module: nn.Module) -> str:
    """Initialise what ``module`` holds on the meta device again, as the constructors of its parts would have done.

    Part by part, children first, ``reset_parameters`` is called; models of Hugging Face then initialise themselves.
    Draws random numbers. Nothing on the meta device is left without a recipe.

    Returns:
        What is wrong unless a checkpoint is loaded: names of parameters that were changed after their parts were
        built, which is lost, or of tensors that nothing fills. Empty if nothing is.

    Raises:
        ConfigError: if nothing fills a buffer that no checkpoint holds. Names it.
    """
    born = {name: tensor for name, tensor in _named(module) if _is_bare(tensor)}
    if not born:
        return ""
    before = {id(tensor): tensor._version for tensor in born.values() if isinstance(tensor, nn.Parameter)}
    models = [part for part in module.modules() if hasattr(part, "initialize_weights")]
    theirs = {id(tensor) for model in models for tensor in model.parameters()}
    changed: set[int] = set()
    with deferring(None), torch.no_grad():
        for tensor in born.values():
            _restart(tensor)
        ties = _untie(module, before)
        # Which of two parts of different kinds has made a weight that they share, nobody knows.
        changed |= {id(tie.parameter) for tie in ties if tie.is_mixed and id(tie.parameter) not in theirs}
        for model in models:
            _unmark(model)
        for part in _children_first(module):
            did_reset = _reset(part)
            for parameter in part.parameters(recurse=False):
                # Of parts that only their model initialises, nobody knows what their constructor does.
                is_known = did_reset and id(parameter) in theirs
                if is_known and parameter._version < before.get(id(parameter), 0):
                    changed.add(id(parameter))
            if hasattr(part, "initialize_weights"):
                part.initialize_weights()  # type: ignore[operator]
        for model in models:
            _unmark(model)
        for tie in ties:
            tie.part._parameters[tie.key] = tie.parameter
    outside = [tensor for tensor in born.values() if id(tensor) in before and id(tensor) not in theirs]
    changed |= {id(tensor) for tensor in outside if tensor._version < before[id(tensor)]}
    lost = [name for name, tensor in born.items() if id(tensor) in changed]
    unset = [name for name, tensor in born.items() if never_written(tensor)]
    saved = set(module.state_dict(keep_vars=True))
    if never := [name for name in unset if name not in saved]:
        raise ConfigError(_unset(never))
    if lost:
        return (
            "These parameters were built on the meta device and then changed (an initialisation of your own, or a tie),"
            f" which is lost there: {some(lost)}. Build the module in configure_model, where the meta device keeps what"
            " is done to a tensor, do the initialisation in reset_parameters() of its parts, or load a checkpoint with"
            " ckpt_path."
        )
    return _unset(unset) if unset else ""


def _unset(names: list[str]) -> str:
    return (
        f"These parameters or buffers are on the meta device and nothing says which values they have: {some(names)}."
        " Build the module in configure_model, where the meta device keeps what is done to a tensor, or give their"
        " parts a reset_parameters() that fills them."
    )


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _is_bare(tensor: Tensor) -> bool:
    return tensor.is_meta and memory_of(tensor) is None and not is_placeholder(tensor)


def _restart(tensor: Tensor) -> None:
    """Let the same object begin anew, with a recipe."""
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    new.requires_grad_(tensor.requires_grad)
    torch._C._swap_tensor_impl(tensor, new)
    renew_hooks(tensor)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    seen: set[int] = set()

    def walk(part: nn.Module) -> Iterator[nn.Module]:
        if id(part) not in seen:
            seen.add(id(part))
            for child in part.children():
                yield from walk(child)
            yield part

    yield from walk(module)


@dataclass(frozen=True)
class _Tie:
    """A parameter under its second name."""

    part: nn.Module
    key: str
    parameter: nn.Parameter
    is_mixed: bool
    """Whether the part that has the first name is of another class."""


def _untie(module: nn.Module, born: Container[int]) -> list[_Tie]:
    """Put other parameters in the place of second names, as their constructors did; gives what was there."""
    first: dict[int, type] = {}
    ties: list[_Tie] = []
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is None or id(parameter) not in born:
                continue
            if id(parameter) in first:
                ties.append(_Tie(part, key, parameter, first[id(parameter)] is not type(part)))
            first.setdefault(id(parameter), type(part))
    for tie in ties:
        tie.part._parameters[tie.key] = nn.Parameter(torch.empty_like(tie.parameter, device="meta"))
    return ties


def _reset(part: nn.Module) -> bool:
    """Let ``part`` fill what it holds itself, if it knows how and all of that is to be filled."""
    own = [tensor for tensor in (*part._parameters.values(), *part._buffers.values()) if tensor is not None]
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(part, name, None)
        tensors = own or (list(part.parameters()) if name == "_reset_parameters" else [])
        if callable(reset) and tensors and all(memory_of(tensor) is not None for tensor in tensors):
            reset()
            return True
    return False


def _unmark(model: nn.Module) -> None:
    """Let a model of Hugging Face initialise everything that was to be filled, and nothing else."""
    for part in model.modules():
        vars(part).pop("_is_hf_initialized", None)
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None and memory_of(tensor) is None:
                tensor._is_hf_initialized = True  # type: ignore[attr-defined]
            elif tensor is not None:
                vars(tensor).pop("_is_hf_initialized", None)
