"""What the contracts have in common: promises, how one is tried, and how a broken one is told.

A contract is a class to inherit: each of its methods named ``test_*`` tries one promise, so pytest runs them as they
are, and :meth:`Contract.outcome` runs them without pytest. A promise is tried on a fresh instance. The first line of a
method's docstring is the promise, as a person reads it in a table.

The contracts themselves are in ``stager`` and ``join``.
"""

from __future__ import annotations

import inspect
import traceback
import unittest
from dataclasses import dataclass
from typing import NoReturn

from stagereg.errors import BrokenPromiseError

__all__ = ["Contract", "Outcome"]


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
    """Base of the contracts: lists the promises, tries one, tells what was seen."""

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
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            told = "".join(traceback.format_exception_only(error)).strip()
            return Outcome(name, promise, False, f"{told} ({where.filename}:{where.lineno})")
        return Outcome(name, promise, True)

    def broken(self, seen: str) -> NoReturn:
        """Say that a promise was broken.

        Args:
            seen: what was seen, and what would have been right.

        Raises:
            BrokenPromiseError: always.
        """
        raise BrokenPromiseError(seen)

    def skipped(self, reason: str) -> NoReturn:
        """Say that a promise cannot be tried here; pytest reports it as skipped.

        Raises:
            unittest.SkipTest: always.
        """
        raise unittest.SkipTest(reason)
