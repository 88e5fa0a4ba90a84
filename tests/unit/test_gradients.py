"""Clipping in one process: what a GPU would round is not left to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d.config import Sizes
from lightning_3d.mesh import build_mesh
from lightning_3d.sharding import OwnedParameter, clip_by_norm


class _Products(TorchDispatchMode):
    """The types of what is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[tuple[torch.dtype, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mul" in func.overloadpacket.__name__ and isinstance(args[1], Tensor):
            first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
            self.types.add((first.dtype, args[1].dtype))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_gradient_is_multiplied_in_the_type_of_the_factor(dtype: torch.dtype) -> None:
    """A GPU computes a product with a scalar tensor in the type of the other one, which would round the factor."""
    parameter = nn.Parameter(torch.ones(1000, dtype=dtype))
    parameter.grad = torch.linspace(1, 2, 1000).to(dtype)
    given = parameter.grad.double().clone()
    mesh = build_mesh(Sizes(pp=1, dp=1, tp=1), torch.device("cpu"))
    with _Products() as products:
        norm = clip_by_norm([OwnedParameter("p", parameter)], mesh, 0.3)
    wide = torch.promote_types(dtype, torch.float32)
    assert products.types == {(wide, wide)}
    torch.testing.assert_close(parameter.grad, (given * (0.3 / (norm + 1e-6))).to(dtype))
