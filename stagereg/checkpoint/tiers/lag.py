"""Says when the copies of a run do not keep up with its saves, once, and once more when they do again."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)

_MANY = 5  # saves


class CopyLag:
    """What the saves since the newest copied step are told to, on rank 0; raises nothing."""

    def __init__(self) -> None:
        self._late, self._newest = 0, "no step of the tier is copied yet"

    def note_late(self, why: str) -> None:
        """Another save begins, and the one before is not copied, or none can begin, for this reason."""
        self._late += 1
        if self._late == _MANY:
            _log.warning(
                "stagereg: %s, and %d saves have begun since: %s. A machine that is lost now costs all steps since. "
                "Look after the machines that have no copy, or raise tier.every or tier.bandwidth.",
                *(self._newest, self._late, why),
            )

    def note_copied(self, step: int | None) -> None:
        """Another save begins, and this step is copied as often as it should be; ``None`` for the first save."""
        if self._late >= _MANY:
            _log.info("stagereg: the copies of the tier keep up again: step %s is copied.", step)
        self._late = 0
        if step is not None:
            self._newest = f"step {step} is the newest that is copied in the tier"
