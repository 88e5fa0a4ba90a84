"""Runs a block with a layout without its values: whether its code can work with one rank's shapes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_3d.mesh import Axis
from lightning_3d.tensor_parallel.clone import GuessValues, trial_clone, trial_tensor
from lightning_3d.tensor_parallel.convert import convert_block
from lightning_3d.tensor_parallel.layout import BlockLayout
from lightning_3d.tensor_parallel.parameters import ParameterCut
from lightning_3d.tensor_parallel.probe import BlockCall
from lightning_3d.tensor_parallel.region import Regions


def output_shape(block: nn.Module, call: BlockCall, device: str) -> torch.Size | str:
    """Shape of what the whole ``block`` returns first, or why it does not run without values."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), GuessValues():
            return _first(_call(trial_clone(block, device), call, device)).shape
    except Exception as error:
        return _said(error)


def shape_fault(
    block: nn.Module,
    call: BlockCall,
    whole: torch.Size | str,
    layout: BlockLayout,
    tp: int,
    sequence_dim: int | None,
    device: str,
) -> str:
    """Why ``block`` cannot run with ``layout``; empty if it can. Nothing is sent, no values are computed.

    Args:
        block: The original; left as it is.
        call: How it is called.
        whole: What :func:`output_shape` gives for it.
        layout: What to cut.
        tp: Ranks to cut over.
        sequence_dim: Dim along which hidden states are scattered, if they are.
        device: As for ``observe``.
    """
    if isinstance(whole, str):
        return whole
    expected = list(whole)
    axis = Axis("tp", tp, 0, tuple(range(tp)), None)
    copy = trial_clone(block, device)
    done: set[int] = set()

    def cut(_: str, parameter: nn.Parameter, cut: ParameterCut) -> None:
        if id(parameter) not in done:
            parameter.data = cut.take(parameter.detach(), axis.rank)
            done.add(id(parameter))

    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), GuessValues():
            convert_block(copy, layout, Regions(axis, torch.device("cpu"), sequence_dim or 0), cut, sequence_dim)
            leaves, spec = call.leaves()
            if sequence_dim is not None and call.hidden >= 0:
                hidden = leaves[call.hidden]
                if hidden.shape[sequence_dim] % tp:
                    return f"the example's sequence of {hidden.shape[sequence_dim]} does not divide by {tp}"
                leaves[call.hidden] = hidden.narrow(sequence_dim, 0, hidden.shape[sequence_dim] // tp)
                expected[sequence_dim] //= tp
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            found = _first(_call(copy, BlockCall(args, kwargs), device))
    except Exception as error:
        return _said(error)
    if list(found.shape) != expected:
        return f"the output has shape {tuple(found.shape)} instead of {tuple(expected)}"
    return ""


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _call(block: nn.Module, call: BlockCall, device: str) -> object:
    args, kwargs = pytree.tree_map_only(Tensor, lambda x: trial_tensor(x, device), (call.args, call.kwargs))
    return block(*args, **kwargs)


def _first(output: object) -> Tensor:
    return next(x for x in pytree.tree_leaves(output) if isinstance(x, Tensor))
