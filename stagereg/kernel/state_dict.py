"""Decomposes a state dict into plain tensors, and builds a copy of it around other tensors.

:func:`flatten` walks a state dict once, with a pickler. The pickle contains the structure: types, order, keys, sharing
and cycles. Objects such as dataclasses are decomposed like containers, into the state that pickle would store. Plain
strided tensors go into a list. Objects that have their own deep copy, and no tensors, are copied immediately.

:meth:`TreeSpec.unflatten` unpickles the structure with staged tensors instead of the source tensors. It wraps these
as ``Parameter``, DTensor, ShardedTensor or traceable subclass, and restores their Python attributes. A value that
cannot be staged raises an error that contains its path in the dict. Lazy conjugation and negation are resolved, because
they are lost when a tensor is transferred to another process.

Most calls stage a state dict with the structure and memory of the previous call. :class:`Recognizer` recognizes such a
state dict at a fraction of the cost of :func:`flatten` and a layout.
"""

from __future__ import annotations

import copy
import copyreg
import io
import pickle
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stagereg.base.many_tensors import Description, has_attributes, span_of
from stagereg.errors import StagingError, UnstageableTypeError

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # a private name of torch, only needed to recognize state dicts
    TensorGuards = None  # type: ignore[assignment, misc]

# Types of immutable values, which the copy shares with the source.
ATOMS = frozenset({
    type(None), bool, int, float, complex, str, bytes, range, type, slice, type(Ellipsis),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
    types.FunctionType, types.BuiltinFunctionType,
})  # fmt: skip

# Base classes. Most of their subclasses are immutable for ``copy.deepcopy`` too.
_ATOMIC = (types.CodeType, property, weakref.ref)

# Types that ``type_check`` accepts, in addition to containers.
_CHECKED = (bool, int, float, str, bytes, io.BytesIO, type(None), torch.Tensor)

_Reduced = tuple[Any, ...]  # the result of ``__reduce__``, see the documentation of pickle


class TreeSpec:
    """The copy of a state dict, without its tensors.

    ``tensors``: the plain strided tensors of the source, each object once, neither detached nor copied. ``lazy``: the
    tensors, by index, whose lazy conjugation or negation was resolved in new memory.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.lazy: dict[int, torch.Tensor] = {}
        self._constants: list[Any] = []
        self._finish: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}
        self._pickled = b""

    def release_sources(self) -> None:
        """Clear ``tensors`` and ``lazy``, which :meth:`unflatten` does not use."""
        self.tensors.clear()
        self.lazy.clear()

    def unflatten(self, staged: Sequence[torch.Tensor]) -> Any:
        """Return the finished copy, which has ``staged[i]`` instead of ``tensors[i]``. Call only once."""
        finished = list(staged)
        for i, finish in self._finish.items():
            finished[i] = finish(finished[i])
        return _StructureUnpickler(self._pickled, finished, self._constants).load()


def flatten(state: Any, type_check: bool = False) -> TreeSpec:
    """Decompose ``state``, which consists of nested containers and objects.

    If a value cannot be staged, the error contains its path. ``type_check``: raise for values other than tensors,
    numbers, strings, bytes, ``BytesIO`` and None, as torch does. Without ``type_check``, other objects are copied as
    ``copy.deepcopy`` would copy them, except their tensors, which are listed.
    """
    try:
        return _flatten(state, type_check)
    except StagingError as error:
        raise type(error)(_path_to(state, lambda x: _fails(x, type_check), {}), error.reason) from error.__cause__


def path_to(state: Any, index: int) -> tuple[object, ...]:
    """Return the path (list of keys) of the tensor at ``index`` in the list of :func:`flatten`, for error messages."""
    wanted = _identities(flatten(state))[index]
    return _path_to(state, lambda x: wanted in _identities(flatten(x)), {})


def _identities(spec: TreeSpec) -> list[tuple[Any, ...]]:
    sources = (spec.lazy.get(i, x) for i, x in enumerate(spec.tensors))
    return [
        (x.untyped_storage()._cdata, x.storage_offset(), x.dtype, x.shape, x.stride(), x.is_conj(), x.is_neg())
        for x in sources
    ]


def _path_to(x: Any, is_there: Callable[[Any], bool], met: dict[int, Any]) -> tuple[object, ...]:
    met[id(x)] = x  # keeps x alive, so that no other object gets its id
    for key, value in entries_of(x):
        if id(value) not in met and is_there(value):
            return (key, *_path_to(value, is_there, met))
    return ()


def entries_of(x: Any) -> list[tuple[object, Any]]:
    """Return the (key, value) pairs of a container, followed by the (name, value) pairs of an object's attributes."""
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
    """Placeholder in the pickled structure for a staged tensor."""


def _constant(index: int) -> Any:
    """Placeholder in the pickled structure for a value that is already copied, or that copy and source share."""


def _set_attributes(x: torch.Tensor, attributes: dict[str, Any]) -> None:
    vars(x).update(attributes)


class _StructureUnpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, staged: list[torch.Tensor], constants: list[Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._values = {"_tensor": staged, "_constant": constants}

    def find_class(self, module: str, name: str) -> Any:
        return self._values[name].__getitem__


class _StructurePickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, spec: TreeSpec) -> None:
        super().__init__(file, protocol=5)
        self._spec = spec
        self._own: dict[type, frozenset[str]] = {}

    def reducer_override(self, x: Any) -> Any:
        """Called by pickle once per object, except for dicts, lists, sets, tuples, numbers and strings."""
        kind = type(x)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return self._plain(x)
        if kind in ATOMS:
            return NotImplemented if x in (_tensor, _constant) else self._constant(x)
        if issubclass(kind, (dict, list, set, frozenset)) or hasattr(kind, "n_sequence_fields"):
            return NotImplemented
        if issubclass(kind, tuple):
            return (lambda items: tuple.__new__(kind, items)), (tuple(x),)  # does not call the constructor
        return self._subclass(x) if issubclass(kind, torch.Tensor) else self._object(x)

    def _constant(self, x: Any) -> _Reduced:
        self._spec._constants.append(x)
        return _constant, (len(self._spec._constants) - 1,)

    def _object(self, x: Any) -> _Reduced:
        """Return a reduce value with which pickle copies an object as ``copy.deepcopy`` would."""
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
        if hasattr(x, "trigger_wait"):  # the result of an asynchronous collective: wait for it
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

        if x.layout is not torch.strided or x.is_quantized or x.is_nested:  # not one strided block of memory
            copied = self._constant(finish(_attempt(lambda y: y.detach().cpu().clone(), x)))
            return self._with_attributes(copied, vars(x))
        index = len(self._spec.tensors)
        if x.is_neg() or x.is_conj():
            self._spec.lazy[index] = x
        self._spec.tensors.append(_flipped(x.detach()) if index in self._spec.lazy else x)
        if kind is not torch.Tensor or wants_grad:
            self._spec._finish[index] = finish
        return self._with_attributes((_tensor, (index,)), vars(x) if has_attributes([x]) else {})

    def _with_attributes(self, reduced: _Reduced, attributes: dict[str, Any]) -> _Reduced:
        return (*reduced, attributes, None, None, _set_attributes) if attributes else reduced

    def _wrapper(self, x: Any) -> _Reduced:
        """Decompose a DTensor, or another traceable wrapper, with the flatten protocol of its class."""
        (names, context), size, stride, kind = x.__tensor_flatten__(), x.size(), x.stride(), type(x)
        parts = {name: getattr(x, name) for name in names}
        x._clear_non_serializable_cached_data()  # before torch 2.13, size() caches values in __dict__

        def make(inner: dict[str, Any]) -> Any:
            return kind.__tensor_unflatten__(inner, context, size, stride)

        if kind not in self._own:  # attributes that the flatten protocol restores
            self._own[kind] = frozenset(vars(make(parts))).union(names)
        return self._with_attributes((make, (parts,)), {k: v for k, v in vars(x).items() if k not in self._own[kind]})

    def _sharded(self, x: ShardedTensor) -> _Reduced:
        """Decompose a ShardedTensor into its local shards. The metadata of the copy places the shards on the CPU."""
        whole, group, rrefs = x.metadata(), x._process_group, x._init_rrefs  # do not capture x, which holds the tensors
        pieces = [shard.metadata for shard in x.local_shards()]

        def make(parts: list[torch.Tensor]) -> ShardedTensor:
            metadata = copy.deepcopy(whole)
            local = [Shard(part, copy.deepcopy(piece)) for part, piece in zip(parts, pieces, strict=True)]
            for part in parts:  # the stager may have changed the dtype
                metadata.tensor_properties.dtype = part.dtype
            for meta in [*metadata.shards_metadata, *(shard.metadata for shard in local)]:
                if meta.placement is not None:
                    meta.placement._device = torch.device("cpu")
            make_sharded = ShardedTensor._init_from_local_shards_and_global_metadata
            return make_sharded(local, metadata, process_group=group, init_rrefs=rrefs)

        return make, ([shard.tensor for shard in x.local_shards()],)


# -- single values


def _attempt(copier: Callable[[Any], Any], x: Any) -> Any:
    try:
        return copier(x)
    except StagingError:
        raise
    except Exception as error:
        kind, why = type(x), f"{type(error).__name__}: {error}"
        raise UnstageableTypeError([], f"a {kind.__module__}.{kind.__qualname__} cannot be copied ({why})") from error


def why_without_data(x: torch.Tensor) -> str | None:
    """Return the reason why a tensor has a shape but no memory, or ``None`` if it has memory."""
    if x.device.type != "meta" and not isinstance(x, (UninitializedParameter, UninitializedBuffer, FakeTensor)):
        return None
    kind = type(x).__name__
    return f"a {kind} on {x.device} has no data to stage. Materialize it first, for example by a forward pass"


def has_storage(x: torch.Tensor) -> bool:
    """Return whether a strided tensor has its own memory. Subclasses that wrap other tensors do not."""
    try:
        x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # the storage has no memory
        return False
    return True


def _flipped(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((span_of(x),), (1,)).clone().as_strided(x.shape, x.stride(), 0)


# -- recognizing a state dict

_CHUNK = 512  # tensors per chunk; small enough that all checks of a chunk find it in the CPU cache

_CONTAINERS = (dict, list, OrderedDict)


class Recognizer:
    """Recognizes a state dict that has the structure and memory of an earlier state dict.

    Supports only common plain state dicts: dicts, lists and ``OrderedDict`` of bare tensors, each used once, and
    immutable values. Tensors are compared by address, shape and strides (:class:`.Description`), and by torch's C++
    guards (``TensorGuards`` of ``torch.compile``: type, dispatch keys, dtype, device, ``requires_grad``). All other
    state dicts go through :func:`flatten`, which is slower and always correct.
    """

    def __init__(self, spec: _PlainSpec) -> None:
        self._structure = spec.structure
        chunks = _chunks(spec.tensors)
        self._known = [*zip(map(Description, chunks), _guards(chunks), strict=True)]
        self._distinct = len(set(map(torch.Tensor.data_ptr, spec.tensors))) == len(spec.tensors)

    @classmethod
    def of(cls, state: Any, tensors: Sequence[torch.Tensor]) -> Recognizer | None:
        """Return a recognizer of ``state``, or ``None`` if the state dict is not plain.

        ``tensors``: the list of :func:`flatten` for ``state``.
        """
        if TensorGuards is None or any(x.requires_grad for x in tensors) or has_attributes([*tensors]):
            return None
        spec = _PlainSpec(state)
        return cls(spec) if spec.is_plain and list(map(id, spec.tensors)) == list(map(id, tensors)) else None

    def match(self, state: Any) -> TreeSpec | None:
        """Return the same result as :func:`flatten` for ``state``, or ``None`` if the state dict differs."""
        spec = _PlainSpec(state)
        if not spec.is_plain or spec.structure != self._structure:
            return None
        for (known, guards), chunk in zip(self._known, _chunks(spec.tensors), strict=True):
            if not known.matches(chunk) or not guards.check(*chunk) or has_attributes(chunk):
                return None
        # If all addresses are distinct, each tensor occurs once.
        return spec if self._distinct or len(set(map(id, spec.tensors))) == len(spec.tensors) else None


def _guards(chunks: list[list[torch.Tensor]]) -> Iterator[TensorGuards]:
    """Yield the guards of each chunk, without sizes and strides, so that most chunks share them in the CPU cache."""
    made: dict[tuple[Any, ...], TensorGuards] = {}
    for chunk in chunks:
        kinds = tuple((x.dtype, x.device, x.ndim) for x in chunk)
        if kinds not in made or not made[kinds].check(*chunk):
            free: Any = [[None] * x.ndim for x in chunk]
            made[kinds] = TensorGuards(*chunk, dynamic_dims_sizes=free, dynamic_dims_strides=free)
        yield made[kinds]


class _PlainSpec(TreeSpec):
    """The copy of a plain state dict, built in one pass. Contains the source tensors until :meth:`unflatten`."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.is_plain = True  # if False, the other attributes are invalid
        self.structure: list[tuple[Any, ...]] = []  # for each container: type, keys, types of the values
        self._runs: list[tuple[Any, Sequence[Any]]] = []  # (container in the copy, keys of its next tensors), in order
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
        if kind is OrderedDict and vars(x):  # for example ``_metadata`` of a module's state dict
            vars(new).update(self._copy(vars(x)))
            self.is_plain = self.is_plain and torch.Tensor not in map(type, vars(new).values())
        return new

    def _copy_some(self, new: Any, keys: Iterable[Any], values: list[Any], types: list[type]) -> None:
        run: list[Any] = []
        for key, value, kind in zip(keys, values, types, strict=True):
            if kind is torch.Tensor:
                self.tensors.append(value)
                run.append(key)
            elif kind not in ATOMS and not (kind is tuple and all(type(item) in ATOMS for item in value)):
                self._runs.append((new, run))  # the tensors of the nested container come next
                run = []
                new[key] = self._copy(value)
        self._runs.append((new, run))


def _chunks(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    return [tensors[at : at + _CHUNK] for at in range(0, len(tensors), _CHUNK)]
