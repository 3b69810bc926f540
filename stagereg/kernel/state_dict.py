"""Decompose a state dict into plain tensors, and build a copy of it around other tensors.

:func:`flatten` walks a state dict once, with a pickler. The pickle holds the structure: types, order, keys, sharing and
cycles. Objects such as dataclasses are decomposed like containers, into the state that pickle would store. Plain
strided tensors are listed; objects with their own deep copy, and without tensors, are copied immediately.
:meth:`TreeSpec.unflatten` unpickles the structure with staged tensors instead of the source's, wrapped again as
``Parameter``, DTensor, ShardedTensor or traceable subclass, with their Python attributes. Values that cannot be staged
raise an error with their path in the dict.

Lazy conjugation and negation are resolved, because transfers of tensors to other processes lose them.

Most calls stage a state dict with the structure and memory of the previous call. :class:`Recognizer` recognizes such a
state dict at a third of the cost of :func:`flatten` and a layout.
"""

from __future__ import annotations

import copy
import copyreg
import io
import pickle
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
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
except ImportError:  # not a public name of torch; without it no state dict is recognized
    TensorGuards = None  # type: ignore[assignment, misc]

# Immutable values: the copy holds the same object.
ATOMS = frozenset({
    type(None), bool, int, float, complex, str, bytes, range, type, slice, type(Ellipsis),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
    types.FunctionType, types.BuiltinFunctionType,
})  # fmt: skip

# Base classes of many types that ``copy.deepcopy`` treats as immutable, too.
_ATOMIC = (types.CodeType, property, weakref.ref)

# Types that torch's type_check accepts in addition to containers.
_CHECKED = (bool, int, float, str, bytes, io.BytesIO, type(None), torch.Tensor)

_Reduced = tuple[Any, ...]  # a reduce value, in pickle's terms


class TreeSpec:
    """A state dict's copy without its tensors.

    ``tensors``: the source's plain strided tensors, each object once, neither detached nor copied. ``lazy``: by index,
    the tensors whose lazy conjugation or negation was resolved in new memory.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.lazy: dict[int, torch.Tensor] = {}
        self._constants: list[Any] = []
        self._finish: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}
        self._pickled = b""

    def release_sources(self) -> None:
        """Clear ``tensors`` and ``lazy``, which :meth:`unflatten` does not need."""
        self.tensors.clear()
        self.lazy.clear()

    def unflatten(self, staged: Sequence[torch.Tensor]) -> Any:
        """Return the finished copy, with ``staged[i]`` instead of ``tensors[i]``. Call only once."""
        finished = list(staged)
        for i, finish in self._finish.items():
            finished[i] = finish(finished[i])
        return _StructureUnpickler(self._pickled, finished, self._constants).load()


def flatten(state: Any, type_check: bool = False) -> TreeSpec:
    """Decompose ``state``, nested containers and objects. Errors contain the path of the value that cannot be staged.

    ``type_check``: refuse leaves that are not a tensor, number, string, bytes, ``BytesIO`` or None, as in torch.
    Otherwise such leaves are copied as ``copy.deepcopy`` would, except for their tensors, which are listed.
    """
    try:
        return _flatten(state, type_check)
    except StagingError as error:
        path = _path_to(state, lambda x: _fails(x, type_check), {})
        raise type(error)(path, error.reason) from error.__cause__


def path_to(state: Any, index: int) -> tuple[object, ...]:
    """Return the keys that lead to the tensor at ``index`` in :func:`flatten`'s list, for error messages."""
    wanted = _identities(flatten(state))[index]
    return _path_to(state, lambda x: wanted in _identities(flatten(x)), {})


def _identities(spec: TreeSpec) -> list[tuple[Any, ...]]:
    sources = (spec.lazy.get(i, x) for i, x in enumerate(spec.tensors))
    return [
        (x.untyped_storage()._cdata, x.storage_offset(), x.dtype, x.shape, x.stride(), x.is_conj(), x.is_neg())
        for x in sources
    ]


def _path_to(x: Any, is_there: Callable[[Any], bool], met: dict[int, Any]) -> tuple[object, ...]:
    """Return the keys that lead to the innermost value for which ``is_there`` is true."""
    met[id(x)] = x  # keep alive, so that no other object gets this id; a dict may create its values
    for key, value in entries_of(x):
        if id(value) not in met and is_there(value):
            return (key, *_path_to(value, is_there, met))
    return ()


def entries_of(x: Any) -> list[tuple[object, Any]]:
    """Return the items of a container and the attributes of an object, by their keys and names."""
    entries = list(x.items() if isinstance(x, dict) else enumerate(x if isinstance(x, (list, tuple, deque)) else ()))
    if type(x) not in ATOMS and not (isinstance(x, torch.Tensor) and why_without_data(x)):
        entries += getattr(x, "__dict__", {}).items()
    return entries


def _fails(x: Any, type_check: bool) -> bool:
    try:
        _flatten(x, type_check)
    except StagingError:
        return True
    return False


def _flatten(state: Any, type_check: bool) -> TreeSpec:
    spec, file = TreeSpec(), io.BytesIO()
    if type_check:
        _check_types(state, set())
    _attempt(_StructurePickler(file, spec).dump, state)
    spec._pickled = file.getvalue()
    return spec


def _check_types(x: Any, met: set[int]) -> None:
    if isinstance(x, (dict, list, tuple)):
        if id(x) not in met:
            met.add(id(x))
            for value in x.values() if isinstance(x, dict) else x:
                _check_types(value, met)
    elif not isinstance(x, _CHECKED):
        raise UnstageableTypeError([], f"Unexpected value type {type(x)}")


# -- pickling


def _tensor(index: int) -> Any:
    """Placeholder in the structure for a staged tensor."""


def _constant(index: int) -> Any:
    """Placeholder in the structure for a value that is already copied, or shared with the source."""


def _set_attributes(x: torch.Tensor, attributes: dict[str, Any]) -> None:
    vars(x).update(attributes)


class _StructureUnpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, staged: list[torch.Tensor], constants: list[Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._values = {"_tensor": staged, "_constant": constants}

    def find_class(self, module: str, name: str) -> Any:
        return self._values[name].__getitem__


class _StructurePickler(pickle.Pickler):
    """Pickles a structure, and stores its tensors and constants in ``spec``."""

    def __init__(self, file: io.BytesIO, spec: TreeSpec) -> None:
        super().__init__(file, protocol=5)
        self._spec = spec
        self._own: dict[type, frozenset[str]] = {}

    def reducer_override(self, x: Any) -> Any:
        """Called once per object, except exact dicts, lists, sets, tuples, numbers and strings."""
        kind = type(x)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return self._plain(x)
        if kind in ATOMS:
            return NotImplemented if x in (_tensor, _constant) else self._constant(x)
        if issubclass(kind, (dict, list, set, frozenset)) or hasattr(kind, "n_sequence_fields"):
            return NotImplemented
        if issubclass(kind, tuple):
            return (lambda items: tuple.__new__(kind, items)), (tuple(x),)  # independent of the constructor's arguments
        if issubclass(kind, torch.Tensor):
            return self._subclass(x)
        return self._object(x)

    def _constant(self, x: Any) -> _Reduced:
        self._spec._constants.append(x)
        return _constant, (len(self._spec._constants) - 1,)

    def _object(self, x: Any) -> _Reduced:
        """Return a reduce value that copies like ``copy.deepcopy``: atoms, ``__deepcopy__``, pickle's protocol."""
        kind = type(x)
        if isinstance(x, (type, *_ATOMIC)):
            return self._constant(x)
        if not hasattr(kind, "__deepcopy__"):
            reduced = _attempt(copyreg.dispatch_table.get(kind, lambda x: x.__reduce_ex__(4)), x)
            return self._constant(x) if isinstance(reduced, str) else reduced
        copied: dict[int, Any] = {}
        constant = self._constant(_attempt(lambda x: copy.deepcopy(x, copied), x))
        if any(isinstance(each, torch.Tensor) for each in copied.values()):
            raise UnstageableTypeError(
                [],
                f"a {kind.__module__}.{kind.__qualname__} has tensors and its own __deepcopy__, which would copy "
                "them on their device, one by one. Put the tensors themselves into the state dict",
            )
        return constant

    def _subclass(self, x: Any) -> _Reduced:
        if hasattr(x, "trigger_wait"):  # an asynchronous collective's result: valid after the wait
            return self.reducer_override(x.trigger_wait())
        if isinstance(x, ShardedTensor):
            return self._sharded(x)
        if is_traceable_wrapper_subclass(x):
            return self._wrapper(x)
        if why := why_without_data(x):
            raise StagingError([], why)
        if x.layout is torch.strided and not has_storage(x):
            name = f"{type(x).__module__}.{type(x).__qualname__}"
            text = f"a {name} has no storage and does not list its inner tensors. Implement __tensor_flatten__"
            raise UnstageableTypeError([], f"{text}, or put the inner tensors themselves into the state dict")
        return self._plain(x)

    def _plain(self, x: torch.Tensor) -> _Reduced:
        kind, wants_grad = type(x), x.requires_grad and x.is_leaf

        def finish(y: torch.Tensor) -> torch.Tensor:
            if kind is torch.nn.Parameter:
                return torch.nn.Parameter(y, requires_grad=wants_grad)
            if kind is not torch.Tensor:
                y = y.as_subclass(kind)
            return y.requires_grad_() if wants_grad else y

        if x.layout is not torch.strided or x.is_quantized or x.is_nested:  # not a single strided block
            copied = self._constant(finish(_attempt(lambda y: y.detach().cpu().clone(), x)))
            return self._with_attributes(copied, vars(x))
        index = len(self._spec.tensors)
        if x.is_neg() or x.is_conj():
            self._spec.lazy[index] = x
        self._spec.tensors.append(_flipped(x.detach()) if index in self._spec.lazy else x)
        if kind is not torch.Tensor or wants_grad:
            self._spec._finish[index] = finish
        return self._with_attributes((_tensor, (index,)), vars(x))

    def _with_attributes(self, reduced: _Reduced, attributes: dict[str, Any]) -> _Reduced:
        return (*reduced, attributes, None, None, _set_attributes) if attributes else reduced

    def _wrapper(self, x: Any) -> _Reduced:
        """Handle DTensor and other traceable wrappers, through their own flatten protocol."""
        (names, context), size, stride, kind = x.__tensor_flatten__(), x.size(), x.stride(), type(x)
        parts = {name: getattr(x, name) for name in names}
        x._clear_non_serializable_cached_data()  # before torch 2.13, size() caches values in __dict__

        def make(inner: dict[str, Any]) -> Any:
            return kind.__tensor_unflatten__(inner, context, size, stride)

        if kind not in self._own:  # attributes that the protocol restores itself
            self._own[kind] = frozenset(vars(make(parts))).union(names)
        return self._with_attributes((make, (parts,)), {k: v for k, v in vars(x).items() if k not in self._own[kind]})

    def _sharded(self, x: ShardedTensor) -> _Reduced:
        """Handle a ShardedTensor with staged shards; its metadata places the shards on the CPU."""
        whole, group, rrefs = x.metadata(), x._process_group, x._init_rrefs  # do not capture x: it has the tensors
        pieces = [shard.metadata for shard in x.local_shards()]

        def make(parts: list[torch.Tensor]) -> ShardedTensor:
            metadata = copy.deepcopy(whole)
            local = [Shard(part, copy.deepcopy(piece)) for part, piece in zip(parts, pieces, strict=True)]
            for part in parts:  # a stager may cast
                metadata.tensor_properties.dtype = part.dtype
            for meta in [*metadata.shards_metadata, *(shard.metadata for shard in local)]:
                if meta.placement is not None:
                    meta.placement._device = torch.device("cpu")
            return ShardedTensor._init_from_local_shards_and_global_metadata(
                local, metadata, process_group=group, init_rrefs=rrefs
            )

        return make, ([shard.tensor for shard in x.local_shards()],)


# -- single values


def _attempt(copier: Callable[[Any], Any], x: Any) -> Any:
    """Return ``copier(x)``; exceptions become an ``UnstageableTypeError`` that names the type."""
    try:
        return copier(x)
    except StagingError:
        raise
    except Exception as error:
        kind, why = type(x), f"{type(error).__name__}: {error}"
        raise UnstageableTypeError([], f"a {kind.__module__}.{kind.__qualname__} cannot be copied ({why})") from error


def why_without_data(x: torch.Tensor) -> str | None:
    """Return why a tensor with a shape has no memory; ``None`` if it has memory."""
    if x.device.type != "meta" and not isinstance(x, (UninitializedParameter, UninitializedBuffer, FakeTensor)):
        return None
    return (
        f"a {type(x).__name__} on {x.device} has no data to stage. Materialize it first, for example by a forward pass"
    )


def has_storage(x: torch.Tensor) -> bool:
    """Return whether a strided tensor has its own memory; subclasses that wrap other tensors do not."""
    try:
        x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # the storage has no memory
        return False
    return True


def span_of(x: torch.Tensor) -> int:
    """Return the number of elements from the first of ``x`` in memory to its last, inclusive; 0 for an empty tensor."""
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0


def _flipped(x: torch.Tensor) -> torch.Tensor:
    """Resolve the lazy negation and conjugation of ``x``, in new memory with the same strides."""
    return x.as_strided((span_of(x),), (1,)).clone().as_strided(x.shape, x.stride(), 0)


# -- recognizing a state dict

_CHUNK = 512  # tensors that are checked several times in a row, while they are in the CPU cache

_CONTAINERS = (dict, list, OrderedDict)

_attributes: Callable[[Any], dict[str, Any]] = attrgetter("__dict__")


class Recognizer:
    """Recognizes a state dict that has the structure and memory of an earlier state dict.

    Supports only common plain state dicts: dicts, lists and ``OrderedDict`` of bare tensors, each used once, and
    immutable values. Tensors are compared by address and by torch's C++ guards (``TensorGuards`` of ``torch.compile``:
    type, dispatch keys, dtype, device, ``requires_grad``, sizes, strides). All other state dicts go through
    :func:`flatten`, which is slower and always correct.
    """

    def __init__(self, spec: _PlainSpec) -> None:
        self._structure = spec.structure
        chunks = _chunks(spec.tensors)
        self._guards = [TensorGuards(*chunk, dynamic_dims_sizes=None, dynamic_dims_strides=None) for chunk in chunks]
        self._addresses = [[x.data_ptr() for x in chunk] for chunk in chunks]
        self._distinct = len(set(chain.from_iterable(self._addresses))) == len(spec.tensors)

    @classmethod
    def of(cls, state: Any, tensors: Sequence[torch.Tensor]) -> Recognizer | None:
        """Remember ``state``, whose ``tensors`` :func:`flatten` lists; ``None`` if the state dict is not plain."""
        if TensorGuards is None or any(x.requires_grad or _attributes(x) for x in tensors):
            return None
        spec = _PlainSpec(state)
        return cls(spec) if spec.is_plain and list(map(id, spec.tensors)) == list(map(id, tensors)) else None

    def match(self, state: Any) -> TreeSpec | None:
        """Return the result of :func:`flatten` for ``state``, or ``None`` if it has changed."""
        spec = _PlainSpec(state)
        if not spec.is_plain or spec.structure != self._structure or any(map(_attributes, spec.tensors)):
            return None
        address = torch.Tensor.data_ptr
        for guards, addresses, chunk in zip(self._guards, self._addresses, _chunks(spec.tensors), strict=True):
            if not guards.check(*chunk) or list(map(address, chunk)) != addresses:
                return None
        # If all addresses differ, no tensor occurs twice.
        return spec if self._distinct or len(set(map(id, spec.tensors))) == len(spec.tensors) else None


class _PlainSpec(TreeSpec):
    """The copy of a plain state dict, built in one pass with the source's tensors in it."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.is_plain = True  # if False, the other attributes are not valid
        self.structure: list[tuple[Any, ...]] = []  # per container: type, keys, types of the values
        self._runs: list[tuple[Any, Sequence[Any]]] = []  # a new container, and the keys of its next tensors
        self._met: set[int] = set()
        self._root = self._copy(state)

    def release_sources(self) -> None:
        self.unflatten([torch.empty(0, dtype=torch.uint8, device="cpu")] * len(self.tensors))
        super().release_sources()

    def unflatten(self, staged: Sequence[torch.Tensor]) -> Any:
        rest = iter(staged)
        for container, keys in self._runs:
            if type(container) is list:
                for key in keys:
                    container[key] = next(rest)
            else:
                container.update(zip(keys, rest))  # noqa: B905  # the shorter iterable ends the zip
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
        if (kinds := set(types)) == {torch.Tensor}:
            self.tensors += values
            self._runs.append((new, keys))
        elif not kinds <= ATOMS:
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
                self._runs.append((new, run))  # tensors in the nested container follow
                run = []
                new[key] = self._copy(value)
        self._runs.append((new, run))


def _chunks(tensors: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
    return [tensors[at : at + _CHUNK] for at in range(0, len(tensors), _CHUNK)]
