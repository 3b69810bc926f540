"""CUDA calls that do not invalidate the CUDA graph that another thread captures at the same time."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import Any

import torch


def is_capturing() -> bool:
    """Return whether this thread's current stream captures a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def relaxed_capture() -> contextlib.AbstractContextManager[None]:
    """Return a context manager in which CUDA calls of this thread do not invalidate a capture of another thread.

    While a thread captures a graph in the mode "global", torch's default, calls such as an event query, a wait or a
    host registration on any other thread fail and invalidate the graph. A thread in the mode "relaxed" is exempt. The
    mode belongs to the thread, so enter and leave on one thread. Contexts can be nested. Never raises.

    Does nothing before torch has initialized CUDA, in a forked child, and without NVIDIA's driver (ROCm). Source:
    cuThreadExchangeStreamCaptureMode of the CUDA driver. torch's caching allocator does the same around cudaMalloc.
    """
    set_mode = _exchange() if torch.cuda.is_initialized() else None
    return contextlib.nullcontext() if set_mode is None else _relaxed(set_mode)


@contextlib.contextmanager
def _relaxed(set_mode: Any) -> Any:
    mode = ctypes.c_int(2)  # relaxed; the driver replaces the value by the previous mode of the thread
    failed = set_mode(ctypes.byref(mode))
    try:
        yield
    finally:
        if not failed:
            set_mode(ctypes.byref(mode))


@functools.cache
def _exchange() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # no driver, or a driver before CUDA 10.1
        return None
