"""The metrics that rank 0 logs (:func:`stagereg.log`) for saved steps.

A checkpoint has the metrics that were logged for its step before ``save`` was called. A value that is logged later is
not part of that checkpoint, and a warning names it. If the step is saved again, the new checkpoint has the value.

Memory is bounded: at most 256 metrics are held for each of the newest 64 steps and the newest 64 saves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import stagereg.base.record as record
from stagereg.base.option_text import option
from stagereg.checkpoint.extension import Candidate, CheckpointExtension, RestoreRequest, Saves, Setup
from stagereg.checkpoint.format.manifest import is_name
from stagereg.checkpoint.save.store_target import StoreTarget
from stagereg.checkpoint.targets import SaveTarget

_log = logging.getLogger(__name__)

_STEPS = 64  # maximum number of steps, and of saves, whose metrics are held
_NAMES = 256  # maximum number of metrics of a step
_LATE = (
    "stagereg: %s of step %d was logged after that step was saved, so the checkpoint does not have this value, and "
    "%s and on_commit do not get it. Call stagereg.log before maybe_save or save."
)


class LoggedMetrics(CheckpointExtension):
    """The metrics of the steps of one checkpointer, on rank 0. Thread-safe."""

    name = "logged metrics"

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a signal handler that logs metrics may interrupt another log call
        self._logged: dict[int, dict[str, float]] = {}  # metrics of logged steps, in the order of logging
        self._saved: dict[int, dict[str, float]] = {}  # metrics of saved steps, in the order of saving
        self._late: set[str] = set()  # names of metrics that a warning has reported
        self._warned = False

    def start(self, setup: Setup, saves: Saves) -> None:
        if setup.ranks.rank == 0:
            record.listen(self)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add logged values of a step. A later value replaces an earlier value of the same name."""
        with self._lock:
            known = self._logged.pop(step, {})
            _hold(self._logged, step, known)
            for name, value in values.items():
                if is_name(name) and (name in known or len(known) < _NAMES):
                    known[name] = value
                elif not self._warned:
                    self._warned = True
                    text = "stagereg: Metric %.60r is not saved: its name is invalid, or a step has over %d metrics."
                    _log.warning(text, name, _NAMES)
            late: set[str] = set()
            if (saved := self._saved.get(step)) is not None and len(self._late) < _NAMES:
                changed = {name for name in known.keys() & values if repr(saved.get(name)) != repr(known[name])}
                late = changed - self._late  # compared as strings: NaN differs from NaN
                self._late |= late
        if late:
            _log.warning(_LATE, ", ".join(sorted(late)), step, option("checkpoint.keep"))

    def begin_save(self, step: int, state: Mapping[str, Any] | None, targets: Sequence[SaveTarget]) -> None:
        """Copy the metrics of a step when a save of the step to a checkpoint directory begins."""
        if not any(isinstance(each, StoreTarget) for each in targets):
            return
        with self._lock:
            self._saved.pop(step, None)
            _hold(self._saved, step, dict(self._logged.get(step, {})))

    def manifest_fields(self, step: int) -> Mapping[str, Any]:
        with self._lock:
            return {"metrics": dict(self._saved.get(step, self._logged.get(step, {})))}

    def restored(self, request: RestoreRequest, candidate: Candidate | None) -> None:
        """Delete the metrics of all steps, because the steps after a restore have new metrics."""
        with self._lock:
            self._logged.clear()
            self._saved.clear()


def _hold(steps: dict[int, dict[str, float]], step: int, values: dict[str, float]) -> None:
    steps[step] = values
    if len(steps) > _STEPS:
        del steps[next(iter(steps))]
