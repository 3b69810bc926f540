"""The base class of contracts, which test a component against the promises of its kind.

The author of a component inherits a contract. Each method named ``test_*`` tests one promise with a new instance, under
pytest or in :meth:`Contract.outcome`. The first line of its docstring is the promise.
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

_STARTING_S = 60.0  # seconds for ranks to start, in addition to the contract's time limit


@dataclass(frozen=True)
class Outcome:
    """The result of testing one promise."""

    name: str  # name of the test method
    promise: str  # text of the promise, one line
    kept: bool | None  # `None` if the promise cannot be tested on this machine
    seen: str = ""  # how the promise was broken, or why it was not tested


class Contract:
    """Base class of contracts: lists the promises, tests one, and returns the outcome.

    Attributes:
        timeout_s: time limit of a test in seconds; a test that exceeds it counts as a broken promise.
    """

    timeout_s: ClassVar[float] = 20.0

    @classmethod
    def promises(cls) -> dict[str, str]:
        """Return the promises by the name of their test method, in the order of the contract."""
        found: dict[str, str] = {}
        for owner in reversed(cls.__mro__):
            for name, member in vars(owner).items():
                if name.startswith("test_") and callable(getattr(cls, name, None)):
                    found[name] = (inspect.getdoc(member) or found.get(name) or name).splitlines()[0]
        return found

    @classmethod
    def outcome(cls, name: str) -> Outcome:
        """Test one of :meth:`promises` with a new instance. Raises only ``KeyboardInterrupt``."""
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
        """Raise ``BrokenPromiseError``; ``seen`` describes the observed and the correct result."""
        raise BrokenPromiseError(seen)

    def skipped(self, reason: str) -> NoReturn:
        """Raise ``unittest.SkipTest``, which pytest supports, because a promise cannot be tested here."""
        raise unittest.SkipTest(reason)

    def on_ranks(self, what: str, nproc: int, fn: Callable[..., Any], *args: object) -> list[Any]:
        """Return the results of ``fn(rank, world_size, *args)`` on ``nproc`` local ranks.

        Raises:
            BrokenPromiseError: a rank failed or hung; the message begins with ``what``.
        """
        try:
            return run_ranks(fn, nproc, args=args, timeout_s=self.timeout_s + _STARTING_S)
        except RankFailure as failure:
            self.broken(f"{what}{'; '.join(map(summarize, failure.failed.values())) or 'a rank hung'}")

    def on_rank_0(self, do: str, *args: object) -> None:
        """Call the method ``do`` of a new contract with the rank and ``args``, on each of two ranks."""
        what = "called on one of two ranks: "
        if seen := self.on_ranks(what, 2, _broken_on_a_rank, type(self), do, *args)[0]:
            self.broken(f"{what}{seen}")

    def within(self, do: Callable[[], T], timeout_s: float | None = None) -> T:
        """Call ``do`` on another thread with a time limit, so that a component that hangs fails the test.

        Return the result of ``do``, or raise its error. A thread that hangs is not ended.

        Raises:
            BrokenPromiseError: ``do`` exceeds ``timeout_s`` seconds (default: the class's); the message contains
                its stack.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        # Popped, because an error's traceback holds this frame: a cycle would keep the test's objects alive.
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
            self.broken(f"the call did not return within {limit_s:g} s. It is at {places or 'its end'}")
        return futures.pop().result()


def _broken_on_a_rank(rank: int, world_size: int, kind: type[Contract], do: str, *args: object) -> str:
    try:
        getattr(kind(), do)(rank, *args)
    except BrokenPromiseError as broken:
        return str(broken)
    return ""


def _stack_of(thread: threading.Thread) -> list[str]:
    """Return a thread's stack, innermost call first, from a dump: walking another thread's frames may crash."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        begins = f"Thread 0x{thread.ident or 0:016x} "
        lines = file.read().partition(begins)[2].partition("\n\n")[0].splitlines()
    return [line.strip().removeprefix("File ") for line in lines[1:]]
