"""Sums of a few numbers that only the ranks in a loop ask for, while ranks that have left it answer with zeros.

Who has left cannot know when the others ask, or how often. So it has a thread that answers until all have ended. Then
it can begin anew, as for another loop.
"""

from __future__ import annotations

import threading

from stagereg.errors import JoinError
from stagereg.kernel.channel import ControlChannel, Waiting
from stagereg.kernel.membership import wait_until

__all__ = ["SumResponder"]


class SumResponder:
    """One rank's end. Every rank closes it once a loop, unless the join has failed.

    Args:
        channel: on which nothing else is summed.
        width: how many numbers there are.
        waiting: how to wait.
    """

    def __init__(self, channel: ControlChannel, width: int, waiting: Waiting = wait_until) -> None:
        self._channel = channel
        self._width = width
        self._waiting = waiting
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def request(self, *values: float) -> list[float]:
        """Return the sums over all ranks; called by every rank that does not serve, in the same order.

        Raises:
            JoinError: this rank serves.
        """
        if self._thread is not None:
            raise JoinError(
                "the loop body passed over an empty batch, and now calls join.mean on another one; it must do the "
                "same on every empty batch, best of all nothing special: remove what looks at whether there are "
                "samples"
            )
        pending = self._channel.add([*values, 0.0])
        self._waiting(pending.ready, "join.mean")
        return pending.wait()[:-1]

    def start(self) -> None:
        """Answer from now on, until all ranks have closed or serve. Twice is harmless."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._answer, name="stagereg-tally", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End; returns when every rank has. Raises: what the thread failed with."""
        if self._thread is None:
            pending = self._channel.add([*[0.0] * self._width, 1.0])
            self._waiting(pending.ready, "the end of the join")
            return
        thread, self._thread = self._thread, None
        self._waiting(lambda seconds: _ends(thread, seconds), "the end of the join")
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _answer(self) -> None:
        try:
            ended = 0.0
            while ended < self._channel.size:
                ended = self._channel.add([*[0.0] * self._width, 1.0]).wait()[-1]
        except Exception as error:
            self._failure = error


def _ends(thread: threading.Thread, seconds: float) -> bool:
    thread.join(seconds)
    return not thread.is_alive()
