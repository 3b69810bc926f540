"""The same state dict once more, recognised without being taken apart again.

Most calls stage a state dict of the same structure over the same memory as the one before. :class:`Replay` remembers
one: its containers' keys and the types of what is in them, and of its tensors what a layout depends on. To look whether
another state dict fits costs a third of what ``tree`` and ``layout`` do: the tensors are compared by address, and by
torch's own guards in C++ (``TensorGuards``, which ``torch.compile`` is built on: type, dispatch keys, dtype, device,
``requires_grad``, sizes, strides).

It only takes on what is common and plain: dicts, lists and ``OrderedDict`` of bare tensors, each met once, and of
values that nobody can change. Anything else goes the long way, which is always right.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from stagereg.kernel.layout import Layout
from stagereg.kernel.state_dict import ATOMS

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # not a public name of torch; without it every state dict goes the long way
    TensorGuards = None  # type: ignore[assignment, misc]

__all__ = ["Match", "Replay"]

_CHUNK = 512  # tensors that are looked at several times in a row, while the cache has them

_KINDS = (dict, list, OrderedDict)

_attributes: Callable[[Any], dict[str, Any]] = attrgetter("__dict__")


@dataclass(slots=True)
class _Node:
    """One container, as it was.

    Attributes:
        kind: its type.
        keys: of a dict; None for a list.
        types: of its values.
        slots: positions of the values that are tensors (None) or containers, in order.
        tensors_only: whether every value is a tensor.
        tuples: positions of the values that are tuples.
    """

    kind: Any
    keys: list[Any] | None
    types: list[type]
    slots: list[tuple[int, _Node | None]]
    tensors_only: bool
    tuples: list[int]


@dataclass(slots=True)
class _Found:
    """One container, as it is now."""

    container: Any
    values: list[Any]
    attributes: dict[str, Any] | None


@dataclass(slots=True)
class Match:
    """A state dict that fits.

    Attributes:
        tensors: its tensors, in the order of the layout.
        layout: where they go.
    """

    tensors: list[torch.Tensor]
    layout: Layout
    _root: _Node
    _found: list[_Found]

    def unflatten(self, staged: Sequence[torch.Tensor]) -> Any:
        """Return the finished copy, ``staged[i]`` standing where ``tensors[i]`` stood. To be called once."""
        return _fill(self._root, iter(self._found), iter(staged))


class Replay:
    """What is remembered of a state dict; made by :meth:`of`."""

    def __init__(self, root: _Node, tensors: Sequence[torch.Tensor], layout: Layout) -> None:
        self._root = root
        self._layout = layout
        self._count = len(tensors)
        chunks = [tensors[at : at + _CHUNK] for at in range(0, len(tensors), _CHUNK)]
        self._guards = [TensorGuards(*chunk, dynamic_dims_sizes=None, dynamic_dims_strides=None) for chunk in chunks]
        self._addresses = [[x.data_ptr() for x in chunk] for chunk in chunks]

    @classmethod
    def of(cls, state: Any, tensors: Sequence[torch.Tensor], layout: Layout) -> Replay | None:
        """Remember ``state``, whose ``tensors`` are laid out so; None if it is not of the plain kind."""
        root = _note(state, set()) if TensorGuards is not None else None
        if root is None:
            return None
        met: list[torch.Tensor] = []
        if not _collect(root, state, met, []) or not _bare(met):
            return None
        same = len(met) == len(tensors) and all(x is y for x, y in zip(met, tensors, strict=True))
        if not same or any(x.requires_grad for x in met):
            return None
        return cls(root, tensors, layout)

    def match(self, state: Any) -> Match | None:
        """Return how ``state`` fits, or None if it does not."""
        tensors: list[torch.Tensor] = []
        found: list[_Found] = []
        if not _collect(self._root, state, tensors, found) or len(tensors) != self._count or not _bare(tensors):
            return None
        if len({id(each.container) for each in found}) != len(found):
            return None
        address = torch.Tensor.data_ptr
        for k, (guards, addresses) in enumerate(zip(self._guards, self._addresses, strict=True)):
            chunk = tensors[k * _CHUNK : (k + 1) * _CHUNK]
            if not guards.check(*chunk) or list(map(address, chunk)) != addresses:
                return None
        return Match(tensors, self._layout, self._root, found)


def _note(x: Any, met: set[int]) -> _Node | None:
    """Describe a container and those in it; None if there is anything in it that is not plain."""
    kind = type(x)
    if kind not in _KINDS or id(x) in met:
        return None
    met.add(id(x))
    values = list(x) if kind is list else list(x.values())
    types = list(map(type, values))
    tuples = [at for at, each in enumerate(types) if each is tuple]
    node = _Node(kind, None if kind is list else list(x), types, [], set(types) == {torch.Tensor}, tuples)
    for at, value in enumerate(values):
        if type(value) is torch.Tensor:
            node.slots.append((at, None))
        elif type(value) in _KINDS:
            child = _note(value, met)
            if child is None:
                return None
            node.slots.append((at, child))
        elif not _constant(value):
            return None
    return node


def _collect(node: _Node, x: Any, tensors: list[torch.Tensor], found: list[_Found]) -> bool:
    """Add the tensors and containers of ``x`` in the order of ``tree``'s walk; False where it is not as it was."""
    if type(x) is not node.kind:
        return False
    values = list(x) if node.keys is None else list(x.values())
    if (node.keys is not None and list(x) != node.keys) or list(map(type, values)) != node.types:
        return False
    attributes = None
    if node.kind is OrderedDict and _attributes(x):  # such as the ``_metadata`` of a module's state dict
        attributes = _plain_copy(_attributes(x))
        if attributes is None:
            return False
    found.append(_Found(x, values, attributes))
    if node.tensors_only:
        tensors += values
        return True
    if not all(_constant(values[at]) for at in node.tuples):
        return False
    for at, child in node.slots:
        if child is None:
            tensors.append(values[at])
        elif not _collect(child, values[at], tensors, found):
            return False
    return True


def _plain_copy(x: Any) -> Any:
    """Return a copy of nested dicts of values that nobody can change; None if it is anything else."""
    made = type(x)()
    for key, value in x.items():
        if type(value) in ATOMS:
            made[key] = value
        elif type(value) in (dict, OrderedDict) and (type(value) is dict or not _attributes(value)):
            inner = _plain_copy(value)
            if inner is None:
                return None
            made[key] = inner
        else:
            return None
    return made


def _fill(node: _Node, found: Iterator[_Found], staged: Iterator[torch.Tensor]) -> Any:
    now = next(found)
    values = now.values
    for at, child in node.slots:
        values[at] = next(staged) if child is None else _fill(child, found, staged)
    if node.keys is None:
        return values
    made = node.kind(zip(now.container, values, strict=True))
    if now.attributes:
        vars(made).update(now.attributes)
    return made


def _constant(value: Any) -> bool:
    if type(value) is tuple:
        return all(type(item) in ATOMS for item in value)
    return type(value) in ATOMS or type(value) in _KINDS or type(value) is torch.Tensor


def _bare(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether each is met once, and has no attributes of its own."""
    return len(set(map(id, tensors))) == len(tensors) and not any(map(_attributes, tensors))
