"""Objects of a state that JSON cannot carry: checked before they are written, read without running code.

A tuple with a tensor in it, or a value of an allowed type (``torch.serialization.add_safe_globals([T])``), is stored by
``torch.save`` and read with ``torch.load(weights_only=True)``. Both are tried before the save, without tensor data.
Archives are checked by :mod:`.archives` and :mod:`.archive_pickle` before they are read.
"""

from __future__ import annotations

import io
import pickle
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

import stagereg.checkpoint.format.split_tensors as split_tensors
from stagereg.checkpoint.format.archive_pickle import expect_bounded
from stagereg.checkpoint.format.archives import Archive, records
from stagereg.checkpoint.format.wrappers import form_of, name_of, wraps
from stagereg.data import is_stateful
from stagereg.errors import CheckpointError, reason

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, DTensor})
QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
_SHOWN = 5
NOT_REACHED = (
    "which a restore does not reach there. Put each such object under a name of its own in the state, as in {'model': "
    "model, 'scheduler': scheduler}; dicts, lists and tuples of objects are spread by themselves. A state_dict() that "
    "returns the object returns its state_dict() instead"
)
_LOADERS = (DataLoader, Sampler, _BaseDataLoaderIter)
_NO_POSITION = (
    "{name!r} is a {kind}, which has no state_dict(): a restore would not bring back a position in the data. Put a "
    "sampler that counts batches into the state:\n"
    "  sampler = stagereg.data.ResumableSampler(dataset)  # with shuffle=False in the order of the dataset\n"
    "  loader = DataLoader(dataset, batch_size=..., sampler=sampler)\n"
    "  state['sampler'] = sampler  # before restore(), in the place of {name!r}\n"
    "  for batch in sampler.batches(loader, epochs=...):\n"
    "A loader with a state, such as StatefulDataLoader of torchdata, may be in the state itself"
)
_loadable: set[object] = set()  # kinds of tensors that wrap others, each tested once


def expect_loadable(name: str, value: Any) -> None:
    """Raise ``CheckpointError``, with advice, if a value called ``name`` could not be read back."""
    if type(value) is ShardedTensor:  # of dense shards
        return
    if isinstance(value, torch.Tensor) and wraps(value):
        if not value.numel():  # no shard of it would be written
            raise CheckpointError(
                f"{name!r} cannot be saved: it is a {name_of(value)} without elements, which would come back as "
                "a plain tensor. Leave it out of the state, or save the tensors in it."
            )
        value = value._local_tensor if isinstance(value, DTensor) else value
        form = form_of(value)
        if (kind := (form, *map(_types_in, vars(value).items()))) not in _loadable:
            _expect_read_back(name, value, form)
            _loadable.add(kind)
        return
    if type(value) in _TENSORS or isinstance(value, NestedTensor):
        expect_dense(name, value.dtype, "nested" if value.is_nested else value.layout)
        if split_tensors.is_split(value):
            split_tensors.expect_valid(name, value)
        return
    _expect_read_back(name, value.detach() if isinstance(value, torch.Tensor) else value)


def _types_in(attribute: tuple[str, Any]) -> tuple[object, ...]:
    """Return the name of an attribute, its type, and the types of its items."""
    name, value = attribute
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return name, type(value), *(map(type, items) if isinstance(value, (dict, list, tuple, set, frozenset)) else ())


def _expect_read_back(name: str, value: Any, form: str = "") -> None:
    """Test whether a value can be read back, and, if ``form`` is given, whether in the same form."""
    stream = io.BytesIO()
    try:
        with torch.serialization.skip_data():
            torch.save(value, stream)
    except Exception as error:
        _expect_no_object(name, value, error)
        kind = f"a {type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")
        raise CheckpointError(
            f"{name!r} cannot be saved: it is {kind}, and pickling that fails ({reason(error)}). "
            "Leave it out of the state, or give what it consists of."
        ) from error
    try:
        inside = records(stream.getbuffer())
    except ValueError as error:  # another torch writes archives in another way
        raise CheckpointError(f"{name!r} would not load back: {error}. Save the tensors in it.") from error
    try:
        found = _read(inside)
    except Exception as error:
        _expect_no_object(name, value, error)
        expect_no_data(name, value, (Dataset,))
        text = "Save numbers, text or tensors instead (such as float(x), torch.as_tensor(x)), or allow"
        raise CheckpointError(f"{name!r} would not load back: {_refusal(inside, error, text)}") from error
    if form and not (isinstance(found, torch.Tensor) and wraps(found) and form_of(found) == form):
        raise CheckpointError(
            f"{name!r} would not load back: torch.load makes something else of a {name_of(value)} than torch.save was "
            "given. Save the tensors in it, or leave it out of the state."
        )


def is_object(value: Any) -> bool:
    """Whether a value has its own state, which is saved and restored instead of the value."""
    return is_stateful(value) or is_generator(value)


def is_generator(value: Any) -> bool:
    """Whether a value is a random number generator of the program."""
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if (numpy := sys.modules.get("numpy")) is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)  # SystemRandom has no state


def expect_no_data(name: str, value: Any, kinds: tuple[type, ...] = _LOADERS) -> None:
    """Raise ``CheckpointError`` for a data loader or sampler without a state, which could not continue its data."""
    if isinstance(value, kinds):
        raise CheckpointError(
            _NO_POSITION.format(name=name, kind=f"{type(value).__module__}.{type(value).__qualname__}")
        )


def find_object(value: Any) -> str | None:
    """Return the name of the type of an object that pickling ``value`` would copy, if there is one."""
    try:
        _ObjectFinder(io.BytesIO(), protocol=5, buffer_callback=lambda _: None).dump(value)
    except _FoundError as found:
        return str(found)
    except Exception:  # a later check refuses values that cannot be pickled
        return None
    return None


class _FoundError(Exception):
    pass


class _ObjectFinder(pickle.Pickler):
    """Raises ``_FoundError`` at the first object with its own state; omits the content of tensors."""

    def reducer_override(self, x: Any) -> Any:
        if is_object(x):
            raise _FoundError(f"{type(x).__module__}.{type(x).__qualname__}")
        return (int, ()) if isinstance(x, torch.Tensor) else NotImplemented


def _expect_no_object(name: str, value: Any, error: Exception) -> None:
    if (kind := find_object(value)) is not None:
        raise CheckpointError(f"{name!r} cannot be saved: it has a {kind}, {NOT_REACHED}.") from error


def expect_dense(name: str, dtype: torch.dtype, layout: torch.layout | str, verb: str = "saved") -> None:
    """Raise ``CheckpointError`` for a kind of tensor that ``copy_`` does not fill correctly when it is read."""
    if dtype in QUANTIZED:
        raise CheckpointError(
            f"{name!r} cannot be {verb}: it is quantized, and would get the scale of what it is loaded into. "
            "Save x.int_repr() and its scale, or x.dequantize()."
        )
    if layout is not torch.strided:
        raise CheckpointError(f"{name!r} cannot be {verb}: it is {layout}, not dense. Save the dense tensors it has.")


def load(name: str, data: bytes | bytearray) -> Any:
    """Return an object from the ``data`` of ``torch.save``. Raises: ``CheckpointError``."""
    found: Mapping[str, memoryview] = {}
    try:
        found = records(data)
        return _read(found)
    except Exception as error:
        own = isinstance(error, CheckpointError) or not found
        why = f"{error}." if own else _refusal(found, error, "If you trust who wrote it, allow")
        raise CheckpointError(f"{name!r:.100} was not read: {why}") from error


def _read(found: Mapping[str, memoryview]) -> Any:
    expect_bounded(found)
    return torch.load(Archive(found), map_location="cpu", mmap=False, weights_only=True)  # type: ignore[arg-type]


def _refusal(found: Mapping[str, memoryview], error: Exception, otherwise: str) -> str:
    """Return the refused type of an archive, and the call that would allow it."""
    try:
        stream: Any = Archive(found)
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(stream))[:_SHOWN]
    except Exception:
        names = []
    shown = ", ".join(_printable(name[:100]) for name in names)
    refused = (str(error).partition("WeightsUnpickler error: ")[2] or str(error)).strip() or type(error).__name__
    what = shown or f"something that torch refuses ({_printable(refused.splitlines()[0][:200])})"
    return (
        f"it has {what}. Checkpoints are read without running code. {otherwise} the type when saving and when "
        f"restoring: torch.serialization.add_safe_globals([{shown or 'TheType'}])"
    )


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)  # a terminal interprets some characters as commands
