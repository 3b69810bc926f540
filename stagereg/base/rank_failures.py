"""What this process does when another rank fails: nothing, unless an extension has set a :class:`FailureResponse`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol


class FailureResponse(Protocol):
    """Saves what surviving ranks have when other ranks fail. Thread-safe."""

    def is_expected(self) -> bool:
        """Whether something saves after a rank failure."""

    def await_saved(self) -> None:
        """Wait for that save, for a bounded time, if another rank has failed. Training thread."""

    def shorten_timeout(self) -> None:
        """Shorten the failure detection timeout: this process is to exit. Idempotent."""


class _NoResponse:
    def is_expected(self) -> bool:
        return False

    def await_saved(self) -> None: ...

    def shorten_timeout(self) -> None: ...


# Global because a process is one rank, and neither a checkpointer nor a signal handler is given the launcher.
_response: FailureResponse = _NoResponse()


def response() -> FailureResponse:
    """Return the response of this process."""
    return _response


@contextlib.contextmanager
def responding(response: FailureResponse) -> Iterator[None]:
    """Set the response of this process for the time of a ``with`` block."""
    global _response
    before, _response = _response, response
    try:
        yield
    finally:
        _response = before
