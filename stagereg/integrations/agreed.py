"""What one rank finds out for all, for the adapters: where to write, what to load, whether that can be done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stagereg.errors import CheckpointError, StageregError


def agreed(decide: Callable[[], Any], is_first: bool, broadcast: Callable[[Any], Any]) -> Any:
    """Return what ``decide`` returns on the first rank, or raise its error, on all ranks. Collective.

    ``decide`` is called on the first rank alone; its value, and a ``StageregError``, must be picklable. ``broadcast``
    returns the value of the first rank on each. Any other error becomes a ``CheckpointError`` with its type and text.
    """
    answer: Any = None
    if is_first:
        try:
            answer = decide()
        except Exception as error:  # that the others must not wait for
            known = isinstance(error, StageregError)
            answer = error if known else CheckpointError(f"{type(error).__name__}: {error}")
    answer = broadcast(answer)
    if isinstance(answer, StageregError):
        raise answer
    return answer
