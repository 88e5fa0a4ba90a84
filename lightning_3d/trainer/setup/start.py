"""Making all ranks begin from the same weights and the same random numbers, and huge models start small."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.collectives import as_bytes, broadcast_object
from lightning_3d.config import ParallelConfig
from lightning_3d.errors import ConfigError
from lightning_3d.fingerprint import fingerprints
from lightning_3d.initialization import LARGE, Recipes, deferring, is_deferred, reading_late
from lightning_3d.mesh import Mesh
from lightning_3d.random import generator_of
from lightning_3d.trainer.data.host_random import HostRandomState


def share_random_state(mesh: Mesh) -> None:
    """Give every rank the random state of rank 0: torch's generators of CPU and device, NumPy's and Python's.

    Nobody seeds a GPU's generator but who asks for it: left alone, a random transform of a batch on the device would
    differ within a replica.
    """
    generator = None if mesh.device.type == "cpu" else generator_of(mesh.device)
    own = HostRandomState.get(), None if generator is None else generator.get_state()
    host, on_device = broadcast_object(own, mesh.control_world, 0)
    host.set()
    if generator is not None:
        generator.set_state(on_device)


@contextlib.contextmanager
def start_small(mesh: Mesh, config: ParallelConfig) -> Iterator[None]:
    """Within, models are built without memory for their large parameters, where a rank will hold only parts of them.

    Elsewhere only what the user's code puts on the meta device is. Either way everything gets the values that one
    process would have given it.
    """
    cuts = mesh.pp.size > 1 or mesh.tp.size > 1 or (mesh.dp.size > 1 and config.zero_stage > 0)
    least = LARGE if cuts else None
    with deferring(least), reading_late(least):
        yield


def refuse_views(module: nn.Module) -> None:
    """Refuse parameters that are views of another's memory: cut or sharded, each would go its own way.

    Raises:
        ConfigError: naming two of them.
    """
    spans = []
    for name, parameter in module.named_parameters():
        if parameter.numel() and not parameter.is_meta:
            length = 1 + sum(
                (size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
            )
            start = parameter.data_ptr()
            spans.append((start, start + length * parameter.element_size(), name))
    end, holder = 0, ""
    for start, stop, name in sorted(spans):
        if start < end:
            raise ConfigError(
                f"The parameters {holder} and {name} are two views of the same memory, which several ranks cannot keep"
                " in step once it is cut or sharded. Make them one parameter (self.a.weight = self.b.weight), take the"
                " part that is needed where it is used, or give each its own memory with .clone()."
            )
        if stop > end:
            end, holder = stop, name


def own_memory(module: nn.Module) -> None:
    """Give the parameters and buffers memory of this rank's own, in place.

    Where ranks start as functions, a module that the parent sent arrives in shared memory: every rank's optimizer
    would step the same values.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "cpu" and tensor.is_shared():
            tensor.data = tensor.data.clone()


def share_weights(module: nn.Module, mesh: Mesh) -> bool:
    """Give every rank the parameters and buffers of rank 0, so that replicas start equal whatever the user seeded.

    Each rank has built the whole module, with values or recipes. Checksums are compared first, and nothing else is
    sent when they agree. Of recipes only the random states and numbers in them are sent.

    Returns:
        Whether the weights had to be sent.

    Raises:
        ConfigError: if the ranks built different modules.
    """
    if mesh.world.size == 1:
        return False
    held = [*module.parameters(), *module.buffers()]
    tensors = [tensor.data for tensor in held if not is_deferred(tensor)]
    recipes = Recipes(module)
    count = torch.tensor([len(held), len(tensors), sum(tensor.numel() for tensor in tensors), len(recipes)])
    if _differs(count, mesh) or _differs(_numbers(recipes.structure()), mesh):
        raise ConfigError(
            "The ranks built modules with different parameters or buffers, so they cannot train together. Build the"
            " same module everywhere: nothing in its construction may depend on the rank."
        )
    differ = bool(len(recipes)) and _differs(_numbers(recipes.digest()), mesh)
    if differ:
        recipes.take_over(broadcast_object(recipes.values(), mesh.control_world, 0))
    if not tensors or not _differs(fingerprints(tensors, torch.device("cpu")), mesh):
        return differ
    for tensor in tensors:
        whole = tensor.cpu().contiguous()
        dist.broadcast(as_bytes(whole), 0, group=mesh.control_world.group)
        tensor.copy_(whole)
    return True


def _numbers(digest: bytes) -> Tensor:
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(torch.int32)


def _differs(values: Tensor, mesh: Mesh) -> bool:
    low, high = values.clone(), values.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=mesh.control_world.group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=mesh.control_world.group)
    return not torch.equal(low, high)
