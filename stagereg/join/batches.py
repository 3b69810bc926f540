"""What a batch is to a join: how many samples it has, its empty form, and how that reaches ranks that never had one.

The empty form is ``batch[:0]`` for what a loader gives: nested dicts, lists, tuples, named tuples and dataclasses of
tensors and arrays, as ``torch.utils.data.default_collate`` makes them. Types, dtypes, devices and the sizes of all but
the first dimension stay, so the loop body runs on it as on any other. What cannot be emptied is an error that names its
place in the batch and how the user supplies one.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import enum
import io
import numbers
import pathlib
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from itertools import islice
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence

from stagereg.errors import JoinError

__all__ = ["LIMIT", "SampleCounter", "emptied", "fetch", "publish", "samples_in"]

LIMIT = 1 << 20
"""Bytes that an empty batch may take on its way to other ranks."""

_ADVICE = (
    "Supply one: join.iterate(loader, example=...), where example is a batch as the loader would give, or an already "
    "empty one."
)
_CONSTANTS = (
    type(None), str, bytes, bytearray, numbers.Number, enum.Enum, range, slice, torch.Size, torch.device, torch.dtype,
    datetime.date, datetime.time, datetime.timedelta, pathlib.PurePath,
)  # fmt: skip
_DEPTH, _WIDTH = 4, 8
"""How deep, and at how many parts of a container, the samples of a batch are looked for."""


@dataclasses.dataclass
class SampleCounter:
    """Counts what one rank was given by the loops of one join, without the empty batches that keep it in step.

    Attributes:
        batches: how many.
        samples: in all of them; ``None`` if that is unknown of some batch, or if there was no loop.
    """

    batches: int = 0
    samples: int | None = None

    def add(self, batch: Any) -> None:
        """Count a batch."""
        known = self.samples if self.batches else 0
        found = None if known is None else samples_in(batch)
        self.samples = None if known is None or found is None else known + found
        self.batches += 1


def samples_in(batch: Any) -> int | None:
    """Return how many samples a batch has: the first dimension of its first tensor or array. Never raises.

    This runs at every step, so it looks at little: ``None`` for a batch that hides that tensor well.
    """
    return _samples_in(batch, _DEPTH)


def emptied(batch: Any) -> Any:
    """Return ``batch`` with no samples left, in memory of its own, so that the batch itself can be freed.

    * Tensors and NumPy arrays lose the entries of their first dimension; those without dimensions stay.
    * Lists and tuples that hold no tensor or array at any depth, such as the strings of a batch, become empty. Others
      are taken for the fields of a batch and keep their length, as do named tuples, dataclasses and mappings.
    * Numbers, strings and the like stay as they are.

    A batch whose tensors and arrays have no samples already comes back with all that it holds: that is how a user
    supplies what these rules get wrong.

    Args:
        batch: what a loader gave, or an example of it. It is not changed.

    Raises:
        JoinError: something in it cannot be emptied, or nothing in it can; the message says what and where.
    """
    sizes = list(_sizes(batch))
    if sizes and not any(sizes):
        return copy.deepcopy(batch)
    result = _emptied(batch, "")
    if not sizes:
        raise _refusal(batch, "", "it holds no tensor or array")
    return result


def publish(store: Any, key: str, empty: Any) -> None:
    """Put an empty batch into the store, for ranks that never had a batch. Any rank with one may call it.

    Args:
        store: a ``torch.distributed`` store.
        key: where; if this raises, the key has the error, for the ranks that wait for it.
        empty: from :func:`emptied`, or what that has raised; tensors of accelerators travel through host memory.

    Raises:
        JoinError: the batch cannot be pickled, or is larger than :data:`LIMIT` bytes.
    """
    try:
        content = _saved(empty)
    except JoinError as error:
        store.set(key, _saved(error))
        raise
    store.set(key, content)


def fetch(store: Any, key: str, device: torch.device) -> Any:
    """Return the empty batch that another rank has published.

    Args:
        store: a ``torch.distributed`` store.
        key: as in :func:`publish`.
        device: where tensors go that were on an accelerator on the other rank.

    Raises:
        JoinError: the rank that published could not, for the reason in the message.
    """

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(device=device)

    found = torch.load(io.BytesIO(store.get(key)), map_location=place, weights_only=False)
    if isinstance(found, JoinError):
        raise found
    return found


def _saved(thing: Any) -> bytes:
    cannot = "the empty batch cannot go to the ranks that have no batch of their own"
    file = io.BytesIO()
    try:
        torch.save(thing, file)
    except Exception as error:  # of any class that the batch is made of
        raise JoinError(f"{cannot}: it cannot be pickled ({error}). {_ADVICE}") from error
    if file.tell() > LIMIT:
        raise JoinError(f"{cannot}: it takes {file.tell()} bytes, more than {LIMIT}, beside its samples. {_ADVICE}")
    return file.getvalue()


# -- looking into a batch


def _parts(thing: Any) -> dict[Any, Any] | None:
    """The parts of a container by key, index or field name; ``None`` for what is no container."""
    if isinstance(thing, _CONSTANTS):
        return None
    if isinstance(thing, Mapping):
        return dict(thing)
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}
    if isinstance(thing, (list, tuple)):
        return dict(zip(getattr(thing, "_fields", range(len(thing))), thing, strict=True))
    return None


def _is_tensor(thing: Any) -> bool:
    numpy = sys.modules.get("numpy")  # not imported: no arrays
    return isinstance(thing, torch.Tensor) or (numpy is not None and isinstance(thing, numpy.ndarray))


def _is_plain_list(thing: Any) -> bool:
    """Whether it is a list without a tensor at any depth, whose items are taken for samples."""
    is_list = isinstance(thing, (list, tuple)) and not isinstance(thing, torch.Size) and not hasattr(thing, "_fields")
    return is_list and not any(map(_holds_tensors, thing))


def _holds_tensors(thing: Any) -> bool:
    return _is_tensor(thing) or any(map(_holds_tensors, (_parts(thing) or {}).values()))


def _samples_in(thing: Any, depth: int) -> int | None:
    if isinstance(thing, PackedSequence):  # its tensor has the steps of all sequences
        return int(thing.batch_sizes[0])
    if _is_tensor(thing):
        return int(thing.shape[0]) if thing.ndim else None
    parts = (_parts(thing) or {}).values() if depth else ()
    found = (_samples_in(part, depth - 1) for part in islice(parts, _WIDTH))
    return next((count for count in found if count is not None), None)


def _sizes(thing: Any) -> Iterator[int]:
    """The number of samples of every tensor and array in ``thing``."""
    if _is_tensor(thing):
        if thing.ndim:
            yield 1 if getattr(thing, "is_nested", False) else thing.shape[0]
    else:
        for part in (_parts(thing) or {}).values():
            yield from _sizes(part)


# -- emptying


def _emptied(thing: Any, path: str) -> Any:
    if isinstance(thing, _CONSTANTS):
        return thing
    if isinstance(thing, torch.Tensor):
        if isinstance(thing, DTensor) or thing.is_nested or thing.layout != torch.strided:
            what = "on several ranks" if isinstance(thing, DTensor) else f"nested or of the layout {thing.layout}"
            raise _refusal(thing, path, f"it is {what}")
        whole = thing.detach()
        return (whole[:0] if whole.dim() else whole).clone().requires_grad_(thing.requires_grad)
    if _is_tensor(thing):  # an array
        return (thing[:0] if thing.ndim else thing).copy()
    if _is_plain_list(thing):
        return type(thing)()
    parts = _parts(thing)
    if parts is None or isinstance(thing, PackedSequence):
        raise _refusal(thing, path, "it is no tensor, array, dict, list, tuple or dataclass of them")
    fields = not isinstance(thing, (Mapping, list)) and (not isinstance(thing, tuple) or hasattr(thing, "_fields"))
    where = {key: f"{path}.{key}" if fields else f"{path}[{key!r}]" for key in parts}
    return _rebuilt(thing, path, {key: _emptied(part, where[key]) for key, part in parts.items()})


def _rebuilt(thing: Any, path: str, parts: dict[Any, Any]) -> Any:
    """A container like ``thing`` of other parts."""
    kind: Any = type(thing)
    if isinstance(thing, (list, tuple)):
        return kind(*parts.values()) if hasattr(kind, "_fields") else kind(parts.values())
    twin = copy.copy(thing)
    if isinstance(thing, MutableMapping):
        for key, part in parts.items():
            twin[key] = part
    elif isinstance(thing, Mapping):
        raise _refusal(thing, path, "it is a mapping that cannot be changed")
    else:
        for name, part in parts.items():
            object.__setattr__(twin, name, part)  # also where it is frozen; its checks are for real batches
    return twin


def _refusal(thing: Any, path: str, reason: str) -> JoinError:
    where = f"batch{path}, a {type(thing).__name__}," if path else f"a batch that is a {type(thing).__name__}"
    return JoinError(f"{where} cannot be emptied for the ranks that are out of data: {reason}. {_ADVICE}")
