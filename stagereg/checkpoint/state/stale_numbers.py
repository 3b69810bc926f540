"""Finds numbers in a state that the program counts elsewhere: ``state = {"samples": samples}`` keeps the first value.

A dict that is given to save after save and has the same number in it may hold a constant. It does not where the program
has a variable of the same name whose value changes meanwhile, so the caller's variables are looked at, in the first
saves. Nothing else tells the two apart.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from stagereg.checkpoint.state.looking import only_looks

_log = logging.getLogger(__name__)

_LOOKS = 10  # saves; a counter has changed by then
_SEEN = 2  # values of the variable other than the one in the state


class StaleNumbers:
    """What numbers a state had in the saves so far, and what the variables of their names have had."""

    def __init__(self) -> None:
        self._state = 0  # which dict it was; by its address, since a reference would keep all objects in it alive
        self._seen: dict[str, tuple[float, set[float]]] = {}
        self._left = _LOOKS

    @only_looks
    def look(self, state: Mapping[str, Any]) -> None:
        """Log those that do not follow their variables, once. On the thread of the program, below its call of save."""
        if not self._left:
            return
        self._left -= 1
        if id(state) != self._state:
            numbers = {name: value for name, value in state.items() if type(value) in (int, float)}
            self._state, self._seen = id(state), {name: (value, set()) for name, value in numbers.items()}
        self._seen = {name: each for name, each in self._seen.items() if state.get(name) == each[0]}
        for name, value in _variables(self._seen).items():
            saved, others = self._seen[name]
            others |= {value} - {saved}
            if len(others) == _SEEN:
                self._left = 0
                _log.warning(
                    "stagereg: %r in the state is %r in each checkpoint so far, and the variable %s of the program is "
                    "%r by now. A number in the state stays what it was when the dict was made: write state[%r] = %s "
                    "before each save, or make a new dict for it.",
                    *(name, saved, name, value, name, name),
                )


def _variables(names: Iterable[str]) -> dict[str, float]:
    """Return those variables of the function that calls the package which are numbers, its module's among them."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("stagereg."):
        frame = frame.f_back
    own: Any = frame.f_locals
    found = {name: space[name] for space in (frame.f_globals, own) for name in names if name in space}
    # Until Python 3.12 this is a dict that the frame keeps, and with it all tensors; the program may have it, too.
    if type(own) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.getrefcount(own) <= 3:
        own.clear()
    return {name: value for name, value in found.items() if type(value) in (int, float)}
