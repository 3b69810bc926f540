"""Objects of a state that JSON cannot carry: checked before they are written, read without running code.

Such an object, a tuple with a tensor in it or a value of a type that the program has allowed
(``torch.serialization.add_safe_globals([T])``), lies in a file as ``torch.save`` has made it, and is read with
``torch.load(weights_only=True)``.

A checkpoint that cannot be read is worth nothing, so what is saved is held against that at the first save. Whether an
object can be read depends on what its pickle names. So the names are listed at each save, by the pickler that torch
uses as well, and only a set of names that has not been seen before is tried out, by writing the object and reading it.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

from stagereg.errors import CheckpointError

__all__ = ["WHY", "allowed_by_user", "expect_loadable", "load"]

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, DTensor, ShardedTensor})
_TORCHS_OWN = ("torch.distributed.", "torch.nested.")
_LONG_INTEGER = re.compile(rb"\x8b..\x00\x00", re.DOTALL)  # the instruction for an integer of more than 255 bytes
_MESH = b"ctorch.distributed.device_mesh\n"  # the instruction that names one; torch reads no other, nor compressed ones
_SHOWN = 5
WHY = "Checkpoints are read without running code."
_STORAGES = (torch.UntypedStorage, torch.TypedStorage)

_loadable: set[frozenset[Any]] = set()
"""A cache of sets of names that load; what loads depends on the installed torch alone, so it holds for a process."""


def allowed_by_user() -> dict[str, Any]:
    """Return by dotted path what the program has allowed with ``torch.serialization.add_safe_globals``.

    Not what torch allows there by itself for its tensors: making a ``DeviceMesh`` connects this process with others.
    """
    found = {}
    for entry in torch.serialization.get_safe_globals():
        what, path = entry if isinstance(entry, tuple) else (entry, f"{entry.__module__}.{entry.__qualname__}")
        if not path.startswith(_TORCHS_OWN):
            found[path] = what
    return found


def expect_loadable(name: str, value: Any) -> None:
    """Let a tensor or an object pass that can be read back; quick for a kind of object that has been here before.

    Args:
        name: its dotted name in the state, for the message.
        value: the tensor or object.

    Raises:
        CheckpointError: it could not be read back, and what to do.
    """
    kind = type(value)
    if kind in _TENSORS:
        _expect_dense(name, value)
        return
    try:
        data, names = _names_of(value)
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


def load(name: str, data: bytes | bytearray) -> Any:
    """Return the object called ``name``, of which ``data`` is what ``torch.save`` has written.

    Raises:
        CheckpointError: it has something else than data and allowed types, or is damaged.
    """
    stream = io.BytesIO(data)
    try:
        _expect_stored(stream)
        return _read(stream)
    except CheckpointError as error:
        raise CheckpointError(f"{name!r:.100} was not read: {error}.") from error
    except Exception as error:
        refused = _Refused.by(stream, error)
        raise CheckpointError(
            f"{name!r:.100} was not read: it has {refused.what}. {WHY} If you trust who wrote it, allow its types "
            f"before restoring: {refused.allow}"
        ) from error


def _expect_stored(stream: io.BytesIO) -> None:
    """Make sure that nothing in an archive of torch's would be inflated, or takes more memory than it has bytes."""
    try:
        records = zipfile.ZipFile(stream).infolist()
    except zipfile.BadZipFile:
        raise CheckpointError("it is no archive as torch writes them") from None
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise CheckpointError("it has compressed records, which torch does not write")
    if sum(record.file_size for record in records) > len(stream.getbuffer()):
        raise CheckpointError("its records claim to have more bytes than there are")
    stream.seek(0)


def _read(stream: io.BytesIO) -> Any:
    # Torch allows its type by itself. Making one connects this process with others, by environment variables.
    if _MESH in stream.getvalue():
        raise CheckpointError("it has a DeviceMesh, which is made by connecting ranks")
    # Bytes without any are pickled as a call of ``bytes``, which torch does not take; here it can make nothing else.
    more: list[Any] = [(_no_bytes, "builtins.bytes")]
    with torch.serialization.safe_globals(more):
        return torch.load(stream, map_location="cpu", weights_only=True)


def _no_bytes() -> bytes:
    return b""


def _names_of(value: Any) -> tuple[bytes, frozenset[Any]]:
    """Pickle a value, and return the pickle and the classes, functions and kinds of tensors that it needs to be read.

    The content of tensors is left out. Raises: what pickling raises.
    """
    stream = io.BytesIO()
    pickler = _Listing(stream, protocol=2)
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
