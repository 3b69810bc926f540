"""The checkpointer: stages in the training loop, writes and commits in the background, restores at the start.

docs/architecture.md follows one save and one restore through the modules below.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

import stagereg.base.record as record
import stagereg.checkpoint.load.choosing as choosing
import stagereg.checkpoint.load.restoring as restoring
import stagereg.checkpoint.options as options
from stagereg.base import first_step
from stagereg.base.command import is_program
from stagereg.base.followers import followers
from stagereg.base.uncaught import print_once
from stagereg.checkpoint.dispatch import Extensions, weakly
from stagereg.checkpoint.end_report import describe_end, expect_usable, log_end, warn_of_unclosed
from stagereg.checkpoint.extension import CheckpointExtension, Due, RestoreRequest, Setup
from stagereg.checkpoint.hold import DirectoryLock
from stagereg.checkpoint.load.read_back import read_back
from stagereg.checkpoint.options import Failure, Restore
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.save.save_threads import SaveThreads
from stagereg.checkpoint.save.saver import Saver, checked_state, checked_step
from stagereg.checkpoint.save.store_target import StoreTarget
from stagereg.checkpoint.state.nested import expect_savable
from stagereg.checkpoint.state.optimizer_state import ParameterNames
from stagereg.checkpoint.stats import CheckpointStats
from stagereg.checkpoint.storage.protocol import Storage, expect_fit, name_of
from stagereg.checkpoint.store.keep import Keep, KeepRule
from stagereg.checkpoint.store.open_store import open_store, path_or_url
from stagereg.checkpoint.targets import ReplicaSharding, Schedule
from stagereg.checkpoint.together import LEAVE, RESTORE, RankCoordinator
from stagereg.errors import is_consequence
from stagereg.stagers.async_stager import AsyncStager

_log = logging.getLogger(__name__)

Own = TypeVar("Own", bound="Checkpointer")


class Checkpointer:
    """The core of :class:`stagereg.Checkpointer`, which builds it with extensions. Constructing it is collective.

    Arguments that are not below are those of :class:`stagereg.Checkpointer`.

    Args:
        every: ``maybe_save`` saves at the multiples of this, at least 1; or when a schedule says.
        save_last: whether the end of a ``with`` block, where nothing was raised, saves the last step that
            :meth:`maybe_save` or :meth:`should_save` was called with, unless it is saved.
        extensions: accompany this checkpointer, in one order on all ranks.
        sharding: which rank writes what several ranks hold identically; ``None`` for the lowest one, unchecked.
        notes: a directory for the lock and for notes; checkpoints then go to the targets of extensions alone, and
            ``dir`` is their directory in messages.
        compared: more options that must be the same on all ranks, by name.

    Raises:
        ConfigError: an option is of no use, the ranks differ in one or in their extensions, or ``dir`` is another
            directory on some machine.
        CheckpointError: on all ranks: another job of the sweep has had ``dir``; or an extension raises it.
    """

    def __init__(
        self,
        dir: str,
        every: int | Schedule = 100,
        keep: int | Keep | KeepRule = Keep(),  # noqa: B008  # it cannot change
        resume: str = "auto",
        stager: AsyncStager | str | None = None,
        storage: Storage | str | None = None,
        process_group: dist.ProcessGroup | None = None,
        restore: Restore = Restore(),  # noqa: B008  # it cannot change, nor can those below
        failure: Failure = Failure(),  # noqa: B008
        save_last: bool = True,
        enable: bool = True,
        extensions: Sequence[CheckpointExtension] = (),
        sharding: ReplicaSharding | None = None,
        notes: str | None = None,
        compared: Mapping[str, Any] = {},
    ) -> None:
        print_once()
        self._stores, place = notes is None, dir if notes is None else notes
        groups = {"restore": restore, "failure": failure}
        options.check_all(
            {"dir": place, "every": every, "keep": keep, "resume": resume, "save_last": save_last, **groups}
        )
        self.resume, self.restore_options = resume, restore
        self._enabled, self._failure, self._save_last = enable, failure, save_last
        self._store = open_store(place)
        self.dir = path_or_url(self._store.root if self._stores else dir)
        self._stager: AsyncStager = options.component("stager", stager, "overlapped")
        self._storage: Storage = options.component("storage", storage, "dcp")
        expect_fit(self._storage, self._store.root)
        self.stats = CheckpointStats()
        self.restored: Path | str | None = None
        self._seen: int | None = None  # the step last asked about
        self._resumed: int | None = None  # the step that ``resume`` has led to
        self._how: str | None = None  # ``resume``, once :meth:`restore` is called
        self._closed, self._pid = False, os.getpid()
        self._extensions = Extensions(extensions)
        self._ranks = RankGroup(process_group, failure.timeout)
        locked = weakly(self._extensions.locked, None)
        self._hold = DirectoryLock(self._store, self._ranks, failure.timeout.total_seconds(), resume, locked)
        if enable:
            schedule, policy = every if isinstance(every, Schedule) else Schedule(every), Keep.of(keep)
            alike: dict[str, Any] = {
                "dir": self._store.root if self._stores else None,
                "every": str(schedule),
                "keep": policy,
            }
            alike |= {"resume": resume, **groups, "save_last": save_last, "storage": name_of(self._storage)}
            options.expect_alike(self._ranks, options.compared(**alike, **compared, **self._extensions.options()))
            token = self._hold.open(dir if self._stores else None)
            parts = self._store, policy, self._storage, self._ranks, token, schedule, read_back
            self._target = StoreTarget(*parts, [self._extensions.manifest_fields])
            self._begin(process_group, sharding)

    def _begin(self, process_group: dist.ProcessGroup | None, sharding: ReplicaSharding | None) -> None:
        """Make what saves and exchanges, on all ranks: one group for each kind of exchange, which must not meet."""
        called, target, timeout, names = self._extensions, self._target, self._failure.timeout, ParameterNames()
        every = target.schedule.every if type(target.schedule) is Schedule else None
        training = None if self._ranks.group is None else process_group or dist.group.WORLD
        setup = Setup(
            *(self._ranks, process_group, training, self._store, self._stores, self._storage, names, every, self.dir),
            *(target.token, self.resume, timeout, self._hold.acquire_on_all, weakly(called.is_urged, False)),
        )
        nearer = called.targets(setup)
        target.schedule.start(process_group)
        self._background = SaveThreads([*nearer, *[target] * self._stores], timeout, self._failure.on_error == "warn")
        ready = self._hold.acquire_to_save
        self._saver = Saver(self._background, self._stager, sharding, names, called, ready)
        self.stats = self._background.stats
        for each in self._background.all:
            where = "store" if each.target is target else "tier"
            each.listen(partial(called.committed, where, each.target))
        called.start(setup, weakref.proxy(self._background))
        parts = target.token, self._ranks, self._saver, self._background, called, self._save
        self._together = RankCoordinator(training, *parts)
        warn, kept = self._ranks.rank == 0 and self._save_last, (self.dir, self._saver, self._hold, self._pid)
        self._unclosed = weakref.finalize(self, warn_of_unclosed, *kept) if warn else None
        if self._ranks.group is not None:
            self._background.last.call_when_idle(self._together.look_for_missed)
            followers.add(self._together)

    def lock(self) -> None:
        """Lock ``dir`` now, and not at the first call that asks for a save. Collective. Raises as :meth:`save`."""
        expect_usable(self._closed, self._pid)
        if self._enabled:
            self._hold.acquire_on_all()

    def maybe_save(self, step: int, state: MutableMapping[str, Any]) -> bool:
        """Save at the end of a step if :meth:`should_save` says so; return whether it did. Raises as :meth:`save` does.

        The checkpoint is complete once it is written and its copy is confirmed; a kill before that loses it. The next
        optimizer step or call confirms the copy. A loop that evaluates or idles has neither: there it takes 0.5 s, or
        as long as the copy has taken.
        """
        self.remember(state, step)
        if self.should_save(step):
            self.save(step, state)
            return True
        expect_usable(self._closed, self._pid)
        if self._enabled:
            self._background.raise_failure()
        return False

    def should_save(self, step: int) -> bool:
        """Whether to save, or to leave, after ``step``: of the ranks that call it with one step, all get one answer.

        For programs that call :meth:`save` themselves, once a step in place of :meth:`maybe_save`: true at positive
        multiples of ``every``, at what ``"auto"`` has agreed upon, and when one rank got SIGTERM or SIGUSR1.
        """
        first_step.take_step()
        self._seen = checked_step(step)
        if not self._enabled:
            self._extensions.end_step(step, None)
            return False
        self._hold.acquire_to_save()
        self._saver.end_step(step)
        return self._saver.due(step, everywhere=self._extensions.due(step) > Due.NO)

    def goes_everywhere(self, step: int) -> bool:
        """Whether a save of ``step`` goes to ``dir`` and the tier, not to the tier alone, by :meth:`should_save`."""
        return not self._enabled or self._saver.goes_everywhere(step)

    def save(self, step: int, state: MutableMapping[str, Any], everywhere: bool = False) -> None:
        """Stage ``state`` and let it be written and committed in the background.

        Returns when the stager allows the state to change again. One save may be written while the next one waits; a
        third call first waits for the oldest to end. A step that is there already is replaced.

        Args:
            step: the training step, not negative; the same on all ranks.
            state: what to save, see the class.
            everywhere: in ``dir`` also if :meth:`should_save` has asked for the tier alone.

        Raises:
            CheckpointError: an earlier save failed, or this rank could not stage the state; or, on rank 0, another run
                saves in ``dir``, or it cannot be written to. The other ranks then raise at their next call. Checkpoints
                that were complete stay.
            Preempted: (a ``SystemExit`` with code 75) the ranks have agreed to leave after this step, since one of them
                got SIGTERM or SIGUSR1, and it is saved and committed.
            Stopped: (a ``SystemExit`` with code 128 + signal) likewise, and it could not be saved.
        """
        expect_usable(self._closed, self._pid)
        if self._enabled:
            first_step.take_step()
            self.remember(state)
            self._together.save(checked_step(step), everywhere)

    def _save(self, what: str, step: int, targets: Sequence[int] | None, follows: bool) -> None:
        if what == LEAVE:
            self._extensions.notify(CheckpointExtension.leaving)
            self._extensions.exit(step, self._saver.save_to_leave(step, follows), self._how)
        self._saver.save(step, targets, follows)

    def listen(self, listener: Callable[[int], object]) -> None:
        """Call ``listener(step)`` on this rank for each complete checkpoint from now on, before :meth:`wait` returns.

        On the background thread: it must not use the process group. What it raises is logged; the checkpoint is there.
        """
        if self._enabled:
            self._background.last.listen(listener)

    def wait(self) -> None:
        """Wait until every save has ended, or has taken longer than ``timeout``; not for the deletion of older ones.

        Raises:
            CheckpointError: one failed, and no call has raised that yet.
        """
        expect_usable(self._closed, self._pid)
        if self._enabled:
            self._background.wait()
            if (step := self._saver.retake.step_to_repeat()) is not None:
                self._together.save(step, everywhere=True)
            self._background.wait()
            self._saver.drop_retake()
            self._background.raise_failure()

    def restore(self, state: MutableMapping[str, Any], source: str | os.PathLike[str] | None = None) -> int | None:
        """Load a checkpoint, chosen by ``resume``, into the objects and values of ``state``; call it on all ranks.

        Objects take their state with ``load_state_dict``; plain tensors and containers change in place, other plain
        values are replaced in ``state``. The random number generators of each rank are set as well. ``"auto"`` logs
        which checkpoints it passes over, why, and how many steps are lost.

        Args:
            state: the same names as were saved, or some of them; of what others saved, modules and optimizers are
                found by the names of their parameters.
            source: what to load in place of what ``resume`` says: one checkpoint, or a directory of checkpoints, of
                which it is the newest undamaged one. It is read only, also while another run writes there.

        Returns:
            The step of the checkpoint, or ``None`` if none was to be loaded.

        Raises:
            CheckpointError: on all ranks: what ``resume`` names is not there or damaged; there are checkpoints and none
                is good; one cannot be looked at; it has no entry of some name, or an object does not take it.
        """
        expect_usable(self._closed, self._pid)
        if not self._enabled:
            return None
        self._how = self.resume if source is None else self._how
        state = self._saver.take(checked_state(state))
        self._background.finish_before_restore()
        self._together.post(RESTORE)
        store, resume = choosing.resolve_resume(self._store, self.resume, source, self._ranks)
        if resume == "never":
            self._ranks.run_on_all("Nothing was restored", self.wait)
            return None
        how, own = self.restore_options, source is None
        asked = RestoreRequest(
            *(store, resume, own, how.verify, how.read, how.cast, how.exact, how.rename, how.allow_missing),
            *(state, self._saver.names, self._storage, self._ranks),
        )
        restored = restoring.restore(asked, self._extensions.all, partial(self._begin_restore, own))
        step = None if restored is None else restored.manifest.step
        self._store.retention.spared.clear()
        self._hold.continues = True
        choosing.log_begin(restored, asked, self.dir, source)
        if restored is None or step is None:  # now, and not at the first save
            self._ranks.run_on_all("No save could succeed", partial(expect_savable, state))
            return None
        self.restored = path_or_url(restored.path)
        trains = self._hold.acquired or is_program(restored.manifest.command)  # else it may be an evaluation
        self._resumed = step if source is None and trains else None
        if self._resumed is not None and self.resume in choosing.RESUME:
            record.emit("resumed", step=step, dir=str(self.dir))
        self._saver.reached = -1  # also a run that begins with what another one has trained counts anew
        self._background.restored(step, restored.path)
        return step

    def _begin_restore(self, own: bool) -> None:
        self.wait()
        if own:
            self._hold.acquire_to_restore()

    def close(self) -> None:
        """Wait for every save, no longer than ``timeout``, end the thread and close the stager. Twice is harmless.

        Raises: ``CheckpointError`` if a save failed, and no call has raised that yet; all is closed nevertheless.
        """
        if self._closed:
            return
        if not self._enabled:
            self._closed = True
            self._stager.close()
            return
        if self._unclosed is not None:
            self._unclosed.detach()
        self._together.leave()
        ended = self._background.finish()
        self._saver.drop_retake()
        self._closed = True
        if not ended:
            for each in self._background.all:
                each.abandon()
        self._extensions.notify(CheckpointExtension.close, ended)
        self._background.close()
        if ended:  # else a thread hangs, and no other run may write before this process ends
            self._hold.release()
        try:
            self._stager.close()
        finally:
            self._background.raise_failure()

    def __enter__(self: Own) -> Own:
        expect_usable(self._closed, self._pid)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._enabled:
            self.close()
            return
        self._extensions.notify(CheckpointExtension.ending, error)
        interrupted = isinstance(error, KeyboardInterrupt)
        if interrupted and self._hold.acquired:
            _log.warning("stagereg: interrupted. %s", describe_end(self._background, self.dir, False, self._how))
        try:
            if error is None:
                self._end()
        finally:
            try:
                self.close()
            except Exception as also:
                if error is None or (is_consequence(error) and not is_consequence(also)):
                    raise  # the failed save is the cause; the error that another rank caused adds nothing
                self._background.failures.log_after(also, error)
        resumed, last = self._resumed, max(self._seen or 0, self._saver.saved or 0)
        stayed = None if resumed is None or self.restored is None or last > resumed else (resumed, self.restored)
        if self._ranks.rank == 0 and (self._hold.acquired or stayed) and not interrupted:
            outlook = self._extensions.outlook()
            log_end(self._background, self.dir, error is None, self._how, stayed, outlook)

    def _end(self) -> None:
        """End the block with all ranks, none of which has raised."""
        if self._save_last:
            self._together.end(self._seen)
        self._extensions.notify(CheckpointExtension.ended)
        if self._save_last:
            self._saver.save_last(self._seen)
        if self._background.wait():
            self._extensions.notify(CheckpointExtension.completed)

    @property
    def latest(self) -> Path | str | None:
        """The directory of the checkpoint committed last, a URL if ``dir`` is one; ``None`` if there is none yet."""
        return path_or_url(found.path) if self._enabled and (found := self._store.latest()) else None

    @property
    def every(self) -> int:
        """Steps from one checkpoint to the next; with ``"auto"``, as it is at present."""
        return self._target.schedule.every if self._enabled else 0

    @property
    def saved(self) -> int | None:
        """The step last saved, with ``dir`` not in the tier alone, or ``None``: shows whether the last one is saved."""
        return self._saver.stored if self._enabled and self._saver.retake.pending is None else None

    def remember(self, state: MutableMapping[str, Any], step: int | None = None) -> None:
        """Keep what there is to save if this rank leaves a loop, or others are lost; ``step`` ends with it, if any."""
        if self._enabled:
            self._saver.remember(checked_state(state), step)
