"""Where a chain of blocks scatters its hidden states along the sequence, and where it gathers them again."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_3d.errors import ConfigError
from lightning_3d.mesh import Axis
from lightning_3d.tensor_parallel.collectives import gather_from_sequence, scatter_to_sequence
from lightning_3d.tensor_parallel.layout import Position


def scatter_before(block: nn.Module, name: str, axis: Axis, dim: int, hidden: Position, dims: int) -> None:
    """Let ``block`` receive this rank's piece of its hidden states.

    Args:
        block: The first block of a chain.
        name: Its name, for messages.
        axis: The tensor-parallel axis.
        dim: The sequence dim. A call with a length that does not divide by the axis raises ``ConfigError``.
        hidden: Which argument holds the hidden states.
        dims: How many dims they had when the plan was made. A call with another number raises ``ConfigError``.
    """

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = list(args)
        kwargs = dict(kwargs)
        holder: Any = changed if isinstance(hidden, int) else kwargs
        if not isinstance(hidden, int) and hidden not in kwargs:
            holder, place = changed, 0
        else:
            place = hidden  # type: ignore[assignment]
        state: Tensor = holder[place]
        if state.dim() != dims:
            raise ConfigError(
                f"{name} received hidden states of shape {list(state.shape)}, and sequence_parallel was planned for"
                f" {dims} dims, of which dim {dim} is the sequence. Set example_input_array on the module to an input"
                " like those of the data, or use sequence_parallel=False, the only way if they have no dim of tokens."
            )
        if state.shape[dim] % axis.size:
            raise ConfigError(
                f"{name} received a sequence of {state.shape[dim]}, which sequence_parallel cannot cut evenly over"
                f" {axis.size} tensor-parallel ranks. Pad sequences to a multiple of {axis.size} (in the collate"
                " function, say), or use sequence_parallel=False."
            )
        holder[place] = scatter_to_sequence(state, axis, dim)
        return tuple(changed), kwargs

    block.register_forward_pre_hook(hook, with_kwargs=True)


def gather_after(block: nn.Module, axis: Axis, dim: int) -> None:
    """Let what follows ``block`` see the whole sequence."""

    def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (gather_from_sequence(output[0], axis, dim, reduce_gradient=False), *output[1:])
        return gather_from_sequence(output, axis, dim, reduce_gradient=False)

    block.register_forward_hook(hook)
