"""What a block reads of Hugging Face's stores of keys and values, and what it leaves in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

from lightning_3d.pipeline.caches import is_cache
from lightning_3d.pipeline.signature import outside_layers, signature


@dataclass(frozen=True)
class CacheEffects:
    """One call of a block, as far as stores were concerned."""

    read: tuple[tuple[int, int, Any], ...] = ()
    """The layers that it looked at: number of the store, of the layer, and the signature of what it found there."""
    written: tuple[tuple[int, int, type, Any], ...] = ()
    """What those layers and new ones held in the end: described attributes."""
    outside: tuple[Any, ...] = ()
    """For every store its other attributes in the end."""

    def leaves(self) -> list[Any]:
        """Everything that is left in the stores."""
        return pytree.tree_leaves((self.outside, [attributes for *_, attributes in self.written]))

    def apply_to(self, caches: Sequence[Any], given: list[Any]) -> bool:
        """Whether a block would find in ``caches`` what it found then; adds what it finds to ``given``."""
        for number, index, found in self.read:
            layer = vars(caches[number])["layers"][index]
            if (type(layer), signature(vars(layer), given, [])) != found:
                return False
        return True

    def repeat(self, caches: Sequence[Any], recall: Callable[[Any], Any]) -> None:
        """Leave in ``caches`` what the block left there, made of its description by ``recall``."""
        for cache, outside in zip(caches, self.outside, strict=True):
            vars(cache).update(pytree.tree_map(recall, outside))
        for number, index, kind, attributes in self.written:
            layers = vars(caches[number])["layers"]
            if index == len(layers):
                layers.append(object.__new__(kind))
            held = vars(layers[index])
            held.clear()
            held.update(pytree.tree_map(recall, attributes))


class CacheWatch:
    """Sees what a block does to the stores among its arguments."""

    def __init__(self, caches: Sequence[Any], given: list[Any]) -> None:
        self._caches = caches
        self._given = given
        self._watched = [_Layers(vars(cache).get("layers", ()), given) for cache in caches]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run the block within."""
        originals = [vars(cache).get("layers") for cache in self._caches]
        for cache, original, watched in zip(self._caches, originals, self._watched, strict=True):
            if original is not None:
                cache.layers = watched
        try:
            yield
        finally:
            for cache, original, watched in zip(self._caches, originals, self._watched, strict=True):
                if original is not None:
                    original[:] = watched.plain()
                    cache.layers = original

    def effects(self, describe: Callable[[Any], Any]) -> CacheEffects | None:
        """What was seen, with tensors as ``describe`` gives them; ``None`` if it cannot be repeated."""
        read, written = [], []
        for number, watched in enumerate(self._watched):
            layers = watched.plain()
            if len(layers) < watched.size or any(found[1] is None for found in watched.found.values()):
                return None
            read += [(number, index, found) for index, found in watched.found.items()]
            for index in (*watched.found, *range(watched.size, len(layers))):
                if signature(vars(layers[index]), [], []) is None:
                    return None
                attributes = pytree.tree_map(describe, dict(vars(layers[index])))
                written.append((number, index, type(layers[index]), attributes))
        outside = []
        for cache in self._caches:
            others = {name: value for name, value in outside_layers(cache).items() if not is_cache(value)}
            if others.get("offloading") or signature(others, [], []) is None:
                return None
            outside.append(pytree.tree_map(describe, others))
        return CacheEffects(tuple(read), tuple(written), tuple(outside))


class _Layers(list[Any]):
    """The layers of a store, which remember in what state they were when they were looked at first."""

    def __init__(self, layers: Sequence[Any], given: list[Any]) -> None:
        super().__init__(layers)
        self._given = given
        self.size = len(layers)
        self.found: dict[int, tuple[type, Any]] = {}

    def __getitem__(self, index: Any) -> Any:
        places = range(len(self))[index]
        for place in [places] if isinstance(places, int) else places:
            self._look(place)
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        for place in range(self.size):
            self._look(place)
        return super().__iter__()

    def plain(self) -> list[Any]:
        """The layers, without looking at them."""
        return [super(_Layers, self).__getitem__(place) for place in range(len(self))]

    def _look(self, place: int) -> None:
        if place < self.size and place not in self.found:
            layer = super().__getitem__(place)
            self.found[place] = type(layer), signature(vars(layer), self._given, [])
