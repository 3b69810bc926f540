"""Calls the observers of saves, in one order. What one raises is logged, and fails nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from stagereg.checkpoint.extension import SaveObserver
from stagereg.checkpoint.targets import SaveTarget

_log = logging.getLogger(__name__)


class Observers(SaveObserver):
    """All observers of one saver as one. For the training thread, but for what :meth:`capturing` returns."""

    def __init__(self, observers: Sequence[SaveObserver]) -> None:
        self._observers = observers

    def given(self, state: Mapping[str, Any]) -> None:
        for each in self._observers:
            _call(each.given, state)

    def end_step(self, step: int, state: MutableMapping[str, Any] | None) -> None:
        for each in self._observers:
            _call(each.end_step, step, state)

    def begin_save(self, step: int, state: Mapping[str, Any] | None, targets: Sequence[SaveTarget]) -> None:
        for each in self._observers:
            _call(each.begin_save, step, state, targets)

    def capturing(self, state: Mapping[str, Any], captured: Mapping[str, Any]) -> Callable[[dict[str, Any]], None]:
        found = [_call(each.capturing, state, captured) for each in self._observers]

        def inspect(copy: dict[str, Any]) -> None:
            for each in filter(None, found):
                _call(each, copy)

        return inspect


def _call(method: Callable[..., Any], *args: Any) -> Any:
    try:
        return method(*args)
    except Exception:
        _log.warning("stagereg: %s has failed. Training goes on.", method.__qualname__, exc_info=True)
        return None
