"""Flattens a state whose dicts, lists and tuples hold modules, optimizers, schedulers or other objects.

``{"nets": {"g": G, "d": D}}`` is the same state as ``{"nets.g": G, "nets.d": D}``. :class:`Spreader` returns a flat
view, with an entry for each object and for each plain value that shares a container with an object. A restore writes
through the view into the program's containers. A list of only modules, or only optimizers, is one entry
(:mod:`.module_state`). A container without objects is one plain value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import reduce
from operator import getitem
from types import NoneType
from typing import Any

import torch

import stagereg.checkpoint.state.entries as entries
import stagereg.checkpoint.state.module_state as module_state
import stagereg.checkpoint.state.optimizer_state as optimizer_state
from stagereg.checkpoint.format.configs import content_of, is_config
from stagereg.checkpoint.format.encoding import encode
from stagereg.checkpoint.format.pickled import NOT_REACHED, expect_no_data, find_object, is_object
from stagereg.errors import CheckpointError

_PLAIN = frozenset({NoneType, bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter, torch.Size})
_SPREAD = (dict, list, tuple)
_OTHERS = (Mapping, set, frozenset, deque)  # containers that are not flattened
NOTHING = object()
"""Returned by :func:`find_inside` if there is no value."""
_OPTIMIZER = {"state", "param_groups"}  # keys of the state dict of an optimizer
_DEEPEST = 200  # maximum depth of nested containers in a checkpoint


class NestedState(MutableMapping[str, Any]):
    """A flat view of a nested state. ``ways`` maps the name of each entry to its path of keys."""

    def __init__(self, state: MutableMapping[str, Any], ways: dict[str, tuple[Any, ...]]) -> None:
        self._state, self.ways = state, ways

    def __getitem__(self, name: str) -> Any:
        try:
            return reduce(getitem, self.ways[name], self._state)
        except (LookupError, TypeError):  # the program has changed the container after the view was created
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        _put(self._state, self.ways.setdefault(name, (name,)), value)

    def takes(self, name: str) -> bool:
        """Return whether ``name`` is not in the state yet, but a container in the state could store it."""
        return name not in self.ways and bool(self._containers_of(name))

    def add(self, name: str) -> None:
        """Add an entry with the value ``None`` to its container, and create missing inner dicts.

        Raises:
            CheckpointError: the container is not a dict whose keys are strings.
        """
        before, rest = self._containers_of(name)[-1]
        holder: Any = reduce(getitem, before, self._state)
        *inner, last = rest
        for key in inner:
            holder = holder.setdefault(key, {}) if isinstance(holder, dict) else None
        if not isinstance(holder, dict) or not all(isinstance(key, str) for key in holder):
            raise CheckpointError(f"{name!r} was saved, but its container here has no such item; add it before")
        holder[last] = None
        self.ways[name] = *before, *rest

    def _containers_of(self, name: str) -> list[tuple[tuple[Any, ...], list[str]]]:
        """Return the containers around ``name``, outermost first, each as its path and the remaining keys."""
        found = {}
        for way in self.ways.values():
            for end in range(1, len(way)):
                prefix = ".".join(map(str, way[:end])) + "."
                if name.startswith(prefix):
                    found[way[:end]] = name.removeprefix(prefix).split(".")
        return sorted(found.items(), key=lambda each: len(each[0]))

    def __delitem__(self, name: str) -> None:
        *before, key = self.ways.pop(name)
        del reduce(getitem, before, self._state)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.ways)

    def __len__(self) -> int:
        return len(self.ways)


class Spreader:
    """Flattens the state of a program. Remembers which containers had no objects in the last call."""

    def __init__(self) -> None:
        self._plain: dict[int, Any] = {}

    def spread(self, state: MutableMapping[str, Any], again: bool = True) -> MutableMapping[str, Any]:
        """Return a flat view of ``state``; ``state`` itself if no container holds an object.

        If ``again`` is false, containers that had no objects in the last call are not searched, because searching large
        containers in each step takes time. Raises: ``CheckpointError`` if two entries would have the same name, or
        containers are nested too deeply.
        """
        known, self._plain = ({} if again else self._plain), {}
        ways: dict[str, tuple[Any, ...]] = {}
        self._collect(state, (), "", ways, known)
        return NestedState(state, ways) if any(len(way) > 1 for way in ways.values()) else state

    def _collect(
        self, holder: Any, way: tuple[Any, ...], before: str, ways: dict[str, tuple[Any, ...]], known: dict[int, Any]
    ) -> None:
        if len(way) > _DEEPEST:
            raise CheckpointError(f"{before[:200]!r} is nested more than {_DEEPEST} levels deep. Flatten it.")
        for key, value in list(_items(holder)):
            name = f"{before}{key}" if way else key
            if isinstance(value, _SPREAD) and self._is_spread(value, known):
                self._collect(value, (*way, key), f"{name}.", ways, known)
            elif name in ways:
                text = f"The state has two entries {name!r}, one of them in a container; give one of them another name."
                raise CheckpointError(text)
            else:
                ways[name] = *way, key

    def _is_spread(self, value: Any, known: dict[int, Any]) -> bool:
        if id(value) not in known and not _is_entry(value) and _holds_object(value, {id(value)}):
            return True
        self._plain[id(value)] = value
        return False


def is_module_state(value: Any) -> bool:
    """Return whether a value is a module's state dict, or a copy of one."""
    return isinstance(value, dict) and hasattr(value, "_metadata")


def state_dicts(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield each state dict in nested dicts, as its dotted name and its kind, ``module`` or ``optimizer``."""
    if is_module_state(value):
        yield name, "module"
    elif isinstance(value, dict) and value.keys() >= _OPTIMIZER:
        yield name, "optimizer"
    elif isinstance(value, dict) and not _PLAIN.issuperset(map(type, value.values())):
        for key, item in value.items():
            yield from state_dicts(item, f"{name}.{key}")


def expect_savable(state: Mapping[str, Any]) -> None:
    """Raise ``CheckpointError`` if ``state`` has a plain value that a checkpoint cannot store."""
    expect_reachable(state)
    for name in state:
        if not _is_entry(value := entries.value_of(state, name)):
            encode(value, name)


def expect_reachable(state: Mapping[str, Any]) -> None:
    """Raise ``CheckpointError`` if a plain value contains an object. A restore would replace this object with a copy.

    A data loader or sampler without ``state_dict`` is rejected too.
    """
    for name in state:
        value = entries.value_of(state, name)
        if not _is_entry(value) and (found := _find_unreached(value, name, set())) is not None:
            path, kind = found
            raise CheckpointError(f"{path!r} has a {kind}, {NOT_REACHED}")


def code_of(state: Mapping[str, Any], name: str) -> str:
    """Return the Python expression for an entry, such as ``state['nets']['g']``."""
    way = state.ways[name] if isinstance(state, NestedState) else (name,)
    return "state" + "".join(f"[{key!r}]" for key in way)


def outer_names(name: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each dotted prefix of a name, longest first, with the remaining keys."""
    keys = name.split(".")
    return ((".".join(keys[:end]), keys[end:]) for end in range(len(keys) - 1, 0, -1))


def find_inside(value: Any, keys: Sequence[str]) -> Any:
    """Return the value under a path of keys in nested dicts, lists and tuples; ``NOTHING`` if it does not exist."""
    if not keys:
        return value
    if isinstance(value, _SPREAD):
        for key, item in _items(value):
            own = str(key).split(".")
            if own == keys[: len(own)] and (found := find_inside(item, keys[len(own) :])) is not NOTHING:
                return found
    return NOTHING


def _is_entry(value: Any) -> bool:
    """Return whether a value is saved by ``state_dict`` or as :class:`.PerRank`, and not as a plain value."""
    if type(value) in _PLAIN:
        return False
    is_one = isinstance(value, entries.PerRank) or is_object(value)
    return is_one or bool(module_state.modules_of(value) or optimizer_state.optimizers_of(value))


def _items(holder: Any) -> Any:
    return holder.items() if isinstance(holder, Mapping) else enumerate(holder)


def _values(holder: Any) -> Any:
    return holder.values() if isinstance(holder, Mapping) else holder


def _holds_object(holder: Any, seen: set[int], depth: int = 0) -> bool:
    if depth > _DEEPEST or _PLAIN.issuperset(map(type, _values(holder))):  # fast: milliseconds for a million numbers
        return False
    for value in _values(holder):
        if _is_entry(value):
            return True
        if isinstance(value, _SPREAD) and id(value) not in seen:
            seen.add(id(value))
            if _holds_object(value, seen, depth + 1):
                return True
    return False


def _find_unreached(value: Any, path: str, seen: set[int], depth: int = 0) -> tuple[str, str] | None:
    """Return the dotted name and the type name of the first object inside a plain value, or ``None``."""
    if type(value) in _PLAIN or id(value) in seen or depth > _DEEPEST:  # encode() rejects deeper values
        return None
    seen.add(id(value))
    if is_config(value):  # plain data, except for objects that OmegaConf allows by a flag
        value = content_of(value)
    if isinstance(value, (*_SPREAD, *_OTHERS)) and not is_object(value):
        if _PLAIN.issuperset(map(type, _values(value))):
            return None
        found = (_find_unreached(item, f"{path}.{key}", seen, depth + 1) for key, item in _items(value))
        return next(filter(None, found), None)
    expect_no_data(path, value)
    kind = find_object(value)
    return None if kind is None else (path, kind)


def _put(state: Any, way: tuple[Any, ...], value: Any) -> None:
    """Set a value in its container. If the container is a tuple, put a new tuple into the container around it."""
    *before, key = way
    holder = reduce(getitem, before, state)
    if not isinstance(holder, tuple):
        holder[key] = value
    elif holder[key] is not value:
        items = [*holder[:key], value, *holder[key + 1 :]]
        _put(state, tuple(before), holder._make(items) if hasattr(holder, "_make") else type(holder)(items))
