"""The shape of a state dict apart from its leaves, so that a checkpoint can be read into nothing.

torch's distributed checkpoint stores leaves under dotted names (``optimizer.state.0.exp_avg``). On the way it turns
integer keys into text, drops empty dicts and forgets which mapping a ``Counter`` or ``OrderedDict`` was. An optimizer
that has not stepped yet has no state to serve as template, either. So each saved entry is accompanied by its skeleton:
the same containers with ``...`` in place of every leaf. The rules for what is a leaf follow torch's
``traverse_state_dict`` (torch/distributed/checkpoint/_traverse.py): mappings are always walked; a list is walked when a
tensor or a walked container is in it; all else, tuples included, is a leaf.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["dump", "leaf_names", "leaves", "load", "rebuild"]


def _walked(value: object) -> bool:
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list) and any(isinstance(item, torch.Tensor) or _walked(item) for item in value)


def _skeleton(value: Any) -> Any:
    if not _walked(value):
        return ...
    if isinstance(value, list):
        return [_skeleton(item) for item in value]
    bones: Any = copy.copy(value) if isinstance(value, dict) else dict(value)
    for key, item in value.items():
        bones[key] = _skeleton(item)
    return bones


def dump(value: Any) -> bytes:
    """Return the skeleton of one entry, for :func:`load`."""
    return pickle.dumps(_skeleton(value))


def load(data: bytes) -> Any:
    """Return the skeleton that :func:`dump` wrote. Like all reading of checkpoints, only for files you trust."""
    return pickle.loads(data)


def _children(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    return ((f"{name}.{key}", item) for key, item in items)


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each leaf of an entry called ``name``."""
    if not _walked(value):
        yield name, value
        return
    for child_name, child in _children(value, name):
        yield from leaves(child, child_name)


def leaf_names(skeleton: Any, name: str) -> Iterator[str]:
    """Yield the dotted name of each leaf that the skeleton of an entry called ``name`` has room for."""
    if skeleton is ...:
        yield name
        return
    for child_name, child in _children(skeleton, name):
        yield from leaf_names(child, child_name)


def rebuild(skeleton: Any, name: str, values: Mapping[str, Any]) -> Any:
    """Return the skeleton, filled in place, with the leaves taken from ``values`` by dotted name."""
    if skeleton is ...:
        return values[name]
    items = skeleton.items() if isinstance(skeleton, Mapping) else enumerate(skeleton)
    for key, child in list(items):
        skeleton[key] = rebuild(child, f"{name}.{key}", values)
    return skeleton
