"""``checkpoint.keep.weights_after``: older retained checkpoints lose their optimizer state and keep the weights.

After each save, a thread of rank 0 copies one checkpoint without the entries of optimizers into a hidden directory
(:mod:`.rewriting`). The save thread puts the copy in place after a later save; :meth:`WeightsAfter.close` does so at
the end. First the copy gets a name with a token, then the whole checkpoint is hidden, then the copy gets its name. So
after a crash at any time, one of the two is complete. If both are visible, the whole one is listed, and the next save
hides the copy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait

import stagereg.checkpoint.store.conditions as conditions
from stagereg.base.option_text import choice, option
from stagereg.base.providers import has, needs
from stagereg.checkpoint.extension import CheckpointExtension, Saves, Setup
from stagereg.checkpoint.format.damage import VerificationResult
from stagereg.checkpoint.format.manifest import Checkpoint, Manifest, new_token
from stagereg.checkpoint.save.scheduling import give_way, short_turns
from stagereg.checkpoint.storage.protocol import name_of
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.errors import ConfigError, CorruptCheckpointError, reason
from stagereg.extensions.retention.rewriting import STORAGES, StoppedError, WeightsCopy

_STOP_S = 5.0  # seconds to wait for the thread after it was stopped

_log = logging.getLogger(__name__)


class WeightsAfter(CheckpointExtension):
    """Drops the optimizer state from all but the ``newest`` whole checkpoints of one run. Works only on rank 0.

    ``newest``: the option ``weights_after``; ``None`` disables this class.
    """

    name = "weights after"

    def __init__(self, newest: int | None) -> None:
        self._newest = newest
        self._store: CheckpointStore | None = None  # set on rank 0
        self._copying: tuple[Checkpoint, str, Future[Manifest]] | None = None  # with the hidden directory of the copy
        self._stopped = threading.Event()
        self._failed: set[str] = set()  # keys of checkpoints that could not be copied
        self._timeout_s = 0.0
        self._has_saved = False
        self._hurries = False  # whether the run ends early, so that close() must not wait for a copy

    def start(self, setup: Setup, saves: Saves) -> None:
        if self._newest is None:
            return
        what = option("checkpoint.keep.weights_after", self._newest)
        if not setup.stores or setup.store.backend.remote:
            where = setup.store.root if setup.stores else "a tier alone"
            raise ConfigError(f"{what} needs a checkpoint directory in a file system, not {where}.")
        if (storage := name_of(setup.storage)) not in STORAGES:
            raise ConfigError(
                f"{what} does not support {choice('storage', storage)}. Use {choice('storage', STORAGES[0])} or "
                f"{choice('storage', STORAGES[1])}."
            )
        if not has("interop"):  # reads ``.metadata``
            raise ConfigError(f"{what} {needs('interop')}")
        if setup.ranks.rank == 0:
            self._store, self._timeout_s = setup.store, setup.timeout.total_seconds()

    def committed(self, step: int, where: str, checkpoint: Checkpoint | None) -> None:
        if self._store is not None and where == "store":
            self._has_saved = True
            self._install(self._store)
            self._begin(self._store)

    def leaving(self) -> None:
        self._hurries = True

    def ending(self, error: BaseException | None) -> None:
        self._hurries = self._hurries or error is not None

    def close(self, in_time: bool) -> None:
        """Finish the copies, for at most the timeout of one save. If the run ends early, stop the copy instead."""
        if self._store is None or not self._has_saved:  # otherwise the run does not hold the directory lock
            return
        until = time.monotonic() + (self._timeout_s if in_time and not self._hurries else 0)
        while True:
            if time.monotonic() < until:
                self._begin(self._store)
            if self._copying is None:
                return
            _log.info("stagereg: Waiting until %s has lost its optimizer state.", self._copying[0].path)
            wait([self._copying[2]], max(0.0, until - time.monotonic()))
            if not self._copying[2].done():
                self._stopped.set()
                wait([self._copying[2]], _STOP_S)
            if not in_time or not self._copying[2].done():
                return
            self._install(self._store)
            self._store.retention.clear()

    def _begin(self, store: CheckpointStore) -> None:
        """Begin to copy the next checkpoint, unless a copy is in progress."""
        if self._copying is not None or not (found := self._candidates(store)):
            return
        written, copied = store.temporary(found[0].manifest.step, new_token()), Future[Manifest]()
        copy = WeightsCopy(store, found[0], written, self._stopped.is_set)
        thread = threading.Thread(target=_copy, args=(copy, copied), name="stagereg-weights", daemon=True)
        thread.start()
        self._copying = found[0], written, copied

    def _candidates(self, store: CheckpointStore) -> Sequence[Checkpoint]:
        """Return the checkpoints to copy, newest first. Inexact checkpoints do not count as whole."""
        retention, spared = store.retention, store.retention.spared
        found = [each for each in retention.trusted(conditions.conditions(store.backend)) if each.path not in spared]
        whole = [each for each in found if not each.manifest.dropped and not each.manifest.lacks][: self._newest]
        if len(whole) != self._newest:
            return ()
        busy = {*store.readers.found(), retention.pointed()}
        older = [each for each in found[found.index(whole[-1]) + 1 :] if not each.manifest.dropped]
        return [each for each in older if each.key not in self._failed and each.name not in busy]

    def _install(self, store: CheckpointStore) -> None:
        """Put a finished copy in place. An error is logged once, and the whole checkpoint stays."""
        if self._copying is None or not self._copying[2].done():
            return
        (whole, written, copied), self._copying = self._copying, None
        try:
            if conditions.look(store.backend, whole.path).manifest == whole.manifest:  # otherwise it was deleted
                written = _replace(store, whole, written, copied.result())
        except StoppedError:
            pass
        except Exception as error:
            if isinstance(error, CorruptCheckpointError):
                store.retention.distrusted.add(whole.path)
            text = "stagereg: %s keeps its optimizer state, although %s was given: %s."
            level = logging.DEBUG if self._failed else logging.WARNING
            self._failed.add(whole.key)
            what = option("checkpoint.keep.weights_after", self._newest)
            _log.log(level, text, whole.path, what, reason(error).rstrip("."))
        if written:
            store.backend.discard(written)


def _copy(copy: WeightsCopy, copied: Future[Manifest]) -> None:
    give_way()
    try:
        with short_turns():
            copied.set_result(copy.write())
    except Exception as error:
        copied.set_exception(error)


def _replace(store: CheckpointStore, whole: Checkpoint, written: str, manifest: Manifest) -> str:
    """Replace a checkpoint with the copy in ``written``. If it is being read, return the hidden path of the copy."""
    backend, retention, old = store.backend, store.retention, VerificationResult(whole.path, whole.manifest)
    retention.check()
    made = VerificationResult(backend.commit(written, manifest), manifest)
    if conditions.look(backend, made.path).checkpoint is None or retention.remove([old], {whole.path}):
        return backend.hide(made)
    backend.bring_back(VerificationResult(whole.path, manifest), made.path)
    return ""
