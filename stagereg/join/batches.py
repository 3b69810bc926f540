"""What a batch is to a join: how many samples it has, its empty form, and how that reaches ranks that never had one.

The empty form is ``batch[:0]`` for what a loader gives: nested dicts, lists, tuples, named tuples and dataclasses of
tensors and arrays. Types, dtypes, devices and the sizes of all but the first dimension stay, so the loop body runs on
it as on any other. Anything else is an error that names its place in the batch and how the user supplies an empty one.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import io
import numbers
import sys
from collections import UserDict
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence

from stagereg.errors import JoinError

_ADVICE = (
    "Supply one: join.iterate(loader, example=...), where example is a batch as the loader would give, or an already "
    "empty one."
)
_MAPPINGS = (dict, UserDict)
_CONSTANTS = (type(None), str, bytes, numbers.Number, enum.Enum, torch.Size, torch.device, torch.dtype)
_DEPTH, _WIDTH = 4, 8  # how deep, and at how many parts of a container, the samples of a batch are looked for


@dataclasses.dataclass
class SampleCounter:
    """Counts what one rank was given by the loops of one join, without the empty batches that keep it in step."""

    batches: int = 0
    samples: int | None = 0  # None if it is unknown of some batch

    def add(self, batch: Any) -> None:
        """Count a batch."""
        self.batches += 1
        if self.samples is not None:
            found = samples_in(batch)
            self.samples = None if found is None else self.samples + found


def samples_in(batch: Any) -> int | None:
    """Return the first dimension of a batch's first tensor or array; ``None`` where it is well hidden. Never raises."""
    try:
        return next(_sizes(batch, _DEPTH, _WIDTH), None)
    except Exception:  # of a class that is not what it looks like
        return None


def emptied(batch: Any) -> Any:
    """Return ``batch`` with no samples left, in memory of its own, so that the batch itself can be freed.

    * Tensors and NumPy arrays lose the entries of their first dimension; those without dimensions stay.
    * Lists and tuples that hold no tensor or array at any depth, such as the strings of a batch, become empty. Others
      are taken for the fields of a batch and keep their length, as do named tuples, dataclasses and dicts.
    * Numbers, strings and the like stay as they are.

    A batch whose tensors and arrays have no samples already comes back with all that it holds: that is how a user
    supplies what these rules get wrong.

    Raises:
        JoinError: something in it cannot be emptied, or nothing in it can; the message says what and where.
    """
    try:
        sizes = list(_sizes(batch))
        result = _emptied(batch, "", is_empty=bool(sizes) and not any(sizes))
    except JoinError:
        raise
    except Exception as error:  # of a class that is not made as others of its kind are
        raise _refusal(batch, "", f"{type(error).__name__}: {error}") from error
    if not sizes:
        raise _refusal(batch, "", "it holds no tensor or array")
    return result


def emptied_or_error(batch: Any) -> Any:
    """Return what :func:`emptied` returns, or the ``JoinError`` that it raises; both can be published."""
    try:
        return emptied(batch)
    except JoinError as error:
        return error


def publish(store: Any, key: str, empty: Any) -> None:
    """Put what :func:`emptied_or_error` returned into the store, for ranks that never had a batch."""
    file = io.BytesIO()
    try:
        torch.save(empty, file)
    except Exception as error:  # of any class that the batch is made of
        file = io.BytesIO()
        text = "the empty batch cannot go to the ranks that have no batch of their own: it cannot be pickled"
        torch.save(JoinError(f"{text} ({error}). {_ADVICE}"), file)
    store.set(key, file.getvalue())


def fetch(store: Any, key: str, device: torch.device) -> Any:
    """Return the empty batch that another rank has published; tensors of an accelerator go to ``device``."""

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(device=device)

    found = torch.load(io.BytesIO(store.get(key)), map_location=place, weights_only=False)
    if isinstance(found, JoinError):
        raise found
    return found


def _parts(thing: Any) -> dict[Any, Any]:
    """The parts of a container by key, index or field name; nothing for what is no container."""
    if isinstance(thing, _MAPPINGS):
        return dict(thing)
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}
    if isinstance(thing, (list, tuple)) and not isinstance(thing, (torch.Size, PackedSequence)):
        return dict(enumerate(thing))
    return {}


def _is_array(thing: Any) -> bool:
    numpy = sys.modules.get("numpy")  # not imported: no arrays
    return numpy is not None and isinstance(thing, numpy.ndarray)


def _sizes(thing: Any, depth: int = -1, width: int | None = None) -> Iterator[int]:
    """The number of samples of every tensor and array in ``thing``, as far as they are looked for."""
    if isinstance(thing, PackedSequence):  # its tensor has the steps of all sequences
        yield int(thing.batch_sizes[0])
    elif isinstance(thing, torch.Tensor) or _is_array(thing):
        if thing.ndim:
            yield len(thing)
    elif depth:
        for part in islice(_parts(thing).values(), width):
            yield from _sizes(part, depth - 1, width)


def _holds_tensors(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor) or _is_array(thing) or any(map(_holds_tensors, _parts(thing).values()))


def _emptied(thing: Any, path: str, is_empty: bool) -> Any:
    if isinstance(thing, _CONSTANTS):
        return thing
    if isinstance(thing, torch.Tensor):
        return _emptied_tensor(thing, path, is_empty)
    if _is_array(thing):
        return (thing[:0] if thing.ndim else thing).copy()
    is_sequence = isinstance(thing, (list, tuple)) and not isinstance(thing, PackedSequence)
    is_named = hasattr(thing, "_fields")
    if is_sequence and not is_named and not is_empty and not _holds_tensors(thing):
        return type(thing)()  # its items are taken for samples
    parts = {key: _emptied(part, f"{path}[{key!r}]", is_empty) for key, part in _parts(thing).items()}
    if is_sequence:
        return type(thing)(*parts.values()) if is_named else type(thing)(parts.values())
    if parts or isinstance(thing, _MAPPINGS):
        twin: Any = copy.copy(thing)
        for key, part in parts.items():
            if isinstance(thing, _MAPPINGS):
                twin[key] = part
            else:  # a dataclass, which may be frozen; its checks are for real batches
                object.__setattr__(twin, key, part)
        return twin
    if is_empty:
        return thing
    raise _refusal(thing, path, "it is no tensor, array, dict, list, tuple or dataclass of them")


def _emptied_tensor(thing: torch.Tensor, path: str, is_empty: bool) -> torch.Tensor:
    if not is_empty and (isinstance(thing, DTensor) or thing.is_nested or thing.layout != torch.strided):
        raise _refusal(thing, path, "it is sharded, nested or sparse")
    whole = thing.detach()
    return (whole[:0] if whole.ndim and not is_empty else whole).clone().requires_grad_(thing.requires_grad)


def _refusal(thing: Any, path: str, reason: str) -> JoinError:
    where = f"batch{path}, a {type(thing).__name__},"
    return JoinError(f"{where} cannot be emptied for the ranks that are out of data: {reason}. {_ADVICE}")
