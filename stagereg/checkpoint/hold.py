"""The lock of a run on its checkpoint directory: rank 0 holds the lock, and no other run writes there meanwhile.

A program that never saves is a reader, and a constructor cannot know that. So constructing takes no lock. Rank 0 takes
the lock when the program first asks for a save (``maybe_save``, ``should_save``, ``save``), or at ``restore`` if the
same command saved the newest checkpoint: the same program with the same arguments (:func:`.command_key`). A crash
between ``restore`` and the first ``maybe_save`` is counted then, and a second run is refused before it trains. An
evaluation can run next to training and start before it. With a tier, whose folder is locked, constructing takes both.

At the start the ranks check that they see one directory, and not a different directory with the same path on each
machine: rank 0 writes a reader's lease, which no run deletes meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from pathlib import Path

from stagereg.base.command import command_key
from stagereg.base.deadline import within
from stagereg.base.machine import machine_name
from stagereg.base.option_text import choice, option
from stagereg.checkpoint.format.manifest import new_token, step_name
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.store.advice import advice
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.checkpoint.store.lease import LeaseRecord
from stagereg.checkpoint.store.lock import Owner, StoreLock
from stagereg.checkpoint.store.readers import reader_name
from stagereg.checkpoint.store.sweep_job import expect_own_job, note_job
from stagereg.errors import CheckpointError, ConfigError, kind_of, name_ranks, reason

SCRATCH = "stagereg-scratch-"
"""Prefix of a folder that receives no checkpoints, so that each machine may have its own folder of that path."""

_PATIENCE_S = 5.0  # seconds for a network file system to show a file that another machine has created
_POLL_INTERVAL_S = 0.05
_SHOWN = 3  # machines that a message names

_log = logging.getLogger(__name__)


class DirectoryLock:
    """The lock of one run, on one rank; only rank 0 acquires the lock.

    Args:
        acquired: called on rank 0 once the lock is acquired.

    Attributes:
        continues: whether the run has restored, so that it owns the checkpoints of earlier runs.
    """

    def __init__(
        self,
        store: CheckpointStore,
        ranks: RankGroup,
        seconds: float,
        resume: str,
        acquired: Callable[[], object] = lambda: None,
    ) -> None:
        self._store, self._ranks, self._seconds, self._resume = store, ranks, seconds, resume
        self._process = os.getpid()  # a forked child takes no lock
        self._lock: StoreLock | None = None
        self._failing = ""  # prefix of error messages
        self._warned = False
        self._known: int | None = None  # serial of the last committed checkpoint that the run has seen
        self.continues = False
        self._when_acquired = acquired

    @property
    def acquired(self) -> bool:
        """Whether this process has taken the lock; it may have released the lock since."""
        return self._lock is not None

    def open(self, given: str | None) -> str:
        """Make sure that all ranks see the directory, and return a token of this run. Collective.

        ``given`` is the directory as the user wrote it, ``None`` if each machine has its own.

        Raises:
            CheckpointError: another job of the sweep has used the directory.
            ConfigError: some rank does not see the file that rank 0 writes.
        """
        root = self._store.root
        named = root if given is None else option("checkpoint.dir", given)
        self._failing = f"Cannot write to {named}"
        scratch = os.path.basename(root).startswith(SCRATCH)
        looks = given is not None and not self._store.backend.remote and not scratch and self._ranks.size > 1
        token, probe = self._ranks.run_on_all(f"Cannot use {named}", partial(self._open, looks))[0]
        if probe:
            self._expect_one_directory(named, probe)
        return token

    def acquire_to_save(self) -> None:
        """Take the lock on rank 0, unless the rank has it; delete the leftovers of dead runs.

        Warns of checkpoints that a run without a restore will delete.

        Raises: ``CheckpointError`` if another run holds the lock, or the directory is not writable or not responding.
        """
        try:
            self._acquire()
        except Exception as error:
            raise kind_of([error])(f"{self._failing}: {reason(error)}") from error
        if self.acquired and not self._warned:
            self._warned = True
            _warn_of_earlier_run(self._store)

    def acquire_on_all(self) -> None:
        """Take the lock as :meth:`acquire_to_save`, without a warning; all ranks raise together. Collective."""
        self._ranks.run_on_all(self._failing, self._acquire)

    def acquire_to_restore(self) -> None:
        """Take the lock on rank 0 if the same command saved the newest checkpoint. Raises: any error."""
        if self._ranks.rank == 0 and self._lock is None:
            self._known = self._store.last_serial()
        newest = self._store.latest() if self._ranks.rank == 0 else None
        if newest is not None and newest.manifest.command == command_key():
            self._acquire()

    def release(self) -> None:
        """Release the lock, so that other runs can write. This run does not take the lock again."""
        self._process = 0
        if self._lock is not None:
            self._store.settle()
            self._lock.release()

    def _open(self, looks: bool) -> tuple[str, str]:
        """Return a token, and the path of a lease that the other ranks must see; an empty path if none was written."""
        if self._ranks.rank > 0:
            return "", ""
        with within(self._seconds):
            expect_own_job(self._store, self._resume)
            if not self._store.backend.remote:  # to list an empty prefix, s3fs lists the parent
                self._known = self._store.last_serial()
        token, probe = new_token(), f"{self._store.root}/{reader_name(step_name(0))}"
        if not looks:
            return token, ""
        try:
            os.makedirs(self._store.root, exist_ok=True)
            self._store.backend.write(probe, LeaseRecord(Owner.ourselves(), token, machine_name(), time.time()).dumps())
        except OSError:  # a reader needs no write permission; a save raises the error later
            return token, ""
        return token, probe

    def _expect_one_directory(self, named: str, probe: str) -> None:
        """Raise ``ConfigError`` on all ranks if some rank does not find the file of rank 0. Collective."""
        store = self._store
        probe = f"{store.root}/{os.path.basename(probe)}"
        try:
            look = partial(_look, probe)
            seen = self._ranks.run_on_all(f"The ranks could not compare their view of {store.root}", look)
            blind: dict[str, list[int]] = {}  # the ranks of each machine that has another directory
            for rank, (machine, sees) in enumerate(seen):
                if not sees:
                    blind.setdefault(machine, []).append(rank)
            if blind:
                there = [f"{machine} ({name_ranks(ranks)})" for machine, ranks in blind.items()]
                more = f", and {len(there) - _SHOWN} more machines" if len(there) > _SHOWN else ""
                raise ConfigError(
                    f"{named} is not the same directory on all machines: the file that rank 0 created on {seen[0][0]} "
                    f"is missing on {', '.join(there[:_SHOWN])}{more}. Give a directory that all machines share, in a "
                    "network file system or an object store, such as s3://BUCKET/RUN. For copies on each machine's own "
                    f"disk, with or without a shared directory, add {choice('tier', 'disk', dir='PATH')}."
                )
        finally:
            if self._ranks.rank == 0:
                store.backend.delete(probe)

    def _acquire(self) -> None:
        if self._ranks.rank > 0 or self._lock is not None or self._process != os.getpid():
            return
        how = self._resume, self.continues, self._known
        root, take = self._store.root, partial(_take, self._store, self._seconds, *how)
        try:
            self._lock = self._store.backend.in_time(self._seconds, take, methodcaller("release"))
        except PermissionError as error:
            if not self._store.backend.remote:
                raise
            raise CheckpointError(f"{reason(error)}. {advice(error, root)}") from error
        self._when_acquired()


def _warn_of_earlier_run(store: CheckpointStore) -> None:
    """Warn of the checkpoints that a run will delete if it saves and has restored nothing."""
    if store.retention.spared:
        _log.warning(
            "stagereg: restore() was not called, and %s has checkpoints of an earlier run, among them %s: each is "
            "deleted once this run has passed its step. To resume from them, call restore(state) before the loop. To "
            "keep them, give this run another directory, %s. To start from scratch on purpose, add %s.",
            store.root,
            ", ".join(sorted(os.path.basename(each) for each in store.retention.spared)[-2:]),
            option("checkpoint.dir", "PATH"),
            option("checkpoint.resume", "never"),
        )


def _look(path: str) -> tuple[str, bool]:
    """Return the name of this machine, and whether a file made on another machine is visible within some seconds."""
    ends = time.monotonic() + _PATIENCE_S
    while True:
        for folder in [*Path(path).parents][::-1]:  # opening a folder makes NFS refresh its entries
            with contextlib.suppress(OSError):
                os.close(os.open(folder, os.O_RDONLY))
        if (sees := os.path.lexists(path)) or time.monotonic() > ends:
            return socket.gethostname(), sees
        time.sleep(_POLL_INTERVAL_S)


def _take(store: CheckpointStore, seconds: float, resume: str, continues: bool, known: int | None) -> StoreLock:
    with within(seconds):
        hold = store.lock()
        failpoint("locked")
        try:
            store.sweep()
            if known is not None and store.last_serial() > known:  # a save of this run would replace that checkpoint
                raise CheckpointError(
                    "another run has saved a checkpoint there since this run began. Start this run again with "
                    f"{option('checkpoint.resume', 'auto')}: it then resumes from that checkpoint"
                )
            expect_own_job(store, resume)
            note_job(store)
            if continues or resume == "never":
                store.retention.spared.clear()
        except BaseException:
            hold.release()
            raise
        failpoint("swept")
        return hold
