"""Collectives that only the ranks in a loop call, while ranks that have left it answer with what they have.

Who has left cannot know when the others call, or how often. So it has a thread that puts its answer down and waits for
the call. When a join ends, every rank closes its end, and the threads with it.

Where sums of a few numbers are enough, :mod:`stagereg.join.tally` has them for less.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from stagereg.errors import JoinError
from stagereg.kernel.channel import ControlChannel

__all__ = ["GatherResponder"]

_CALL, _ANSWER, _END = "call", "answer", "end"


class GatherResponder:
    """One rank's end. It can be used again once all ranks have closed it.

    Args:
        channel: on which nothing else is gathered.
    """

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    @property
    def running(self) -> bool:
        """Whether this rank answers, and cannot call."""
        return self._thread is not None

    def request(self, payload: Any) -> list[Any]:
        """Return what all ranks gave, in rank order: the payloads of those that call, the answers of those that serve.

        Every rank that does not serve calls it, in the same order; it waits for all of them. What is given is pickled.

        Raises:
            JoinError: this rank serves, or another one has closed already.
        """
        if self.running:
            raise JoinError(
                "a rank that has left the loop answers calls by itself, and can make none until the join ends"
            )
        things = self._round(_CALL, payload)
        gone = [rank for rank, (kind, _) in enumerate(things) if kind == _END]
        if gone:
            raise JoinError(
                f"rank {', '.join(map(str, gone))} ended the join while this rank still calls on all ranks. Make such "
                "calls inside the loop, or on all ranks after the join."
            )
        return [thing for _, thing in things]

    def start(self, answer: Callable[[], Any], on_result: Callable[[list[Any]], object] = lambda things: None) -> None:
        """Answer calls from now on. Twice is harmless.

        Args:
            answer: what to give, asked for ahead of each call; it runs in the thread.
            on_result: told what all ranks gave, after each call; likewise.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._answer, args=(answer, on_result), name="stagereg-desk", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """End; every rank once. Returns when all have. Raises: what the thread failed with."""
        thread = self._thread
        if thread is None:
            self._end()
            return
        thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _answer(self, answer: Callable[[], Any], on_result: Callable[[list[Any]], object]) -> None:
        try:
            called = True
            while called:
                things = self._round(_ANSWER, answer())
                kinds = {kind for kind, _ in things}
                called = _CALL in kinds and _END not in kinds
                if called:
                    on_result([thing for _, thing in things])
            # Nobody can call any more: that takes all ranks which do not serve, and they have ended, or there are none.
            self._end()
        except Exception as error:
            self._failure = error

    def _end(self) -> None:
        """Say so until all do: ranks that serve have given their next answer before they hear of the end."""
        while any(kind != _END for kind, _ in self._round(_END, None)):
            pass

    def _round(self, kind: str, thing: Any) -> list[tuple[str, Any]]:
        return self._channel.gather((kind, thing))
