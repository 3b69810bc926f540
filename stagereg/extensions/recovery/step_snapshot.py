"""A snapshot of the state at the end of a step, which is valid until code writes to the state.

Between the end of a step and the next optimizer step, parameters and optimizer state keep their values, so the snapshot
refers to these tensors. At the end of each step, it copies the rest: random number states, plain values, data loader
states, options of optimizers, and small tensors that a forward pass may write, such as running statistics. The version
counters of the other tensors reveal writes outside optimizers. No large tensor is copied.

A host queues work ahead of its accelerator. When a rank fails, the accelerators of the other ranks wait in a
collective, but their hosts may have queued the next optimizer steps. Events on the accelerator therefore mark the end
of each step and the begin of the next optimizer step. A step is valid if the first event is complete and the second is
not. Version counters count queued writes, so they are compared just before an optimizer step is queued. Later writes
must be queued on the stream of the optimizer, or on a stream that waits for it. If the state or a part of it is in host
memory, the optimizer writes when the host calls it.

An abort of a collective lets the queued steps run on incomplete gradients. So a step is valid only if its end was
complete before the abort, and the next optimizer step had not begun when the copy was complete. After a failure, calls
of the accelerator's driver are limited in time, and work is queued only on new streams, which wait for no other stream.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch.distributed as dist

import stagereg.checkpoint.state.module_state as module_state
from stagereg.base.capture import is_capturing, relaxed_capture
from stagereg.base.hooks import ABORTS, ANNOUNCES_REPLAYS
from stagereg.checkpoint.state.optimizer_state import ParameterNames, optimizers_of
from stagereg.errors import CheckpointError, reason
from stagereg.extensions.recovery.end_of_step import EndOfStep
from stagereg.extensions.recovery.state_tensors import StateTensors, known_objects
from stagereg.kernel.broken import backends_of
from stagereg.stagers.guard import WriteGuard

T = TypeVar("T")

_RECORDED = 4  # maximum number of recorded steps on an accelerator
_ANSWER_S = 1.0  # seconds to wait for an accelerator's driver
_POLL_INTERVAL_S = 0.02
_NONE_ENDED, _WRITTEN = "no step has completed", "its optimizer had begun the next step"
_UNFINISHED = "its accelerator has not finished the step"
_AHEAD = f"its host had queued more than {_RECORDED} steps ahead of its accelerator"
_PASSING = {_WRITTEN, _UNFINISHED, _AHEAD}  # reasons that may change while the accelerator advances
_ABORTED = "a process group may have been aborted before its accelerator finished the step"
_CAPTURED = "a CUDA graph has captured a step of an optimizer"
_OVERTAKEN = "its accelerator began the next step during the copy"
_ERROR_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")


class StepSnapshot:
    """The snapshot of one rank's state. Only :meth:`note` and :meth:`close` are called on the training thread."""

    def __init__(self, names: ParameterNames) -> None:
        self.step: int | None = None  # the last completed step; after hold(), the step of the snapshot
        self.kinds = ""  # a digest of the names, shapes and dtypes of all tensors in modules and optimizers
        self._names = names
        self._seen: StateTensors | None = None
        self._ends: list[EndOfStep] = []  # oldest first; only the last one if the host writes the state
        self._found: list[EndOfStep] = []  # the step of the snapshot, and later ones
        self._held = self._aborted = self._is_captured = False
        self._lock = threading.Lock()  # not held during calls of an accelerator's driver
        self._guard = WriteGuard(self._before_write)
        self._forget_aborts = ABORTS.add(self._before_abort)

    def note(self, step: int, state: Mapping[str, Any]) -> bool:
        """Record the program's ``state`` at the end of a step. Return whether ``kinds`` has changed."""
        if self._held:
            return False
        seen, changed = self._seen, False
        if seen is None or not seen.is_of(state):
            objects = {name: x for name, x in state.items() if module_state.modules_of(x) or optimizers_of(x)}
            changed = seen is None or seen.known != known_objects(objects)
            if seen is None or changed:
                seen = StateTensors(state, objects, self._names)
        ends, end = self._unreplaced(), EndOfStep(step, state, seen)
        ends = [*ends, end] if end.ended else [end]
        with self._lock:
            if self._held:
                return False
            if len(ends) > _RECORDED:  # if the accelerator waits in a collective, it holds the first
                ends[0].skip(ends.pop(1))
            for gone in {*self._ends} - {*ends}:
                gone.seen.spare.append(gone.copies)
            self._seen, self.kinds, self.step, self._ends = seen, seen.kinds, step, ends
        return changed

    def _unreplaced(self) -> list[EndOfStep]:
        """Return the recorded steps whose values no later recorded step has replaced, also on the accelerator."""
        first = 0
        for number, end in enumerate(self._ends):
            first = number if self._has_ended(end) else first
        return self._ends[first:]

    def close(self) -> bool:
        """Stop recording, and release the state unless :meth:`hold` was called. Return whether it was released."""
        with self._lock:
            if not self._held:
                self._guard.close()
                self._forget_aborts()
                self._seen, self._ends = None, []
            return not self._held

    def hold(self, settle_s: float = 0.0) -> str:
        """Block all optimizers from now on. Return why the snapshot is invalid; an empty string if it is valid.

        Waits up to ``settle_s`` seconds while an optimizer writes or an accelerator finishes a step. Returns at most
        two seconds later, even if the accelerator does not advance. Any thread.
        """
        until = time.monotonic() + settle_s
        try:
            _within(settle_s + _ANSWER_S, lambda: self._settle(until))
            with self._lock:
                self._held = True
            return _within(max(0.0, until - time.monotonic()) + _ANSWER_S, lambda: self._settle(until))
        except Exception as error:  # the driver failed or does not answer
            return reason(error)
        finally:
            with self._lock:
                self._held = True

    def _settle(self, until: float) -> str:
        while (why := self._find()) in _PASSING and time.monotonic() < until:
            time.sleep(_POLL_INTERVAL_S)
        return why

    def _find(self) -> str:
        """Find the step that the state holds. Return why it holds no step; an empty string if it holds one."""
        ends = self._ends
        at = next((i for i in reversed(range(len(ends))) if self._has_ended(ends[i])), None)
        if at is None:
            return _UNFINISHED if ends else _NONE_ENDED
        self._found, end = ends[at:], ends[at]
        if self._is_captured or not end.is_sound:
            return _CAPTURED if self._is_captured else _ABORTED
        if not end.seen.unfit and any(each.has_begun() for each in self._found):
            return _AHEAD if end.skipped else _WRITTEN
        if not (why := end.find_changes()):
            self.step, self.kinds = end.step, end.seen.kinds
        return why

    def _has_ended(self, end: EndOfStep) -> bool:
        has_ended = end.has_ended()
        if has_ended and not end.is_sound:  # checks for aborts last, since an abort completes the event too
            aborted = self._aborted or (_aborts_after_errors() and _has_reported_error())
            end.is_sound = not end.ended or not aborted
        return has_ended

    def expect_unchanged(self) -> None:
        """Raise ``CheckpointError`` if code has written to the taken entries since the step ended."""
        if not self._found[0].ended and (why := self._found[0].find_changes()):  # otherwise, they are a copy
            raise CheckpointError(why)

    def take(self, rank: int, world_size: int, until: float = float("inf")) -> dict[str, Any]:
        """Return the entries to save. If a tensor is on an accelerator, they are a copy in host memory.

        Otherwise, they contain live tensors, to which only the blocked optimizers write. Restores the options of the
        optimizers. Called after :meth:`hold` has returned an empty string. Any thread.

        Args:
            until: the time at which to stop copying, by ``time.monotonic``.

        Raises:
            CheckpointError: code has written to the state; the accelerator has begun the next step, for example because
                a collective was aborted; or the copy takes too long.
        """
        end = self._found[0]

        def copied() -> dict[str, Any]:
            taken = end.take(rank, world_size, self._names)
            if any(each.has_begun() for each in self._found):
                raise CheckpointError(_OVERTAKEN)
            if why := end.find_changes():
                raise CheckpointError(why)
            return taken

        return _within(min(until - time.monotonic(), threading.TIMEOUT_MAX), copied)

    def _before_abort(self, _: object) -> None:
        for end in self._ends:
            self._has_ended(end)
        self._aborted = True

    def _before_write(self) -> None:
        ends = self._ends[-1:]
        if is_capturing():  # a capture writes nothing, but before torch 2.14, its replays write without a callback
            self._is_captured, ends = self._is_captured or not ANNOUNCES_REPLAYS, []
        begun = [end.record_begin() for end in ends]
        with self._lock:
            if not self._held:
                for end, (events, why) in zip(ends, begun, strict=True):
                    end.begin(events, why)
                return
        threading.Event().wait()  # until this process exits


def _aborts_after_errors() -> bool:
    """Whether NCCL's watchdog in torch aborts communicators after an error. By default, it ends the process instead."""
    return next((os.environ[name] for name in _ERROR_HANDLING if name in os.environ), "3") in ("1", "2")


def _has_reported_error() -> bool:
    """Whether a process group has reported an error, which the watchdog does before it aborts."""
    groups = [*dist.distributed_c10d._world.pg_map] if dist.is_initialized() else []
    found = (getattr(backend, "get_error", None) for group in groups for backend in backends_of(group))
    return any(error().name != "SUCCESS" for error in found if error is not None)


def _within(seconds: float, function: Callable[[], T]) -> T:
    """Return the result of a function, which runs on another thread, because an accelerator's driver may block.

    Raises: ``CheckpointError`` if the function has not returned after ``seconds``; or the error of the function.
    """
    answer: Future[T] = Future()

    def act() -> None:
        try:
            with relaxed_capture():
                answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=act, name="stagereg-snapshot", daemon=True).start()
    if not wait([answer], max(0.0, seconds)).done:
        raise CheckpointError(f"its accelerator did not answer within {seconds:.1f} s")
    return answer.result()
