"""Collectives that only the ranks in a loop request, while ranks that have left it answer with what they have.

A rank that has left cannot know when the others request, or how often. So it answers on its channel's own thread until
all ranks have closed; then it can begin anew, as for another loop. :class:`SumResponder` sums a few numbers and costs
one small all-reduce; :class:`GatherResponder` exchanges any objects.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from stagereg.errors import JoinError
from stagereg.kernel.channel import ControlChannel, Waiting
from stagereg.kernel.membership import wait_until

__all__ = ["GatherResponder", "SumResponder"]


class _Responder:
    """Runs one function on a channel's thread, and keeps what it failed with for :meth:`_finish`."""

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel
        self._ended: threading.Event | None = None
        self._failure: Exception | None = None

    @property
    def running(self) -> bool:
        """Whether this rank answers, and cannot request."""
        return self._ended is not None

    def _begin(self, answer: Callable[[], None]) -> None:
        ended = self._ended = threading.Event()

        def run() -> None:
            try:
                answer()
            except Exception as error:
                self._failure = error
            ended.set()

        self._channel.submit(run)

    def _finish(self, waiting: Waiting) -> None:
        assert self._ended is not None
        waiting(self._ended.wait, "the end of the join")
        self._ended = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


class SumResponder(_Responder):
    """One rank's end of sums. Every rank closes it once a loop, unless the join has failed.

    Args:
        channel: on which nothing else is summed.
        width: how many numbers there are.
        waiting: how to wait.
    """

    def __init__(self, channel: ControlChannel, width: int, waiting: Waiting = wait_until) -> None:
        super().__init__(channel)
        self._nothing = [0.0] * width
        self._waiting = waiting

    def request(self, *values: float) -> list[float]:
        """Return the sums over all ranks; called by every rank that does not answer, in the same order.

        Raises:
            JoinError: this rank answers.
        """
        if self.running:
            raise JoinError(
                "the loop body passed over an empty batch, and now calls join.mean on another one; it must do the "
                "same on every empty batch, best of all nothing special: remove what looks at whether there are "
                "samples"
            )
        pending = self._channel.add([*values, 0.0])
        self._waiting(pending.ready, "join.mean")
        return pending.wait()[:-1]

    def start(self) -> None:
        """Answer from now on, until all ranks have closed or answer. Twice is harmless."""
        if not self.running:
            self._begin(self._answer)

    def close(self) -> None:
        """End; returns when every rank has. Raises: what answering failed with."""
        if self.running:
            self._finish(self._waiting)
        else:
            pending = self._channel.add([*self._nothing, 1.0])
            self._waiting(pending.ready, "the end of the join")

    def _answer(self) -> None:
        ended = 0.0
        while ended < self._channel.size:
            ended = self._channel.add([*self._nothing, 1.0]).wait()[-1]


_REQUEST, _ANSWER, _END = "request", "answer", "end"


class GatherResponder(_Responder):
    """One rank's end of gathers. It can be used again once all ranks have closed it.

    Args:
        channel: on which nothing else is gathered.
    """

    def request(self, payload: Any) -> list[Any]:
        """Return what all ranks gave, in rank order: payloads of those that request, answers of those that do not.

        Every rank that does not answer calls it, in the same order; it waits for all of them. What is given is pickled.

        Raises:
            JoinError: this rank answers, or another one has closed already.
        """
        if self.running:
            raise JoinError(
                "a rank that has left the loop answers requests by itself, and can make none until the join ends"
            )
        things = self._channel.gather((_REQUEST, payload))
        gone = [rank for rank, (kind, _) in enumerate(things) if kind == _END]
        if gone:
            raise JoinError(
                f"rank {', '.join(map(str, gone))} ended the join while this rank still requests from all ranks. Make "
                "such calls inside the loop, or on all ranks after the join."
            )
        return [thing for _, thing in things]

    def start(self, answer: Callable[[], Any], on_result: Callable[[list[Any]], object] = lambda things: None) -> None:
        """Answer from now on. Twice is harmless.

        Args:
            answer: what to give, called ahead of each request, on the channel's thread.
            on_result: called with what all ranks gave, after each request; likewise.
        """
        if not self.running:
            self._begin(lambda: self._answer(answer, on_result))

    def close(self) -> None:
        """End; every rank once. Returns when all have. Raises: what answering failed with."""
        if self.running:
            self._finish(wait_until)
        else:
            self._end()

    def _answer(self, answer: Callable[[], Any], on_result: Callable[[list[Any]], object]) -> None:
        requested = True
        while requested:
            things = self._channel.gather((_ANSWER, answer()))
            kinds = {kind for kind, _ in things}
            requested = _REQUEST in kinds and _END not in kinds
            if requested:
                on_result([thing for _, thing in things])
        # No rank can request any more: that takes all ranks which do not answer, and they have ended.
        self._end()

    def _end(self) -> None:
        """Repeat until all ranks do: those that answer have given their next answer before they learn of the end."""
        while any(kind != _END for kind, _ in self._channel.gather((_END, None))):
            pass
