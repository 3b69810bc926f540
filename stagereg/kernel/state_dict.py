"""Take a state dict apart into plain tensors, and put a copy of it together around other ones.

:func:`flatten` walks a state dict once. It makes the copy's containers on the way (same types, same order, same keys,
same sharing, cycles included), copies everything that is no tensor, and lists the plain strided tensors it met.
:meth:`TreeSpec.unflatten` then puts the staged tensors where the source had theirs: wrapped again as ``Parameter``,
DTensor, ShardedTensor or whatever traceable subclass they were, with their Python attributes. What cannot be staged is
refused with its path in the dict.

Most calls stage a state dict of the same structure over the same memory as the call before. :class:`Recognizer`
remembers one and recognises it at a third of the cost of :func:`flatten` and a layout.

Where bytes go, and how, is left to ``layout`` and ``copier``.
"""

from __future__ import annotations

import copy
import io
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stagereg.errors import StagingError, UnstageableTypeError

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # not a public name of torch; without it no state dict is recognised
    TensorGuards = None  # type: ignore[assignment, misc]

__all__ = ["Recognizer", "TreeSpec", "flatten", "flip", "path_to", "why_without_data"]

# Immutable values: the copy holds the very same object.
ATOMS = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, range, type, slice, type(Ellipsis),
        torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
        types.FunctionType, types.BuiltinFunctionType,
    }
)  # fmt: skip

# What torch's type_check admits besides containers and tensors.
_CHECKED = (bool, int, float, str, bytes, io.BytesIO, type(None))

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class _Slot:
    """An entry of the copy that gets its value once the staged tensors are there."""

    __slots__ = ("_make", "_value")

    def __init__(self, make: Callable[[Sequence[torch.Tensor]], Any]) -> None:
        self._make: Callable[[Sequence[torch.Tensor]], Any] | None = make
        self._value: Any = None

    def resolve(self, staged: Sequence[torch.Tensor]) -> Any:
        if self._make is not None:
            self._value = self._make(staged)
            self._make = None
        return self._value


class TreeSpec:
    """A state dict's copy without its tensors.

    Attributes:
        tensors: the plain strided tensors of the source, each object once, in the order they were met; any device.
            They are not detached, and not copied yet.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._root: Any = None
        self._holes: list[tuple[Any, Any, _Slot]] = []
        self._dresses: list[tuple[_Slot, dict[str, Any]]] = []

    def unflatten(self, staged: Sequence[torch.Tensor]) -> Any:
        """Return the finished copy, ``staged[i]`` standing where ``tensors[i]`` stood. To be called once."""
        for container, key, slot in self._holes:
            container[key] = slot.resolve(staged)
        for slot, attributes in self._dresses:  # last, for an attribute may be any tensor, even the one it is of
            vars(slot.resolve(staged)).update(attributes)
        return self._root.resolve(staged) if type(self._root) is _Slot else self._root


def flatten(state: Any, type_check: bool = False) -> TreeSpec:
    """Take ``state`` apart.

    Args:
        state: nested dicts, lists and tuples of tensors and other values.
        type_check: refuse leaves that are no tensor, number, string, bytes, ``BytesIO`` or None, as torch does under
            that name; otherwise such a leaf is deep-copied.

    Raises:
        StagingError: an entry cannot be staged; the message has its path.
    """
    walker = _Walker(type_check)
    walker.spec._root = walker.visit(state)
    return walker.spec


def path_to(state: Any, index: int) -> tuple[object, ...]:
    """Return the keys that lead to the tensor that :func:`flatten` lists at ``index``; for error messages."""
    try:
        _Walker(type_check=False, stop_at=index).visit(state)
    except StagingError as error:
        return error.path
    return ()


class _Walker:
    def __init__(self, type_check: bool, stop_at: int = -1) -> None:
        self.spec = TreeSpec()
        self._type_check = type_check
        self._stop_at = stop_at
        self._memo: dict[int, Any] = {}
        self._own: dict[type, frozenset[str]] = {}
        self._alive: list[Any] = []  # what has its id in the memo must outlive the walk; a dict may make its values

    def visit(self, x: Any) -> Any:
        kind = type(x)
        if kind in ATOMS:
            self._check(x)
            return x
        known = self._memo.get(id(x), self)
        if known is not self:
            return known
        self._alive.append(x)
        if kind in _PLAIN:
            made: Any = self._plain(x)
        elif issubclass(kind, dict):
            return self._container(x, x.items())
        elif issubclass(kind, list):
            return self._container(x, enumerate(x))
        elif issubclass(kind, tuple):
            made = self._tuple(x)
        elif issubclass(kind, torch.Tensor):
            made = self._tensor(x)
        else:
            self._check(x)
            made = _attempt(copy.deepcopy, x)
        self._memo[id(x)] = made
        return made

    # -- containers

    def _container(self, x: Any, items: Iterable[tuple[Any, Any]]) -> Any:
        # A copy keeps what a subclass is, such as a defaultdict's factory; its values are replaced below.
        new = {} if type(x) is dict else _attempt(copy.copy, x)
        self._memo[id(x)] = new
        self._items(items, new)
        attributes = getattr(x, "__dict__", None)  # such as ``_metadata`` of a module's state dict
        if attributes:
            self._items(attributes.items(), new.__dict__)
        return new

    def _tuple(self, x: tuple[Any, ...]) -> Any:
        parts: list[Any] = [None] * len(x)
        before = len(self.spec._holes)
        self._items(enumerate(x), parts)
        if id(x) in self._memo:  # a cycle through this tuple has already made it
            return self._memo[id(x)]
        if len(self.spec._holes) == before and all(a is b for a, b in zip(parts, x, strict=True)):
            return x
        make = _tuple_maker(type(x))
        if any(container is parts for container, _, _ in self.spec._holes[before:]):
            return _Slot(lambda staged: make(parts))
        return make(parts)

    def _items(self, items: Any, new: Any) -> None:
        key: Any = None
        holes = self.spec._holes
        visit = self.visit
        try:
            for key, value in items:
                made = visit(value)
                if type(made) is _Slot:
                    new[key] = None  # keeps the order of the keys
                    holes.append((new, key, made))
                else:
                    new[key] = made
        except StagingError as error:
            raise type(error)([key, *error.path], error.reason) from error.__cause__

    # -- leaves

    def _check(self, x: Any) -> None:
        if self._type_check and not isinstance(x, _CHECKED):
            raise UnstageableTypeError([], f"Unexpected value type {type(x)}")

    def _tensor(self, x: Any) -> Any:
        if hasattr(x, "trigger_wait"):  # an asynchronous collective's result: its value is there after the wait
            return self.visit(x.trigger_wait())
        if isinstance(x, ShardedTensor):
            return self._sharded(x)
        if is_traceable_wrapper_subclass(x):
            return self._wrapper(x)
        if why := why_without_data(x):
            raise StagingError([], why)
        return self._plain(x)

    def _plain(self, x: torch.Tensor) -> _Slot:
        if x.layout is not torch.strided or x.is_quantized or x.is_nested:
            loose = _attempt(_to_host, x)  # no single strided block to plan for
            return self._dressed(x, lambda staged: loose)
        index, negative, conjugate = len(self.spec.tensors), x.is_neg(), x.is_conj()
        if index == self._stop_at:
            raise StagingError([], "this is the tensor")
        pick = itemgetter(index)
        if negative or conjugate:
            self.spec.tensors.append(flip(x.detach(), negative, conjugate))
            return self._dressed(x, lambda staged: flip(pick(staged), negative, conjugate))
        self.spec.tensors.append(x)
        if x.requires_grad or type(x) is not torch.Tensor or x.__dict__:
            return self._dressed(x, pick)
        return _Slot(pick)

    def _dressed(self, x: torch.Tensor, bare: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> _Slot:
        """The staged tensor with the source's class, ``requires_grad`` and attributes."""
        kind, wants_grad = type(x), x.requires_grad and x.is_leaf

        def make(staged: Sequence[torch.Tensor]) -> torch.Tensor:
            y = bare(staged)
            if kind is torch.nn.Parameter:
                return torch.nn.Parameter(y, requires_grad=wants_grad)
            if kind is not torch.Tensor:
                y = y.as_subclass(kind)
            return y.requires_grad_() if wants_grad else y

        return self._with_attributes(x, _Slot(make), vars(x))

    def _with_attributes(self, x: torch.Tensor, slot: _Slot, attributes: dict[str, Any]) -> _Slot:
        if attributes:
            self._memo[id(x)] = slot  # an attribute may lead back here
            copied: dict[str, Any] = {}
            self._items(list(attributes.items()), copied)
            self.spec._dresses.append((slot, copied))
        return slot

    def _wrapper(self, x: Any) -> _Slot:
        """DTensor and other traceable wrappers, through their own flatten protocol."""
        names, context = x.__tensor_flatten__()
        size, stride, kind = x.size(), x.stride(), type(x)
        parts = {name: getattr(x, name) for name in names}
        inner: dict[str, Any] = {}
        self._items(parts.items(), inner)

        def make(staged: Sequence[torch.Tensor]) -> Any:
            return kind.__tensor_unflatten__(inner, context, size, stride)

        if kind not in self._own:  # the attributes that the protocol brings back by itself
            self._own[kind] = frozenset(vars(kind.__tensor_unflatten__(parts, context, size, stride))).union(names)
        return self._with_attributes(x, _Slot(make), {k: v for k, v in vars(x).items() if k not in self._own[kind]})

    def _sharded(self, x: ShardedTensor) -> _Slot:
        """A ShardedTensor over staged shards; its metadata says where they lie now: on the CPU."""
        shards = x.local_shards()
        parts: list[Any] = [None] * len(shards)
        self._items(enumerate(shard.tensor for shard in shards), parts)

        def make(staged: Sequence[torch.Tensor]) -> ShardedTensor:
            metadata = copy.deepcopy(x.metadata())
            local = [Shard(part, copy.deepcopy(old.metadata)) for part, old in zip(parts, shards, strict=True)]
            for meta in [*metadata.shards_metadata, *(shard.metadata for shard in local)]:
                if meta.placement is not None:
                    meta.placement._device = torch.device("cpu")
            return ShardedTensor._init_from_local_shards_and_global_metadata(
                local, metadata, process_group=x._process_group, init_rrefs=x._init_rrefs
            )

        return _Slot(make)


# -- single values


def _attempt(copier: Callable[[Any], Any], x: Any) -> Any:
    """Return ``copier(x)``; what that raises becomes an ``UnstageableTypeError`` that names the type."""
    try:
        return copier(x)
    except StagingError:
        raise
    except Exception as error:
        raise UnstageableTypeError(
            [], f"a {type(x).__module__}.{type(x).__qualname__} cannot be copied ({type(error).__name__}: {error})"
        ) from error


def why_without_data(x: torch.Tensor) -> str | None:
    """Say why a tensor that has a shape has no memory; None where it has."""
    if x.device.type != "meta" and not isinstance(x, (UninitializedParameter, UninitializedBuffer, FakeTensor)):
        return None
    return f"a {type(x).__name__} on {x.device} has no data to stage; materialize it first, as by a forward pass"


def _to_host(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone() if x.device.type == "cpu" else x.detach().to("cpu")


def flip(x: torch.Tensor, negative: bool, conjugate: bool) -> torch.Tensor:
    """Turn the lazy negation and conjugation of ``x`` on or off; its memory stays the same."""
    if negative:
        x = torch._neg_view(x)
    return x.conj() if conjugate else x


def _tuple_maker(kind: type[tuple[Any, ...]]) -> Callable[[list[Any]], Any]:
    """Return what makes a tuple of that type out of its items, whatever its constructor takes."""
    if hasattr(kind, "_make"):  # a named tuple
        return kind._make
    if hasattr(kind, "n_sequence_fields"):  # a struct sequence, such as those of torch.return_types
        return kind
    return lambda items: tuple.__new__(kind, items)


# -- the same state dict once more

_CHUNK = 512  # tensors that are looked at several times in a row, while the cache has them

_CONTAINERS = (dict, list, OrderedDict)

_attributes: Callable[[Any], dict[str, Any]] = attrgetter("__dict__")


class Recognizer:
    """Recognises a state dict of the same structure, over the same memory, as the one that it was made of.

    It takes only what is common and plain: dicts, lists and ``OrderedDict`` of bare tensors, each met once, and of
    immutable values. Tensors are compared by address and by torch's own guards in C++ (``TensorGuards`` of
    ``torch.compile``: type, dispatch keys, dtype, device, ``requires_grad``, sizes, strides). Everything else takes the
    long way through :func:`flatten`, which is always right.
    """

    def __init__(self, spec: _PlainSpec) -> None:
        self._structure = spec.structure
        self._guards = [
            TensorGuards(*chunk, dynamic_dims_sizes=None, dynamic_dims_strides=None) for chunk in _chunks(spec.tensors)
        ]
        self._addresses = [[x.data_ptr() for x in chunk] for chunk in _chunks(spec.tensors)]
        self._distinct = len(set(chain.from_iterable(self._addresses))) == len(spec.tensors)

    @classmethod
    def of(cls, state: Any, tensors: Sequence[torch.Tensor]) -> Recognizer | None:
        """Remember ``state``, of which :func:`flatten` lists ``tensors``; None if it is not of the plain kind."""
        if TensorGuards is None or any(x.requires_grad or _attributes(x) for x in tensors):
            return None
        spec = _PlainSpec(state)
        return cls(spec) if spec.is_plain and list(map(id, spec.tensors)) == list(map(id, tensors)) else None

    def match(self, state: Any) -> TreeSpec | None:
        """Return what :func:`flatten` would make of ``state``; None if it is not as it was."""
        spec = _PlainSpec(state)
        if not spec.is_plain or spec.structure != self._structure or any(map(_attributes, spec.tensors)):
            return None
        address = torch.Tensor.data_ptr
        for guards, addresses, chunk in zip(self._guards, self._addresses, _chunks(spec.tensors), strict=True):
            if not guards.check(*chunk) or list(map(address, chunk)) != addresses:
                return None
        # With as many addresses as tensors, none is met twice.
        return spec if self._distinct or len(set(map(id, spec.tensors))) == len(spec.tensors) else None


class _PlainSpec(TreeSpec):
    """The copy of a plain state dict, made in one pass with the source's tensors in it.

    Attributes:
        is_plain: whether it is one; otherwise nothing else is valid.
        structure: of each container: type, keys, types of the values.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.is_plain = True
        self.structure: list[tuple[Any, ...]] = []
        self._runs: list[tuple[Any, Sequence[Any]]] = []  # a new container, and the keys of its next tensors
        self._met: set[int] = set()
        self._root = self._copy(state)

    def unflatten(self, staged: Sequence[torch.Tensor]) -> Any:
        rest = iter(staged)
        for container, keys in self._runs:
            if type(container) is list:
                for key in keys:
                    container[key] = next(rest)
            else:
                container.update(zip(keys, rest))  # noqa: B905  # the shorter one ends it
        return self._root

    def _copy(self, x: Any) -> Any:
        kind = type(x)
        if kind not in _CONTAINERS or id(x) in self._met:
            self.is_plain = False
            return x
        self._met.add(id(x))
        new: Any = kind(x)
        keys, values = (range(len(new)), new) if kind is list else (list(new), list(new.values()))
        types = list(map(type, values))
        self.structure.append((kind, keys, types))
        if set(types) == {torch.Tensor}:
            self.tensors += values
            self._runs.append((new, keys))
        else:
            self._copy_some(new, keys, values, types)
        if kind is OrderedDict and _attributes(x):  # such as the ``_metadata`` of a module's state dict
            vars(new).update(self._copy(_attributes(x)))
            self.is_plain = self.is_plain and torch.Tensor not in map(type, vars(new).values())
        return new

    def _copy_some(self, new: Any, keys: Iterable[Any], values: list[Any], types: list[type]) -> None:
        run: list[Any] = []
        for key, value, kind in zip(keys, values, types, strict=True):
            if kind is torch.Tensor:
                self.tensors.append(value)
                run.append(key)
            elif kind not in ATOMS and not (kind is tuple and all(type(item) in ATOMS for item in value)):
                self._runs.append((new, run))  # the tensors inside come next
                run = []
                new[key] = self._copy(value)
        self._runs.append((new, run))


def _chunks(tensors: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
    return [tensors[at : at + _CHUNK] for at in range(0, len(tensors), _CHUNK)]
