"""The base of the contracts: promises, how one is tried, and how a broken one is reported.

A contract is a class to inherit: each of its methods named ``test_*`` tries one promise, so pytest runs them as they
are, and :meth:`Contract.outcome` runs them without pytest. A promise is tried on a fresh instance. The first line of a
method's docstring is the promise, as a person reads it in a table.

The contracts themselves are in ``stager`` and ``join``.
"""

from __future__ import annotations

import inspect
import sys
import threading
import traceback
import unittest
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, TypeVar

from stagereg.crash_report import summarize_exception
from stagereg.errors import BrokenPromiseError

__all__ = ["Contract", "Outcome", "table"]

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """How one promise fared.

    Attributes:
        name: of the method that tried it.
        promise: what was promised, one line.
        kept: ``None`` where it could not be tried on this machine.
        seen: what was seen of a broken promise, or why it was not tried; empty for a kept one.
    """

    name: str
    promise: str
    kept: bool | None
    seen: str = ""


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
        """Try one promise on a fresh instance; only interrupting the process raises.

        Args:
            name: one of :meth:`promises`.
        """
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
        """Report that a promise was broken.

        Args:
            seen: what was seen, and what would have been right.

        Raises:
            BrokenPromiseError: always.
        """
        raise BrokenPromiseError(seen)

    def skipped(self, reason: str) -> NoReturn:
        """Report that a promise cannot be tried here; pytest reports it as skipped.

        Raises:
            unittest.SkipTest: always.
        """
        raise unittest.SkipTest(reason)

    def within(self, do: Callable[[], T], timeout_s: float | None = None) -> T:
        """Call ``do`` on another thread and wait for it, so that a component that never comes back fails a test.

        A thread that hangs is left behind: Python cannot end one.

        Args:
            do: is called once, without arguments.
            timeout_s: seconds to wait; the class's own by default.

        Returns:
            What ``do`` returned.

        Raises:
            BrokenPromiseError: it still runs after ``timeout_s``; the message has where.
            BaseException: what ``do`` raised.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        results: list[T] = []
        errors: list[BaseException] = []

        def attempt() -> None:
            try:
                results.append(do())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=attempt, name="stagereg-contract", daemon=True)
        thread.start()
        thread.join(limit_s)
        if thread.is_alive():
            self.broken(f"it did not come back within {limit_s:g} s; it is at {_whereabouts(thread)}")
        if errors:
            try:
                raise errors[0]
            finally:
                errors.clear()  # this frame is in its traceback: a cycle that would keep what the trial held
        return results[0]


def table(kinds: Mapping[str, type[Contract]]) -> str:
    """Try every promise of several contracts of one kind, and return a table of them in Markdown.

    Args:
        kinds: a heading for each column, and the contract that is tried for it.

    Returns:
        One line for each promise, without a line break at the end: "yes" where it is kept, "**no**" where it is broken,
        "-" where it could not be tried.
    """
    promises: dict[str, str] = {name: text for kind in kinds.values() for name, text in kind.promises().items()}
    rows = [["promise", *kinds], ["---", *("---" for _ in kinds)]]
    for name, text in promises.items():
        kept = [kind.outcome(name).kept if name in kind.promises() else None for kind in kinds.values()]
        rows.append([text.rstrip("."), *("-" if each is None else "yes" if each else "**no**" for each in kept)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _whereabouts(thread: threading.Thread) -> str:
    """The three innermost frames of a thread's stack, outermost first."""
    frame: Any = sys._current_frames().get(thread.ident or 0)
    places = [f"{f.filename}:{f.lineno} in {f.name}" for f in traceback.extract_stack(frame)[-3:]] if frame else []
    return " -> ".join(places) or "its end"
