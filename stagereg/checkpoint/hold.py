"""The hold of a run on the directory that it writes to: rank 0 has it, and no other run writes there meanwhile.

Taking it, the ranks make sure that they see one directory and not, on each machine, another one of that path: rank 0
makes an empty file, named as the hidden directory of a save, so that the next start deletes what a killed run has left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from functools import partial
from operator import methodcaller
from pathlib import Path

from stagereg.checkpoint.format.manifest import new_token
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.store.advice import advice
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.checkpoint.store.lock import StoreLock
from stagereg.checkpoint.store.open_store import is_url
from stagereg.checkpoint.store.retry import answered, within
from stagereg.checkpoint.store.sweep_job import take_for_job
from stagereg.errors import CheckpointError, ConfigError, name_ranks, reason
from stagereg.option_text import choice, option

SCRATCH = "stagereg-scratch-"
"""What the name of a folder begins with that nothing is saved to, so that each machine may have one of that path."""

_PATIENCE_S = 5.0  # for a network file system to show what another machine has made
_LOOK_S = 0.05
_SHOWN = 3  # machines that a message names

_log = logging.getLogger(__name__)


class Hold:
    def __init__(self, store: CheckpointStore, ranks: RankGroup, seconds: float, resume: str) -> None:
        self._store, self._ranks, self._seconds, self._resume = store, ranks, seconds, resume
        self._lock: StoreLock | None = None  # of rank 0

    def take(self, given: str | None) -> str:
        """Make sure that the store can be written to, take it, and clear away what dead runs have left. Collective.

        ``given`` is the directory as the user wrote it, ``None`` if each machine has one. Returns a token of this run.
        Raises ``CheckpointError`` if another run holds it, or it does not answer in time; ``ConfigError`` if not all
        ranks see what rank 0 writes.
        """

        root = self._store.root
        named = root if given is None else option("checkpoint.dir", given)
        token = self._ranks.run_on_all(f"{named} cannot be written to", self._take)[0]
        scratch = os.path.basename(root).startswith(SCRATCH)
        if not is_url(root) and self._ranks.size > 1:
            self._expect_one_directory(token, named, looks=given is not None and not scratch)
        return token

    def let_go(self) -> None:
        """Let other runs write there."""
        if self._lock is not None:
            self._store.settle()
            self._lock.release()

    def _take(self) -> str:
        store, token = self._store, new_token()
        if self._ranks.rank > 0:
            return token
        away = is_url(store.root)
        probe = None if away or self._ranks.size == 1 else Path(store.temporary(0, token))
        take = partial(_take, store, self._seconds, self._resume, probe)
        try:
            self._lock = answered(store.root, self._seconds, take, methodcaller("release")) if away else take()
        except PermissionError as error:
            if not away:
                raise
            raise CheckpointError(f"{reason(error)}. {advice(error, store.root)}") from error
        return token

    def _expect_one_directory(self, token: str, named: str, looks: bool) -> None:
        """Raise ``ConfigError`` on all ranks, and let go, if one does not find what rank 0 has made. Collective."""
        store, probe = self._store, self._store.temporary(0, token)
        try:
            look = partial(_look, probe) if looks else lambda: ("", True)
            seen = self._ranks.run_on_all(f"The ranks could not compare what they see in {store.root}", look)
            blind: dict[str, list[int]] = {}  # the ranks of each machine that has another directory
            for rank, (machine, sees) in enumerate(seen):
                if not sees:
                    blind.setdefault(machine, []).append(rank)
            if blind:
                there = [f"{machine} ({name_ranks(ranks)})" for machine, ranks in blind.items()]
                more = f", and {len(there) - _SHOWN} machines more" if len(there) > _SHOWN else ""
                raise ConfigError(
                    f"{named} is not the same directory on all machines: what rank 0 has made there on {seen[0][0]} "
                    f"is not there on {', '.join(there[:_SHOWN])}{more}. Give one that all machines share, in a "
                    "network file system or an object store, such as s3://BUCKET/RUN; or for copies on each machine's "
                    f"own disk {choice('tier', 'disk', dir='PATH')}, with a shared directory or without one."
                )
        except BaseException:
            self.let_go()
            raise
        finally:
            if self._ranks.rank == 0:
                store.backend.discard(probe)


def warn_of_earlier_run(store: CheckpointStore) -> None:
    """Warn of what a run that saves and has restored nothing will delete."""
    if store.retention.spared:
        _log.warning(
            "stagereg: restore() was not called, and %s has checkpoints of an earlier run, among them %s: each is "
            "deleted when this run has passed its step. Call restore(state) before the loop to resume from them; or "
            "give this run another directory, %s; or to start from scratch on purpose, add %s.",
            store.root,
            ", ".join(sorted(os.path.basename(each) for each in store.retention.spared)[-2:]),
            option("checkpoint.dir", "PATH"),
            option("checkpoint.resume", "never"),
        )


def _look(path: str) -> tuple[str, bool]:
    """Return the name of this machine, and whether a file made on another one is here, or will be in some seconds."""
    ends = time.monotonic() + _PATIENCE_S
    while True:
        for folder in [*Path(path).parents][::-1]:  # opening one has NFS ask anew what is in it
            with contextlib.suppress(OSError):
                os.close(os.open(folder, os.O_RDONLY))
        if (sees := os.path.lexists(path)) or time.monotonic() > ends:
            return socket.gethostname(), sees
        time.sleep(_LOOK_S)


def _take(store: CheckpointStore, seconds: float, resume: str, probe: Path | None) -> StoreLock:
    with within(seconds):
        hold = store.lock()
        failpoint("locked")
        try:
            store.sweep()
            take_for_job(store, resume)
            if resume == "never":
                store.retention.spared.clear()
            if probe is not None:
                probe.touch()
        except BaseException:
            hold.release()
            raise
        failpoint("swept")
        return hold
