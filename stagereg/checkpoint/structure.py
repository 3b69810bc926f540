"""The shape of a state dict apart from its leaves, so that a checkpoint can be read into nothing.

torch's distributed checkpoint stores leaves under dotted names (``optimizer.state.0.exp_avg``). On the way it turns
integer keys into text, drops empty dicts and forgets which mapping a ``Counter`` or ``OrderedDict`` was. An optimizer
that has not stepped yet has no state to serve as template, either. So each saved entry is accompanied by its skeleton:
the same containers with ``...`` in place of every leaf. The rules for what is a leaf follow torch's
``traverse_state_dict`` (torch/distributed/checkpoint/_traverse.py): mappings are always walked; a list is walked when a
tensor or a walked container is in it; all else, tuples included, is a leaf.

A skeleton is a pickle, read by :mod:`stagereg.checkpoint.trusted`: it can hold ``dict``, ``list``, ``OrderedDict``,
``Counter``, ``defaultdict`` and the types that the program allows with ``torch.serialization.add_safe_globals``. One
that would not load back is refused before it is written.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

import stagereg.checkpoint.pickled as pickled
import stagereg.checkpoint.trusted as trusted
from stagereg.errors import CheckpointError

__all__ = ["dump", "leaf_names", "leaves", "load", "rebuild"]

_DEEPEST = 200
_PROTOCOL = 4
_CONTAINERS = frozenset({dict, list, OrderedDict, Counter, defaultdict})

_loadable: set[frozenset[Any]] = set()
"""A cache of sets of names that load; what loads depends on the installed torch alone, so it holds for a process."""


def _walked(value: object) -> bool:
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list) and any(isinstance(item, torch.Tensor) or _walked(item) for item in value)


def _skeleton(value: Any, name: str, depth: int = 0) -> Any:
    if not _walked(value):
        pickled.expect_loadable(name, value)
        return ...
    if depth == _DEEPEST:
        raise CheckpointError(f"{name[:200]!r} is nested more than {_DEEPEST} deep; flatten it.")
    if isinstance(value, list):
        return [_skeleton(item, f"{name}.{i}", depth + 1) for i, item in enumerate(value)]
    bones: Any = copy.copy(value) if isinstance(value, dict) else dict(value)
    for key, item in value.items():
        _expect_key(key, name)
        bones[key] = _skeleton(item, f"{name}.{key}", depth + 1)
    return bones


def _expect_key(key: Any, name: str) -> None:
    # The names that other keys' pickles have are checked below; those of tuples are not.
    if isinstance(key, (tuple, frozenset)):
        try:
            trusted.expect_key(key, trusted.allowed_by_user().trusted)
        except TypeError as error:
            raise CheckpointError(f"{name!r} would not load back: {error}. Use text or a number.") from error


def dump(value: Any, name: str) -> bytes:
    """Return the skeleton of the entry called ``name``, for :func:`load`.

    Raises:
        CheckpointError: a leaf or a container of it would not load back, with its dotted name and what to do.
    """
    bones = _skeleton(value, name)
    try:
        data, names = pickled.names_of(bones, _PROTOCOL)
    except Exception as error:
        raise CheckpointError(
            f"{name!r} cannot be saved: pickling its containers fails ({type(error).__name__}: {error})."
        ) from error
    if names not in _loadable:
        _expect_loadable(data, bones, name)
        _loadable.add(names)
    return data


def _expect_loadable(data: bytes, bones: Any, name: str) -> None:
    try:
        load(data)
    except CheckpointError as error:
        known = _CONTAINERS | trusted.allowed_by_user().trusted
        for path, container in _containers(bones, name):
            if type(container) not in known:
                kind = f"{type(container).__module__}.{type(container).__qualname__}"
                raise CheckpointError(
                    f"{path!r} would not load back: it is a {kind}. {pickled.WHY} Save a dict instead, or allow "
                    f"the type when saving and when restoring: torch.serialization.add_safe_globals([{kind}])"
                ) from error
        raise CheckpointError(f"{name!r} would not load back: of its containers, {error}.") from error


def _containers(bones: Any, name: str) -> Iterator[tuple[str, Any]]:
    if bones is not ...:
        yield name, bones
        for child_name, child in _children(bones, name):
            yield from _containers(child, child_name)


def load(data: Any) -> Any:
    """Return the skeleton that :func:`dump` wrote.

    Raises:
        CheckpointError: it is none, or has types in it that are not allowed; nothing of it was run.
    """
    if type(data) is not bytes:
        raise CheckpointError(f"there is a {type(data).__name__} where the structure of an entry belongs")
    bones = trusted.loads(data, trusted.CONTAINERS | trusted.allowed_by_user())
    _expect_skeleton(bones)
    return bones


def _expect_skeleton(bones: Any) -> None:
    """Refuse what is none: other leaves, and containers that occur twice, whose walk could go on forever."""
    seen: set[int] = set()
    left = [(bones, 0)]
    while left:
        value, depth = left.pop()
        if value is ...:
            continue
        if not isinstance(value, (Mapping, list)) or id(value) in seen or depth == _DEEPEST:
            raise CheckpointError("the structure of an entry is not one that was written with a checkpoint")
        seen.add(id(value))
        left.extend((child, depth + 1) for child in (value.values() if isinstance(value, Mapping) else value))


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
    """Yield the dotted name of each leaf in the skeleton of an entry called ``name``."""
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
