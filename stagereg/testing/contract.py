"""The base class of contracts. A contract is a class of tests for one kind of plugin component, such as stagers.

The author of a component inherits a contract. Each method named ``test_*`` tests one promise (= requirement), with
pytest or with :meth:`Contract.outcome`. The first line of the method's docstring is the text of the promise.
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

_STARTING_S = 60.0  # seconds that ranks may need to start, in addition to the contract's time limit


@dataclass(frozen=True)
class Outcome:
    """The result of testing one promise (= one requirement of a contract)."""

    name: str  # name of the test method
    promise: str  # text of the promise, one line
    kept: bool | None  # whether the component meets it; `None` if it cannot be tested on this machine
    seen: str = ""  # how the component broke the promise, or why it was not tested


class Contract:
    """Base class of contracts. Lists the promises (= requirements) of a kind of component, and tests one at a time.

    Attributes:
        timeout_s: time limit of a test in seconds. A test that exceeds the limit counts as a broken promise.
    """

    timeout_s: ClassVar[float] = 20.0

    @classmethod
    def promises(cls) -> dict[str, str]:
        """Return a dict from the name of each test method to the text of its promise, in definition order."""
        found: dict[str, str] = {}
        for owner in reversed(cls.__mro__):
            for name, member in vars(owner).items():
                if name.startswith("test_") and callable(getattr(cls, name, None)):
                    found[name] = (inspect.getdoc(member) or found.get(name) or name).splitlines()[0]
        return found

    @classmethod
    def outcome(cls, name: str) -> Outcome:
        """Run the test method ``name`` on a new instance of the contract. Raises only ``KeyboardInterrupt``."""
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
        """Raise ``BrokenPromiseError``. ``seen`` describes the observed result and the correct result."""
        raise BrokenPromiseError(seen)

    def skipped(self, reason: str) -> NoReturn:
        """Skip a test that cannot run on this machine: raise ``unittest.SkipTest``, which pytest supports."""
        raise unittest.SkipTest(reason)

    def on_ranks(self, what: str, nproc: int, fn: Callable[..., Any], *args: object) -> list[Any]:
        """Run ``fn(rank, world_size, *args)`` on ``nproc`` local ranks, and return the results in rank order.

        Raises:
            BrokenPromiseError: a rank failed or hung; the message begins with ``what``.
        """
        try:
            return run_ranks(fn, nproc, args=args, timeout_s=self.timeout_s + _STARTING_S)
        except RankFailure as failure:
            self.broken(f"{what}{'; '.join(map(summarize, failure.failed.values())) or 'a rank hung'}")

    def on_rank_0(self, do: str, *args: object) -> None:
        """Call the method ``do(rank, *args)`` of a new contract on each of two ranks, and raise the error of rank 0."""
        what = "called on one of two ranks: "
        if seen := self.on_ranks(what, 2, _broken_on_a_rank, type(self), do, *args)[0]:
            self.broken(f"{what}{seen}")

    def within(self, do: Callable[[], T], timeout_s: float | None = None) -> T:
        """Call ``do`` on another thread with a time limit, so that a component that hangs fails the test.

        Return the result of ``do``. Errors of ``do`` propagate. A thread that hangs continues to run.

        Raises:
            BrokenPromiseError: ``do`` did not return within ``timeout_s`` seconds (default: the attribute
                ``timeout_s`` of the class). The message contains the stack of the thread.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        # The future is popped below. An error's traceback refers to this frame: a cycle would keep test objects alive.
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
    """Return a thread's stack, innermost call first. Reads a dump, because walking the frames from Python may crash."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        begins = f"Thread 0x{thread.ident or 0:016x} "
        lines = file.read().partition(begins)[2].partition("\n\n")[0].splitlines()
    return [line.strip().removeprefix("File ") for line in lines[1:]]
