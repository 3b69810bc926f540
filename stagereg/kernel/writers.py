"""Whether somebody is at work who will let go of lent memory: the question a pool asks before it waits.

A writer is a function that runs on another thread and reaches a tensor over that memory from its variables. Python has
no such register, so the stacks of the threads are looked through, which costs about a millisecond and is done only
while a caller would have to wait.

Two holders are no writers: the main thread, which may be waiting for this very call, and a consumer parked in
``queue.Queue.get``, which holds its last piece of work until the next one comes.
"""

from __future__ import annotations

import inspect
import queue
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.shard import Shard

__all__ = ["COPY_THREADS", "Span", "alone", "writer_at_work"]

COPY_THREADS = "stagereg-copy"
"""How the names of the kernel's own threads begin."""

Span = tuple[int, int]
"""Address and bytes."""

_LOOK = 1000  # objects that are looked at behind one variable


def writer_at_work(blocks: Sequence[Span]) -> bool:
    """Whether a function running on another thread reaches a tensor that lies in one of ``blocks``."""
    tops = sys._current_frames()
    # A variable here that holds this very frame would be a cycle, and keep alive what the callers hold.
    tops.pop(threading.get_ident(), None)
    tops.pop(threading.main_thread().ident or 0, None)
    for top in tops.values():
        frames = list(_stack(top))
        if not any(map(_is_parked, frames)) and any(_holds(frame, blocks) for frame in frames):
            return True
    return False


def alone() -> bool:
    """Whether no thread but the caller's (and the kernel's own) could let go of anything."""
    here = threading.current_thread()
    return not any(t is not here and not t.name.startswith(COPY_THREADS) for t in threading.enumerate())


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_parked(frame: FrameType) -> bool:
    return frame.f_code is queue.Queue.get.__code__


def _holds(frame: FrameType, blocks: Sequence[Span]) -> bool:
    variables = frame.f_locals
    holding = [name for name, value in list(variables.items()) if _reaches(value, blocks)]
    if isinstance(variables, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED and frame.f_trace is None:
        # Before Python 3.13 this dictionary is a snapshot that stays with the frame and would prolong the lease.
        for name in holding:
            variables.pop(name, None)
    return bool(holding)


def _reaches(value: object, blocks: Sequence[Span]) -> bool:
    todo: deque[Any] = deque([value])
    for _ in range(_LOOK):
        if not todo:
            break
        x = todo.popleft()
        kind = type(x)  # not isinstance, which asks a proxy for its class and so runs foreign code
        inside: Any = ()
        if issubclass(kind, torch.Tensor):
            if _lies_in(x, blocks):
                return True
            inside = x.__dict__.values()
        elif issubclass(kind, dict):
            inside = dict.values(x)
        elif issubclass(kind, (list, tuple, deque)):
            inside = x
        elif kind is Shard:
            inside = (x.tensor,)
        try:
            todo.extend(islice(inside, _LOOK))
        except RuntimeError:  # its owner has just changed it
            continue
    return False


def _lies_in(x: torch.Tensor, blocks: Sequence[Span]) -> bool:
    try:
        address = x.data_ptr()
    except RuntimeError:  # a wrapper, which has no memory of its own
        return False
    return any(begin <= address < begin + nbytes for begin, nbytes in blocks)
