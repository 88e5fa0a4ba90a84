"""What the blocks of a model cost on a device: the time of their forward and backward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from lightning_3d.pipeline.costs import Costs, Positions
from lightning_3d.pipeline.flops import known_length
from lightning_3d.placeholder import Placeholder
from lightning_3d.tensor_parallel.clone import clone_block
from lightning_3d.tensor_parallel.probe import BlockCall, probe

_DEFAULT_LENGTH = 512
_WARM_UP, _RUNS = 2, 5


def time_costs(
    module: nn.Module,
    blocks: Sequence[str],
    outside: Positions,
    device: torch.device,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    recomputed: float = 0.0,
) -> Costs | None:
    """Measure forward and backward of copies of the blocks, and of the modules around them, one after another.

    Blocks of one class with the same shapes are measured once. The copies have random weights, and are called with
    random values of the shapes that a run of the model on meta tensors shows. The last layer after the blocks is
    followed by a cross entropy, which stands for the loss.

    Args:
        module: The whole model; left as it is.
        blocks: Names of its blocks, in the order of their calls.
        outside: Modules outside the blocks.
        device: Where to measure.
        context: Gives what the forward runs in, such as autocast.
        recomputed: Share of the blocks whose forward is run again in the backward.

    Returns:
        Seconds per block, or ``None`` if no made-up inputs run through all of them.
    """
    around = {name: where for name, where in outside.items() if where}
    length = known_length(module) or _DEFAULT_LENGTH
    calls = probe(module, [*blocks, *around], 1, length).blocks
    if any(name not in calls for name in blocks):
        return None
    measured: dict[object, float] = {}
    devices = [device] if device.type == "cuda" else []

    def seconds(name: str, loss: bool = False) -> float:
        part, call = module.get_submodule(name), calls[name]
        key = (type(part), loss, _shapes(part.named_parameters()), _shapes(enumerate(call.leaves()[0])))
        if key not in measured:
            with torch.random.fork_rng(devices=devices):
                measured[key] = _median(part, call, device, context, loss)
        return measured[key]

    costs = [seconds(name) * (1 + recomputed / 3) for name in blocks]  # a forward is a third
    last = [name for name, where in around.items() if len(blocks) - 1 in where and name in calls]
    for name, where in around.items():
        for position in where if name in calls else ():
            costs[position] += seconds(name, loss=bool(last) and name == last[-1] and position == len(blocks) - 1)
    hidden = next((leaf.shape for leaf in calls[blocks[0]].leaves()[0] if isinstance(leaf, Tensor)), ())
    shape = " x ".join(map(str, hidden))
    return Costs(tuple(costs), "seconds", f"by time, measured on {device.type} with a first block's input of {shape}")


def _shapes(named: Any) -> tuple[Any, ...]:
    return tuple((n, tuple(x.shape), x.dtype, x.requires_grad) for n, x in named if isinstance(x, Tensor))


def _median(
    part: nn.Module,
    call: BlockCall,
    device: torch.device,
    context: Callable[[], AbstractContextManager[Any]],
    loss: bool,
) -> float:
    def parameter(_: str, tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, device=device).mul_(0.02).to(tensor.dtype)

    def other(_: str, tensor: Tensor) -> Tensor:
        if tensor.is_meta or isinstance(tensor, Placeholder):
            return torch.ones(tensor.shape, dtype=tensor.dtype, device=device)
        return tensor.detach().clone().to(device)

    copy = clone_block(part, parameter, other).train(part.training)
    for mine, original in zip(copy.parameters(), part.parameters(), strict=True):
        mine.requires_grad_(original.requires_grad)
    leaves, spec = call.leaves()
    values = [_value(leaf, device) for leaf in leaves]
    if call.hidden >= 0:
        values[call.hidden].requires_grad_()
    args, kwargs = pytree.tree_unflatten(values, spec)
    times = []
    for _ in range(_WARM_UP + _RUNS):
        _wait(device)
        start = time.perf_counter()
        with torch.enable_grad(), context():
            output = copy(*args, **kwargs)
            found = next(x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point())
            if loss:
                found = F.log_softmax(found.float(), -1).mean()
        if found.requires_grad:
            torch.autograd.backward(found, torch.ones_like(found))
        _wait(device)
        times.append(time.perf_counter() - start)
        for tensor in (*copy.parameters(), *(x for x in values if isinstance(x, Tensor))):
            tensor.grad = None
    return statistics.median(times[_WARM_UP:])


def _value(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if not leaf.is_meta:
        return leaf.detach().to(device)
    if leaf.is_floating_point():
        return torch.randn(leaf.shape, device=device).to(leaf.dtype)
    fill = torch.ones if leaf.dtype == torch.bool or leaf.is_complex() else torch.zeros
    return fill(leaf.shape, dtype=leaf.dtype, device=device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
