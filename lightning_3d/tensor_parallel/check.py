"""The numeric check: a block with its layout against the original block, outputs and every gradient."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from lightning_3d.collectives import all_reduce
from lightning_3d.mesh import Axis
from lightning_3d.placeholder import Placeholder
from lightning_3d.tensor_parallel.clone import clone_block
from lightning_3d.tensor_parallel.convert import convert_block
from lightning_3d.tensor_parallel.layout import BlockLayout
from lightning_3d.tensor_parallel.parameters import ParameterCut
from lightning_3d.tensor_parallel.probe import BlockCall
from lightning_3d.tensor_parallel.region import Regions

FAILS = "block fails when it is cut"

_DOUBLE_UP_TO = 50_000_000
"""Parameters of a block up to which the check runs in float64."""


@dataclass(frozen=True)
class Verdict:
    """What the check of a block found, the same on every rank of the axis."""

    fault: str = ""
    """What differs first; empty when nothing does."""
    layer: str = ""
    """Layer at which the difference first shows."""
    partial: frozenset[str] = frozenset()
    """Whole parameters whose gradients are partial on every rank."""
    compared: int = 0
    """Outputs and gradients that were compared."""


class BlockCheck(Protocol):
    """What compares a block cut by a layout with the whole block: :func:`check_block`."""

    def __call__(
        self,
        block: nn.Module,
        call: BlockCall,
        layout: BlockLayout,
        axis: Axis,
        device: torch.device,
        sequence_dim: int | None,
    ) -> Verdict | None:
        """See :func:`check_block`."""


@dataclass
class _Run:
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    inputs: dict[int, Tensor]
    """Gradients of arguments, by leaf."""
    further: dict[int, Tensor]
    """What the block returned and others read, beyond its leading output."""


def check_block(
    block: nn.Module,
    call: BlockCall,
    layout: BlockLayout,
    axis: Axis,
    device: torch.device,
    sequence_dim: int | None,
) -> Verdict | None:
    """Compare ``block`` cut by ``layout`` with the whole block, on small random values.

    Collective over ``axis``.

    Args:
        block: The original; only its structure is used.
        call: How it is called.
        layout: What to cut.
        axis: The tensor-parallel axis.
        device: Where to compute.
        sequence_dim: Dim along which hidden states are scattered, if they are.

    Returns:
        The verdict, or ``None`` when the original itself cannot run on made-up values.
    """
    # A forward that somebody replaced may lead from the copies back to the original.
    gradients = [(parameter, parameter.grad) for parameter in block.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        return _check(block, call, layout, axis, device, sequence_dim)
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _check(
    block: nn.Module,
    call: BlockCall,
    layout: BlockLayout,
    axis: Axis,
    device: torch.device,
    sequence_dim: int | None,
) -> Verdict | None:
    count = sum(parameter.numel() for parameter in block.parameters())
    inner = {name for region in layout.regions for name in region.inner}
    names = [*(row for region in layout.regions for row in region.rows), *layout.attentions]
    # Some kernels know no float64; masks of one kind or the other may hide every token.
    dtypes = (torch.float64, torch.float32) if count <= _DOUBLE_UP_TO else (torch.float32,)
    for dtype, fill in itertools.product(dtypes, (True, False)):
        whole = _filled(block, dtype, device)
        try:
            reference = _run(whole, call, names, dtype, device, fill, Axis("tp", 1, 0, (0,), None), None)
        except torch.OutOfMemoryError:
            raise  # of this rank alone: the others would compare with other numbers, or wait
        except Exception:
            continue
        if all(bool(torch.isfinite(output).all()) for output in reference.outputs.values()):
            break
    else:
        return None
    tolerance = 1e-4 if dtype == torch.float64 else 2e-3
    shapes = {name: parameter for name, parameter in whole.named_parameters()}
    cuts: dict[str, ParameterCut] = {}
    copy = _filled(block, dtype, device)
    own = {id(parameter): name for name, parameter in copy.named_parameters()}

    def cut(_: str, parameter: nn.Parameter, how: ParameterCut) -> None:
        if own[id(parameter)] not in cuts:
            cuts[own[id(parameter)]] = how
            parameter.data = how.take(parameter.detach(), axis.rank)

    convert_block(copy, layout, Regions(axis, device, sequence_dim or 0), cut, sequence_dim)
    try:
        found = _run(copy, call, names, dtype, device, fill, axis, sequence_dim)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of shapes, so on every rank alike
        said = str(error).splitlines()[0] if str(error) else ""
        return Verdict(f"{FAILS} ({type(error).__name__}: {said})", "")

    def piece(tensor: Tensor) -> Tensor:
        if sequence_dim is None:
            return tensor
        length = tensor.shape[sequence_dim] // axis.size
        return tensor.narrow(sequence_dim, axis.rank * length, length)

    floor = 1e-3 * max((g.square().mean().sqrt().item() for g in reference.gradients.values()), default=0.0)
    items: list[tuple[str, str]] = []
    close: list[bool] = []

    def compare(layer: str, what: str, value: Tensor | None, expected: Tensor, least: float = 0.0) -> None:
        items.append((layer, what))
        close.append(_close(value, expected, tolerance, least))

    for name, expected in reference.outputs.items():
        value = found.outputs.get(name)
        if sequence_dim is None or name == "" or name in names:
            compare(name, "output", value, piece(expected))
    for index, expected in reference.further.items():
        compare("", f"output {index}", found.further.get(index), expected)
    for index, expected in reference.inputs.items():
        scattered = sequence_dim is not None and index == call.hidden
        expected = piece(expected) if scattered else expected
        compare("", "input gradient", found.inputs.get(index), expected, floor)
    summed: dict[str, tuple[int, int]] = {}
    for name in shapes:
        expected = reference.gradients[name]
        gradient = found.gradients[name]
        layer = name.rpartition(".")[0]
        if name in cuts:
            compare(
                layer, f"gradient of {name.rpartition('.')[2]}", gradient, cuts[name].take(expected, axis.rank), floor
            )
            continue
        total = all_reduce(gradient.clone(), axis)
        compare(layer, f"gradient of {name.rpartition('.')[2]}", gradient, expected, floor)
        compare(layer, f"gradient of {name.rpartition('.')[2]}", total, expected, floor)
        summed[name] = (len(items) - 2, len(items) - 1)
    agreed = all_reduce(torch.tensor(close, dtype=torch.int32, device=device), axis, "min").bool().tolist()
    partial = set()
    for name, (alone, together) in summed.items():
        if agreed[together] and (not agreed[alone] or name in inner or sequence_dim is not None):
            partial.add(name)
        agreed[alone] = agreed[together] = agreed[alone] or agreed[together]
    for (layer, what), good in zip(items, agreed, strict=True):
        if not good:
            return Verdict(what, layer)
    return Verdict(partial=frozenset(partial), compared=len(items))


def _close(value: Tensor | None, expected: Tensor, tolerance: float, least: float) -> bool:
    if value is None or value.shape != expected.shape:
        return False
    scale = max(expected.norm().item(), least * expected.numel() ** 0.5)
    return bool((value - expected).norm().item() <= tolerance * scale + 1e-12)


def _filled(block: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A copy of ``block`` with random parameters, the same on every rank and at every call."""

    def parameter(name: str, original: Tensor) -> Tensor:
        if not original.is_floating_point():
            return torch.zeros(original.shape, dtype=original.dtype, device=device)
        noise = _normal(original.shape, zlib.crc32(name.encode()), dtype)
        if original.dim() > 1:
            return (noise / max(1, original.shape[-1]) ** 0.5).to(device)
        # Zero or one everywhere would hide mistakes, and so would weights that start at zero.
        base = 0.0 if name.endswith("bias") else 1.0
        return (base + 0.1 * noise).to(device)

    def other(_: str, original: Tensor) -> Tensor:
        if original.is_meta or isinstance(original, (Placeholder, DTensor)):
            return torch.ones(original.shape, dtype=_as(original.dtype, dtype), device=device)
        return original.detach().clone().to(device, _as(original.dtype, dtype))

    return clone_block(block, parameter, other).eval()


def _run(
    block: nn.Module,
    call: BlockCall,
    names: list[str],
    dtype: torch.dtype,
    device: torch.device,
    fill: bool,
    axis: Axis,
    sequence_dim: int | None,
) -> _Run:
    outputs: dict[str, Tensor] = {}
    for name in names:
        block.get_submodule(name).register_forward_hook(
            lambda _, args, output, name=name: outputs.__setitem__(name, _leading(output).detach().clone())
        )
    leaves, spec = call.leaves()
    leaves = [_value(leaf, index, dtype, device, fill) for index, leaf in enumerate(leaves)]
    inputs: dict[int, Tensor] = {}
    for index in sorted({call.hidden, *call.trained}):
        if index < 0 or not leaves[index].is_floating_point():
            continue
        value = leaves[index]
        if sequence_dim is not None and index == call.hidden:
            length = value.shape[sequence_dim] // axis.size
            value = value.narrow(sequence_dim, axis.rank * length, length).clone()
        inputs[index] = value.requires_grad_()
        leaves[index] = value.view_as(value)
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        returned = call.outputs(block(*args, **kwargs))
        leading = next(iter(returned))
        output = returned.pop(leading)
        shape = list(output.shape)
        if sequence_dim is not None:
            shape[sequence_dim] *= axis.size
        weights = _normal(shape, 1, output.dtype).to(device)
        if sequence_dim is not None:
            length = output.shape[sequence_dim]
            weights = weights.narrow(sequence_dim, axis.rank * length, length)
        total = (output * weights).sum()
        for index, value in returned.items():
            if value.requires_grad:
                total = total + (value * _normal(value.shape, index + 1000, value.dtype).to(device)).sum()
        total.backward()
    outputs[""] = output.detach()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in block.named_parameters()
    }
    changed = {i: torch.zeros_like(x) if x.grad is None else x.grad for i, x in inputs.items()}
    return _Run(outputs, gradients, changed, {index: value.detach() for index, value in returned.items()})


def _leading(output: object) -> Tensor:
    return next(x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point())


def _value(leaf: object, index: int, dtype: torch.dtype, device: torch.device, fill: bool) -> object:
    """A value for an argument: what was seen if it was real, random numbers where only its shape is known."""
    if not isinstance(leaf, Tensor):
        return leaf
    if not (leaf.is_meta or isinstance(leaf, Placeholder)):
        return leaf.detach().to(device, _as(leaf.dtype, dtype))
    if leaf.is_complex():
        angles = _normal(leaf.shape, index + 2, torch.float64)
        return torch.polar(torch.ones_like(angles), angles).to(device, leaf.dtype)
    if leaf.is_floating_point():
        return _normal(leaf.shape, index + 2, dtype).to(device)
    if leaf.dtype == torch.bool:
        return torch.full(leaf.shape, fill, device=device)
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)


def _as(original: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    return dtype if original.is_floating_point else original


def _normal(shape: object, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)  # type: ignore[arg-type]
