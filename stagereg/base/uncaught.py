"""If an uncaught error ends several ranks, print its traceback only once. By default, each rank prints the traceback.

Used in programs without ``stagereg.main``. With ``stagereg.main``, the launcher prints the errors of the ranks.
"""

from __future__ import annotations

import hashlib
import sys
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import stagereg.base.output as output
from stagereg.base.deadline import answer_within
from stagereg.errors import StageregError

_PRINTED_S = 2.0  # seconds to wait until the chosen rank has printed the error; then this rank prints the error
_ANSWER_S = 4.0  # seconds to wait for the rendezvous store, including waits for other ranks
_OWN_S = 0.5  # seconds to wait for the rank that has the traceback of the root cause
_POLL_S = 0.01

_hook: _Hook | None = None  # global like `sys.excepthook`


def print_once() -> None:
    """Install a hook: if an uncaught stagereg error ends several ranks, one rank prints its traceback. Idempotent.

    The other ranks print one line. Each distinct error is printed. Does nothing before ``init_process_group``.
    """
    global _hook
    dist = sys.modules["torch.distributed"]
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    if _hook is None:
        _hook = _Hook(sys.excepthook)
        sys.excepthook = _hook
    _hook.group, _hook.rank = weakref.ref(dist.group.WORLD), dist.get_rank()


class _Hook:
    """The replacement for ``sys.excepthook``, which prints an error on only one rank."""

    group: Callable[[], Any]  # a weak reference, since a strong reference would keep the port of the store open
    rank: int

    def __init__(self, before: Callable[[type[BaseException], BaseException, TracebackType | None], Any]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        key = f"stagereg/uncaught/{hashlib.sha256(f'{kind} {error}'.encode()).hexdigest()}"
        of_project = isinstance(error, StageregError)
        other = self._ask(lambda store: self._other(store, key, error)) if of_project else None
        if other is None:
            self._before(kind, error, trace)
            sys.stderr.flush()
            if of_project:
                self._ask(lambda store: store.set(f"{key}/printed", ""))
        else:
            output.warn(f"stagereg: rank {self.rank} exits with the {kind.__name__} that rank {other} printed")

    def _other(self, store: Any, key: str, error: BaseException) -> int | None:
        """Return the rank that has printed the error; ``None`` if this rank must print it."""
        own = f"{key}/own"
        claim = own if _has_trace(error.__cause__) or _wait_for(store, own, _OWN_S) else key
        rank = int(store.compare_set(claim, "", str(self.rank)))
        return rank if rank != self.rank and _wait_for(store, f"{key}/printed", _PRINTED_S) else None

    def _ask(self, call: Callable[[Any], int | None]) -> int | None:
        """Return the result of ``call`` with the store; ``None`` if the store is unreachable or does not respond."""
        return answer_within(_ANSWER_S, lambda: call(self.group().get_group_store()))


def _wait_for(store: Any, key: str, seconds: float) -> bool:
    ends = time.monotonic() + seconds
    while not (found := bool(store.check([key]))) and time.monotonic() < ends:
        time.sleep(_POLL_S)
    return found


def _has_trace(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, was raised on this rank."""
    return error is not None and (error.__traceback__ is not None or _has_trace(error.__cause__))
