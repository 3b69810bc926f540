"""What rank 0 logs (:func:`stagereg.log`) about the steps that are saved: for manifests, hooks and retention.

What is known when a manifest is written goes into the manifest. What is logged later about a step that is saved, such
as by an evaluation after ``maybe_save``, goes into one small file beside the checkpoints, which the background thread
writes (:meth:`.Notes.write_metrics`). Training never waits for either.

Memory is bounded: metrics are held of the newest steps, of saves under way, and of checkpoints that are there; of each
at most 256. A value may be NaN or infinite, which JSON has as a text here.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping

import stagereg.record as record
from stagereg.checkpoint.format.manifest import Manifest, is_name

_log = logging.getLogger(__name__)

_STEPS = 64  # of which metrics are held before they are saved
_NAMES = 256  # of the metrics of a step
_UNDER_WAY = 16  # saves that are not complete, more than there can be: most of so many have failed


class LoggedMetrics:
    """The metrics of the steps of one checkpointer. Methods may be called on any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant, since a signal handler that logs may interrupt a log
        self._on_late: weakref.WeakMethod[Callable[[], None]] | None = None
        self._recent: OrderedDict[int, dict[str, float]] = OrderedDict()
        self._saved: dict[int, dict[str, float]] = {}  # in the order of their saves
        self._manifests: dict[int, Manifest] = {}  # of those that are complete, by step
        self._warned = False

    def listen(self, on_late: Callable[[], None]) -> None:
        """Take what this process logs from now on.

        ``on_late``, a bound method that is held weakly, is called on the thread that logs when something was logged
        about a step whose manifest is written.
        """
        self._on_late = weakref.WeakMethod(on_late)
        record.listen(self)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a step; a later value of one name replaces the earlier one."""
        with self._lock:
            known = self._saved.get(step)
            if known is None:
                known = self._recent.setdefault(step, {})
                self._recent.move_to_end(step)
                if len(self._recent) > _STEPS:
                    self._recent.popitem(last=False)
            for name, value in values.items():
                if is_name(name) and (name in known or len(known) < _NAMES):
                    known[name] = value
                elif not self._warned:
                    self._warned = True
                    _log.warning("stagereg: checkpoints are without the metric %.60r: %d names a step", name, _NAMES)
            late = step in self._manifests
        if late and self._on_late is not None and (call := self._on_late()) is not None:
            call()

    def begin_save(self, step: int) -> None:
        """Hold what is known of a step, and what will be, since it is being saved."""
        with self._lock:
            known = self._saved.pop(step, None)
            self._saved[step] = self._recent.pop(step, {}) if known is None else known
            self._manifests.pop(step, None)
            for lost in [each for each in self._saved if each not in self._manifests][:-_UNDER_WAY]:
                del self._saved[lost]

    def of_step(self, step: int) -> dict[str, float]:
        """Return what is known of a step."""
        with self._lock:
            return dict(self._saved.get(step) or self._recent.get(step) or {})

    def committed(self, manifest: Manifest, serials: Collection[int]) -> None:
        """Note that a save is complete; forget those whose ``serials`` are not among those there beside it."""
        with self._lock:
            for gone in [step for step, each in self._manifests.items() if each.serial not in serials]:
                del self._manifests[gone], self._saved[gone]
            if manifest.step in self._saved:
                self._manifests[manifest.step] = manifest

    def late_metrics(self) -> dict[int, dict[str, float]]:
        """Return what manifests do not have, by their serials."""
        with self._lock:
            found = {each.serial: _changed(each.metrics, self._saved[step]) for step, each in self._manifests.items()}
        return {serial: metrics for serial, metrics in found.items() if metrics}

    def forget_steps(self) -> None:
        """Forget all steps, as training goes back, or saves go to another directory."""
        with self._lock:
            for each in (self._recent, self._saved, self._manifests):
                each.clear()


def _changed(old: Mapping[str, float], new: Mapping[str, float]) -> dict[str, float]:
    # As texts, in which NaN is what it was.
    return {name: value for name, value in new.items() if name not in old or str(old[name]) != str(value)}
