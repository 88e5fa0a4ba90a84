"""Streams of random numbers: equal where ranks hold the same values, different where they hold different ones.

Outside steps every rank draws from the *shared* stream, the default generator, which is equal everywhere. A micro-batch
runs on the *user* stream, equal over the pipeline and tensor-parallel ranks of a replica and different between
replicas. Each block has a stream of its own, so that its dropout does not depend on where the pipeline is cut. Between
a column and a row layer the *local* stream differs over tensor-parallel ranks.

Every stream is set from the seed of the one it branches from and is undone afterwards. So a part that is computed again
under activation checkpointing, which puts back the generator's state, draws the same numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_3d.mesh import Axis, Mesh

_MASK = (1 << 64) - 1

States = list[Tensor]


def mix_seed(*keys: int | str) -> int:
    """A seed of 63 bits from numbers and names, the same on every machine and in every process."""
    seed = 0x9E3779B97F4A7C15
    for key in keys:
        value = zlib.crc32(key.encode()) if isinstance(key, str) else key
        seed = (seed ^ (value & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        seed = (seed ^ seed >> 27) * 0x94D049BB133111EB & _MASK
        seed ^= seed >> 31
    return seed >> 1


class StepStreams:
    """The streams of the micro-batches of a step and of the blocks in them.

    Does nothing in a world of one rank, whose numbers stay those of plain PyTorch.

    Args:
        mesh: Where this rank stands.
        seed: What all streams derive from; equal on every rank. By default that of the shared stream.
        sequence_parallel: Whether blocks work on pieces of the sequence, so that their streams differ over
            tensor-parallel ranks.
    """

    def __init__(self, mesh: Mesh, seed: int | None = None, sequence_parallel: bool = False) -> None:
        self._active = mesh.world.size > 1
        self._seed = torch.initial_seed() if seed is None else seed
        self._replica = mesh.dp.rank
        self._block_salt = 1 + mesh.tp.rank if sequence_parallel else 0
        self._generators = [torch.default_generator]
        if mesh.device.type != "cpu":
            self._generators.append(generator_of(mesh.device))

    @contextmanager
    def micro_batch(self, step: int, micro_batch: int) -> Iterator[None]:
        """Run a micro-batch's user code on its own stream, and put the shared stream back afterwards.

        Args:
            step: Batches seen before; distinct for every batch.
            micro_batch: Index in the batch.
        """
        if not self._active:
            yield
            return
        states = self._save()
        self._set(mix_seed(self._seed, step, micro_batch, self._replica))
        try:
            yield
        finally:
            self.leave_block(states)

    def enter_block(self, name: str) -> States | None:
        """Change to the stream of the block ``name``; give what :meth:`leave_block` needs."""
        if not self._active:
            return None
        states = self._save()
        self._set(mix_seed(self._generators[0].initial_seed(), name, self._block_salt))
        return states

    def leave_block(self, states: States | None) -> None:
        """Change back to the stream that was left."""
        if states is not None:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)

    @contextmanager
    def block(self, name: str) -> Iterator[None]:
        """:meth:`enter_block` and :meth:`leave_block` around the body."""
        states = self.enter_block(name)
        try:
            yield
        finally:
            self.leave_block(states)

    def _save(self) -> States:
        return [generator.get_state() for generator in self._generators]

    def _set(self, seed: int) -> None:
        for generator in self._generators:
            generator.manual_seed(seed)


class LocalStream:
    """The stream that differs over the ranks of ``axis``, opened by column layers and closed by row layers.

    Touches only the host side of the device's generator, so it never waits for the device.
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self._axis = axis
        self._device = device
        self._outer: Tensor | None = None
        self._seed: int | None = None

    def open(self) -> None:
        """Branch off the current stream, which moves on equally on every rank; no effect inside the local stream."""
        if self._axis.size == 1:
            return
        generator = generator_of(self._device)
        # Recomputation may leave a region half way and put the generator's state back itself; the seed tells whether
        # the stream that was opened is still the current one.
        if self._outer is not None and generator.initial_seed() == self._seed:
            return
        if self._device.type == "cuda":
            offset = generator.get_offset()
            generator.set_offset(offset + 4)
            key = mix_seed(generator.initial_seed(), offset)
        else:
            key = int(torch.randint(1 << 62, (), generator=generator))
        self._outer = generator.get_state()
        self._seed = mix_seed(key, self._axis.rank)
        generator.manual_seed(self._seed)

    def close(self) -> None:
        """Return to the stream that :meth:`open` left; no effect outside the local stream."""
        if self._outer is None:
            return
        generator = generator_of(self._device)
        if generator.initial_seed() == self._seed:
            generator.set_state(self._outer)
        self._outer = None


def generator_of(device: torch.device) -> torch.Generator:
    """The default generator of a device."""
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
