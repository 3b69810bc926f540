"""The lock of a run on its checkpoint directory. While rank 0 holds the lock, no other run writes there.

The constructor of a Checkpointer does not acquire the lock, because a program may only read. Rank 0 acquires the lock
at the first call to ``maybe_save``, ``should_save`` or ``save``. It acquires the lock in ``restore`` if a run with the
same command line (:func:`.command_key`) saved the newest checkpoint. So a crash between ``restore`` and the first
``maybe_save`` is counted, and a second run fails before it trains. An evaluation, which has another command line, can
run at the same time. With a local tier, the constructor already locks the tier's folder and the directory.

The constructor also checks that all machines see one shared directory, not different directories with the same path:
rank 0 writes a reader's lease, which other runs do not delete, and the other ranks check that the file exists.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from functools import partial
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
"""Prefix of the names of folders without checkpoints, which need not be shared between machines."""

_PATIENCE_S = 5.0  # seconds for a network file system to show a file that another machine has created
_POLL_INTERVAL_S = 0.05
_SHOWN = 3  # maximum number of machines that a message names

_log = logging.getLogger(__name__)


class DirectoryLock:
    """The directory lock of one run. Each rank has this object, but only rank 0 acquires the lock.

    ``acquired``: called on rank 0 after the lock is acquired.
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
        self._process = os.getpid()  # a forked child must not acquire the lock
        self._lock: StoreLock | None = None
        self._failing = ""  # prefix of error messages
        self._warned = False
        self._known: int | None = None  # number of the last commit when the run began
        self.continues = False  # whether the run has called ``restore``: earlier checkpoints here belong to it
        self._when_acquired = acquired

    @property
    def acquired(self) -> bool:
        """Whether this process has acquired the lock. Still True after the release."""
        return self._lock is not None

    def open(self, given: str | None) -> str:
        """Check that all ranks see the same directory, and return a random token that identifies this run. Collective.

        ``given``: the directory as the user wrote it, or ``None`` if each machine has its own directory. Raises:
        ``CheckpointError`` if another job of the sweep has used the directory, ``ConfigError`` if a rank does not see
        the file that rank 0 wrote.
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
        """Acquire the lock on rank 0, unless it is held already, and delete the unfinished saves of killed runs.

        If the run has not called ``restore``, warn that it will delete the checkpoints of an earlier run.

        Raises: ``CheckpointError`` if another run holds the lock, or the directory is not writable or does not respond.
        """
        try:
            self._acquire()
        except Exception as error:
            raise kind_of([error])(f"{self._failing}: {reason(error)}") from error
        if self.acquired and not self._warned:
            self._warned = True
            if spared := self._store.retention.spared:
                newest = ", ".join(sorted(os.path.basename(each) for each in spared)[-2:])
                _log.warning(
                    "stagereg: restore() was not called, and %s has checkpoints of an earlier run, among them %s: this "
                    "run deletes each of them after reaching its step. To resume from them, call restore(state) before "
                    "the loop. To retain them, give this run another directory, %s. To start from scratch on purpose, "
                    "add %s.",
                    *(self._store.root, newest, option("checkpoint.dir", "PATH"), option("checkpoint.resume", "never")),
                )

    def acquire_on_all(self) -> None:
        """Acquire the lock on rank 0, without a warning. If this fails, all ranks raise the error. Collective."""
        self._ranks.run_on_all(self._failing, self._acquire)

    def acquire_to_restore(self) -> None:
        """Acquire the lock on rank 0 if the newest checkpoint was saved by a run with the same command line."""
        if self._ranks.rank == 0 and self._lock is None:
            self._known = self._store.last_serial()
        newest = self._store.latest() if self._ranks.rank == 0 else None
        if newest is not None and newest.manifest.command == command_key():
            self._acquire()

    def release(self) -> None:
        """Release the lock, so that other runs can write. This run cannot acquire the lock again."""
        self._process = 0
        if self._lock is not None:
            self._store.settle()
            self._lock.release()

    def _open(self, looks: bool) -> tuple[str, str]:
        """On rank 0, return a random token, and the path of a new lease file for the other ranks to find, or ``""``."""
        if self._ranks.rank > 0:
            return "", ""
        with within(self._seconds):
            expect_own_job(self._store, self._resume)
            if not self._store.backend.remote:  # s3fs would list the parent of an empty directory
                self._known = self._store.last_serial()
        token, probe = new_token(), f"{self._store.root}/{reader_name(step_name(0))}"
        if looks:
            with contextlib.suppress(OSError):  # a program that only reads needs no write permission
                os.makedirs(self._store.root, exist_ok=True)
                lease = LeaseRecord(Owner.ourselves(), token, machine_name(), time.time())
                self._store.backend.write(probe, lease.dumps())
                return token, probe
        return token, ""

    def _expect_one_directory(self, named: str, probe: str) -> None:
        """Raise ``ConfigError`` on all ranks if a rank does not see ``probe``, which rank 0 has written. Collective."""
        store = self._store
        probe = f"{store.root}/{os.path.basename(probe)}"
        try:
            look = partial(_look, probe)
            seen = self._ranks.run_on_all(f"The ranks could not compare their view of {store.root}", look)
            blind: dict[str, list[int]] = {}  # ranks that do not see the file, by machine
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
            self._lock = self._store.backend.in_time(self._seconds, take, lambda lock: lock.release())
        except PermissionError as error:
            if not self._store.backend.remote:
                raise
            raise CheckpointError(f"{reason(error)}. {advice(error, root)}") from error
        self._when_acquired()


def _look(path: str) -> tuple[str, bool]:
    """Return the name of this machine, and whether the file from rank 0 appears here within five seconds."""
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
            if known is not None and store.last_serial() > known:  # this run could overwrite it
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
