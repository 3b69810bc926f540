"""The checkpointer: stages in the training loop, writes and commits in the background, restores at the start.

``save`` copies the state with the stager, the only stall, and hands the copy to one background thread. There the ranks
agree that all of them have staged, write with torch's distributed checkpoint through a storage
(:mod:`stagereg.checkpoint.storage`), and rank 0 commits (:mod:`stagereg.checkpoint.store`). What a checkpoint consists
of is described in :mod:`stagereg.checkpoint.format.manifest`.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, MutableMapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch.distributed as dist

import stagereg.checkpoint.load.choosing as choosing
import stagereg.checkpoint.load.restoring as restoring
import stagereg.checkpoint.options as options
import stagereg.checkpoint.state.entries as entries
import stagereg.record as record
from stagereg.checkpoint.format.manifest import new_token
from stagereg.checkpoint.hold import let_go, take_hold
from stagereg.checkpoint.load.crashes import CrashCounter, is_in_order
from stagereg.checkpoint.options import Failure, Leave, Replicas, Restore
from stagereg.checkpoint.ranks.preemption_consensus import PreemptionConsensus
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.ranks.requests import Requests
from stagereg.checkpoint.ranks.shares import ShareBook
from stagereg.checkpoint.save.background import Background, CheckpointStats
from stagereg.checkpoint.save.on_commit_calls import CommitCalls
from stagereg.checkpoint.save.pending_save import SaveTarget
from stagereg.checkpoint.save.saver import Saver, checked_state, checked_step
from stagereg.checkpoint.save.schedule import Automatic, Schedule
from stagereg.checkpoint.storage.protocol import Storage, expect_fit, name_of
from stagereg.checkpoint.store.keep import Keep, KeepRule
from stagereg.checkpoint.store.lock import StoreLock
from stagereg.checkpoint.store.open_store import is_url, open_parent_store, open_store, path_or_url
from stagereg.checkpoint.together import LEAVE, MOVE, RESTORE, SAVE, Together
from stagereg.errors import CheckpointError, ClosedError
from stagereg.join.peers import followers
from stagereg.launch.rank import command_to_go_on
from stagereg.registry import register
from stagereg.spec import suggests_arguments
from stagereg.stagers.async_stager import AsyncStager, ReleasesCopies, ReservesPadding

_log = logging.getLogger(__name__)

_NO_STEP = (
    "stagereg: NO STEP WAS TAKEN: this run resumed from step %d, in %s, and had none left. To train anew, give it "
    "another checkpoint.dir, or checkpoint.resume=never; to train on, more steps."
)


@register("checkpoint", "default")
class Checkpointer:
    """Saves the state of a training run without stopping it, and brings the run back to where it was.

    Every rank constructs one, calls the same methods with the same steps, and gives the same names; a process without
    an initialised ``torch.distributed`` works alone. Checkpoints are complete or absent: a crash at any moment leaves
    the earlier ones untouched. Plain ``torch.distributed.checkpoint.load(template, checkpoint_id=dir / "latest")``
    reads what the storages ``dcp`` and ``torch_dcp`` wrote.

    A state is a dict of names to objects with ``state_dict`` and ``load_state_dict`` (modules, optimizers, schedulers)
    or plain values (numbers, text, tensors, nested dicts and lists); several modules or several optimizers, such as the
    pipeline stages of a rank, may be a list. Modules and optimizers are saved by the names of parameters without those
    of wrappers, so an optimizer's modules have to be in the same state. Each rank saves what it has: shards of
    ``DTensor`` and ``ZeroRedundancyOptimizer``, stages, experts. What several ranks have alike under one name is stored
    once; plain values that differ are kept for each rank. What else differs is refused, but for buffers, of which the
    lowest rank's are stored; what each rank has for itself is marked :func:`stagereg.per_rank`. The step
    and every rank's random number generators are added by themselves.

    What some ranks have saved any other number of ranks restore, split in any other way, bit for bit; all but the
    random number generators and what is per rank, which as many ranks alone restore.

    Saving a step that is there already writes the new checkpoint beside the old one and exchanges the two. Only one run
    at a time may write to a directory.

    Args:
        dir: where the checkpoints go; created if it is not there. All ranks see the same file system.
        every: ``maybe_save`` saves at the steps that are multiples of this, at least 1. ``"auto"`` saves as often as
            loses least time to checkpoints and failures together, from what saves turn out to cost: first after 10
            steps, then at the interval that is best for ``failure.mtbf``.
        keep: how many of the newest checkpoints stay, at least 1, or which of all: :class:`stagereg.Keep`, or a
            component of the kind ``keep``. The disk needs space for one more, since an old one goes only when the new
            one is complete.
        resume: what ``restore`` loads: ``"auto"`` the newest undamaged checkpoint, if there is one; ``"never"``
            nothing; ``"latest"`` the newest, which must be there; or the path of a checkpoint directory, also of one
            that ``torch.distributed.checkpoint.save`` wrote. A bare name, ``step-00000300``, is one in ``dir``, or if
            there is none, in the working folder; where both have it, an error.
        stager: copies the state, or the name that one is registered by, ``None`` for ``overlapped``; the checkpointer
            closes it.
        storage: writes the files, or a name, ``None`` for ``dcp``. A checkpoint is read through the storage that wrote
            it, whatever is given here.
        process_group: the ranks that save together, ``None`` for all of them. A gloo group with the same ranks is made
            for the checkpointer's own use, so constructing is collective.
        restore: how :meth:`restore` chooses and reads a checkpoint: :class:`stagereg.Restore`.
        failure: what may fail, and what then: :class:`stagereg.Failure`.
        replicas: how what several ranks hold alike is saved: :class:`stagereg.Replicas`.
        leave: how a run ends: :class:`stagereg.Leave`.
        enable: False makes all methods do nothing: nothing is saved, and nothing is restored.
        on_commit: what rank 0 calls in the background for each complete checkpoint: components of the kind
            ``on_commit`` or functions of one argument, a :class:`.CommittedCheckpoint`; a list, or a mapping by name,
            as ``+on_commit@checkpoint.on_commit.tracker=wandb`` makes it. One that fails, or takes longer than
            ``failure.timeout``, is logged and counted in ``stats``, and fails nothing. :meth:`close` waits as long.

    Attributes:
        preemption: whether the ranks are to leave; ``None`` without ``leave.grace``.
        restored: the directory of the checkpoint that :meth:`restore` loaded last, a URL if it is one; else ``None``.
        stats: what the checkpoints have cost so far, on this rank; goes on counting.

    Raises:
        ConfigError: an option is of no use, or the ranks differ in one.
        CheckpointError: on all ranks, if rank 0 cannot create files in ``dir``.

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
        dir: str,
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
    ) -> None:
        groups = {"restore": restore, "failure": failure, "replicas": replicas, "leave": leave}
        options.check_all({"dir": dir, "every": every, "keep": keep, "resume": resume, **groups})
        self.enable = enable
        self._store = open_store(dir)
        self.dir = path_or_url(self._store.root)
        self.keep, self.resume = keep, resume
        self.verify, self.read, self.cast, self.fresh = restore.verify, restore.read, restore.cast, restore.fresh
        self.timeout, self.save_last = failure.timeout, leave.save_last
        self._stager: AsyncStager = options.component("stager", stager, "overlapped")
        self._storage: Storage = options.component("storage", storage, "dcp")
        if isinstance(self._storage, Storage) and isinstance(self._stager, ReservesPadding):
            self._stager.reserve_padding(*self._storage.padding)
        if isinstance(self._stager, ReleasesCopies):
            self._stager.expect_release()
        expect_fit(self._storage, self._store.root)
        components = options.on_commit(on_commit)
        self.stats = CheckpointStats()
        self.preemption: PreemptionConsensus | None = None
        self.restored: Path | str | None = None
        self._hold: StoreLock | None = None
        self._seen: int | None = None  # the step last asked about
        self._resumed: int | None = None  # the step that ``resume`` has led to
        self._closed = False
        self._pid = os.getpid()
        self._schedule = Schedule(every if isinstance(every, int) else 1)
        self._ranks = RankGroup(process_group, failure.timeout)
        if not enable:
            return
        policy = Keep.of(keep)
        compared = policy if isinstance(policy, Keep) else policy.name
        alike = options.compared(every=every, keep=compared, resume=resume, **groups)
        alike |= {"dir": self._store.root, "storage": name_of(self._storage)}
        options.expect_alike(self._ranks.run_on_all("The ranks could not compare their options", lambda: alike))
        opened = self._ranks.run_on_all(f"checkpoint.dir={dir} cannot be written to", self._open)
        if resume == "never":
            self._store.retention.spared.clear()
        # The training threads have groups of their own: one for each kind of exchange, since not all ranks may come to
        # each, and those of two kinds must not meet.
        if every == "auto":
            self._schedule = Automatic(failure.mtbf.total_seconds(), RankGroup(process_group))
        self._target = SaveTarget(self._store, policy, self._storage, self._ranks, opened[0])
        self._background = Background(self._target, failure.timeout, self._schedule, failure.on_error == "warn")
        shared = ShareBook(replicas.verify_every, replicas.share)
        self._saver = Saver(self._target, self._stager, self._background, self._schedule, shared, restore.cast)
        self.stats = self._background.stats
        self._crashes = CrashCounter(self._store, restore.give_up_after, counts=self._ranks.rank == 0)
        self._background.listeners.append(self._crashes.committed)
        if self._ranks.rank == 0:
            self._target.metrics.listen(self._background.note_metrics)
        training = None if self._ranks.group is None else process_group or dist.group.WORLD
        if leave.grace is not None:
            newest = self._background.describe_newest
            exchanges = Requests(training, f"checkpoint/{opened[0]}/signals")
            ranks = RankGroup(process_group)
            self.preemption = PreemptionConsensus(ranks, leave.grace.total_seconds(), newest, exchanges)
        self._together = Together(training, f"checkpoint/{opened[0]}", self._ranks, self._saver, self.preemption)
        components = components if self._ranks.rank == 0 else {}
        self._calls = CommitCalls(components, self._background, self._target.metrics, self.preemption)
        self._unclosed: Any = None
        if self._ranks.rank == 0 and leave.save_last:
            self._unclosed = weakref.finalize(self, _warn_of_unclosed, self.dir, self._saver, self._pid)
        if training is not None:
            self._background.call_when_idle(self._together.look_for_missed)
            followers.add(self)

    def maybe_save(self, step: int, state: MutableMapping[str, Any]) -> bool:
        """Save if that is :meth:`due`; return whether it did. Call it at the end of each step.

        Raises as :meth:`save` does.
        """
        self.remember(state)
        if self.due(step):
            self.save(step, state)
            return True
        self._check_open()
        if self.enable:
            self._background.raise_failure()
        return False

    def due(self, step: int) -> bool:
        """Whether it is time to save: ``step`` is a positive multiple of ``every``, or with ``"auto"`` the step agreed
        upon has come; or the ranks have agreed to leave after this step, since one of them got SIGTERM or SIGUSR1.

        For programs that call :meth:`save` themselves, once a step in place of :meth:`maybe_save`. Of the ranks that
        call it with the same step, all get the same answer.
        """
        record.emit("step", step=checked_step(step))
        self._seen = step
        if not self.enable:
            return False
        self._saver.end_step(step)
        self._calls.at_step(step)
        leaves = self.preemption is not None and self.preemption.agreed_at(step)
        return self._schedule.due(step) or leaves

    def save(self, step: int, state: MutableMapping[str, Any]) -> None:
        """Stage ``state`` and let it be written and committed in the background.

        Returns when the stager allows the state to change again. One save may be written while the next one waits; a
        third call first waits for the oldest to end.

        Args:
            step: the training step, not negative; the same on all ranks.
            state: what to save, see the class.

        Raises:
            CheckpointError: an earlier save failed, or this rank could not stage the state (the other ranks then raise
                at their next call), or the checkpointer is closed. Checkpoints that were complete stay.
            Preempted: (a ``SystemExit`` with code 75) this is the step that the ranks have agreed to leave after, since
                one of them got SIGTERM or SIGUSR1, and it is saved and committed.
            Stopped: (a ``SystemExit`` with code 128 + signal) likewise, and it could not be saved.
        """
        self._check_open()
        if not self.enable:
            return
        self.remember(state)
        what = SAVE
        if not self._saver.leaving:
            if self.preemption is not None and self.preemption.agreed_before_save(step):
                what = LEAVE
            self._together.post(f"{what} {checked_step(step)}")
        self._save(what, step)

    def follow(self) -> None:
        """Save, or leave, as ranks in a loop do that this rank has left. Called by a join, between two steps."""
        if self.preemption is not None:
            self.preemption.follow()
        while not self._closed and (entry := self._together.take()) is not None:
            what, _, step = entry.partition(" ")  # or where to
            if what == RESTORE:
                self._together.answer(entry)
            elif what == MOVE:
                self._finish("saved")
                self._move(step)
            else:
                self._save(what, int(step), follows=True)

    def loop_ended(self) -> None:
        """No rank is in the loop of a join any more. Called by the join, on all ranks."""
        if self.preemption is not None:
            self.preemption.loop_ended()

    def _save(self, what: str, step: int, follows: bool = False) -> None:
        if self._store.retention.spared and self.saved is None:
            _log.warning(
                "stagereg: restore() was not called, and %s has checkpoints of an earlier run, among them %s: each is "
                "deleted when this run has passed its step. Call restore(state) before the loop to go on from them; or "
                "give this run another directory, or say that it starts anew, with resume='never'.",
                self.dir,
                ", ".join(sorted(os.path.basename(each) for each in self._store.retention.spared)[-2:]),
            )
        if what == LEAVE:
            assert self.preemption is not None
            self._calls.leave()
            self._saver.leave(step, self.preemption, str(self.dir), follows)
        self._saver.save(step, follows)

    def listen(self, listener: Callable[[int], object]) -> None:
        """Call ``listener(step)`` on this rank for each complete checkpoint from now on, before :meth:`wait` returns.

        On the background thread, so it must not use the process group; it holds up the next save, not training.
        What it raises is logged: the checkpoint is there.
        """
        if self.enable:
            self._background.listeners.append(listener)

    def wait(self) -> None:
        """Wait until every save has ended, or has taken longer than ``timeout``; not for the deletion of older ones.

        Raises:
            CheckpointError: one failed, and no call has raised that yet.
        """
        self._check_open()
        if self.enable:
            self._background.wait()
            self._background.raise_failure()

    def move_to(self, dir: str | os.PathLike[str]) -> None:
        """Let saves from now on go to another directory, with the same copies and plans; call it on all ranks.

        Waits for the saves under way, and lets go of the directory that it had. One that is not there yet appears with
        its first complete checkpoint; a run killed before leaves ``.NAME.tmp`` beside it, which the next one deletes.

        Raises:
            CheckpointError: on all ranks: a save failed, and no call has raised that yet, or another run writes there.
            ConfigError: the storage cannot write there, or the ranks name different directories.
        """
        self._check_open()
        where = os.fspath(dir)
        options.at_directory(where)
        if self.enable and path_or_url(open_store(where).root) != self.dir:
            self._finish("saved")
            self._together.post(f"{MOVE} {where}")
            self._move(where)

    def _move(self, dir: str) -> None:
        store = open_store(dir)
        expect_fit(self._storage, store.root)
        taken: list[StoreLock] = []

        def take() -> bool:
            hidden = not is_url(store.root) and not os.path.lexists(store.root)
            self.wait()
            if self._ranks.rank == 0:
                if hidden:
                    store.hide()
                taken.append(take_hold(store, self.timeout.total_seconds(), self.resume))
            return hidden

        try:
            named = self._ranks.run_on_all("The ranks could not compare their directories", lambda: {"dir": store.root})
            options.expect_alike(named)
            hidden = self._ranks.run_on_all(f"{dir} cannot be written to", take)[0]
        except BaseException:
            for lock in taken:
                lock.release()
            raise
        if hidden and not store.appears_as:
            store.hide()
        self._let_go()
        self._hold = taken[0] if taken else None
        self._store = self._target.store = store
        self._crashes.move(store)
        self._saver.reached = -1
        self._target.metrics.forget_steps()
        self.dir = path_or_url(store.appears_as or store.root)
        self._background.newest = None
        if self.resume == "never":
            store.retention.spared.clear()

    def restore(self, state: MutableMapping[str, Any], source: str | os.PathLike[str] | None = None) -> int | None:
        """Load a checkpoint, chosen by ``resume``, into the objects and values of ``state``; call it on all ranks.

        Objects take their state with ``load_state_dict``; plain tensors and containers change in place, other plain
        values are replaced in ``state``. The random number generators of each rank are set as well. The files are
        looked at first, as ``restore.verify`` says. ``"auto"`` passes over damaged and incomplete checkpoints, and
        those that runs crash after (``restore.give_up_after``), and logs what is wrong with each, and how many steps
        are lost; nothing of them has got into any object by then, or, with ``restore.read="once"``, all of it is
        overwritten.

        Args:
            state: the same names as were saved, or some of them; of what others saved, modules and optimizers are
                found by the names of their parameters.
            source: what to load in place of what ``resume`` says: one checkpoint, or a directory of checkpoints, of
                which it is the newest undamaged one. It is read only, also while another run writes there.

        Returns:
            The step of the checkpoint, or ``None`` if none was to be loaded.

        Raises:
            CheckpointError: on all ranks: the checkpoint named by ``resume`` is not there, incomplete or damaged; there
                are checkpoints and none of them is good; one cannot be looked at; it has no entry of some name; an
                object does not take what was saved.
        """
        self._check_open()
        if not self.enable:
            return None
        checked_state(state)
        self._finish("restored")
        self._together.post(RESTORE)
        self.remember(state)
        store, resume = (self._store, self.resume) if source is None else choosing.sought(os.fspath(source))
        if resume not in options.RESUME and os.path.basename(resume) == resume:  # a bare name
            [resume, *_] = self._ranks.run_on_all("Nothing was restored", partial(choosing.path_named, store, resume))
        if resume == "never":
            self._ranks.run_on_all("Nothing was restored", self.wait)
            return None
        where = store, resume, self.verify, self.read, self.cast, state, self._storage
        who = self._ranks, self._saver.names, self.wait, self._crashes, self.fresh
        restored = restoring.restore(restoring.RestoreRequest(*where, *who))
        self._store.retention.spared.clear()
        self._target.metrics.forget_steps()
        if self._ranks.rank == 0:
            begins = "training starts from scratch" if restored is None else f"resumed from {restored.path}"
            _log.info("stagereg: %s%s", "" if source else f"checkpoints go to {self.dir}; ", begins)
        if restored is None:  # now, and not at the first save
            self._ranks.run_on_all("No save could succeed", partial(entries.expect_savable, state))
            return None
        self.restored = path_or_url(restored.path)
        self._resumed = restored.manifest.step if source is None else None
        self._schedule.restored(restored.manifest.step)
        self._saver.reached = -1  # also a run that begins with what another one has trained counts anew
        if os.path.realpath(open_parent_store(restored.path).root) == os.path.realpath(self._store.root):
            self._background.newest = restored.manifest.step
        return restored.manifest.step

    def _finish(self, done: str) -> None:
        """Wait for every save before an exchange on the training thread."""
        self._background.finish()
        if self._background.hanging:  # in an exchange with the other ranks, which another one must not meet
            self._background.raise_failure()
            raise CheckpointError(f"Nothing was {done}: a save has not ended yet, since the storage hangs.")

    def close(self) -> None:
        """Wait for every save, no longer than ``timeout``, end the thread and close the stager. Twice is harmless.

        Raises:
            CheckpointError: a save failed, and no call has raised that yet; everything is closed nevertheless.
        """
        if self._closed:
            return
        if not self.enable:
            self._closed = True
            self._stager.close()
            return
        if self._unclosed is not None:
            self._unclosed.detach()
        self._together.leave()
        ended = self._background.finish()
        self._closed = True
        self._calls.close()
        if self.preemption is not None:
            self.preemption.close()
        self._background.close()
        if ended:  # else a thread hangs, and no other run may write before this process ends
            self._let_go()
        try:
            self._stager.close()
        finally:
            self._background.raise_failure()

    def __enter__(self) -> Checkpointer:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.enable:
            self.close()
            return
        interrupted = isinstance(error, KeyboardInterrupt)
        if interrupted and self._ranks.rank == 0:
            _log.warning("stagereg: interrupted. %s", self._describe_end(finished=False))
        self._crashes.crashed = True  # unless all ranks come to the end
        try:
            if error is None and self.save_last:
                try:
                    self._together.end(self._seen)
                except CheckpointError:
                    self._background.raise_failure()  # of a save, which says more
                    raise
            self._crashes.crashed = not is_in_order(error)
            if error is None and self.save_last:
                self._saver.save_last(self._seen)
        finally:
            try:
                self.close()
            except Exception as also:
                if error is None:
                    raise
                _log.error("While another error ended the training: %s", also)
        if self._ranks.rank == 0 and not interrupted:
            if error is None and self._resumed is not None and max(self._seen or 0, self.saved or 0) <= self._resumed:
                _log.warning(_NO_STEP, self._resumed, self.restored)
            else:
                _log.info("stagereg: %s", self._describe_end(finished=error is None))

    @property
    def latest(self) -> Path | str | None:
        """The directory of the checkpoint committed last, a URL if ``dir`` is one; ``None`` if there is none yet."""
        found = self._store.latest() if self.enable else None
        return None if found is None else path_or_url(found.path)

    @property
    def every(self) -> int:
        """Steps from one checkpoint to the next; with ``"auto"``, as it is at present."""
        return self._schedule.every

    @property
    def saved(self) -> int | None:
        """The step last given to :meth:`save`, or ``None``: shows whether the last step is yet to be saved."""
        return self._saver.saved if self.enable else None

    def remember(self, state: MutableMapping[str, Any]) -> None:
        """Keep what this rank would have to save if it left a loop; done by :meth:`maybe_save` and :meth:`restore`."""
        if self.enable:
            self._saver.remember(checked_state(state))

    def _describe_end(self, finished: bool) -> str:
        """Return what there is to go on from, and how."""
        newest = self._background.describe_newest()
        if self._background.newest is None:
            return newest
        command = command_to_go_on(str(self.dir))
        if command == "the same command":
            return f"{newest} The same command goes on from there{', if it has more steps to take' * finished}."
        return f"{newest} The same command would start anew, in a directory of its own; to go on, run {command}."

    def _open(self) -> str:
        """Take hold of the directory on rank 0; return a token of this run, of which that of rank 0 counts."""
        if self._ranks.rank == 0:
            self._hold = take_hold(self._store, self.timeout.total_seconds(), self.resume)
        return new_token()

    def _let_go(self) -> None:
        self._crashes.leave()
        if self._hold is not None:
            let_go(self._store, self._hold)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("This checkpointer is closed; construct another one.")
        if os.getpid() != self._pid:
            raise CheckpointError(
                f"This checkpointer is of process {self._pid}; a forked child, such as a worker of a DataLoader, can "
                "neither save nor restore through it."
            )


def _warn_of_unclosed(dir: Path | str, saver: Saver, pid: int) -> None:
    """Log that a program has dropped a checkpointer, or has ended by itself, without ``close()``."""
    own = os.getpid() == pid  # and not a forked child's
    if own and not saver.leaving and getattr(sys, "last_value", None) is None:  # which has what ended the program
        _log.warning(
            "stagereg: the Checkpointer of %s was not closed: its last step is saved only if that was one to save. Put "
            "the loop into `with Checkpointer(...) as checkpointer:`, whose end saves it; or call close() at the end.",
            dir,
        )
