"""Cross entropy on logits that stay cut over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import Self, override

from lightning_3d.collectives import all_reduce
from lightning_3d.mesh import Axis
from lightning_3d.tensor_parallel.collectives import gather_from_tp, split_to_tp
from lightning_3d.tensor_parallel.vocabulary import is_own

_HALF = (torch.bfloat16, torch.float16)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    axis: Axis,
    sizes: Sequence[int],
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy`` of logits of which each rank holds a piece of the classes.

    Args:
        logits: This rank's piece, ``[..., sizes[rank]]``.
        target: Class indices ``[...]`` in the whole vocabulary, the same on every rank.
        axis: The tensor-parallel axis.
        sizes: Number of classes that every rank holds.
        ignore_index: Target that counts nothing.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: Share of the target spread evenly over all classes.

    Returns:
        The loss, the same on every rank; computed in float32 for 16-bit logits, like PyTorch under autocast, and
        then given in their type unless autocast is on.

    Raises:
        IndexError: on CPU, for a target outside the vocabulary; on a GPU the kernel of the look-up asserts.
        ValueError: when there are not as many targets as rows of logits.
    """
    vocab = sum(sizes)
    flat, wanted = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    if len(flat) != len(wanted):
        raise ValueError(f"{len(wanted)} targets were given for {len(flat)} rows of logits: there has to be one each.")
    ignored = wanted == ignore_index
    if wanted.device.type == "cpu" and bool((((wanted < 0) | (wanted >= vocab)) & ~ignored).any()):
        raise IndexError(f"A target is out of bounds: the vocabulary has {vocab} entries, ignore_index={ignore_index}.")
    start = sum(sizes[: axis.rank])
    losses = _CrossEntropy.apply(flat, wanted, ignored, axis, start, vocab, label_smoothing)
    if reduction == "none":
        result: Tensor = losses.view(target.shape)
    else:
        result = losses.sum()
        if reduction == "mean":
            result = result / (~ignored).sum()
    # Not before: the sum over many tokens has no place in float16, nor has their number.
    keeps = logits.dtype in _HALF and not torch.is_autocast_enabled(logits.device.type)
    return result.to(logits.dtype) if keeps else result


class ShardedLogits(Tensor):
    """Logits ``[..., vocab]`` of which this rank holds a piece of the vocabulary.

    Views, shifts, casts and scaling keep the pieces, and ``F.cross_entropy`` (so ``nn.CrossEntropyLoss``) works on
    them. Any other operation gathers the whole logits first, with the same result as without ``loss_parallel``; as
    that is a collective, it has to run on every tensor-parallel rank. What it writes into them is written into the
    pieces.
    """

    local: Tensor
    axis: Axis
    sizes: tuple[int, ...]
    vocab_dim: int

    @classmethod
    def of(cls, local: Tensor, axis: Axis, sizes: Sequence[int], vocab_dim: int = -1) -> Self:
        """Wrap this rank's piece ``local``, which is cut along ``vocab_dim``."""
        dim = vocab_dim % local.dim()
        shape = list(local.shape)
        shape[dim] = sum(sizes)
        made = Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        made.local, made.axis, made.sizes, made.vocab_dim = local, axis, tuple(sizes), dim
        return made

    def whole(self) -> Tensor:
        """The plain logits, gathered from all ranks."""
        return gather_from_tp(self.local, self.axis, self.vocab_dim, self.sizes)

    def _write(self, func: Callable[..., Any], rest: Any, kwargs: dict[str, Any]) -> ShardedLogits:
        """Do on the whole logits what ``func`` does in place, and take this rank's piece of them."""
        whole = self.whole().clone()  # which may be a view
        rest, kwargs = torch.utils._pytree.tree_map_only(ShardedLogits, ShardedLogits.whole, (rest, kwargs))
        func(whole, *rest, **kwargs)
        self.local.copy_(split_to_tp(whole, self.axis, self.vocab_dim, self.sizes))
        return self

    @classmethod
    @override
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, ShardedLogits) or isinstance(kwargs.get("input"), ShardedLogits):
            if func is F.cross_entropy:
                return _cross_entropy(*args, **kwargs)
            if isinstance(first, ShardedLogits):
                if func in _FACTS:
                    with torch._C.DisableTorchFunctionSubclass():
                        return func(*args, **kwargs)
                if _writes(func):
                    return first._write(func, args[1:], kwargs)
                kept = _keep(func, first, args[1:], kwargs)
                if kept is not None:
                    return kept
        args, kwargs = torch.utils._pytree.tree_map_only(ShardedLogits, ShardedLogits.whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = torch.utils._pytree.tree_map_only(ShardedLogits, ShardedLogits.whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedLogits(shape={tuple(self.shape)}, dtype={self.dtype}, local={tuple(self.local.shape)})"


_FACTS: frozenset[Any] = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "is_meta")
) | {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.nelement,
    Tensor.is_floating_point,
    Tensor.element_size,
    Tensor.__len__,
    torch.is_floating_point,
    torch.numel,
}

_WRITES = frozenset({"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow"))})
_OF_SHAPE = frozenset(
    {"requires_grad_", "detach_", "share_memory_", "resize_", "t_", "transpose_", "squeeze_", "unsqueeze_"}
)


def _writes(func: Any) -> bool:
    """Whether ``func`` changes the values of the tensor that it is called on."""
    name = getattr(func, "__name__", "")
    return name in _WRITES or (name.endswith("_") and not name.endswith("__") and name not in _OF_SHAPE)


# Element by element, whatever the other arguments, as long as those are no tensors with a vocabulary dim.
_ELEMENTWISE: frozenset[Any] = frozenset(
    {
        Tensor.float,
        Tensor.double,
        Tensor.half,
        Tensor.bfloat16,
        Tensor.clone,
        Tensor.contiguous,
        Tensor.type,
        Tensor.tanh,
        torch.tanh,
        Tensor.neg,
        Tensor.__neg__,
        Tensor.mul,
        Tensor.__mul__,
        Tensor.__rmul__,
        torch.mul,
        Tensor.div,
        Tensor.__truediv__,
        torch.div,
        Tensor.add,
        Tensor.__add__,
        Tensor.__radd__,
        Tensor.sub,
        Tensor.__sub__,
        torch.clone,
    }
)
_RESHAPES: frozenset[Any] = frozenset({Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten})
_TRANSPOSES: frozenset[Any] = frozenset({Tensor.transpose, torch.transpose, Tensor.permute, torch.permute})


def _keep(func: Any, logits: ShardedLogits, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedLogits | None:
    """The result of ``func`` on the pieces, where that is the piece of its result; ``None`` where it is not."""
    last = logits.vocab_dim == logits.dim() - 1
    if func in _ELEMENTWISE or (func is Tensor.to and _is_cast(rest, kwargs)):
        others = torch.utils._pytree.tree_leaves((rest, kwargs))
        if any(isinstance(other, Tensor) and other.dim() > 0 for other in others):
            return None
        return _like(logits, func(logits.local, *rest, **kwargs))
    if func in _RESHAPES and last:
        meta = func(torch.empty(logits.shape, device="meta"), *rest, **kwargs)
        if meta.dim() == 0 or meta.shape[-1] != logits.shape[-1] or isinstance((*rest, None)[0], torch.dtype):
            return None
        return _like(logits, logits.local.reshape(*meta.shape[:-1], logits.local.shape[-1]))
    if func is Tensor.__getitem__ and last and _leaves_last_dim(rest[0], logits.dim()):
        return _like(logits, logits.local[rest[0]])
    if func in _TRANSPOSES:
        marks = torch.empty([dim + 2 for dim in range(logits.dim())], device="meta")
        turned = list(func(marks, *rest, **kwargs).shape)
        return _like(logits, func(logits.local, *rest, **kwargs), turned.index(logits.vocab_dim + 2))
    return None


def _like(logits: ShardedLogits, local: Tensor, vocab_dim: int | None = None) -> ShardedLogits:
    if vocab_dim is None:
        vocab_dim = logits.vocab_dim if local.dim() == logits.dim() else -1
    return ShardedLogits.of(local, logits.axis, logits.sizes, vocab_dim)


def _is_cast(rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return all(isinstance(item, torch.dtype) for item in (*rest, *kwargs.values()))


def _leaves_last_dim(index: Any, dims: int) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    taken = 0
    for item in items:
        if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
            taken += item.dim()
        elif item is not None and item is not Ellipsis and not isinstance(item, bool):
            taken += 1
    if isinstance(items[-1], slice) and items[-1] == slice(None):
        return True
    ends_open = items[-1] is Ellipsis or not any(item is Ellipsis for item in items)
    return taken < dims and ends_open and items[-1] is not None


def _cross_entropy(
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    logits: ShardedLogits = input
    class_dim = 1 if logits.dim() > 1 else 0
    old_style = size_average is not None or reduce is not None
    by_index = not target.is_floating_point() and not isinstance(target, ShardedLogits)
    if weight is not None or old_style or not by_index or logits.vocab_dim != class_dim:
        return F.cross_entropy(
            logits.whole(), target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    local = logits.local.movedim(class_dim, -1)
    return vocab_parallel_cross_entropy(
        local, target, logits.axis, logits.sizes, ignore_index, reduction, label_smoothing
    )


class _CrossEntropy(torch.autograd.Function):
    """Loss of every row; the softmax of the local classes is what backward needs."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, ignored: Tensor, axis: Axis, start: int, vocab: int, smoothing: float
    ) -> Tensor:
        ctx.dtype, ctx.smoothing, ctx.vocab = logits.dtype, smoothing, vocab
        held = logits.shape[1]
        copied = logits.dtype in _HALF
        values = logits.float() if copied else logits
        peak = values.amax(1) if held else values.new_full((len(values),), -torch.inf)
        all_reduce(peak, axis, "max")
        # These are the largest tensors of a step: one of them is enough.
        shifted = values.sub_(peak.unsqueeze(1)) if copied else values - peak.unsqueeze(1)
        here = is_own(target, start, held, vocab) & ~ignored
        index = (target - start).masked_fill(~here, 0)
        sums = shifted.new_zeros(3 if smoothing else 2, len(values))
        if held:
            sums[1] = shifted.gather(1, index.unsqueeze(1)).squeeze(1).masked_fill(~here, 0.0)
            if smoothing:
                sums[2] = shifted.sum(1)
        softmax = shifted.exp_()
        sums[0] = softmax.sum(1)
        all_reduce(sums, axis)
        softmax.div_(sums[0].unsqueeze(1))
        log_total = sums[0].log()
        loss = log_total - sums[1]
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing * (log_total - sums[2] / vocab)
        ctx.save_for_backward(softmax, index, here, ignored)
        return loss.masked_fill_(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        softmax, index, here, ignored = ctx.saved_tensors
        gradient = gradient.masked_fill(ignored, 0.0)
        result = softmax * gradient.unsqueeze(1)
        if result.shape[1]:
            picked = (gradient * -(1 - ctx.smoothing)).masked_fill(~here, 0.0)
            result.scatter_add_(1, index.unsqueeze(1), picked.unsqueeze(1))
            if ctx.smoothing:
                result.sub_(gradient.unsqueeze(1) * (ctx.smoothing / ctx.vocab))
        return result.to(ctx.dtype), None, None, None, None, None, None
