"""``metrics``: answer for a rank without data when the others add up their metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stagereg.join.joinable import JoinHook
from stagereg.join.responder import GatherResponder
from stagereg.registry import register

__all__ = ["MetricsHook"]


@register("join_hook", "metrics")
class MetricsHook(JoinHook):
    """Has a responder serve for as long as this rank is in the join without data.

    Args:
        responder: of the metrics.
        answer: this rank's totals.
        on_result: told the totals of all ranks, whenever the others have added them up.

    Attributes:
        closed: whether the join has come to its regular end.
    """

    def __init__(
        self, responder: GatherResponder, answer: Callable[[], Any], on_result: Callable[[list[Any]], object]
    ) -> None:
        self.closed = False
        self._responder = responder
        self._answer = answer
        self._on_result = on_result

    def out_of_data(self) -> None:
        """Begin to answer; called as soon as this rank leaves its loop, where the join does so."""
        self._responder.start(self._answer, self._on_result)

    def before_step(self) -> None:
        """Begin to answer, if that has not happened yet."""
        self.out_of_data()

    def main_hook(self) -> None:
        """Begin to answer, if that has not happened yet: torch's ``Join`` calls nothing before this."""
        self.out_of_data()

    def post_hook(self, is_last_joiner: bool) -> None:
        """End, together with all ranks."""
        self.closed = True
        self._responder.close()
