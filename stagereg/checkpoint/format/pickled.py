"""Checks objects of a state that JSON cannot represent before they are written, and reads them without running code.

``torch.save`` stores such an object: a tuple that contains a tensor, or a value of an allowed type
(``torch.serialization.add_safe_globals([T])``). ``torch.load(weights_only=True)`` reads it. A save first tries both
calls without tensor data. :mod:`.archives` and :mod:`.archive_pickle` check an archive before torch reads it.
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
from stagereg.errors import CheckpointError, printable, reason

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, DTensor})
QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
_SHOWN = 5
NOT_REACHED = (
    "which a restore cannot reach there. Put each such object under a name of its own in the state, as in {'model': "
    "model, 'scheduler': scheduler}; it may also be in a dict, list or tuple. If a state_dict() returned the object, "
    "let it return the object's state_dict() instead"
)
_LOADERS = (DataLoader, Sampler, _BaseDataLoaderIter)
_NO_POSITION = (
    "{name!r} is a {kind}, which has no state_dict(), so a resumed run could not continue at its position in the data. "
    "Put a sampler that counts batches into the state:\n"
    "  sampler = stagereg.data.ResumableSampler(dataset)  # with shuffle=False in the order of the dataset\n"
    "  loader = DataLoader(dataset, batch_size=..., sampler=sampler)\n"
    "  state['sampler'] = sampler  # before restore(), instead of {name!r}\n"
    "  for batch in sampler.batches(loader, epochs=...):\n"
    "A stateful loader, such as torchdata's StatefulDataLoader, can be in the state itself"
)
_loadable: set[object] = set()  # kinds of wrapping tensors that a test has read back


def expect_loadable(name: str, value: Any) -> None:
    """Raise ``CheckpointError``, with advice, if the value called ``name`` could not be read back."""
    if type(value) is ShardedTensor:  # the shards of this class are dense
        return
    if isinstance(value, torch.Tensor) and wraps(value):
        if not value.numel():  # no shard of the tensor would be written
            raise CheckpointError(
                f"{name!r} cannot be saved: it is a {name_of(value)} without elements, which would come back as "
                "a plain tensor. Leave it out of the state, or save the tensors that it wraps."
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
    """Return the name of an attribute, the type of its value, and the types of the value's items."""
    name, value = attribute
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return name, type(value), *(map(type, items) if isinstance(value, (dict, list, tuple, set, frozenset)) else ())


def _expect_read_back(name: str, value: Any, form: str = "") -> None:
    """Raise ``CheckpointError`` if a trial save cannot be read back, or if the result's form is not ``form``."""
    stream = io.BytesIO()
    try:
        with torch.serialization.skip_data():
            torch.save(value, stream)
    except Exception as error:
        _expect_no_object(name, value, error)
        kind = f"a {type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")
        raise CheckpointError(
            f"{name!r} cannot be saved: it is {kind}, which cannot be pickled ({reason(error)}). "
            "Leave it out of the state, or save the values in it instead."
        ) from error
    try:
        inside = records(stream.getbuffer())
    except ValueError as error:  # another version of torch may write another form of archive
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
            f"{name!r} would not load back: torch.load does not return the {name_of(value)} that torch.save was given. "
            "Save the tensors that it wraps, or leave it out of the state."
        )


def is_object(value: Any) -> bool:
    """Return whether a value has its own state, which is saved and restored instead of the value."""
    return is_stateful(value) or is_generator(value)


def is_generator(value: Any) -> bool:
    """Whether a value is a random number generator of torch, Python or NumPy."""
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if (numpy := sys.modules.get("numpy")) is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)  # SystemRandom has no state


def expect_no_data(name: str, value: Any, kinds: tuple[type, ...] = _LOADERS) -> None:
    """Raise ``CheckpointError`` for a data loader or sampler whose position in the data could not be restored."""
    if isinstance(value, kinds):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise CheckpointError(_NO_POSITION.format(name=name, kind=kind))


def find_object(value: Any) -> str | None:
    """Return the type of the first object with its own state inside ``value``; ``None`` if no such object exists."""
    try:
        _ObjectFinder(io.BytesIO(), protocol=5, buffer_callback=lambda _: None).dump(value)
    except _FoundError as found:
        return str(found)
    except Exception:  # a later check rejects values that cannot be pickled
        return None
    return None


class _FoundError(Exception):
    pass


class _ObjectFinder(pickle.Pickler):
    """Pickles a value without the content of tensors. Raises ``_FoundError`` at the first object with its own state."""

    def reducer_override(self, x: Any) -> Any:
        if is_object(x):
            raise _FoundError(f"{type(x).__module__}.{type(x).__qualname__}")
        return (int, ()) if isinstance(x, torch.Tensor) else NotImplemented


def _expect_no_object(name: str, value: Any, error: Exception) -> None:
    if (kind := find_object(value)) is not None:
        raise CheckpointError(f"{name!r} cannot be saved: it has a {kind}, {NOT_REACHED}.") from error


def expect_dense(name: str, dtype: torch.dtype, layout: torch.layout | str, verb: str = "saved") -> None:
    """Raise ``CheckpointError`` for a quantized or non-dense tensor, which ``copy_`` would not restore correctly."""
    if dtype in QUANTIZED:
        raise CheckpointError(
            f"{name!r} cannot be {verb}: it is quantized, and a restore would use the scale of the tensor that it is "
            "loaded into. Save x.int_repr() and its scale, or x.dequantize()."
        )
    if layout is not torch.strided:
        raise CheckpointError(f"{name!r} cannot be {verb}: it is {layout}, not dense. Save the dense tensors in it.")


def load(name: str, data: bytes | bytearray) -> Any:
    """Return the object that ``torch.save`` wrote as ``data``. Raises: ``CheckpointError`` if torch rejects it."""
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
    """Describe which types in an archive torch does not accept, and which call allows these types."""
    try:
        stream: Any = Archive(found)
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(stream))[:_SHOWN]
    except Exception:
        names = []
    shown = ", ".join(printable(name[:100], lines=False) for name in names)
    refused = (str(error).partition("WeightsUnpickler error: ")[2] or str(error)).strip() or type(error).__name__
    what = shown or f"something that torch refuses ({printable(refused.splitlines()[0][:200])})"
    return (
        f"it contains {what}. Checkpoints are read without running code. {otherwise} the type when saving and when "
        f"restoring: torch.serialization.add_safe_globals([{shown or 'TheType'}])"
    )
