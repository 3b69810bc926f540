"""Checks that look for something to warn of, and must not fail what they look at."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)


def only_looks(check: Callable[P, T]) -> Callable[P, T | None]:
    """Have a check that raises return None, with a debug log: the save reports what is wrong with an entry."""

    @functools.wraps(check)
    def run(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return check(*args, **kwargs)
        except Exception:
            _log.debug("stagereg: skipped the check %s, which raised an error.", check.__qualname__, exc_info=True)
            return None

    return run
