"""The training thread's part of saves: a state is admitted, staged, and handed to the thread that writes.

It keeps the state that it was given last, so that a rank that has left its loop can save with those in it, and counts
the steps of the optimizers in it, so that a rank whose values are stale is found.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import stagereg.base.output as output
import stagereg.base.record as record
import stagereg.base.shutdown as shutdown
import stagereg.checkpoint.state.entries as entries
from stagereg.base.crash_report import summarize_exception
from stagereg.base.option_text import option
from stagereg.checkpoint.extension import SaveObserver
from stagereg.checkpoint.format.manifest import MOST
from stagereg.checkpoint.save.observers import Observers
from stagereg.checkpoint.save.pending_save import PendingSave, Sharing, StagedCopy
from stagereg.checkpoint.save.save_thread import SaveThread
from stagereg.checkpoint.save.schedule import Schedule
from stagereg.checkpoint.save.store_target import StoreTarget
from stagereg.checkpoint.save.structure import outline
from stagereg.checkpoint.state.nested import Spreader, expect_reachable
from stagereg.checkpoint.state.optimizer_state import ParameterNames, optimizers_of
from stagereg.data import LoadsEveryRank
from stagereg.errors import CheckpointError, StageregError, reason
from stagereg.extensions.preemption.consensus import PreemptionConsensus
from stagereg.extensions.replicas.shares import ReplicaShards
from stagereg.stagers.async_stager import AsyncStager, ConfirmsCopies, ReleasesCopies, UnconfirmedCopy

_log = logging.getLogger(__name__)

_BACKWARDS = (
    "stagereg: step %d is saved after step %d. A resume goes on from the checkpoint that was made last, and what is "
    "saved again replaces the checkpoint of that step. Count steps through the whole run, not anew in each epoch; to "
    "go back on purpose, call restore(state, source=CHECKPOINT) first."
)
_ONLY = (
    "stagereg: this run reached no multiple of every=%d, so the end of the run makes its only checkpoint. A crash "
    "before the end would have lost all steps."
)


class Saver:
    """For the training thread, but for :meth:`miss_save` and :meth:`look_for_hang`."""

    def __init__(
        self,
        target: StoreTarget,
        stager: AsyncStager,
        background: SaveThread,
        replicas: ReplicaShards,
        stores: bool,
        names: ParameterNames | None = None,
        observers: Sequence[SaveObserver] = (),
    ) -> None:
        # As it was given last, with objects in containers as entries (:mod:`.nested`).
        self.state: MutableMapping[str, Any] | None = None
        self.saved: int | None = None  # the step that was saved last, well or not, wherever it went
        self.stored: int | None = None  # the step that was not saved near alone, if there is a store
        self.reached = -1  # as ``saved``; -1 before, and after a restore
        self.leaving = False  # whether the ranks are about to exit
        self.names = names or ParameterNames()  # in the state
        self.ready: Callable[[], object] = lambda: None  # called before a save; what it raises fails the save
        self._given: MutableMapping[str, Any] | None = None  # the dict of the program
        self._spreader = Spreader()
        self._given_at: int | None = None  # the step that ends with the state
        self._target, self._stager, self._background = target, stager, background
        self._replicas, self._stores, self._observers = replicas, stores, Observers(observers)
        self._copying: PendingSave | None = None  # what the stager is at
        self._stager_name = f"{type(stager).__module__}.{type(stager).__qualname__}"
        self._taken: Counter[str] = Counter()  # steps of each optimizer in the state
        self._continued: list[str] = []  # the positions in data that any number of ranks continue
        self._positions: tuple[int | None, dict[str, Any]] = None, {}  # those at a step
        self._went_back = target.ranks.rank > 0  # which was said
        self._buffers: tuple[dict[str, Any], Collection[str]] | None = None  # keys of entries, and names of buffers
        if isinstance(stager, ReleasesCopies):
            stager.expect_release()
        self._confirms = stager if isinstance(stager, ConfirmsCopies) else None
        self.retake = background.retake
        for thread in (background, background.ahead):
            if thread is not None and self._confirms is not None:
                thread.retake.confirm_with(self._confirms.confirm)  # a method of this object would keep the state alive

    def remember(self, state: MutableMapping[str, Any], step: int | None = None) -> None:
        """Keep what is to be saved, also after this rank has left a loop, and count the steps of its optimizers.

        ``step`` is the one that ends with it, if one does.
        """
        self._given_at = step
        if state is not self.state:  # which is not the dict of the program if containers in that hold objects
            self.take(state, again=False)

    def take(self, given: MutableMapping[str, Any], again: bool = True) -> MutableMapping[str, Any]:
        """Return the dict of the program as it is kept; ``again`` as of :meth:`.Spreader.spread`."""
        state = self._spreader.spread(given, again)
        self._given, self.state, before = given, state, self.state or {}
        self._continued = [name for name in entries.positions(state) if isinstance(state[name], LoadsEveryRank)]
        if self._confirms is not None:
            self._confirms.copy_at_once(entries.written_in_forward(state))
        self._observers.given(state)
        for name, value in state.items() if self._target.ranks.group is not None else ():
            if isinstance(value, Optimizer) and optimizers_of(value) and before.get(name) is not value:
                with contextlib.suppress(AttributeError):  # of a wrapper without super().__init__(), which has no hooks
                    value.register_step_post_hook(lambda *_, taken=self._taken, name=name: taken.update([name]))
        return state

    def end_step(self, step: int) -> None:
        """Note the positions in data of a step that may be saved later, when the loop has taken another batch."""
        if self._continued and self.state is not None:
            self._positions = step, {name: self.state[name].state_dict() for name in self._continued}
        self._observers.end_step(step, self.state if self._given_at == step else None)

    @property
    def _every(self) -> int | None:
        """The number whose multiples are saved, if there is one."""
        return self._target.schedule.every if type(self._target.schedule) is Schedule else None

    def save(self, step: int, follows: bool = False, near: bool = False) -> None:
        """Stage and submit.

        Args:
            step: of the state.
            follows: whether this rank has left its loop, and saves since others do.
            near: whether it goes to the tier alone.
        """
        self.retake.confirm()
        if self._given is not None:
            self.take(self._given)  # the program may have put objects into its containers since
        taken = {**_schedules(self.state or {}), **self._taken}
        saves = self._begin(checked_step(step), near, follows=follows, taken=taken)
        save = saves[-1]
        if save.again and self._confirms is not None:
            self._confirms.copy_at_once(None)
        if step < self.reached and not self._went_back:
            self._went_back = True
            _log.warning(_BACKWARDS, step, self.reached)
        self.saved = self.reached = step
        self.stored = self.stored if near and self._stores else step
        self._observers.begin_save(step, self._given, [each.to for each in saves])
        try:
            self.ready()
            for each in saves:
                self._thread_of(each).admit(each)
            self._stage(save)
        except BaseException as error:
            save.copy.failure = reason(error)
            self._background.failures.raise_or_warn(error)
        finally:
            # Also when this rank gives up, so that the saves of the ranks stay paired and the others raise too.
            for each in saves:
                self._thread_of(each).submit(each)
            try:
                self._settle(save)
            finally:
                stall = record.now() - save.called
                for each in saves:
                    each.to.schedule.held(step, stall)
        if save.copy.failure is None:
            self._background.stats.stall_seconds.append(stall)
            record.emit("stall", step=step, start=save.called, seconds=stall, **save.copy.target)

    def retakes_at(self, step: int) -> bool:
        """Return whether a discarded save is made again after ``step``. Called once a step; not collective."""
        self.retake.confirm()
        return self.retake.due(step)

    def drop_retake(self) -> None:
        """Report a discarded save as failed: it cannot be made again any more."""
        discarded, failure = self.retake.pending, self.retake.failure
        if discarded is not None and failure is not None:
            self.retake.pending = self.retake.failure = None
            self._background.failures.keep_failure(discarded.step, failure)

    def save_last(self, seen: int | None) -> None:
        """Save the last step that some rank has ``seen``, unless that is done; on all ranks.

        Raises:
            CheckpointError: on all ranks, if a save has failed, and some rank has not raised that yet.
        """
        if not self._background.wait():
            return
        discarded = self.retake.pending is not None
        seen = self.retake.step_to_repeat() if seen is None else seen
        stored = None if discarded else self.stored
        own = [-1 if step is None else step for step in (seen, stored)]
        own_too = [*own, self.state is None, self._background.failing]
        last, done, unknown, failed = self._target.ranks.max_async(own_too)()
        if failed:
            self._background.raise_failure()
            raise CheckpointError("The last step was not saved, since a save before it has failed on another rank.")
        if last > done and not unknown:
            if self.saved is None and self._stores and self._target.ranks.rank == 0 and self._every is not None:
                _log.info(_ONLY, self._every)
            self.save(int(last), follows=own[0] < last)

    def leave(
        self, step: int, preemption: PreemptionConsensus, directory: str, resume: str | None, follows: bool = False
    ) -> NoReturn:
        """Save ``step``, unless that is done, and exit; on all ranks, which have agreed to."""
        self.leaving = True
        failure: CheckpointError | None = None
        self._background.wait()
        ended = self._background if self._stores else self._background.ahead or self._background
        if ended.newest != step:
            try:
                self._background.raise_failure()
            except CheckpointError as earlier:
                _log.error("%s", earlier)
            try:
                self.save(step, follows)
                self._background.wait()
                self._background.raise_failure()
                if ended.newest != step:
                    raise ended.failures.last or CheckpointError(f"Step {step} was not saved.")
            except CheckpointError as error:
                failure, newest = error, self._background.describe_newest()
                if newest not in str(error):
                    failure = CheckpointError(f"{str(error).rstrip('.')}. {newest}")
                self._background.failures.set_status(None)  # the exception below reports it
        preemption.exit(step, directory, failure, resume)

    def miss_save(self, step: int, near: bool = False) -> None:
        """Have the other ranks know that this one does not save ``step``; on any thread."""
        for each in self._begin(step, near, missed=True):
            self._thread_of(each).submit(each)
            each.to.schedule.held(step, 0.0)

    def _begin(self, step: int, near: bool, **more: Any) -> list[PendingSave]:
        """Return what is to be saved: to the tier first, and to the store, unless it goes near alone, of one copy."""
        sharing, copy = Sharing(), StagedCopy()
        if self._target.ranks.size > 1:
            sharing.book, sharing.number = self._replicas, self._replicas.begin_save()
        before = None
        if (ahead := self._background.ahead) is not None:
            before = PendingSave(step, ahead.target, copy=copy, sharing=sharing, **more)
            if near or not self._stores:
                copy.near = True
                return [before]
            before.agreed = Future()
        number, again = self.retake.begin_save()
        more |= {"number": number, "again": again}
        save = PendingSave(step, self._target, copy=copy, sharing=sharing, before=before, **more)
        return [save] if before is None else [before, save]

    def _thread_of(self, save: PendingSave) -> SaveThread:
        ahead = self._background.ahead
        return self._background if save.to is self._target or ahead is None else ahead

    def _share(self, save: PendingSave, captured: dict[str, Any]) -> dict[str, Any]:
        """Return what this rank stages of what it has, and note what the save has to know of it."""
        state = self.state or {}
        if not save.follows:
            keys = {name: tuple(value) for name, value in captured.items() if isinstance(value, Mapping)}
            if self._buffers is None or self._buffers[0] != keys:  # walking modules takes milliseconds
                self._buffers = keys, entries.buffers(state)
            save.sharing.buffers = self._buffers[1]
        if (found := self._replicas.cut(save.sharing.number, captured)) is not None:
            captured, save.sharing.shares = found
        elif not save.follows:
            save.sharing.replicated = entries.replicated(state) if self._replicas.share else ()
        return captured

    def look_for_hang(self) -> None:
        """End the process, whose training thread can raise nothing, if ``stage`` takes longer than a save may."""
        save, limit_s = self._copying, self._background.timeout_s
        if save is None or record.now() < save.copy.began + limit_s:
            return
        self._copying = None
        limit = f"{limit_s:g} s ({option('checkpoint.failure.timeout')})"
        who = f"stage() of {self._stager_name} has not returned for {limit}"
        text = f"rank {self._target.ranks.rank}: Step {save.step} was not saved: {who}. "
        output.warn(f"stagereg: {text}{self._background.describe_newest()}")
        if not self._background.failures.warns:
            shutdown.exit_now(1)

    def _stage(self, save: PendingSave) -> None:
        if self.state is None:
            raise CheckpointError(
                f"Step {save.step} was not saved: this rank never had data, and knows no state to save. Call "
                "restore(state) before the loop, or loop over join.iterate(loader)."
            )
        try:
            ranks = self._target.ranks
            ranks.check_still_all()
            expect_reachable(self.state)
            captured = entries.capture(self.state, save.step, ranks.rank, ranks.size, self.names)
            at, positions = self._positions
            for name, position in positions.items() if at == save.step else ():
                captured[entries.rank_name(name, ranks.rank)] = position
            save.copy.inspect = self._observers.capturing(self.state, captured)
            if ranks.size > 1:
                captured = self._share(save, captured)
            save.copy.began = record.now()
            if isinstance(self._stager, ReleasesCopies):
                save.copy.release = self._stager.release
            save.copy.stager = self._stager_name
            with contextlib.suppress(RecursionError):  # of a cycle, which the save refuses by name
                save.copy.outline = outline(captured)
            self._copy(save, captured)
        except Exception as error:
            raise CheckpointError(f"Step {save.step} was not saved: {reason(error)}") from error

    def _copy(self, save: PendingSave, captured: dict[str, Any]) -> None:
        self._copying = save
        try:
            save.copy.staged = self._stager.stage(captured)
            if not isinstance(save.copy.staged, Future):
                if not self._stager.should_synchronize_after_execute:
                    save.copy.complete()
            elif self._stager.should_synchronize_after_execute:
                save.copy.staged.result()
            elif isinstance(save.copy.staged, UnconfirmedCopy):
                save.copy.staged.when_copied(save.copy.complete)
            else:
                save.copy.staged.add_done_callback(lambda _: save.copy.complete())
        except StageregError:
            raise
        except Exception as error:
            what = summarize_exception(error, __file__)
            raise CheckpointError(f"{what}, raised in stage() of {self._stager_name}") from error
        finally:
            self._copying = None

    def _settle(self, save: PendingSave) -> None:
        """Let the stager wait for what it has to wait for while the writer is at work, in torch's order of calls."""
        try:
            if save.copy.failure is None and self._stager.should_synchronize_after_execute:
                self._stager.synchronize_staging()
                save.copy.complete()
        except Exception as error:
            save.copy.failure = reason(error)
            failure = CheckpointError(f"Step {save.step} was not saved: {save.copy.failure}")
            failure.__cause__ = error
            self._background.failures.raise_or_warn(failure)
        finally:
            save.copy.settled.set()


def _schedules(state: Mapping[str, Any]) -> dict[str, int]:
    """Return the steps of each scheduler that counts them; ChainedScheduler leaves that to those in it."""
    found: dict[str, int] = {}
    for name, value in state.items():
        if isinstance(value, LRScheduler):
            each = [value, *getattr(value, "_schedulers", ())]
            counts = [steps for one in each if type(steps := getattr(one, "last_epoch", None)) is int]
            found |= {name: counts[0]} if counts else {}
    return found


def checked_step(step: int) -> int:
    """Return a step. Raises: ``CheckpointError`` if it is none."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MOST:
        raise CheckpointError(f"A step is a whole number from 0 on, below 2**63, not {step!r:.100}.")
    return step


def checked_state(state: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Return a state. Raises: ``CheckpointError`` if it is none."""
    if not isinstance(state, MutableMapping):
        raise CheckpointError(
            "A state is a dict of names to objects, as in save(step, {'model': model, 'optimizer': optimizer}), not a "
            f"{type(state).__name__}."
        )
    return state
