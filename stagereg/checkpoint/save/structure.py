"""Compares, in each save, the structure of a staged copy with the state that was passed to the stager.

A stager may change values and dtypes, and nothing else. A copy that lacks an entry, or has another container, shape or
kind of value, would be restored in part, or make the resumed run fail inside torch. So the save fails, with an error
that names the path. No tensor data is read. The contents of objects, sets and configs are not compared.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from numbers import Number
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

import stagereg.checkpoint.format.configs as configs
from stagereg.checkpoint.format.split_tensors import shape_of
from stagereg.errors import CheckpointError

Outline: TypeAlias = Any
"""The shape of a tensor, the outlines of a mapping by key, :class:`_Items` for a sequence, or the name of a type."""

_TENSOR, _DICT, _LIST, _TUPLE = "tensor", "dict", "list", "tuple"
_ABSENT = None
_SHOWN, _LONGEST = 3, 80  # maximum differences in a message; maximum characters of a path


class _Items(NamedTuple):
    kind: str
    length: int
    items: list[Outline] | frozenset[str]  # outlines of the items; only their kinds if no item is a tensor or container


class _Key(NamedTuple):
    kind: str


@functools.lru_cache(1024)
def _kind_of(kind: type) -> str:
    """Return the kind of a type. A stager may replace a value with a value of another type of the same kind."""
    if issubclass(kind, torch.Tensor):
        return _TENSOR
    if issubclass(kind, Mapping) and kind.__name__ not in configs.KINDS:
        return _DICT
    if issubclass(kind, (list, tuple)):
        return _LIST if issubclass(kind, list) else _TUPLE
    if issubclass(kind, Number):  # includes NumPy's scalars
        return "number"
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _shape(x: torch.Tensor) -> Outline:
    if type(x) is torch.Tensor and not x.is_nested and not x.__dict__:
        return x.shape
    # torch may raise an error for the shape of a nested tensor, and for the query of a ShardedTensor.
    return _TENSOR if not isinstance(x, ShardedTensor) and x.is_nested else shape_of(x)


def outline(value: Any) -> Outline:
    """Return the structure of a value, for comparison with the structure of a copy. Takes 0.7 us per entry."""
    kind = _kind_of(type(value))  # type: ignore[arg-type]  # mypy rejects it, but a type is hashable
    if kind is _TENSOR:
        return _shape(value)
    if kind is _DICT:
        return {key: _shape(item) if type(item) is torch.Tensor else outline(item) for key, item in value.items()}
    if kind is not _LIST and kind is not _TUPLE:
        return kind
    kinds = frozenset(map(_kind_of, {*map(type, value)}))
    has_more = not kinds.isdisjoint((_TENSOR, _DICT, _LIST, _TUPLE))
    return _Items(kind, len(value), [*map(outline, value)] if has_more else kinds)


def expect_same_structure(expected: Outline, copy: Any, stager: str) -> None:
    """Raise ``CheckpointError`` if a copy differs from its source's outline. ``stager``: name of the stager's class."""
    if not isinstance(copy, dict):
        raise CheckpointError(f"stage() of {stager} must return a copy of its dict, but returned {copy!r:.80}")
    found = [_describe(*each) for each in _differences(expected, outline(copy), ())]
    if found:
        found[_SHOWN:] = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        raise CheckpointError(
            f"stage() of {stager} returned a copy with another structure: {'; '.join(found)}. A stager may change the "
            "values and dtypes of a state dict, and nothing else. Return each entry with its key, type and shape"
        )


def _differences(
    expected: Outline, found: Outline, path: tuple[object, ...]
) -> Iterator[tuple[tuple[object, ...], Outline, Outline]]:
    """Yield the paths that differ, each with both outlines. A missing key has the outline ``_ABSENT``."""
    if expected == found:
        return
    if type(expected) is type(found) is dict:
        added = {str(key): key for key in found if key not in expected}
        for key, item in expected.items():
            if key not in found and str(key) in added:
                yield (*path, key), _Key(type(key).__name__), _Key(type(added.pop(str(key))).__name__)
            else:
                yield from _differences(item, found.get(key, _ABSENT), (*path, key))
        yield from (((*path, key), _ABSENT, found[key]) for key in added.values())
    elif (
        type(expected) is type(found) is _Items
        and expected[:2] == found[:2]
        and type(expected.items) is type(found.items) is list
    ):
        for i, (one, other) in enumerate(zip(expected.items, found.items, strict=True)):
            yield from _differences(one, other, (*path, i))
    else:
        yield path, expected, found


def _describe(path: tuple[object, ...], expected: Outline, found: Outline) -> str:
    dotted = ".".join(map(str, path))
    name = repr(dotted if len(dotted) <= _LONGEST else f"...{dotted[3 - _LONGEST :]}")
    if found is _ABSENT:
        return f"{name} is missing"
    if expected is _ABSENT:
        return f"{name} is added"
    if type(expected) is _Key:
        return f"the key of {name} is of type {found.kind} instead of {expected.kind}"
    one, other = _name_of(expected), _name_of(found)
    if one != other:
        return f"{name} is of type {other} instead of {one}"
    if type(expected) is torch.Size:
        return f"{name} has the shape {[*found]} instead of {[*expected]}"
    if expected.length != found.length:
        return f"{name} has {found.length} items instead of {expected.length}"
    return f"{name} has items of other types"


def _name_of(value: Outline) -> str:
    if type(value) in (dict, torch.Size):
        return _DICT if type(value) is dict else _TENSOR
    return str(value.kind if type(value) is _Items else value)
