"""Describes, compares and creates many plain tensors in few calls.

The compiled extension ``tensors.c`` does this through the C interface of torch for DLPack. The extension is optional:
it is built with the package if a C compiler is available. Without the extension or the interface, Python code does the
same, which takes about twice as long.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sysconfig
from array import array
from pathlib import Path
from typing import Any

import torch

_torch: int | None = None  # address of the C interface of torch; None: use Python

with contextlib.suppress(OSError, AttributeError, ValueError):  # not built, or torch has no such interface
    _beside = Path(__file__).absolute().with_name(f"_tensors{sysconfig.get_config_var('EXT_SUFFIX')}")
    _library = ctypes.PyDLL(str(_beside))  # its functions run with the GIL
    _object, _address, _count = ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t
    _library.stagereg_describe.argtypes, _library.stagereg_describe.restype = [_address, _object], _object
    _library.stagereg_match.argtypes = [_address, _object, ctypes.c_char_p, _address]
    _library.stagereg_attributes.argtypes = [_object]
    _library.stagereg_create.argtypes = [_address, _object, _address, ctypes.c_char_p, _address, _count]
    _library.stagereg_create.restype = _object
    _pointer = ctypes.PYFUNCTYPE(_address, _object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
    _found = _pointer(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api")
    if ctypes.c_uint32.from_address(_found).value == 1:  # the structs are stable within a major version
        _torch = _found


def span_of(x: torch.Tensor) -> int:
    """Return the number of elements from the first to the last element of ``x`` in memory; 0 for an empty tensor."""
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0


def has_attributes(tensors: list[torch.Tensor]) -> bool:
    """Return whether one of the tensors has attributes of its own."""
    return bool(_library.stagereg_attributes(tensors)) if _torch is not None else any(map(vars, tensors))


class Description:
    """The addresses, devices, dtypes, shapes and strides of tensors when the description was made."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._packed: bytes | None = None
        self._facts: list[tuple[Any, ...]] = []
        self._spans: list[int] = []
        if _torch is not None and all(map(_is_kept, {x.dtype for x in tensors})):
            with contextlib.suppress(RuntimeError, BufferError):  # for example a tensor without memory
                self._packed = _library.stagereg_describe(_torch, tensors)
        if self._packed is None:
            self._facts, self._spans = [*map(_facts, tensors)], [*map(span_of, tensors)]
        self._count = len(tensors)

    def matches(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether these tensors have the same properties, in this order."""
        if len(tensors) != self._count:
            return False
        if self._packed is not None:
            return bool(_library.stagereg_match(_torch, tensors, self._packed, _places))
        try:
            return [*map(_facts, tensors)] == self._facts
        except RuntimeError:  # a tensor has no memory of its own
            return False

    def create(self, view: memoryview, offsets: array[int]) -> list[torch.Tensor | None]:
        """Return tensors on the CPU with the described dtypes, shapes and strides, each with its own storage.

        The first element of tensor i is at ``offsets[i]`` bytes in ``view``, which the tensors keep alive. If the
        offset is negative, the list contains ``None`` instead. The caller checks that the offsets fit. While this
        method runs, other threads can take the GIL a few times only.
        """
        if self._packed is None:
            return [None if at < 0 else self._create(view, i, at) for i, at in enumerate(offsets)]
        base = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
        # The tuple also keeps the shapes and strides alive, to which the structs of the tensors point.
        owner, (address, count) = (view, self._packed), offsets.buffer_info()
        made: list[torch.Tensor | None] = _library.stagereg_create(_torch, owner, base, self._packed, address, count)
        return made

    def _create(self, view: memoryview, i: int, at: int) -> torch.Tensor:
        _, dtype, shape, stride, _ = self._facts[i]
        x = torch.frombuffer(view, dtype=dtype, count=self._spans[i], offset=at)
        return x if stride == (1,) else x.as_strided_(shape, stride)


@functools.cache
def _is_kept(dtype: torch.dtype) -> bool:
    """Return whether a tensor keeps its dtype. DLPack lacks some dtypes of torch, and confuses others, such as int1."""
    x = torch.empty(2, dtype=dtype, device="cpu")
    try:
        packed, offsets = _library.stagereg_describe(_torch, [x]), array("q", [0])
        address, count = offsets.buffer_info()
        [made] = _library.stagereg_create(_torch, (x, packed), x.data_ptr(), packed, address, count)
    except (RuntimeError, BufferError):
        return False
    return bool(made.dtype == dtype and made.shape == x.shape)


def _facts(x: torch.Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.dtype, x.shape, x.stride(), x.device


def _find_places() -> tuple[int, int]:
    """Return the positions of the pointers that ``stagereg_match`` follows to load memory early; (0, 0) if not found.

    A pointer that is not found where torch 2.13 has it costs speed. The comparison does not depend on the pointers.
    """
    x = torch.empty(1, dtype=torch.uint8, device="cpu")

    def position(begin: int, size: int, wanted: int) -> int:
        return next((at for at in range(8, size, 8) if _address.from_address(begin + at).value == wanted), 0)

    found = position(id(x), type(x).__basicsize__, x._cdata), position(x._cdata, 64, x.untyped_storage()._cdata)
    return found if all(found) else (0, 0)


if _torch is not None:
    _places = (_count * 2)(*_find_places())
