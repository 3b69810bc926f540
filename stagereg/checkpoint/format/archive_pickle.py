"""Checks the pickle in a ``torch.save`` archive before torch reads it.

``torch.load(weights_only=True)`` runs no code from a pickle, but allocates every size that the pickle contains, such as
``torch.Tensor(1 << 30)``. This module runs the same instructions with placeholders instead of objects. It accepts only
pickles that ``torch.save`` can write: each tensor fits into its record, and no object needs more memory than the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch._utils import IMPORT_MAPPING, NAME_MAPPING

from stagereg.checkpoint.format.unpickler import BoundedUnpickler, Name
from stagereg.errors import CheckpointError

_DEEPEST = 1000  # maximum depth of nested tuples, because Python hashes and compares tuples recursively
_WAYS = 1 << 20  # maximum paths to the items of a tuple, plus one for each byte of the pickle
_MESH = "torch.distributed.device_mesh.DeviceMesh"
_STORAGES = {f"torch.{kind}": dtype.itemsize for dtype, kind in torch.storage._dtype_to_storage_type_map().items()} | {
    "torch.storage.UntypedStorage": 1
}
_PACKED = {"torch.QUInt4x2Storage": 2, "torch.QUInt2x4Storage": 4}  # elements per byte


class _Storage(NamedTuple):
    """Placeholder for a storage, whose content is a record of the archive."""

    elements: int


class _Tensor(NamedTuple):
    whole: bool  # False if the tensor may have more elements than its storage


class _Object(NamedTuple):
    kind: str  # full name of the function that made it


class _Dict(dict[Any, Any]):
    """Placeholder for an instance of a dict subclass."""


class _Bytes(str):
    __slots__ = ()


class _Tuple(tuple[Any, ...]):
    depth: int
    ways: int  # number of paths to direct and nested items; an item that occurs twice counts twice


def expect_bounded(found: Mapping[str, memoryview]) -> None:
    """Raise an exception if a pickle would make torch allocate more memory than the records in ``found`` have."""
    _Walk(found).load()


class _Walk(BoundedUnpickler):
    def __init__(self, found: Mapping[str, memoryview]) -> None:
        super().__init__(found["data.pkl"])
        self._found = found
        self._most_ways = _WAYS + len(found["data.pkl"])
        allowed = torch.serialization.get_safe_globals()
        self._allowed = {of[1] if isinstance(of, tuple) else f"{of.__module__}.{of.__qualname__}" for of in allowed}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in NAME_MAPPING:
            module, name = NAME_MAPPING[module, name]
        else:
            module = IMPORT_MAPPING.get(module, module)
        full = f"{module}.{name}"
        if full == _MESH:  # torch allows a DeviceMesh without a check
            raise CheckpointError("the pickle has a DeviceMesh, which would connect this process to other ranks")
        return Name(full)

    def persistent_load(self, pid: Any) -> Any:
        kind, of, key, location, count = pid
        if type(pid) is not _Tuple or kind != "storage" or type(of) is not Name or type(key) is not str:
            raise CheckpointError("a reference to a record has a form that torch.save does not write")
        if type(location) is not str or type(count) is not int or count < 0:
            raise CheckpointError("a reference to a record has a form that torch.save does not write")
        if count * _STORAGES[of] != len(self._found[f"data/{key}"]):
            raise CheckpointError(f"the record {key:.20} does not have the size that the pickle specifies")
        return _Storage(count * _PACKED.get(of, 1))

    def call(self, of: Any, given: Any) -> Any:
        if type(of) is not Name or type(given) not in (_Tuple, tuple):
            raise CheckpointError("the pickle contains a call that torch.save does not write")
        if of in _RULES:
            return _RULES[of](self, *given)
        if of not in self._allowed:
            raise ValueError(f"it calls {of:.100}")
        return _Object(of)

    def build(self, made: Any, state: Any) -> None:
        if type(made) not in (_Object, _Dict):
            raise CheckpointError("the pickle sets the state of an object that has no state")

    def make_tuple(self, items: list[Any]) -> Any:
        made, inside = _Tuple(items), [item for item in items if type(item) is _Tuple]
        made.depth = 1 + max((item.depth for item in inside), default=0)
        made.ways = 1 + len(items) + sum(item.ways for item in inside)
        if made.depth > _DEEPEST or made.ways > self._most_ways:
            raise CheckpointError("the tuples in the pickle are nested too deeply, or repeat the same items too often")
        return made

    def set_items(self, of: Any, items: list[Any]) -> None:
        if type(of) not in (dict, _Dict):
            raise CheckpointError("the pickle sets an item of an object that is not a dict")
        for key in items[::2]:
            self.gone_through(key.ways if type(key) is _Tuple else 0)
        of.update(dict.fromkeys(range(len(of), len(of) + len(items) // 2)))  # placeholder keys, to count items


def _tensor(_: _Walk, storage: Any, offset: Any, size: Any, *more: Any) -> _Tensor:
    if type(storage) is not _Storage or any(type(each) is not int for each in size):
        raise CheckpointError("the pickle has a tensor with an invalid shape, or without a record")
    return _Tensor(math.prod(size) <= storage.elements)


def _quantized(reader: _Walk, *given: Any) -> _Tensor:
    made = _tensor(reader, *given)
    for each in (made, *given):  # torch allocates memory by the number of elements, not by the storage
        _expect_whole(each)
    return made


def _parameter(_: _Walk, data: Any, *more: Any) -> _Tensor:
    if type(data) not in (_Tensor, _Object):
        raise CheckpointError("the pickle has a parameter that is not a tensor")
    return _Tensor(False)


def _of_type(reader: _Walk, of: Any, kind: Any, given: Any, state: Any) -> Any:
    reader.call(of, given)
    return _Tensor(False)  # the state may change the elements of the tensor


def _made_of(*kinds: type) -> Callable[..., Any]:
    """Return the rule for a function that takes arguments of ``kinds``, and returns an object of about their size."""

    def make(_: _Walk, *given: Any) -> Any:
        for each in given:
            if type(each) not in kinds:
                raise CheckpointError(f"a call in the pickle has an invalid {type(each).__name__.strip('_').lower()}")
            _expect_whole(each)
        return _Object("")

    return make


def _expect_whole(made: Any) -> None:
    """Raise ``CheckpointError`` for a tensor with more elements than its storage, even inside a tuple or list."""
    for each in made if isinstance(made, (tuple, list)) and type(made) is not _Tensor else [made]:
        if type(each) is _Tensor and not each.whole:
            raise CheckpointError("the pickle has a tensor with more elements than its record contains")


def _dict(reader: _Walk, *given: Any) -> Any:
    return _made_of(dict)(reader, *given) and _Dict(*given)


def _bytearray(_: _Walk, *content: Any) -> _Object:
    if content and [*map(type, content)] != [_Bytes]:
        raise CheckpointError("the pickle contains bytes in a form that Python does not write")
    return _Object("bytearray")


def _encoded(_: _Walk, text: Any, codec: Any) -> Any:
    if type(text) is not str or codec not in ("latin1", "latin-1"):
        raise CheckpointError("the pickle contains bytes in a form that Python does not write")
    return _Bytes(text)


_ANY = (_Tensor, _Object, _Bytes, _Tuple, tuple, Name, int, float, str, bool, type(None))
_RULES: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _dict,
    "collections.Counter": _dict,
    **{f"torch._utils.{name}": _tensor for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")},
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch.nn.parameter.Parameter": _parameter,
    "torch._utils._rebuild_sparse_tensor": _made_of(*_ANY),
    "torch._utils._rebuild_nested_tensor": _made_of(_Tensor),
    "torch._utils._rebuild_meta_tensor_no_storage": _made_of(*_ANY),
    "torch._utils._rebuild_wrapper_subclass": _made_of(*_ANY),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _made_of(*_ANY),
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.serialization._get_layout": _made_of(str),
    "torch.Size": _made_of(_Tuple, tuple),
    "torch.device": _made_of(str, int),
    "_codecs.encode": _encoded,
    "builtins.bytearray": _bytearray,
    "builtins.set": _made_of(list),
    "builtins.complex": _made_of(float),
}
