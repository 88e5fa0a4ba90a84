"""What only a GPU shows of saves in the background and of clipping: the order of copies, and the type of products."""

from __future__ import annotations

import torch
from torch import nn

from lightning_3d.checkpoint.host_copies import HostCopies
from lightning_3d.checkpoint.layout import local_chunks
from lightning_3d.checkpoint.state import Entry
from lightning_3d.config import Sizes
from lightning_3d.mesh import build_mesh
from lightning_3d.sharding import OwnedParameter, clip_by_norm


def test_copies_hold_the_moment_at_which_they_were_taken_and_nobody_waits() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    value = torch.zeros(64 * 2**20, device="cuda")
    entries = [
        Entry(key, tuple(tensor.shape), local_chunks(tensor.shape), tensor)
        for key, tensor in {"whole": value, "strided": value.view(8192, -1).t(), "step": torch.tensor(3.0)}.items()
    ]
    copies = HostCopies()
    for moment in (1.0, 2.0):
        for _ in range(50):
            x = (x @ x).clamp(-1, 1)
        value.fill_(moment)
        begun = torch.cuda.Event()
        begun.record()
        copied, ready = copies.take(entries)
        assert moment == 1.0 or not begun.query()  # the first time memory is made, which takes long
        value.fill_(7.0)
        ready()
        whole, strided, step = (entry.tensor for entry in copied)
        assert whole.is_pinned() and not step.is_pinned() and step.item() == 3.0
        assert bool((whole == moment).all()) and bool((strided == moment).all())


def test_the_factor_of_clipping_keeps_its_digits_on_gradients_of_16_bits() -> None:
    parameter = nn.Parameter(torch.ones(1000, device="cuda", dtype=torch.bfloat16))
    parameter.grad = torch.linspace(1, 2, 1000, device="cuda").bfloat16()
    expected = parameter.grad.double()
    expected = (expected * (0.3 / (expected.norm() + 1e-6))).bfloat16()
    mesh = build_mesh(Sizes(pp=1, dp=1, tp=1), torch.device("cuda"))
    clip_by_norm([OwnedParameter("p", parameter)], mesh, 0.3)
    # A factor of 16 bits would move hundreds to the next number; float32 against float64 moves hardly any.
    assert int((parameter.grad != expected).sum()) < 5
