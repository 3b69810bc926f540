"""Batches in a join: counts their samples, empties them, and sends an empty batch to ranks that never had a batch.

The empty form of a common batch is ``batch[:0]``. This works for nested dicts, lists, tuples, named tuples and
dataclasses of tensors and arrays, and for lists of samples. Types, dtypes, devices and all other dimensions stay the
same, so the loop body runs on an empty batch as on any other. Programs register :func:`empty_batch` for their own
classes. For any other object, the error names its path in the batch, and tells how to pass an empty batch.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import io
import numbers
import sys
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import default_collate

from stagereg.errors import JoinError

_ADVICE = (
    "Register a function for its class with stagereg.empty_batch.register(CLASS, function); function(batch) returns "
    "a batch without samples. Or pass an empty batch: join.iterate(loader, example=...)."
)
_NOT_PACKED = (
    "A PackedSequence has no empty form. Let the loader return the padded tensor and the lengths, and pack them in the "
    "model if there are samples: nn.LSTM and nn.GRU take a padded tensor without samples. Or use a plain loop: "
    "with stagereg.Join([model, optimizer], mode='auto', loader=loader)."
)
_MAPPINGS = (dict, UserDict)
_CONSTANTS = (type(None), str, bytes, numbers.Number, enum.Enum, torch.Size, torch.device, torch.dtype)
_DEPTH, _WIDTH = 4, 8  # depth and number of items per container that are searched for samples
_MANY = 4  # a list of at least this many tensors of equal shape counts as a list of samples


@functools.singledispatch
def empty_batch(batch: Any) -> Any:
    """Return ``batch`` without its samples. Programs register a function for each of their own batch classes.

    The function must not change ``batch``. If a rank may receive no batch at all, the class must be picklable.

    Example::

        stagereg.empty_batch.register(Graphs, lambda batch: Graphs(batch.x[:0], num_graphs=0))
    """
    raise _refusal(batch, "", "it is not a tensor, array, dict, list, tuple or dataclass of these")


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of the batches of a loader.

    Attributes:
        batch_dim: the sample dimension of tensors, or a mapping from keys of the batch to sample dimensions, such as
            ``{"x": 1}``. It is 0 for tensors without that dimension, and for keys that the mapping does not contain.
        fields: ``True``: a list of tensors is a batch with one tensor per field; ``False``: the batch is a list of
            samples; ``None``: inferred from the tensors.
    """

    batch_dim: int | Mapping[Any, int] = 0
    fields: bool | None = None

    @classmethod
    def of(cls, loader: Any, batch_dim: int | Mapping[Any, int] = 0) -> Layout:
        """Return the layout of a loader's batches. ``fields`` is known only for some values of ``collate_fn``."""
        collate = getattr(loader, "collate_fn", None)
        return cls(batch_dim, True if collate is default_collate else False if collate in (list, tuple) else None)

    def dim(self, tensor: Any, key: Any) -> int:
        """Return the sample dimension of a tensor. Raises: ``JoinError`` if the tensor does not have that dimension."""
        named = isinstance(self.batch_dim, Mapping)
        dim = self.batch_dim.get(key, 0) if isinstance(self.batch_dim, Mapping) else self.batch_dim
        if dim < 0 or (named and dim >= max(tensor.ndim, 1)):
            last = tensor.ndim - 1
            what = f"batch_dim of join.iterate is {dim} for batch item {key!r}, which has only dimensions 0 to {last}."
            raise JoinError(what)
        return dim if dim < tensor.ndim else 0

    def is_list_of_samples(self, batch: Any) -> bool:
        """Return whether the batch is a list of samples. A tuple is a batch with fields, unless ``fields`` is False."""
        if not _is_list(batch):
            return False
        return self.fields is False or (type(batch) is not tuple and bool(batch) and _are_samples(batch, None, self))


_BY_FIRST = Layout()


def samples_in(batch: Any, layout: Layout | None = None) -> int | None:
    """Return the number of samples of a batch, from its first tensor, array or list of samples.

    Returns ``None`` if the first levels of nesting contain no such item. Never raises.
    """
    try:
        return next(_sizes(batch, layout or _BY_FIRST, _DEPTH, _WIDTH, is_root=True), None)
    except Exception:  # classes of the program may raise any exception
        return None


def emptied(batch: Any, layout: Layout = _BY_FIRST, is_empty: bool | None = None) -> Any:
    """Return a copy of ``batch`` without samples, in its own memory, so that the batch can be freed.

    * The sample dimension of tensors and NumPy arrays gets size 0; 0-dimensional tensors and arrays stay unchanged.
    * A list of samples becomes empty. Such a list contains no tensor or array at any depth (a list of strings), or
      similar items that cannot be fields. Any other list is treated as the fields of a batch and keeps its
      length, like named tuples, dataclasses and dicts.
    * Objects of a class registered with :func:`empty_batch` are replaced by the function's result.
    * Numbers, strings and other constants stay unchanged.

    A batch that is already empty is copied with all its items, so users can supply an empty batch if these rules do not
    fit. ``is_empty``: whether ``batch`` is empty; ``None``: not checked yet.

    Raises:
        JoinError: the batch, or an item of the batch, cannot be emptied; the message names the item and the reason.
    """
    try:
        is_empty = has_no_samples(batch) if is_empty is None else is_empty
        named = layout.batch_dim if isinstance(layout.batch_dim, Mapping) and not is_empty else {}
        if named and (unknown := {*named} - {key for each in _walk(batch) for key in parts_of(each)}):
            names = ", ".join(map(repr, unknown))
            raise JoinError(f"batch_dim of join.iterate names {names}, but the batch has no such key.")
        if not is_empty and layout.is_list_of_samples(batch):
            return type(batch)()
        if not (is_empty or any(map(_is_opaque, _walk(batch))) or _can_be_cut(batch, layout)):
            raise _refusal(batch, "", "it contains no tensor or array")
        return _emptied(batch, "", None, layout, is_empty)
    except JoinError:
        raise
    except Exception as error:  # constructors of subclasses may raise any exception
        raise _refusal(batch, "", f"{type(error).__name__}: {error}") from error


def has_no_samples(batch: Any) -> bool:
    """Return whether a batch is empty: its tensors and arrays have no elements, or its containers have no items."""
    if _is_opaque(batch):
        try:
            if len(batch) == 0:
                return True
        except Exception:  # the object has no length
            batch = getattr(batch, "__dict__", None)
    tensors = [tensor for tensor in _tensors(batch) if tensor.ndim]
    if tensors:
        return all(0 in tensor.shape for tensor in tensors)
    containers = (*_MAPPINGS, list, tuple)
    return isinstance(batch, containers) and all(parts_of(x) or isinstance(x, containers) for x in _walk(batch))


def emptied_or_error(batch: Any, layout: Layout = _BY_FIRST) -> Any:
    """Return the result of :func:`emptied`, or the ``JoinError`` that it raised. :func:`publish` accepts both."""
    try:
        return emptied(batch, layout, is_empty=False)
    except JoinError as error:
        return error


def numbers_in(batch: Any, path: str = "batch") -> Iterator[tuple[str, float]]:
    """Yield the path and value of each nonzero number in a batch, including 0-dimensional tensors and arrays."""
    is_scalar = _is_tensor(batch) and not batch.ndim
    if (is_scalar or isinstance(batch, numbers.Real)) and not isinstance(batch, bool) and batch != 0:
        yield path, float(batch)
    for key, part in parts_of(batch).items():
        yield from numbers_in(part, f"{path}[{key!r}]")


def publish(store: Any, key: str, empty: Any) -> None:
    """Write the result of :func:`emptied_or_error` to the rendezvous store, for ranks that had no batch."""
    file = io.BytesIO()
    try:
        torch.save(empty, file)
    except Exception as error:  # pickling a class of the program may raise any exception
        file = io.BytesIO()
        text = "the empty batch cannot be sent to the ranks that had no batch: it cannot be pickled"
        torch.save(JoinError(f"{text} ({error}). Pass an empty batch: join.iterate(loader, example=...)."), file)
    store.set(key, file.getvalue())


def fetch(store: Any, key: str, device: torch.device) -> Any:
    """Return the empty batch that another rank published. Moves accelerator tensors to ``device``."""

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(device=device)

    found = torch.load(io.BytesIO(store.get(key)), map_location=place, weights_only=False)
    if isinstance(found, JoinError):
        raise found
    return found


def parts_of(thing: Any) -> dict[Any, Any]:
    """Return the items of a container by key, index or field name. Returns an empty dict for any other object."""
    if isinstance(thing, _MAPPINGS):
        return dict(thing)
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}
    if isinstance(thing, (list, tuple)) and not isinstance(thing, (torch.Size, PackedSequence)):
        return dict(enumerate(thing))
    return {}


def with_parts(thing: Any, parts: Mapping[Any, Any]) -> Any:
    """Return a container of the same type as ``thing`` with the given items."""
    if isinstance(thing, (list, tuple)):
        return type(thing)(*parts.values()) if hasattr(thing, "_fields") else type(thing)(parts.values())
    twin: Any = copy.copy(thing)
    for key, part in parts.items():
        if isinstance(thing, _MAPPINGS):
            twin[key] = part
        else:  # not the constructor: its checks may reject an empty batch, and the dataclass may be frozen
            object.__setattr__(twin, key, part)
    return twin


# -- tensors, and lists of samples


def _is_tensor(thing: Any) -> bool:
    numpy = sys.modules.get("numpy")  # if NumPy is not imported, no object is an array
    return isinstance(thing, torch.Tensor) or (numpy is not None and isinstance(thing, numpy.ndarray))


def _is_list(thing: Any) -> bool:
    """Return whether an object is a plain list or tuple, whose length may be its number of samples."""
    return isinstance(thing, (list, tuple)) and not hasattr(thing, "_fields") and not isinstance(thing, torch.Size)


def _is_registered(thing: Any) -> bool:
    return empty_batch.dispatch(type(thing)) is not empty_batch.dispatch(object)


def _is_opaque(thing: Any) -> bool:
    if _is_tensor(thing) or isinstance(thing, (*_CONSTANTS, *_MAPPINGS)):
        return False
    return isinstance(thing, PackedSequence) or not (_is_list(thing) or parts_of(thing) or hasattr(thing, "_fields"))


def _walk(thing: Any) -> Iterator[Any]:
    yield thing
    for part in parts_of(thing).values():
        yield from _walk(part)


def _tensors(thing: Any) -> Iterable[Any]:
    for each in _walk(thing):
        if isinstance(each, PackedSequence):
            yield each.data
        elif _is_tensor(each):
            yield each


def _holds_tensors(thing: Any) -> bool:
    return any(_is_tensor(each) or isinstance(each, PackedSequence) or _is_registered(each) for each in _walk(thing))


def _can_be_cut(thing: Any, layout: Layout) -> bool:
    if _is_tensor(thing) or _is_registered(thing):
        return _is_registered(thing) or bool(thing.ndim)
    parts = parts_of(thing)
    return bool(_lists_of_samples(parts, layout)) or any(_can_be_cut(part, layout) for part in parts.values())


def _holds_scalars(thing: Any) -> bool:
    """Return whether a container holds a number, a string or a 0-dimensional tensor, such as the label of a sample."""
    if _is_tensor(thing):
        return not thing.ndim
    return isinstance(thing, (str, bytes, numbers.Number)) or any(map(_holds_scalars, parts_of(thing).values()))


def _signature(thing: Any, shapes: bool = False) -> Any:
    if _is_tensor(thing):
        return type(thing), thing.dtype, tuple(thing.shape) if shapes else thing.ndim
    return type(thing), tuple((key, _signature(part, shapes)) for key, part in parts_of(thing).items())


def _are_samples(things: Any, size: int | None, layout: Layout) -> bool:
    """Return whether the items of a list are samples, not the fields of a batch.

    All fields of a batch have the same first dimension. ``size``: that dimension of a tensor next to the list, if any.
    """
    items = list(islice(things, _WIDTH))
    if not any(map(_holds_tensors, items)):
        return True
    if layout.fields or len({_signature(item) for item in items}) > 1:
        return False
    sizes = {size for item in items for size in _sizes(item, _BY_FIRST)}
    if len(sizes) != 1 or any(map(_holds_scalars, items)):
        return bool(sizes) or any(map(_holds_scalars, items))
    if size is not None:
        return len(things) == size and sizes != {size}
    return len(things) >= _MANY and len({_signature(item, shapes=True) for item in items}) == 1


def _lists_of_samples(parts: dict[Any, Any], layout: Layout) -> set[Any]:
    lists = {key: part for key, part in parts.items() if _is_list(part) and part}
    tensors = ((key, part) for key, part in parts.items() if _is_tensor(part) and part.ndim)
    size = next((part.shape[layout.dim(part, key)] for key, part in tensors), None)
    found = {key for key, part in lists.items() if _are_samples(part, size, layout)}
    if not layout.fields and 1 < len(lists) == len(parts) and len({len(part) for part in lists.values()}) == 1:
        # zip(*samples) yields lists of equal length. If one of them is a list of samples, all are.
        sizes = {size for part in lists.values() for size in _sizes(part, _BY_FIRST)}
        if found or len(sizes) > 1:
            return set(lists)
    return found


def _sizes(
    thing: Any, layout: Layout, depth: int = -1, width: int | None = None, key: Any = None, is_root: bool = False
) -> Iterator[int]:
    if isinstance(thing, PackedSequence):  # the data tensor has one row per time step of each sequence
        yield int(thing.batch_sizes[0])
    elif _is_tensor(thing):
        if thing.ndim:
            yield len(thing) if getattr(thing, "is_nested", False) else thing.shape[layout.dim(thing, key)]
    elif is_root and layout.is_list_of_samples(thing) and _holds_tensors(thing):
        yield len(thing)
    elif depth:
        parts = dict(islice(parts_of(thing).items(), width))
        lists = _lists_of_samples(parts, layout)
        for name, part in parts.items():
            if name not in lists:
                yield from _sizes(part, layout, depth - 1, width, name)
            elif _holds_tensors(part):
                yield len(part)


# -- emptying


def _emptied(thing: Any, path: str, key: Any, layout: Layout, is_empty: bool) -> Any:
    if _is_registered(thing):
        if is_empty:
            return copy.copy(thing)
        result = empty_batch(thing)
        if result is None:
            raise _refusal(thing, path, "the function registered for its class returned None")
        return result
    if isinstance(thing, _CONSTANTS):
        return thing
    if isinstance(thing, torch.Tensor):
        return _emptied_tensor(thing, path, layout.dim(thing, key), is_empty)
    if _is_tensor(thing):
        dim = layout.dim(thing, key)
        return (thing if is_empty or not thing.ndim else thing[(slice(None),) * dim + (slice(0),)]).copy()
    if _is_opaque(thing):
        if is_empty:
            return copy.copy(thing)
        raise _refusal(thing, path, "it is not a tensor, array, dict, list, tuple or dataclass of these")
    parts = parts_of(thing)
    lists = set() if is_empty else _lists_of_samples(parts, layout)
    emptied = {
        name: type(part)() if name in lists else _emptied(part, f"{path}[{name!r}]", name, layout, is_empty)
        for name, part in parts.items()
    }
    return with_parts(thing, emptied)


def _emptied_tensor(thing: torch.Tensor, path: str, dim: int, is_empty: bool) -> torch.Tensor:
    if not is_empty and (isinstance(thing, DTensor) or thing.is_nested or thing.layout != torch.strided):
        raise _refusal(thing, path, "it is sharded, nested or sparse")
    whole = thing.detach()
    empty = whole.narrow(dim, 0, 0) if whole.ndim and not is_empty else whole
    return empty.clone().requires_grad_(thing.requires_grad)


def _refusal(thing: Any, path: str, reason: str) -> JoinError:
    where = f"batch{path}, a {type(thing).__name__},"
    advice = _NOT_PACKED if isinstance(thing, PackedSequence) else _ADVICE
    return JoinError(f"{where} cannot be emptied for the ranks without data: {reason}. {advice}")
