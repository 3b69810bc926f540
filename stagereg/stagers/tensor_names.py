"""What the tensors of a state dict are called: dotted names, for patterns that a user writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stagereg.kernel.state_dict import path_to

__all__ = ["names_of"]


def names_of(state: Any, tensors: Sequence[torch.Tensor]) -> list[list[str]]:
    """Return the names of each of ``tensors``, which are what ``flatten(state)`` lists.

    A tensor inside of a DTensor or another wrapper has the wrapper's name; one that is met at several keys has a name
    for each.
    """
    names: dict[int, list[str]] = {}
    entered: set[int] = set()
    alive: list[Any] = []  # a dict may make its values, and what is gone leaves its id to another

    def visit(x: Any, path: tuple[str, ...]) -> None:
        alive.append(x)
        if isinstance(x, torch.Tensor):
            for part in _parts(x):
                alive.append(part)
                names.setdefault(id(part), []).append(".".join(path))
        elif isinstance(x, (dict, list, tuple)) and id(x) not in entered:
            entered.add(id(x))
            for key, value in x.items() if isinstance(x, dict) else enumerate(x):
                visit(value, (*path, str(key)))

    visit(state, ())
    return [names.get(id(x)) or [".".join(map(str, path_to(state, i)))] for i, x in enumerate(tensors)]


def _parts(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a tensor is made of."""
    if isinstance(x, ShardedTensor):
        yield from (shard.tensor for shard in x.local_shards())
    elif is_traceable_wrapper_subclass(x):
        for name in x.__tensor_flatten__()[0]:
            yield from _parts(getattr(x, name))
    else:
        yield x
