"""The response of this process when another rank fails: none, unless an extension sets a :class:`FailureResponse`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class FailureResponse:
    """Makes the emergency save of surviving ranks when other ranks fail. This class makes none. Thread-safe."""

    def is_expected(self) -> bool:
        """Return whether a rank failure triggers an emergency save."""
        return False

    def await_saved(self) -> None:
        """If another rank has failed, wait a limited time for the emergency save. Called on the training thread."""

    def shorten_timeout(self) -> None:
        """Shorten the failure detection timeout, because this process must exit soon. Idempotent."""


# Global because a process is one rank, and checkpointers and signal handlers have no reference to the launcher.
_response = FailureResponse()


def response() -> FailureResponse:
    """Return the response of this process to rank failures."""
    return _response


@contextlib.contextmanager
def responding(response: FailureResponse) -> Iterator[None]:
    """Set the response of this process to rank failures within a ``with`` block."""
    global _response
    before, _response = _response, response
    try:
        yield
    finally:
        _response = before
