"""The checkpointer: stages in the training loop, writes and commits in the background, restores at the start."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch.distributed as dist

import stagereg.base.record as record
import stagereg.checkpoint.load.choosing as choosing
import stagereg.checkpoint.load.restoring as restoring
import stagereg.checkpoint.options as options
from stagereg.base import first_step
from stagereg.base.command import is_program
from stagereg.base.followers import followers
from stagereg.base.option_text import constructed
from stagereg.base.spec import suggests_arguments
from stagereg.base.uncaught import print_once
from stagereg.checkpoint.end_report import describe_end, expect_usable, log_end, warn_of_unclosed
from stagereg.checkpoint.extension import RestoreExtension, RestoreRequest
from stagereg.checkpoint.hold import DirectoryLock
from stagereg.checkpoint.load.read_back import read_back
from stagereg.checkpoint.options import Failure, Leave, Replicas, Restore
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.save.save_thread import CheckpointStats
from stagereg.checkpoint.save.save_threads import SaveThreads
from stagereg.checkpoint.save.saver import Saver, checked_state, checked_step
from stagereg.checkpoint.save.schedule import schedule_of
from stagereg.checkpoint.save.store_target import StoreTarget
from stagereg.checkpoint.state.nested import expect_savable
from stagereg.checkpoint.state.optimizer_state import ParameterNames
from stagereg.checkpoint.storage.protocol import Storage, expect_fit, name_of
from stagereg.checkpoint.store.keep import Keep, KeepRule
from stagereg.checkpoint.store.open_store import open_parent_store, open_store, path_or_url
from stagereg.checkpoint.together import LEAVE, RESTORE, RankCoordinator
from stagereg.errors import is_consequence
from stagereg.extensions.callbacks.calls import CommitCalls
from stagereg.extensions.callbacks.on_commit import OnCommit
from stagereg.extensions.diagnostics.checks import Diagnostics
from stagereg.extensions.goodput import phases
from stagereg.extensions.preemption.consensus import PreemptionConsensus
from stagereg.extensions.recovery.quarantine import Quarantine
from stagereg.extensions.recovery.survivors import Survivors, await_saved
from stagereg.extensions.replicas.shares import ReplicaShards
from stagereg.extensions.retention.logged_metrics import LoggedMetrics
from stagereg.extensions.tiers.tier import Tier
from stagereg.extensions.tiers.tiering import Tiering, acquire_with_tier, notes_of
from stagereg.registry import register
from stagereg.stagers.async_stager import AsyncStager

_log = logging.getLogger(__name__)


@register("checkpoint", "default")
class Checkpointer:
    """Saves the state of a training run without stopping it, and brings the run back to where it was.

    Every rank constructs one, calls the same methods with the same steps, and gives the same names; a process without
    an initialised ``torch.distributed`` works alone. Checkpoints are complete or absent: a crash at any moment leaves
    the earlier ones untouched. One run at a time saves in a directory: the first :meth:`maybe_save`, :meth:`due` or
    :meth:`save` locks it, or :meth:`restore` if the same command has saved there. A program that calls none of these
    is a reader: it locks nothing, leaves nothing, and may run next to training.

    A state is a dict of names to objects with ``state_dict`` and ``load_state_dict`` (modules, optimizers, schedulers),
    lists and dicts of such objects, or plain values (numbers, text, tensors, nested dicts and lists). The modules of an
    optimizer must be in the same state. :func:`stagereg.per_rank` marks what each rank has for itself. The step and
    each rank's random number generators are added. docs/checkpoints.md has the rules for several ranks.

    Args:
        dir: where the checkpoints go; created if it is not there. It has to be the same directory on all machines.
            ``None`` where ``tier`` alone keeps them.
        every: ``maybe_save`` saves at the steps that are multiples of this, at least 1. ``"auto"`` saves as often as
            loses least time to checkpoints and failures, by what saves turn out to cost and ``failure.mtbf``.
        keep: how many of the newest checkpoints stay, at least 1, or which of all: :class:`stagereg.Keep` or a
            component of the kind ``keep``. The disk needs space for one more: an old one goes when a new one is there.
        resume: what ``restore`` loads: ``"auto"`` the newest undamaged checkpoint, if there is one; ``"never"``
            nothing; ``"latest"`` the newest, which must be there; or the path of a checkpoint, also of plain torch. A
            bare name, ``step-00000300``, is one in ``dir``, or else in the working folder.
        stager: copies the state, or its name, ``None`` for ``overlapped``; the checkpointer closes it.
        storage: writes the files, or its name, ``None`` for ``dcp``. A checkpoint is read by the one that wrote it.
        process_group: the ranks that save together, ``None`` for all of them. Constructing is collective.
        restore: how :meth:`restore` chooses and reads a checkpoint: :class:`stagereg.Restore`.
        failure: what may fail, and what then: :class:`stagereg.Failure`.
        replicas: how what several ranks hold alike is saved: :class:`stagereg.Replicas`.
        leave: how a run ends: :class:`stagereg.Leave`.
        tier: keeps copies nearer than ``dir``, in memory or on disks of the machines, and saves more often: a component
            of the kind ``tier``, or its name, ``None`` for ``none``. docs/tiers.md has what it survives.
        enable: False makes all methods do nothing: nothing is saved, and nothing is restored.
        on_commit: what rank 0 calls in the background for each complete checkpoint: components of the kind
            ``on_commit`` or functions of one argument, a :class:`.CommittedCheckpoint`; a list, or a mapping by name.
            One that fails, or takes longer than ``failure.timeout``, is logged and counted in ``stats``, and fails
            nothing. :meth:`close` waits as long.

    Attributes:
        preemption: whether the ranks are to leave; ``None`` without ``leave.grace``.
        restored: the directory of the checkpoint that :meth:`restore` loaded last, a URL if it is one; else ``None``.
        stats: what the checkpoints have cost so far, on this rank; goes on counting.

    Raises:
        ConfigError: an option is of no use, the ranks differ in one, or ``dir`` is another directory on some machine.
        CheckpointError: on all ranks: another job of the sweep has had ``dir``; with a tier, see :meth:`lock`.

    Example::

        with Checkpointer("runs/gpt", every=100) as checkpointer:
            start = checkpointer.restore(state) or 0
            for step in range(start + 1, steps + 1):
                train_one_step()
                checkpointer.maybe_save(step, state)
    """

    check_options = staticmethod(options.check_all)

    @suggests_arguments
    def __init__(
        self,
        dir: str | None,
        every: int | Literal["auto"] = 100,
        keep: int | Keep | KeepRule = Keep(),  # noqa: B008  # it cannot change
        resume: str = "auto",
        stager: AsyncStager | str | None = None,
        storage: Storage | str | None = None,
        process_group: dist.ProcessGroup | None = None,
        restore: Restore = Restore(),  # noqa: B008  # it cannot change, nor can those below
        failure: Failure = Failure(),  # noqa: B008
        replicas: Replicas = Replicas(),  # noqa: B008
        leave: Leave = Leave(),  # noqa: B008
        enable: bool = True,
        on_commit: Any = None,
        tier: Tier | str | None = None,
    ) -> None:
        constructed("checkpoint")
        print_once()
        groups = {"restore": restore, "failure": failure, "replicas": replicas, "leave": leave}
        chosen: Tier = options.component("tier", tier, "none")
        self._stores, place = dir is not None, notes_of(chosen) if dir is None else dir
        options.check_all({"dir": place, "every": every, "keep": keep, "resume": resume, **groups})
        self.resume, self.restore_options = resume, restore
        self._enabled, self._failure, self._leave = enable, failure, leave
        self._store = open_store(place)
        self.dir = path_or_url(self._store.root if self._stores else chosen.dir)
        self._stager: AsyncStager = options.component("stager", stager, "overlapped")
        self._storage: Storage = options.component("storage", storage, "dcp")
        expect_fit(self._storage, self._store.root)
        components = options.on_commit(on_commit)
        self.stats = CheckpointStats()
        self.preemption: PreemptionConsensus | None = None
        self.restored: Path | str | None = None
        self._seen: int | None = None  # the step last asked about
        self._resumed: int | None = None  # the step that ``resume`` has led to
        self._how: str | None = None  # ``resume``, once :meth:`restore` is called
        self._closed, self._pid = False, os.getpid()
        self._ranks = RankGroup(process_group, failure.timeout)
        self._hold = DirectoryLock(self._store, self._ranks, failure.timeout.total_seconds(), resume)
        if enable:
            policy = Keep.of(keep)
            root, names = dir and self._store.root, {"storage": name_of(self._storage), "tier": str(chosen)}
            alike = options.compared(dir=root, every=every, keep=policy, resume=resume, **groups, **names)
            options.expect_alike(self._ranks, alike)
            token = self._hold.open(dir)
            acquire_with_tier(chosen, self._hold, self._ranks, self._stores)
            phases.saves_to(str(self.dir))
            schedule = schedule_of(every, failure.mtbf, process_group)
            self._metrics = LoggedMetrics(self._ranks.rank == 0)
            saving = self._store, policy, self._storage, self._ranks, token, schedule, read_back
            self._target = StoreTarget(*saving, [self._metrics.manifest_fields])
            self._tiering = Tiering(chosen, process_group, self._store, self._stores, failure)
            self._begin(replicas, process_group, components)

    def _begin(
        self, replicas: Replicas, process_group: dist.ProcessGroup | None, components: Mapping[str, OnCommit]
    ) -> None:
        """Make what saves and exchanges, on all ranks: one group for each kind of exchange, which must not meet."""
        near, first = self._tiering, self._ranks.rank == 0
        warns, cast = self._failure.on_error == "warn", self.restore_options.cast
        shared = ReplicaShards(replicas.verify_every, replicas.share)
        targets = [*([] if near.target is None else [near.target]), *([self._target] if self._stores else [])]
        self._background = SaveThreads(targets, self._failure.timeout, warns)
        names, token = ParameterNames(), self._target.token
        survivors = [Survivors(self._target, names, self._background)] if self._stores else []
        checks = Diagnostics(self._target, self._stores, cast, self._stager)
        self._observers: list[Any] = [checks, self._metrics, *survivors]
        self._saver = Saver(self._background, self._stager, shared, names, self._observers)
        self.stats = self._background.stats
        most = self.restore_options.max_crashes
        self._crashes = near.counter(self._store, most, first, self._background, token)
        self._restores: list[RestoreExtension] = [*near.restores, Quarantine(self._crashes)]
        self._hold.when_acquired, self._saver.ready = self._crashes.hold, self._hold.acquire_to_save
        parts = token, self._ranks, self._saver, self._leave.grace, self._background, self._save
        self._together = RankCoordinator(process_group, *parts)
        self.preemption = self._together.preemption
        self._calls = CommitCalls(components if first else {}, self._target, self._background, self.preemption)
        warn, kept = first and self._leave.save_last, (self.dir, self._saver, self._hold, self._pid)
        self._unclosed = weakref.finalize(self, warn_of_unclosed, *kept) if warn else None
        if self._ranks.group is not None:
            self._background.call_when_idle(self._together.look_for_missed)
            followers.add(self._together)

    def lock(self) -> None:
        """Lock ``dir`` now, and not at the first call that asks for a save. Collective. Raises as :meth:`save`."""
        expect_usable(self._closed, self._pid)
        if self._enabled:
            self._hold.acquire_on_all()

    def maybe_save(self, step: int, state: MutableMapping[str, Any]) -> bool:
        """Save if that is :meth:`due`, at the end of each step; return whether it did. Raises as :meth:`save` does.

        The checkpoint is complete once it is written and its copy is confirmed; a kill before that loses it. The next
        optimizer step or call confirms the copy. A loop that evaluates or idles has neither: there it takes 0.5 s, or
        as long as the copy has taken.
        """
        self.remember(state, step)
        if self.due(step):
            self.save(step, state)
            return True
        expect_usable(self._closed, self._pid)
        if self._enabled:
            self._background.raise_failure()
        return False

    def due(self, step: int) -> bool:
        """Whether to save, or to leave, after ``step``: of the ranks that call it with one step, all get one answer.

        For programs that call :meth:`save` themselves, once a step in place of :meth:`maybe_save`: true at positive
        multiples of ``every``, at what ``"auto"`` has agreed upon, and when one rank got SIGTERM or SIGUSR1.
        """
        phases.take_step(checked_step(step))
        self._seen = step
        if not self._enabled:
            return False
        self._hold.acquire_to_save()
        self._saver.end_step(step)
        return self._saver.due(step, everywhere=self.preemption is not None and self.preemption.agreed_at(step))

    def goes_everywhere(self, step: int) -> bool:
        """Whether a save of ``step`` goes to ``dir`` and the tier; False if :meth:`due` asks for the tier alone."""
        return not self._enabled or self._saver.goes_everywhere(step)

    def save(self, step: int, state: MutableMapping[str, Any], everywhere: bool = False) -> None:
        """Stage ``state`` and let it be written and committed in the background.

        Returns when the stager allows the state to change again. One save may be written while the next one waits; a
        third call first waits for the oldest to end. A step that is there already is replaced.

        Args:
            step: the training step, not negative; the same on all ranks.
            state: what to save, see the class.
            everywhere: in ``dir`` also if :meth:`due` has asked for the tier alone.

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
        if what == LEAVE and self.preemption is not None:
            self._calls.leave()
            self._saver.leave(step, self.preemption, str(self.dir), self._how, follows)
        self._saver.save(step, targets, follows)

    def listen(self, listener: Callable[[int], object]) -> None:
        """Call ``listener(step)`` on this rank for each complete checkpoint from now on, before :meth:`wait` returns.

        On the background thread: it must not use the process group. What it raises is logged; the checkpoint is there.
        """
        if self._enabled:
            self._background.last.listeners.append(listener)

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
        restored = restoring.restore(asked, self._restores, partial(self._begin_restore, own))
        step = None if restored is None else restored.manifest.step
        self._store.retention.spared.clear()
        self._hold.continues = True
        self._metrics.forget_steps()
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
        stored = os.path.realpath(open_parent_store(restored.path).root) == os.path.realpath(self._store.root)
        there = self._target if stored else self._tiering.target if self._tiering.names(restored.path) else None
        self._background.restored(step, there)
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
        for each in self._observers:
            each.close(ended)
        self._calls.close()
        if self.preemption is not None:
            self.preemption.close()
        self._background.close()
        self._tiering.close()
        if ended:  # else a thread hangs, and no other run may write before this process ends
            self._crashes.leave()
            self._hold.release()
        try:
            self._stager.close()
        finally:
            self._background.raise_failure()

    def __enter__(self) -> Checkpointer:
        expect_usable(self._closed, self._pid)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._enabled:
            self.close()
            return
        await_saved(error)
        interrupted = isinstance(error, KeyboardInterrupt)
        if interrupted and self._hold.acquired:
            _log.warning("stagereg: interrupted. %s", describe_end(self._background, self.dir, False, self._how))
        self._crashes.crashed = True  # unless all ranks come to the end
        try:
            if error is not None:
                self._crashes.failed(error)
            elif self._leave.save_last:
                self._together.end(self._seen)
            self._crashes.crashed &= error is not None
            if error is None and self._leave.save_last:
                self._saver.save_last(self._seen)
            if error is None and self._background.wait():
                stored = self._background.last.newest if self._stores else None
                self._tiering.finish(self._background.all[0].newest, stored)
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
            skipped = self._crashes.skipped_next()
            log_end(self._background, self.dir, error is None, self._how, stayed, skipped)

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
