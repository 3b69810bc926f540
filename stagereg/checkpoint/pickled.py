"""Values in a checkpoint that are no tensors: checks before writing that they can be read without running code.

Torch stores such a leaf of a state dict with ``torch.save`` and reads it with a loader that can run any code in it.
Here it is read with ``torch.load(weights_only=True)``: numbers, text, bytes, tensors, and lists, tuples, dicts and sets
of these. NumPy's numbers are made here from their bytes. Other types the program has to allow:
``torch.serialization.add_safe_globals([T])``.

A checkpoint that cannot be read is worth nothing, so what is saved is held against that at the first save. Whether a
leaf can be read depends on what its pickle names. So the names are listed at each save, by the pickler that torch uses
as well, and only a set of names that has not been seen before is tried out, by writing the leaf and reading it.
"""

from __future__ import annotations

import io
import pickle
import re
from dataclasses import dataclass
from types import FunctionType, NoneType
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

import stagereg.checkpoint.trusted as trusted
from stagereg.checkpoint.storage.archive import expect_stored
from stagereg.checkpoint.trusted import exactly
from stagereg.errors import CheckpointError

__all__ = ["WHY", "allowed_by_user", "expect_loadable", "load", "names_of"]

_PLAIN = frozenset({NoneType, bool, float, str, bytes})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, DTensor, ShardedTensor})
_LONGEST_INTEGER_BITS = 255 * 8 - 1
_LONG_INTEGER = re.compile(rb"\x8b..\x00\x00", re.DOTALL)  # the instruction for an integer of more than 255 bytes
_MESH = b"ctorch.distributed.device_mesh\n"  # the instruction that names one; torch reads no other, nor compressed ones
_SHOWN = 5
WHY = "Checkpoints are read without running code."
_STORAGES = (torch.UntypedStorage, torch.TypedStorage)

_loadable: set[frozenset[Any]] = set()
"""A cache of sets of names that load; what loads depends on the installed torch alone, so it holds for a process."""


def allowed_by_user() -> dict[str, Any]:
    """Return by dotted path what the program has allowed with ``torch.serialization.add_safe_globals``."""
    return {path: maker.make for path, maker in trusted.allowed_by_user().names.items()}


def expect_loadable(name: str, value: Any) -> None:
    """Let a leaf pass that can be read back; takes microseconds for a kind of leaf that has been here before.

    Args:
        name: its dotted name in the state, for the message.
        value: the leaf.

    Raises:
        CheckpointError: it could not be read back, and what to do.
    """
    kind = type(value)
    if kind in _TENSORS:
        _expect_dense(name, value)
        return
    if kind in _PLAIN or (kind is int and value.bit_length() <= _LONGEST_INTEGER_BITS):
        return
    try:
        data, names = names_of(value, protocol=2)
        if names in _loadable and not _LONG_INTEGER.search(data):
            return
        refused = _refused_tensor(value) if isinstance(value, torch.Tensor) else _refused(value)
    except Exception as error:
        raise CheckpointError(
            f"{name!r} cannot be saved: it is {_a(kind)}, and pickling that fails ({type(error).__name__}: {error}). "
            "Leave it out of the state, or give what it consists of."
        ) from error
    if refused is not None:
        raise CheckpointError(
            f"{name!r} would not load back: it has {refused.what}. {WHY} Save numbers, text or tensors instead "
            f"(such as float(x), torch.as_tensor(x)), or allow the type when saving and when restoring: {refused.allow}"
        )
    _loadable.add(names)


def _expect_dense(name: str, x: torch.Tensor) -> None:
    """Refuse a tensor that torch's distributed checkpoint cannot hold, also where it would write it."""
    if x.is_quantized:
        raise CheckpointError(f"{name!r} would not load back: it is quantized. Save x.dequantize(), or x.int_repr().")
    if x.is_nested or x.layout is not torch.strided:
        kind = "nested" if x.is_nested else str(x.layout)
        raise CheckpointError(f"{name!r} cannot be saved: it is {kind}, not dense. Save the dense tensors it has.")


def load(name: str, stream: io.BytesIO) -> Any:
    """Read a leaf that ``torch.save`` has written.

    Raises:
        CheckpointError: it has something else than data and allowed types, or is damaged.
    """
    try:
        expect_stored(stream)
        return _read(stream)
    except CheckpointError as error:
        raise CheckpointError(f"{name!r:.100} was not read: {error}.") from error
    except Exception as error:
        refused = _Refused.by(stream, error)
        raise CheckpointError(
            f"{name!r:.100} was not read: it has {refused.what}. {WHY} If you trust who wrote it, allow its types "
            f"before restoring: {refused.allow}"
        ) from error


def _read(stream: io.BytesIO) -> Any:
    # Torch allows its type by itself. Making one connects this process with others, by environment variables.
    if _MESH in stream.getvalue():
        raise CheckpointError("it has a DeviceMesh, which is made by connecting ranks")
    # Bytes without any are pickled as a call of ``bytes``, which torch does not take; here it can make nothing else.
    more: list[Any] = [(_no_bytes, "builtins.bytes")]
    allowed = trusted.allowed_by_user().names
    more += [(maker, name) for name, maker in _NUMBERS.items() if name not in allowed]
    with torch.serialization.safe_globals(more):
        return torch.load(stream, map_location="cpu", weights_only=True)


def _no_bytes() -> bytes:
    return b""


class _Dtype:
    """Stands for ``numpy.dtype`` in a file: the kind of one plain number, and nothing else that a dtype may be."""

    def __init__(self, name: str, align: bool = False, copy: bool = True) -> None:
        if not _NUMBER.fullmatch(name):
            raise ValueError(f"there is {name!r:.50} where the dtype of a number belongs")
        self.name = name

    def __setstate__(self, state: Any) -> None:
        if state[1] not in ("<", "|") or any(part is not None for part in state[2:5]):
            raise ValueError("there is something else where the dtype of a number belongs")


def _number(dtype: _Dtype, data: bytes) -> Any:
    """Stands for what NumPy makes its scalars with."""
    import numpy

    (number,) = numpy.frombuffer(exactly(bytes, data), "<" + exactly(_Dtype, dtype).name)
    return number


_NUMBER = re.compile(r"b1|[iu][1248]|f[248]|c8|c16")
_NUMBERS = {
    "numpy.dtype": _Dtype,
    **{f"numpy.{core}.multiarray.scalar": _number for core in ("core", "_core")},
}


def names_of(value: Any, protocol: int) -> tuple[bytes, frozenset[Any]]:
    """Pickle a value, and return the pickle and the classes, functions and kinds of tensors that it needs to be read.

    The content of tensors is left out. Raises: what pickling raises.
    """
    stream = io.BytesIO()
    pickler = _Listing(stream, protocol)
    pickler.dump(value)
    return stream.getvalue(), frozenset(pickler.names)


class _Listing(pickle.Pickler):
    """Notes what a pickle names. The plain types never come by: the pickler deals with them before it asks."""

    def __init__(self, stream: io.BytesIO, protocol: int) -> None:
        super().__init__(stream, protocol)
        self.names: set[Any] = set()

    def reducer_override(self, value: Any) -> Any:
        self.names.add(value if isinstance(value, (type, FunctionType)) else type(value))
        if isinstance(value, (torch.Tensor, *_STORAGES)):
            return _left_out, ()
        return NotImplemented


def _left_out() -> None: ...


@dataclass(frozen=True)
class _Refused:
    """Why torch does not read something: what it has, and the call that would allow it."""

    what: str
    allow: str

    @classmethod
    def names(cls, names: list[str]) -> _Refused:
        shown = ", ".join(_printable(name[:100]) for name in sorted(names)[:_SHOWN])
        return cls(f"what is no plain data: {shown}", f"torch.serialization.add_safe_globals([{shown}])")

    @classmethod
    def by(cls, stream: io.BytesIO, error: Exception) -> _Refused:
        """From an archive and the error of its reading."""
        stream.seek(0)
        try:
            names = torch.serialization.get_unsafe_globals_in_checkpoint(stream)
        except Exception:
            names = []
        if names:
            return cls.names(names)
        text = (str(error).partition("WeightsUnpickler error: ")[2] or str(error)).strip() or type(error).__name__
        return cls(
            f"something that torch refuses ({_printable(text.splitlines()[0][:200])})",
            "torch.serialization.add_safe_globals([TheType])",
        )


def _refused(value: Any) -> _Refused | None:
    """Return what of a leaf cannot be read back."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    try:
        _read(stream)
    except Exception as error:
        return _Refused.by(stream, error)
    return None


def _refused_tensor(value: torch.Tensor) -> _Refused | None:
    """The same for a tensor subclass of other packages, without its content."""
    stream = io.BytesIO()
    with torch.serialization.skip_data():
        torch.save(value.detach(), stream)
    stream.seek(0)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(stream)
    return _Refused.names(names) if names else None


def _printable(text: str) -> str:
    """What stands in a file, without what a terminal would take for a command."""
    return text if text.isprintable() else ascii(text)


def _a(kind: type) -> str:
    return f"a {kind.__module__}.{kind.__qualname__}".replace("builtins.", "")
