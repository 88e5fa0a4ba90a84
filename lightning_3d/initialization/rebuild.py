"""Values for modules that were built on the meta device where nobody recorded what was done to them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightning_3d.errors import ConfigError
from lightning_3d.initialization.deferral import deferring
from lightning_3d.initialization.recipes import memory_of
from lightning_3d.initialization.values import never_written, some
from lightning_3d.placeholder import is_placeholder


def rebuild(module: nn.Module) -> str:
    """Initialise what ``module`` holds on the meta device again, as the constructors of its parts would have done.

    Part by part, children first, ``reset_parameters`` is called; then models of Hugging Face initialise themselves.
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
    before = {name: tensor._version for name, tensor in born.items() if isinstance(tensor, nn.Parameter)}
    with deferring(None), torch.no_grad():
        for tensor in born.values():
            _restart(tensor)
        for part in _children_first(module):
            _reset(part)
        changed = [name for name, version in before.items() if born[name]._version < version]
        for model in _self_initialising(module):
            _initialise(model)
    unset = [name for name, tensor in born.items() if never_written(tensor)]
    saved = set(module.state_dict(keep_vars=True))
    if lost := [name for name in unset if name not in saved]:
        raise ConfigError(_unset(lost))
    if changed:
        return (
            f"These parameters were built on the meta device and then changed (an initialisation of your own?), which"
            f" is lost there: {some(changed)}. Build the module in configure_model, where the meta device keeps what is"
            " done to a tensor, do the initialisation in reset_parameters() of its parts, or load a checkpoint with"
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


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    seen: set[int] = set()

    def walk(part: nn.Module) -> Iterator[nn.Module]:
        if id(part) not in seen:
            seen.add(id(part))
            for child in part.children():
                yield from walk(child)
            yield part

    yield from walk(module)


def _reset(part: nn.Module) -> None:
    own = [t for t in (*part._parameters.values(), *part._buffers.values()) if t is not None]
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(part, name, None)
        tensors = own or (list(part.parameters()) if name == "_reset_parameters" else [])
        if callable(reset) and tensors and all(memory_of(tensor) is not None for tensor in tensors):
            reset()
            return


def _self_initialising(module: nn.Module) -> list[nn.Module]:
    """The outermost models that initialise all of their parts themselves, as those of Hugging Face do."""
    found = [part for part in module.modules() if hasattr(part, "initialize_weights")]
    inside = {id(inner) for part in found for inner in part.modules() if inner is not part}
    return [
        part
        for part in found
        if id(part) not in inside and any(memory_of(tensor) is not None for _, tensor in _named(part))
    ]


def _initialise(model: nn.Module) -> None:
    for part in model.modules():
        vars(part).pop("_is_hf_initialized", None)
    for _, tensor in _named(model):
        tensor._is_hf_initialized = memory_of(tensor) is None  # type: ignore[attr-defined]
    model.initialize_weights()  # type: ignore[operator]
    for _, tensor in _named(model):
        del tensor._is_hf_initialized  # type: ignore[attr-defined]
