"""The part of a save on the training thread: waits for earlier saves, stages the state, and submits the copy.

The saver stores the last state and its data loader states, so that a rank that has left its loop can save them. It
counts the steps of the optimizers in the state, to detect a rank with stale values.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import stagereg.base.output as output
import stagereg.base.record as record
import stagereg.base.shutdown as shutdown
import stagereg.checkpoint.state.entries as entries
from stagereg.base.crash_report import summarize_exception
from stagereg.base.option_text import choice, option
from stagereg.checkpoint.dispatch import Extensions
from stagereg.checkpoint.extension import CheckpointExtension
from stagereg.checkpoint.format.manifest import MOST
from stagereg.checkpoint.save.save_thread import SaveThreads
from stagereg.checkpoint.save.staged_copy import Request, StagedCopy
from stagereg.checkpoint.save.structure import outline
from stagereg.checkpoint.state.nested import Spreader, expect_reachable
from stagereg.checkpoint.state.optimizer_state import ParameterNames, optimizers_of
from stagereg.checkpoint.targets import ReplicaSave, ReplicaSharding, Schedule
from stagereg.data import LoadsEveryRank
from stagereg.errors import CheckpointError, StageregError, WrittenWhileSavedError, reason
from stagereg.stagers.async_stager import AsyncStager, ConfirmsCopies, ExpectsStage, ReleasesCopies, UnconfirmedCopy

_log = logging.getLogger(__name__)

_BACKWARDS = (
    "stagereg: Step %d is saved after step %d. The next run resumes from the checkpoint that was saved last, and a "
    "step that is saved again replaces its checkpoint. Count steps through the whole run, not from 0 in each epoch. "
    "To go back on purpose, call restore(state, source=CHECKPOINT) first."
)
_ONLY = (
    "stagereg: This run reached no multiple of every=%d, so its only checkpoint is saved at its end. A crash before "
    "the end would have lost all steps since %s."
)


class Saver:
    """Stages and submits saves. Called on the training thread, except :meth:`miss_save` and :meth:`look_for_hang`.

    ``ready`` is called before each save; if it raises an error, the save fails. The other arguments come from the
    checkpointer.
    """

    def __init__(
        self,
        threads: SaveThreads,
        stager: AsyncStager,
        replicas: ReplicaSharding | None = None,
        names: ParameterNames | None = None,
        extensions: Extensions | None = None,
        ready: Callable[[], object] = lambda: None,
    ) -> None:
        # The last state of the program, flattened (:mod:`.nested`).
        self.state: MutableMapping[str, Any] | None = None
        self.saved: int | None = None  # the step of the last save to any target, even if it failed
        self.stored: int | None = None  # the step of the last save to the last target, even if it failed
        self.reached = -1  # like ``saved``, but -1 at the start and after a restore
        self.leaving = False  # whether the ranks are about to exit
        self.names = names or ParameterNames()  # names of the optimizers' parameters in the state
        self._given: MutableMapping[str, Any] | None = None  # the dict that the program has passed
        self._spreader = Spreader()
        self._given_at: int | None = None  # the step after which the program has this state
        self._ready = ready
        self._threads, self._stager, self._ranks = threads, stager, threads.last.target.ranks
        self._replicas, self._extensions = replicas, extensions or Extensions(())
        self._everywhere = tuple(range(len(threads.all)))  # the numbers of all targets
        self._due: tuple[int | None, tuple[int, ...]] = None, ()  # the due step and its targets, until it is saved
        self._copying: tuple[int, float] | None = None  # the step that the stager is copying, and the start time
        self._stager_name = f"{type(stager).__module__}.{type(stager).__qualname__}"
        self._taken: Counter[str] = Counter()  # number of steps of each optimizer in the state
        self._continued: list[str] = []  # names of data loader states that can be resumed at any world size
        self._positions: tuple[int | None, dict[str, Any]] = None, {}  # a step, and its data loader states at the end
        self._went_back = self._ranks.rank > 0  # whether _BACKWARDS has been logged
        if isinstance(stager, ReleasesCopies):
            stager.expect_release()
        self._confirms = stager if isinstance(stager, ConfirmsCopies) else None
        self._expects = stager if isinstance(stager, ExpectsStage) else None
        self.retake = threads.retake
        if self._confirms is not None:
            self.retake.confirm = self._confirms.confirm  # a method of this object would keep the state alive

    def remember(self, state: MutableMapping[str, Any], step: int | None = None) -> None:
        """Keep the program's state and count optimizer steps, so that this rank can save the state after its loop.

        ``step``: the step after which the program has this state, if it is known.
        """
        self._given_at = step
        if state is not self.state:  # ``self.state`` is another dict if containers in the state hold objects
            self.take(state, again=False)

    def take(self, given: MutableMapping[str, Any], again: bool = True) -> MutableMapping[str, Any]:
        """Flatten and store the state of the program, and return it. ``again`` is as in :meth:`.Spreader.spread`."""
        state = self._spreader.spread(given, again)
        self._given, self.state, before = given, state, self.state or {}
        self._continued = [name for name in entries.positions(state) if isinstance(state[name], LoadsEveryRank)]
        if self._confirms is not None:
            self._confirms.copy_at_once(entries.written_in_forward(state))
        self._extensions.notify(CheckpointExtension.given, state)
        for name, value in state.items() if self._ranks.group is not None else ():
            if isinstance(value, Optimizer) and optimizers_of(value) and before.get(name) is not value:
                with contextlib.suppress(AttributeError):  # a wrapper without super().__init__() has no hooks
                    value.register_step_post_hook(lambda *_, taken=self._taken, name=name: taken.update([name]))
        return state

    def end_step(self, step: int) -> None:
        """Record the data loader states of a step, because the loop may take another batch before the save."""
        if self._continued and self.state is not None:
            self._positions = step, {name: self.state[name].state_dict() for name in self._continued}
        self._extensions.notify(CheckpointExtension.end_step, step, self.state if self._given_at == step else None)

    def due(self, step: int, everywhere: bool = False) -> bool:
        """Return whether a save to any target is due at ``step``. Called once per step; the same on all ranks.

        If ``everywhere`` is true, or if a discarded save is repeated, the save goes to all targets.
        """
        self.retake.confirm()
        everywhere |= self.retake.due(step)
        due = [number for number, each in enumerate(self._threads.all) if each.target.schedule.due(step)]
        if everywhere:
            self._due = step, self._everywhere
        else:
            self._due = step, tuple(sorted({0, *due})) if due else ()  # the first target prepares the copy for all
        if self._expects is not None and self.saved is not None and not self._due[1]:
            every = min(each.target.schedule.every for each in self._threads.all)
            if 2 * (step - self.saved) >= every:  # a copy that is still in use may be in use at the next save too
                self._expects.expect_stage()
        return bool(self._due[1])

    def targets_of(self, step: int, everywhere: bool = False) -> tuple[int, ...]:
        """Return the numbers of the targets of ``step``: those that :meth:`due` has selected, otherwise all."""
        due, targets = self._due
        return targets if due == step and targets and not everywhere else self._everywhere

    def goes_everywhere(self, step: int) -> bool:
        """Return whether a save of ``step`` goes to all targets."""
        return self.targets_of(step) == self._everywhere

    def save(self, step: int, targets: Sequence[int] | None = None, follows: bool = False) -> None:
        """Stage the state of ``step`` and submit the copy to the threads of the targets.

        ``targets``: the numbers of the targets, all by default; the same on all ranks. ``follows``: whether this rank
        has left its loop, and saves because other ranks do.
        """
        self.retake.confirm()
        if self._given is not None:
            self.take(self._given)  # the program may have put objects into its containers meanwhile
        taken = {**_schedules(self.state or {}), **self._taken}
        request, copy = self._begin(checked_step(step), targets, follows=follows, taken=taken)
        if request.again and self._confirms is not None:
            self._confirms.copy_at_once(None)
        if step < self.reached and not self._went_back:
            self._went_back = True
            _log.warning(_BACKWARDS, step, self.reached)
        self.saved, self.reached, self._due = step, step, (None, ())
        if request.targets[-1] == self._everywhere[-1]:
            self.stored = step
        chosen = [self._threads.all[each].target for each in request.targets]
        self._extensions.notify(CheckpointExtension.begin_save, step, self._given, chosen)
        try:
            self._ready()
            self._threads.admit(request)
            self._stage(request, copy)
        except BaseException as error:
            copy.fail(reason(error))
            self._threads.failures.raise_or_warn(error)
        finally:
            # Submit even after an error, so that the saves of the ranks stay paired and the other ranks raise too.
            self._threads.submit(request, copy)
            try:
                self._settle(step, copy)
            finally:
                self._threads.held(request, stall := record.now() - request.called)
        if copy.failure is None:
            self._threads.stats.stall_seconds.append(stall)
            record.emit("stall", step=step, start=request.called, seconds=stall, **request.tags)

    def drop_retake(self) -> None:
        """Report a discarded save as failed, because its state does not exist any more."""
        discarded, failure = self.retake.pending, self.retake.failure
        if discarded is not None and failure is not None:
            self.retake.pending = self.retake.failure = None
            other = choice("stager", "pinned_cached")
            advice = f"Call wait() before the program writes to a saved state, or use {other}."
            failure = WrittenWhileSavedError(f"{str(failure).rstrip('.')}. {advice}")
            self._threads.failures.keep_failure(discarded.step, failure)

    def save_last(self, seen: int | None, resumed: int | None = None) -> None:
        """Save the last step that a rank has ``seen``, unless it is saved. ``resumed``: the restored step. Collective.

        Raises:
            CheckpointError: on all ranks, if a save has failed and some rank has not raised that failure yet.
        """
        if not self._threads.wait():
            return
        discarded = self.retake.pending  # None on all ranks, or a save of the same step on all ranks
        done_here = self.stored if discarded is None else discarded.step
        own = [-1 if step is None else step for step in (seen, done_here)]
        own_too = [*own, self.state is None, any(each.failing for each in self._threads.all)]
        last, done, unknown, failed = self._ranks.max_async(own_too)()
        if failed:
            self._threads.raise_failure()
            raise CheckpointError("The last step was not saved, because an earlier save failed on another rank.")
        if last > done and not unknown:
            target = self._threads.last.target
            at_multiples = target.required and type(target.schedule) is Schedule
            if self.saved is None and self._ranks.rank == 0 and at_multiples:
                _log.info(_ONLY, target.schedule.every, "its start" if resumed is None else f"step {resumed}")
            self.save(int(last), follows=own[0] < last)

    def save_to_leave(self, step: int, follows: bool = False) -> CheckpointError | None:
        """Save ``step`` before all ranks exit, unless it is already saved. Return the error if the save fails."""
        self.leaving = True
        self._threads.wait()
        ended = self._threads.last
        if ended.newest == step:
            return None
        try:
            self._threads.raise_failure()
        except CheckpointError as earlier:
            _log.error("%s", earlier)
        try:
            self.save(step, follows=follows)
            self._threads.wait()
            self._threads.raise_failure()
            if ended.newest != step:
                raise ended.failures.last or CheckpointError(f"Step {step} was not saved.")
        except CheckpointError as error:
            self._threads.failures.set_status(None)  # the returned error reports the failure
            newest = self._threads.describe_newest()
            return error if newest in str(error) else CheckpointError(f"{str(error).rstrip('.')}. {newest}")
        return None

    def miss_save(self, step: int, targets: Sequence[int] | None = None) -> None:
        """Report to the other ranks that this rank does not save ``step``. Called on any thread."""
        request, copy = self._begin(step, targets, missed=True)
        self._threads.submit(request, copy)
        self._threads.held(request, 0.0)

    def _begin(self, step: int, targets: Sequence[int] | None, **more: Any) -> tuple[Request, StagedCopy]:
        numbers = self._everywhere if targets is None else tuple(targets)
        if lasts := any(self._threads.all[each].target.required for each in numbers):
            more["number"], more["again"] = self.retake.begin_save()
        request = Request(step, numbers, lasts, **more)
        replicas = self._replicas if self._ranks.size > 1 else None
        return request, StagedCopy(request, ReplicaSave() if replicas is None else replicas.begin_save())

    def look_for_hang(self) -> None:
        """Exit the process, or only warn, if the training thread is in the stager's ``stage`` beyond the timeout."""
        copying, limit_s = self._copying, self._threads.last.timeout_s
        if copying is None or record.now() < copying[1] + limit_s:
            return
        self._copying = None
        limit = f"{limit_s:g} s ({option('checkpoint.failure.timeout')})"
        who = f"stage() of {self._stager_name} has not returned for {limit}"
        text = f"{self._ranks.name(self._ranks.rank)}: Step {copying[0]} was not saved: {who}. "
        output.warn(f"stagereg: {text}{self._threads.describe_newest()}")
        if not self._threads.failures.warns:
            shutdown.exit_now(1)

    def _stage(self, request: Request, copy: StagedCopy) -> None:
        step, ranks = request.step, self._ranks
        if self.state is None:
            raise CheckpointError(
                f"Step {step} was not saved: this rank never had data, so it has no state to save. Call "
                "restore(state) before the loop, or loop over join.iterate(loader)."
            )
        try:
            ranks.check_still_all()
            expect_reachable(self.state)
            captured = entries.capture(self.state, step, ranks.rank, ranks.size, self.names)
            at, positions = self._positions
            for name, position in positions.items() if at == step else ():
                captured[entries.rank_name(name, ranks.rank)] = position
            inspect = self._extensions.capturing(self.state, captured)
            captured = copy.replicas.stage(self.state, captured, request.follows)
            structure = None
            with contextlib.suppress(RecursionError):  # a later check reports a reference cycle by name
                structure = outline(captured)
            release = self._stager.release if isinstance(self._stager, ReleasesCopies) else None
            copy.begin(self._stager_name, structure, inspect, release)
            self._copy(step, copy, captured)
        except Exception as error:
            raise CheckpointError(f"Step {step} was not saved: {reason(error)}") from error

    def _copy(self, step: int, copy: StagedCopy, captured: dict[str, Any]) -> None:
        self._copying = step, copy.began
        try:
            staged = self._stager.stage(captured)
            copy.put(staged)
            if not isinstance(staged, Future):
                if not self._stager.should_synchronize_after_execute:
                    copy.complete()
            elif self._stager.should_synchronize_after_execute:
                staged.result()
            elif isinstance(staged, UnconfirmedCopy):
                staged.when_copied(copy.complete)
            else:
                staged.add_done_callback(lambda _: copy.complete())
        except StageregError:
            raise
        except Exception as error:
            what = summarize_exception(error, __file__)
            raise CheckpointError(f"{what}, raised in stage() of {self._stager_name}") from error
        finally:
            self._copying = None

    def _settle(self, step: int, copy: StagedCopy) -> None:
        """Wait until the stager has finished its copy. The writer works meanwhile, as in torch's ``async_save``."""
        try:
            if copy.failure is None and self._stager.should_synchronize_after_execute:
                self._stager.synchronize_staging()
                copy.complete()
        except Exception as error:
            copy.fail(reason(error))
            failure = CheckpointError(f"Step {step} was not saved: {copy.failure}")
            failure.__cause__ = error
            self._threads.failures.raise_or_warn(failure)
        finally:
            copy.settled.set()


def _schedules(state: Mapping[str, Any]) -> dict[str, int]:
    """Return the step count of each scheduler. The count of a ``ChainedScheduler`` is that of its first scheduler."""
    found: dict[str, int] = {}
    for name, value in state.items():
        if isinstance(value, LRScheduler):
            each = [value, *getattr(value, "_schedulers", ())]
            counts = [steps for one in each if type(steps := getattr(one, "last_epoch", None)) is int]
            found |= {name: counts[0]} if counts else {}
    return found


def checked_step(step: int) -> int:
    """Return ``step``. Raises: ``CheckpointError`` if it is not an integer in the valid range."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MOST:
        raise CheckpointError(f"step must be an integer in 0..2**63-1, got {step!r:.100}.")
    return step


def checked_state(state: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Return ``state``. Raises: ``CheckpointError`` if it is not a mutable mapping, such as a dict."""
    if not isinstance(state, MutableMapping):
        raise CheckpointError(
            "A state is a dict of names to objects, as in save(step, {'model': model, 'optimizer': optimizer}), not a "
            f"{type(state).__name__}."
        )
    return state
