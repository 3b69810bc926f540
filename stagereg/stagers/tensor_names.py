"""What the tensors of a state dict are called: dotted names, for patterns that a user writes.

The order is that of ``tree.flatten``. A tensor inside of a DTensor or another wrapper has the wrapper's name; one that
lies at several places has a name for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stagereg.kernel.state_dict import path_to

__all__ = ["names_of", "trace"]


def trace(state: Any, tensors: Sequence[torch.Tensor]) -> list[object]:
    """Return what :func:`names_of` depends on, to be compared with ``==``: keys, and which tensor is where."""
    marks: list[object] = []
    index = {id(x): i for i, x in enumerate(tensors)}
    place_of = index.get
    entered: dict[int, int] = {}
    alive: list[Any] = []  # a dict may make its values, and what is gone leaves its id to another

    def visit(items: Iterable[tuple[object, Any]]) -> None:
        for key, x in items:
            marks.append(key)
            place = place_of(id(x))
            if place is not None:
                marks.append(place)
                continue
            kind = type(x)
            marks.append(kind)
            if issubclass(kind, (torch.Tensor, dict, list, tuple)):
                number = entered.setdefault(id(x), len(alive))
                marks.append(number)
                if number == len(alive):
                    alive.append(x)
                    if not issubclass(kind, torch.Tensor):
                        marks.append(len(x))
                        visit(_items(x))

    visit([(None, state)])
    return marks


def names_of(state: Any, tensors: Sequence[torch.Tensor]) -> list[list[str]]:
    """Return the names of each of ``tensors``, which are what ``flatten(state)`` lists."""
    known: dict[int, list[str]] = {}
    alive: list[Any] = []
    _name(state, (), known, set(), alive)
    return [known.get(id(x)) or [_dotted(path_to(state, i))] for i, x in enumerate(tensors)]


def _name(x: Any, path: tuple[object, ...], known: dict[int, list[str]], entered: set[int], alive: list[Any]) -> None:
    kind = type(x)
    if issubclass(kind, torch.Tensor):
        alive.append(x)
        for part in _parts(x):
            alive.append(part)
            known.setdefault(id(part), []).append(_dotted(path))
    elif issubclass(kind, (dict, list, tuple)) and id(x) not in entered:
        entered.add(id(x))
        alive.append(x)
        for key, value in _items(x):
            _name(value, (*path, key), known, entered, alive)


def _items(x: Any) -> Iterable[tuple[object, Any]]:
    return x.items() if isinstance(x, dict) else enumerate(x)


def _parts(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a tensor is made of."""
    if isinstance(x, ShardedTensor):
        yield from (shard.tensor for shard in x.local_shards())
    elif is_traceable_wrapper_subclass(x):
        for name in x.__tensor_flatten__()[0]:
            yield from _parts(getattr(x, name))
    else:
        yield x


def _dotted(path: Sequence[object]) -> str:
    return ".".join(map(str, path))
