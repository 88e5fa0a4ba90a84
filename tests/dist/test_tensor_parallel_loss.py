"""Logits cut over the vocabulary: every way users write a loss gives what whole logits give."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.collectives import chunk_sizes
from lightning_3d.config import Sizes
from lightning_3d.mesh import build_mesh
from lightning_3d.tensor_parallel import ShardedLogits
from tests.harness import run_ranks

VOCAB = 11
IGNORED = torch.tensor([[3, -100, 10, 0], [7, 7, -100, 5]])
TARGET = torch.tensor([[3, 1, 10, 0], [7, 7, 2, 5]])

Loss = Callable[[Tensor], Tensor]

# Computed on the pieces: gathering whole logits there would be a fault.
PARALLEL: dict[str, Loss] = {
    "flat": lambda x: F.cross_entropy(x.view(-1, VOCAB), TARGET.view(-1)),
    "reshaped by size": lambda x: F.cross_entropy(x.reshape(-1, x.size(-1)), TARGET.reshape(-1)),
    "flattened": lambda x: F.cross_entropy(x.flatten(0, 1), TARGET.flatten(), reduction="sum"),
    "shifted": lambda x: F.cross_entropy(x[:, :-1].contiguous().view(-1, x.shape[-1]), TARGET[:, 1:].flatten()),
    "shifted with dots": lambda x: F.cross_entropy(x[..., :-1, :].flatten(0, 1), TARGET[..., 1:].flatten()),
    "ignored": lambda x: nn.CrossEntropyLoss()(x.view(-1, VOCAB), IGNORED.view(-1)),
    "ignored, own index": lambda x: F.cross_entropy(x.view(-1, VOCAB), TARGET.view(-1), ignore_index=7),
    "smoothed": lambda x: F.cross_entropy(x.view(-1, VOCAB), IGNORED.view(-1), label_smoothing=0.1),
    "smoothed sum": lambda x: nn.CrossEntropyLoss(label_smoothing=0.3, reduction="sum")(
        x.flatten(0, 1), TARGET.flatten()
    ),
    "per token": lambda x: (F.cross_entropy(x.transpose(1, 2), TARGET, reduction="none") * torch.arange(4.0)).mean(),
    "permuted": lambda x: F.cross_entropy(x.permute(0, 2, 1), IGNORED),
    "scaled": lambda x: F.cross_entropy((x / 0.7).float().view(-1, VOCAB), TARGET.view(-1)),
    "capped": lambda x: F.cross_entropy((torch.tanh(x / 3) * 3).view(-1, VOCAB), TARGET.view(-1)),
    "one sample": lambda x: F.cross_entropy(x[0, 0], TARGET[0, 0]),
    "masked": lambda x: F.cross_entropy(x[TARGET > 2], TARGET[TARGET > 2]),
    "by keyword": lambda x: F.cross_entropy(input=x[:, -1], target=TARGET[:, -1]),
    "all ignored sum": lambda x: F.cross_entropy(x.flatten(0, 1), torch.full((8,), -100), reduction="sum"),
}


def _written(x: Tensor) -> Tensor:
    x = x * 1.0
    x[..., 9:] = -3.0
    x.masked_fill_(x > 1.5, 0.5).mul_(2)
    x -= 0.25
    x.copy_(x.flip(-1) - x.mean(-1, keepdim=True))
    return F.cross_entropy(x[..., :5, :].flatten(0, 1), TARGET.view(-1), label_smoothing=0.1)


# Needs the whole logits, which are gathered.
GATHERED: dict[str, Loss] = {
    "weighted": lambda x: F.cross_entropy(x.view(-1, VOCAB), TARGET.view(-1), weight=torch.arange(1.0, 12).to(x.dtype)),
    "probabilities": lambda x: F.cross_entropy(x.view(-1, VOCAB), torch.full((8, VOCAB), 1 / VOCAB, dtype=x.dtype)),
    "log softmax": lambda x: F.nll_loss(F.log_softmax(x, -1).view(-1, VOCAB), TARGET.view(-1)),
    "softmax entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean(),
    "one class": lambda x: x[..., 4].square().mean(),
    "some classes": lambda x: x[..., 2:5].square().mean(),
    "z loss": lambda x: torch.logsumexp(x, -1).square().mean(),
    "bias per class": lambda x: F.cross_entropy((x + torch.arange(11.0)).view(-1, VOCAB), TARGET.view(-1)),
    "folded": lambda x: x.reshape(-1).square().mean(),
    "written into": _written,
}


def _losses(rank: int, world_size: int, names: list[str]) -> list[bool]:
    axis = build_mesh(Sizes(pp=1, dp=1, tp=world_size), torch.device("cpu")).tp
    sizes = chunk_sizes(VOCAB, world_size)
    start = sum(sizes[:rank])
    torch.manual_seed(0)
    values = torch.randn(2, 4, VOCAB, dtype=torch.float64)
    gathered = []
    for name in names:
        loss_of = {**PARALLEL, **GATHERED}[name]
        whole = values.clone().requires_grad_()
        expected = loss_of(whole)
        expected.backward()
        local = values.narrow(-1, start, sizes[rank]).clone().requires_grad_()
        logits = ShardedLogits.of(local, axis, sizes)
        assert logits.shape == whole.shape
        with mock.patch.object(ShardedLogits, "whole", autospec=True, side_effect=ShardedLogits.whole) as gather:
            loss = loss_of(logits)
        gathered.append(gather.called)
        assert type(loss) is Tensor, name
        loss.backward()
        assert local.grad is not None and whole.grad is not None
        torch.testing.assert_close(loss, expected, rtol=1e-6 if name == "scaled" else 1e-12, atol=1e-12, msg=name)
        piece = whole.grad.narrow(-1, start, sizes[rank])
        torch.testing.assert_close(local.grad, piece, rtol=1e-5 if name == "scaled" else 1e-11, atol=1e-8, msg=name)
    return gathered


@pytest.mark.parametrize("world_size", [2, 3])
def test_common_losses_are_computed_on_the_pieces(world_size: int) -> None:
    for gathered in run_ranks(_losses, world_size, list(PARALLEL)):
        assert [name for name, whole in zip(PARALLEL, gathered, strict=True) if whole] == []


def test_other_operations_gather_and_agree() -> None:
    for gathered in run_ranks(_losses, 2, list(GATHERED)):
        assert all(gathered)


def _types_and_faults(rank: int, world_size: int) -> None:
    axis = build_mesh(Sizes(pp=1, dp=1, tp=world_size), torch.device("cpu")).tp
    sizes = chunk_sizes(VOCAB, world_size)
    local = torch.randn(8, sizes[rank])
    half = ShardedLogits.of(local.bfloat16(), axis, sizes)
    assert half.dtype == torch.bfloat16
    assert F.cross_entropy(half, TARGET.view(-1)).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert F.cross_entropy(half, TARGET.view(-1)).dtype == torch.float32
    with pytest.raises(IndexError, match="11 entries"):
        F.cross_entropy(half, TARGET.view(-1) + 8)
    assert half.argmax(-1).shape == (8,)
    assert half.detach().shape == (8, VOCAB)
    assert "ShardedLogits" in repr(half)
    with pytest.raises(ValueError, match="7 targets were given for 8 rows"):
        F.cross_entropy(half, TARGET.view(-1)[:7])
    everything_ignored = F.cross_entropy(half.float(), torch.full((8,), -100))
    assert everything_ignored.isnan()


def test_types_faults_and_whole_values() -> None:
    run_ranks(_types_and_faults, 2)


def _many_tokens(rank: int, world_size: int) -> None:
    axis = build_mesh(Sizes(pp=1, dp=1, tp=world_size), torch.device("cpu")).tp
    sizes = chunk_sizes(VOCAB, world_size)
    torch.manual_seed(0)
    values, target = 10 * torch.randn(8191, VOCAB), torch.randint(VOCAB, (8191,))
    for dtype in (torch.float16, torch.bfloat16):
        whole = values.to(dtype)
        wide = whole.float().requires_grad_()
        expected = F.cross_entropy(wide, target)
        assert expected * len(target) > torch.finfo(torch.float16).max
        expected.backward()
        local = whole.narrow(-1, sum(sizes[:rank]), sizes[rank]).clone().requires_grad_()
        loss = F.cross_entropy(ShardedLogits.of(local, axis, sizes), target)
        assert loss == expected.to(dtype)
        loss.backward()
        assert local.grad is not None and wide.grad is not None
        piece = wide.grad.narrow(-1, sum(sizes[:rank]), sizes[rank])
        assert torch.equal(local.grad, piece.to(dtype)) or torch.allclose(
            local.grad.float(), piece, rtol=torch.finfo(dtype).eps, atol=1e-7
        )


def test_the_mean_over_many_tokens_is_exact_in_16_bits() -> None:
    run_ranks(_many_tokens, 2)
