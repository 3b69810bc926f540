"""The base of the contracts: promises, how one is tried, and how a broken one is reported.

A contract is a class to inherit: each method named ``test_*`` tries one promise on a fresh instance, under pytest or by
:meth:`Contract.outcome`. The first line of the method's docstring is the promise.
"""

from __future__ import annotations

import faulthandler
import inspect
import tempfile
import threading
import unittest
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, TypeVar

from stagereg.base.crash_report import summarize_exception
from stagereg.errors import BrokenPromiseError
from stagereg.testing import ranks
from stagereg.testing.crash_text import summarize
from stagereg.testing.ranks import RankFailure, run_ranks

T = TypeVar("T")

_STARTING_S = 60.0  # seconds that ranks may take to start, in addition to the time limit of the contract


@dataclass(frozen=True)
class Outcome:
    """How one promise fared."""

    name: str  # of the method that tried it
    promise: str  # one line
    kept: bool | None  # `None` if it cannot be tried on this machine
    seen: str = ""  # of a broken promise, or why it was not tried


class Contract:
    """Base of the contracts: lists the promises, tries one, reports what was seen.

    Attributes:
        timeout_s: seconds after which a promise whose trial does not come back counts as broken.
    """

    timeout_s: ClassVar[float] = 20.0

    @classmethod
    def promises(cls) -> dict[str, str]:
        """Return the promises by the name of the method that tries each, in the order of the contract."""
        found: dict[str, str] = {}
        for owner in reversed(cls.__mro__):
            for name, member in vars(owner).items():
                if name.startswith("test_") and callable(getattr(cls, name, None)):
                    found[name] = (inspect.getdoc(member) or found.get(name) or name).splitlines()[0]
        return found

    @classmethod
    def outcome(cls, name: str) -> Outcome:
        """Try one of :meth:`promises` on a fresh instance; only interrupting the process raises."""
        promise = cls.promises()[name]
        try:
            getattr(cls(), name)()
        except unittest.SkipTest as reason:
            return Outcome(name, promise, None, str(reason))
        except BrokenPromiseError as broken:
            return Outcome(name, promise, False, str(broken))
        except (Exception, SystemExit) as error:
            return Outcome(name, promise, False, summarize_exception(error))
        return Outcome(name, promise, True)

    def broken(self, seen: str) -> NoReturn:
        """Raise ``BrokenPromiseError``; ``seen`` is what was seen, and what would have been right."""
        raise BrokenPromiseError(seen)

    def skipped(self, reason: str) -> NoReturn:
        """Report that a promise cannot be tried here, by ``unittest.SkipTest``, which pytest knows."""
        raise unittest.SkipTest(reason)

    def on_ranks(self, what: str, nproc: int, fn: Callable[..., Any], *args: object) -> list[Any]:
        """Return what ``fn(rank, world_size, *args)`` returns on each of ``nproc`` local ranks.

        Raises:
            BrokenPromiseError: a rank failed or hung; the message begins with ``what``.
        """
        try:
            return run_ranks(fn, nproc, args=args, timeout_s=self.timeout_s + _STARTING_S)
        except RankFailure as failure:
            self.broken(f"{what}{'; '.join(map(summarize, failure.failed.values())) or 'a rank hung'}")

    def on_rank_0(self, do: str, *args: object) -> None:
        """Make a contract of this class on each of two ranks, and call its method ``do`` with the rank and ``args``."""
        what = "called on one of two ranks: "
        if seen := self.on_ranks(what, 2, _broken_on_a_rank, type(self), do, *args)[0]:
            self.broken(f"{what}{seen}")

    def within(self, do: Callable[[], T], timeout_s: float | None = None) -> T:
        """Call ``do`` on another thread and wait for it, so that a component that never comes back fails a test.

        Returns what ``do`` returned, or raises what it raised. A thread that hangs is left behind.

        Raises:
            BrokenPromiseError: it still runs after ``timeout_s`` seconds (the class's own); the message has where.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        # Popped, for an error has this frame in its traceback: a cycle would keep what the trial held.
        futures: list[Future[T]] = [Future()]

        def attempt() -> None:
            try:
                futures[0].set_result(do())
            except BaseException as error:
                futures[0].set_exception(error)

        ranks.before_wait(limit_s)
        thread = threading.Thread(target=attempt, name="stagereg-contract", daemon=True)
        thread.start()
        thread.join(limit_s)
        if thread.is_alive():
            places = " -> ".join(reversed(_stack_of(thread)[:3]))
            self.broken(f"it did not come back within {limit_s:g} s; it is at {places or 'its end'}")
        return futures.pop().result()


def _broken_on_a_rank(rank: int, world_size: int, kind: type[Contract], do: str, *args: object) -> str:
    try:
        getattr(kind(), do)(rank, *args)
    except BrokenPromiseError as broken:
        return str(broken)
    return ""


def _stack_of(thread: threading.Thread) -> list[str]:
    """Return where a thread is, the innermost call first. Python may crash if one thread walks another's frames."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        begins = f"Thread 0x{thread.ident or 0:016x} "
        lines = file.read().partition(begins)[2].partition("\n\n")[0].splitlines()
    return [line.strip().removeprefix("File ") for line in lines[1:]]
