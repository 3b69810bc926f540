"""The checkpointer copies the state in the training loop, writes and commits it in the background, and restores it.

docs/architecture.md describes one save and one restore, module by module.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

import stagereg.base.record as record
import stagereg.checkpoint.load.choosing as choosing
import stagereg.checkpoint.load.restoring as restoring
import stagereg.checkpoint.options as options
from stagereg.base import first_step
from stagereg.base.command import is_program
from stagereg.base.followers import followers
from stagereg.base.option_text import option
from stagereg.base.uncaught import print_once
from stagereg.checkpoint.dispatch import Extensions, weakly
from stagereg.checkpoint.end_report import describe_end, warn_of_unclosed
from stagereg.checkpoint.extension import CheckpointExtension, CheckpointStats, Due, RestoreRequest, Setup
from stagereg.checkpoint.hold import DirectoryLock
from stagereg.checkpoint.load.read_back import read_back
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.save.save_thread import SaveThreads
from stagereg.checkpoint.save.saver import Saver, checked_state, checked_step
from stagereg.checkpoint.save.store_target import StoreTarget
from stagereg.checkpoint.state.nested import expect_savable
from stagereg.checkpoint.state.optimizer_state import ParameterNames
from stagereg.checkpoint.storage.protocol import Storage, expect_fit, name_of
from stagereg.checkpoint.store.keep import Keep, KeepRule
from stagereg.checkpoint.store.open_store import open_store, path_or_url
from stagereg.checkpoint.targets import ReplicaSharding, Schedule
from stagereg.checkpoint.together import LEAVE, RESTORE, RankCoordinator
from stagereg.errors import RESUME_CODE, CheckpointError, ClosedError, Preempted, Stopped, is_consequence
from stagereg.stagers.async_stager import AsyncStager

_log = logging.getLogger(__name__)

_NO_STEP = (
    "stagereg: NO STEP WAS TAKEN: this run resumed from step %d, in %s, and had no steps left. To train from "
    "scratch, give the run another directory, %s, or add %s. To train longer, give the run more steps."
)


class Checkpointer:
    """The base class of :class:`stagereg.Checkpointer`, which adds the extensions. The constructor is collective.

    :class:`stagereg.Checkpointer` documents the arguments and errors that are not listed here. The constructor also
    raises ``ConfigError`` if the ranks differ in their extensions, and the errors of an extension.

    Args:
        every: a schedule, or the number of steps between saves. ``maybe_save`` saves at multiples of this number.
        extensions: the extensions of this checkpointer, in the same order on all ranks.
        sharding: decides which rank writes replicated tensors. With ``None`` the lowest rank writes each tensor, and
            the ranks do not compare values.
        notes: a directory for only the lock and records. Checkpoints are then saved only to the targets of extensions,
            such as a local tier, and messages name ``dir`` as the directory.
        compared: additional options, by name, that must be the same on all ranks.
    """

    def __init__(
        self,
        dir: str,
        every: int | Schedule = 100,
        keep: int | Keep | KeepRule = Keep(),  # noqa: B008  # immutable
        resume: str = "auto",
        stager: AsyncStager | str | None = None,
        storage: Storage | str | None = None,
        process_group: dist.ProcessGroup | None = None,
        restore: options.Restore = options.Restore(),  # noqa: B008  # immutable
        failure: options.Failure = options.Failure(),  # noqa: B008
        save_last: bool = True,
        enable: bool = True,
        extensions: Sequence[CheckpointExtension] = (),
        sharding: ReplicaSharding | None = None,
        notes: str | None = None,
        compared: Mapping[str, Any] = {},
    ) -> None:
        print_once()
        self._stores, place = notes is None, dir if notes is None else notes
        groups: dict[str, Any] = {"restore": restore, "failure": failure}
        given = {"dir": place, "every": every, "keep": keep, "resume": resume, "save_last": save_last}
        options.check_all({**given, **groups})
        self.resume, self.restore_options = resume, restore
        self._enabled, self._failure, self._save_last = enable, failure, save_last
        self._store = open_store(place)
        self.dir = path_or_url(self._store.root if self._stores else dir)
        self._stager: AsyncStager = options.component("stager", stager, "overlapped")
        self._storage: Storage = options.component("storage", storage, "dcp")
        expect_fit(self._storage, self._store.root)
        self.stats = CheckpointStats()
        self.restored: Path | str | None = None
        self._seen: int | None = None  # step of the last call to maybe_save or should_save
        self._resumed: int | None = None  # the step that the option ``resume`` restored
        self._how: str | None = None  # the option ``resume``, set by restore() without a source
        self._closed, self._pid = False, os.getpid()
        self._extensions = Extensions(extensions)
        self._ranks = RankGroup(process_group, failure.timeout)
        locked = weakly(self._extensions.locked, None)
        self._hold = DirectoryLock(self._store, self._ranks, failure.timeout.total_seconds(), resume, locked)
        if enable:
            schedule, policy = every if isinstance(every, Schedule) else Schedule(every), Keep.of(keep)
            root = self._store.root if self._stores else None
            alike: dict[str, Any] = {"dir": root, "every": str(schedule), "keep": policy, "resume": resume, **groups}
            alike |= {"save_last": save_last, "storage": name_of(self._storage)}
            options.expect_alike(self._ranks, options.compared(**alike, **compared, **self._extensions.options()))
            token = self._hold.open(dir if self._stores else None)
            parts = self._store, policy, self._storage, self._ranks, token, schedule, read_back
            self._target = StoreTarget(*parts, [self._extensions.manifest_fields])
            self._begin(process_group, sharding)

    def _begin(self, process_group: dist.ProcessGroup | None, sharding: ReplicaSharding | None) -> None:
        """Create the saver, the threads and process groups of all save targets, and the coordinator. Collective."""
        called, target, timeout, names = self._extensions, self._target, self._failure.timeout, ParameterNames()
        every = target.schedule.every if type(target.schedule) is Schedule else None
        training = None if self._ranks.group is None else process_group or dist.group.WORLD
        setup = Setup(
            *(self._ranks, process_group, training, self._store, self._stores, self._storage, names, every, self.dir),
            *(target.token, self.resume, timeout, self._hold.acquire_on_all, weakly(called.is_urged, False)),
        )
        nearer = [each for extension in called.all for each in extension.targets(setup)]
        target.schedule.start(process_group)
        self._background = SaveThreads([*nearer, *[target] * self._stores], timeout, self._failure.on_error == "warn")
        self._saver = Saver(self._background, self._stager, sharding, names, called, self._hold.acquire_to_save)
        self.stats = self._background.stats
        for each in self._background.all:
            each.listeners.append(partial(called.committed, "store" if each.target is target else "tier", each.target))
        for extension in called.all:
            extension.start(setup, weakref.proxy(self._background))
        parts = target.token, self._ranks, self._saver, self._background, called, self._save
        self._together = RankCoordinator(training, *parts)
        warn, kept = self._ranks.rank == 0 and self._save_last, (self.dir, self._saver, self._hold, self._pid)
        self._unclosed = weakref.finalize(self, warn_of_unclosed, *kept) if warn else None
        if self._ranks.group is not None:
            self._background.last.call_when_idle(self._together.look_for_missed)
            followers.add(self._together)

    def _expect_usable(self) -> None:
        """Raise ``ClosedError`` after :meth:`close`, or ``CheckpointError`` in a forked child."""
        if self._closed:
            raise ClosedError("This checkpointer is closed. Construct another one.")
        if os.getpid() != self._pid:
            raise CheckpointError(
                f"This checkpointer belongs to process {self._pid}. A forked child, such as a worker of a DataLoader, "
                "can neither save nor restore with it."
            )

    def lock(self) -> None:
        """Lock ``dir`` now instead of at the first save. Collective. Raises the errors of :meth:`save`."""
        self._expect_usable()
        if self._enabled:
            self._hold.acquire_on_all()

    def maybe_save(self, step: int, state: MutableMapping[str, Any]) -> bool:
        """Save after a step if :meth:`should_save` returns True; return its result. Raises the errors of :meth:`save`.

        If the process is killed before the files are written and the staged copy is confirmed, the checkpoint is lost.
        The next optimizer step, or the next call to this object, confirms the copy. If neither happens, for example
        during an evaluation, the copy is confirmed after 0.5 s, or after the time that the copy took if this is longer.
        """
        self.remember(state, step)
        if self.should_save(step):
            self.save(step, state)
            return True
        self._expect_usable()
        if self._enabled:
            self._background.raise_failure()
        return False

    def should_save(self, step: int) -> bool:
        """Return whether to call :meth:`save` after ``step``; the result is the same on all ranks.

        A program that calls :meth:`save` itself calls this method once per step, instead of :meth:`maybe_save`. The
        result is True at positive multiples of ``every``, at the steps that ``every="auto"`` chooses, and before the
        ranks exit because one of them has received SIGTERM or SIGUSR1.
        """
        first_step.take_step()
        self._seen = checked_step(step)
        if not self._enabled:
            self._extensions.notify(CheckpointExtension.end_step, step, None)
            return False
        self._hold.acquire_to_save()
        self._saver.end_step(step)
        return self._saver.due(step, everywhere=self._extensions.due(step) > Due.NO)

    def goes_everywhere(self, step: int) -> bool:
        """Return True if ``step`` is saved to ``dir`` and the local tier, False if only to the local tier."""
        return not self._enabled or self._saver.goes_everywhere(step)

    def save(self, step: int, state: MutableMapping[str, Any], everywhere: bool = False) -> None:
        """Stage ``state``, then write and commit it in the background.

        Returns as soon as the program may change the state again. While one save is written, a second save may wait; a
        third call blocks until the first save has ended. An existing checkpoint of the same step is replaced.

        Args:
            step: the training step, not negative; the same on all ranks.
            state: the objects and values to save; see :class:`stagereg.Checkpointer`.
            everywhere: save to ``dir`` even if :meth:`should_save` returned True only for the local tier.

        Raises:
            CheckpointError: an earlier save failed; this rank could not stage the state; or, on rank 0, another run
                saves to ``dir``, or ``dir`` is not writable. If only rank 0 raises, the other ranks raise at their next
                call. Complete checkpoints do not change.
            Preempted: a ``SystemExit`` with code 75. A rank received SIGTERM or SIGUSR1, so all ranks exit after this
                step, which is committed.
            Stopped: a ``SystemExit`` with code 128 + signal, raised instead if the step could not be saved.
        """
        self._expect_usable()
        if self._enabled:
            first_step.take_step()
            self.remember(state)
            self._together.save(checked_step(step), everywhere)

    def _save(self, what: str, step: int, targets: Sequence[int] | None, follows: bool) -> None:
        if what == LEAVE:
            self._extensions.notify(CheckpointExtension.leaving)
            failure = self._saver.save_to_leave(step, follows)
            for extension in self._extensions.all:
                extension.exit(step, failure, self._how)
            raise SystemExit(RESUME_CODE if failure is None else 1) from failure
        self._saver.save(step, targets, follows)

    def listen(self, listener: Callable[[int], object]) -> None:
        """Register a function that is called on this rank after each complete checkpoint, before :meth:`wait` returns.

        ``listener(step)`` runs on the background thread and must not use the process group. Its exceptions are logged.
        """
        if self._enabled:
            self._background.last.listeners.append(listener)

    def wait(self) -> None:
        """Wait until every save has ended or timed out. Does not wait until older checkpoints are deleted.

        Raises:
            CheckpointError: a save failed, and the failure was not raised by an earlier call.
        """
        self._expect_usable()
        if self._enabled:
            self._background.wait()
            self._saver.drop_retake()
            self._background.raise_failure()

    def restore(self, state: MutableMapping[str, Any], source: str | os.PathLike[str] | None = None) -> int | None:
        """Load the checkpoint that ``resume`` chooses into the objects and values of ``state``. Collective.

        Objects load their state with ``load_state_dict``; plain tensors and containers change in place, other plain
        values are replaced in ``state``. The random number generators of each rank are restored as well. ``"auto"``
        logs the skipped checkpoints with the reasons, and how many steps the run repeats.

        Args:
            state: the objects and values by their saved names. Entries of the checkpoint may be omitted. In checkpoints
                of other programs, modules and optimizers are found by their parameter names.
            source: the checkpoint to load instead of ``resume``: the path of one checkpoint, or a directory whose
                newest valid checkpoint is loaded. The directory is only read, so another run may write there.

        Returns:
            The step of the checkpoint, or ``None`` if there was no checkpoint to load.

        Raises:
            CheckpointError: on all ranks: the checkpoint that ``resume`` names is missing or corrupt; no checkpoint is
                valid; a checkpoint cannot be accessed, or lacks an entry of ``state``; or an object rejects its entry.
        """
        self._expect_usable()
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
        if restored is None or step is None:  # detect an unsupported state before the first save
            self._ranks.run_on_all("No save could succeed", partial(expect_savable, state))
            return None
        self.restored = path_or_url(restored.path)
        trains = self._hold.acquired or is_program(restored.manifest.command)  # False for an evaluation script
        self._resumed = step if source is None and trains else None
        if self._resumed is not None and self.resume in choosing.RESUME:
            record.emit("resumed", step=step, dir=str(self.dir))
        self._saver.reached = -1  # a run that starts from another run's checkpoint may begin at step 0
        self._background.restored(step, restored.path)
        return step

    def _begin_restore(self, own: bool) -> None:
        self.wait()
        if own:
            self._hold.acquire_to_restore()

    def close(self) -> None:
        """Wait for every save, at most ``timeout``, end the background threads and close the stager. Idempotent.

        Closes everything, and then raises ``CheckpointError`` if a save failed and no call has raised that failure.
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
        if ended:  # while a save hangs, this process must keep the lock
            self._hold.release()
        try:
            self._stager.close()
        finally:
            self._background.raise_failure()

    def __enter__(self) -> Self:
        self._expect_usable()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
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
                    raise  # the failed save is the root cause, and ``error`` is only a consequence on this rank
                self._background.failures.log_after(also, error)
        resumed, last = self._resumed, max(self._seen or 0, self._saver.saved or 0)
        stayed = None if resumed is None or self.restored is None or last > resumed else (resumed, self.restored)
        if self._ranks.rank == 0 and (self._hold.acquired or stayed) and not interrupted:
            outlook = self._extensions.outlook()
            if outlook or not isinstance(error, (Preempted, Stopped)):  # otherwise the newest checkpoint was reported
                self._log_end(error is None, stayed, outlook)

    def _log_end(self, finished: bool, stayed: tuple[int, Path | str] | None, outlook: str) -> None:
        """Log how to resume. ``stayed``: the step and path that this run resumed from, if it took no step since."""
        if finished and stayed is not None:
            _log.warning(_NO_STEP, *stayed, option("checkpoint.dir", "PATH"), option("checkpoint.resume", "never"))
        else:
            text = describe_end(self._background, self.dir, finished, self._how, outlook)
            _log.log(logging.WARNING if outlook else logging.INFO, "stagereg: %s", text)

    def _end(self) -> None:
        """Wait for all ranks and save the last step, after the ``with`` block ended normally. Collective."""
        if self._save_last:
            self._together.end(self._seen)
        self._extensions.notify(CheckpointExtension.ended)
        if self._save_last:
            self._saver.save_last(self._seen, self._resumed)
        if self._background.wait():
            self._extensions.notify(CheckpointExtension.completed)

    @property
    def latest(self) -> Path | str | None:
        """The path or URL of the newest committed checkpoint, or ``None`` if there is no checkpoint."""
        return path_or_url(found.path) if self._enabled and (found := self._store.latest()) else None

    @property
    def every(self) -> int:
        """The number of steps between checkpoints. With ``every="auto"``, the number that is used now."""
        return self._target.schedule.every if self._enabled else 0

    @property
    def saved(self) -> int | None:
        """The last step that was saved to ``dir`` (without ``dir``: to the local tier), or ``None``."""
        return self._saver.stored if self._enabled and self._saver.retake.pending is None else None

    def remember(self, state: MutableMapping[str, Any], step: int | None = None) -> None:
        """Keep a reference to ``state``, so that this rank can join saves of other ranks after it has left its loop."""
        if self._enabled:
            self._saver.remember(checked_state(state), step)
