"""Retention: selects the checkpoints that a run retains, and deletes the others.

A checkpoint is first hidden by an atomic rename, and deleted later by :meth:`Retention.clear`. A checkpoint that is
being read, or that ``latest`` points to, remains until a later save. If a step is saved again, its directory name has a
token (random suffix) at first. When the old checkpoint is deleted, the new one gets the plain name, ``step-N``.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection

from stagereg.base.small_files import UnfitFileError, warn_skipped
from stagereg.checkpoint.format.damage import VerificationResult
from stagereg.checkpoint.format.manifest import KEPT, LATEST, MANIFEST, METADATA, Checkpoint, plain_name
from stagereg.checkpoint.store.backend import Backend
from stagereg.checkpoint.store.conditions import complete, conditions
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.checkpoint.store.keep import GuardedRule, Keep
from stagereg.checkpoint.store.lock import StoreLock
from stagereg.checkpoint.store.readers import Readers

_FILES = {MANIFEST, METADATA, "index.json"}  # each checkpoint has one of these

_log = logging.getLogger(__name__)


class Retention:
    """Selects and deletes checkpoints for the run that holds the lock.

    Attributes:
        distrusted: paths of checkpoints that look complete, but are corrupt or quarantined. The rules do not count or
            delete these checkpoints.
        spared: paths of checkpoints from an earlier run. The rules do not count these checkpoints, and do not delete
            a checkpoint before this run reaches the same step.
        check: called before each checkpoint is hidden; raises an exception if this run has lost the lock.
    """

    def __init__(self, backend: Backend, readers: Readers) -> None:
        self.distrusted: set[str] = set()
        self.spared: set[str] = set()
        self.check: Callable[[], object] = lambda: None
        self._backend, self._readers = backend, readers
        self._why: dict[str, str] = {}  # reasons why checkpoints were retained in the last save, by path
        self._explains = True  # whether the file with the reasons may exist
        self._again: set[int] = set()  # steps that were saved again, and still need plain names
        self._hidden: list[tuple[VerificationResult, str]] = []  # may still be read; with hidden paths
        self._out_of_sight: list[str] = []  # hidden paths for :meth:`clear` to delete
        self._warned: set[str] = set()

    def kept(self) -> dict[str, str]:
        """Map checkpoint names to the reasons why the last save retained them; empty if all reasons are "newest"."""
        path = f"{self._backend.root}/{KEPT}"
        try:
            read = json.loads(self._backend.read(path))
            return {name: why for name, why in read.items() if isinstance(why, str) and why.isprintable()}
        except UnfitFileError as error:
            warn_skipped(path, error)
        except (OSError, ValueError, AttributeError, RecursionError):
            pass
        return {}

    def retire(
        self, before: list[VerificationResult], made: Checkpoint, keep: Keep | GuardedRule
    ) -> list[VerificationResult]:
        """Hide the checkpoints in ``before`` that the new one, ``made``, makes obsolete. Return the visible ones."""
        if not self._backend.in_place and made.name != plain_name(made.name):
            self._again.add(made.manifest.step)
        self._why, old = self._choose(before, made, keep)
        return [*self.remove(before, old), VerificationResult(made.path, made.manifest)]

    def use_plain_names(self, there: list[VerificationResult]) -> dict[str, str]:
        """Rename steps that were saved again to ``step-N``, if the name is free. Return the new paths by old path.

        ``latest`` points to a complete checkpoint at any time. Also record why checkpoints are retained.
        """
        plain: dict[str, str] = {}
        named = []
        for each in self.trusted(there):  # if a step has two checkpoints, the newer gets the name
            try:
                path = self._backend.link(each)
            except OSError as error:
                where = self._backend.root
                self._warn_once(f"Steps that are saved again keep names like step-00000060.TOKEN in {where}: {error}")
                continue
            if path:
                if self.pointed() == each.name:
                    self._backend.point(plain_name(each.name))
                    failpoint("repointed")
                named.append(VerificationResult(each.path, each.manifest))
                plain[each.path] = path
        self.remove(named, plain)
        self._why = {plain.get(path, path): text for path, text in self._why.items()}
        self._explain()
        return plain

    def settle(self, lock: StoreLock) -> None:
        """At the end of a run, call :meth:`use_plain_names` again if readers have prevented some of the renames."""
        if self._again:
            lock.check()
            found = [each for each in conditions(self._backend) if each.step in self._again]
            self.use_plain_names(self.remove(found, _replaced(found, self.trusted(found))))
            self.clear()

    def clear(self) -> None:
        """Delete the files of the hidden checkpoints."""
        while self._out_of_sight:
            self._backend.discard(self._out_of_sight.pop())

    def pointed(self) -> str:
        """Return the name of the directory that ``latest`` points to, or ``"latest"`` if the link does not exist."""
        return self._backend.resolve(f"{self._backend.root}/{LATEST}").rpartition("/")[2]

    def trusted(self, found: list[VerificationResult]) -> list[Checkpoint]:
        """Return the complete checkpoints that are not distrusted, newest first."""
        return [each for each in complete(found) if each.path not in self.distrusted]

    def _choose(
        self, before: list[VerificationResult], made: Checkpoint, keep: Keep | GuardedRule
    ) -> tuple[dict[str, str], Collection[str]]:
        """Return the reason for each retained checkpoint, by path, and the paths of the checkpoints to hide."""
        step = made.manifest.step
        self.distrusted.discard(made.path)
        spared = self.spared & {each.path for each in before if each.step is not None and each.step > step}
        trusted = self.trusted(before)
        replaced = _replaced(before, trusted) - spared | {each.path for each in before if each.step == step}
        counted = [each for each in trusted if each.path not in replaced | spared]
        why = keep.select([made, *counted], {each.path: each.manifest.metrics for each in [made, *counted]})
        if isinstance(keep, Keep):  # a custom rule has its own warnings
            for text in keep.warnings(made, [each for each in counted if each.path not in why]):
                self._warn_once(text)
        old = {each.path for each in counted} - why.keys() | replaced
        return why | dict.fromkeys(spared, "earlier run"), old

    def remove(self, before: list[VerificationResult], old: Collection[str]) -> list[VerificationResult]:
        """Hide the checkpoints in ``before`` with a path in ``old``, unless they are being read. Return all others."""
        if not old:
            return before
        read = self._readers.found(delete=True)
        old = {*old} - {f"{self._backend.root}/{self.pointed()}"}
        try:
            for each in before:
                if each.path in old and each.name not in read and self._is_ours(each):
                    self.check()
                    self._hidden.append((each, self._backend.hide(each)))
        finally:
            gone = self._bring_back()
        for each in before:
            if each.path in gone and (each.damages or each.path in self.distrusted):
                self.distrusted.discard(each.path)
                text = "stagereg: the corrupt or skipped checkpoint %s was replaced: step %d was saved again."
                _log.warning(text, each.path, each.step)
        return [each for each in before if each.path not in gone]

    def _is_ours(self, each: VerificationResult) -> bool:
        """Return whether a ``step-N`` directory contains checkpoint files, rather than unrelated files of a user."""
        there = {MANIFEST} if each.manifest is not None else self._backend.list(each.path).keys()
        if there and not _FILES & there:
            where = self._backend.root
            self._warn_once(f"a directory in {where} is named like a step, but is not a checkpoint: {each.path}")
            return False
        return True

    def _bring_back(self) -> set[str]:
        """Make hidden checkpoints that are being read visible again. Return the former paths of the other hidden ones.

        If listing the leases fails, the next call tries again.
        """
        read = self._readers.found() if self._hidden else {}
        gone = set()
        while self._hidden:
            each, hidden = self._hidden.pop()
            if each.manifest is not None and each.name in read:
                self._backend.bring_back(each, hidden)
            else:
                self._out_of_sight.append(hidden)
                gone.add(each.path)
        return gone

    def _explain(self) -> None:
        """Write the reasons why checkpoints are retained to a file; delete the file if all reasons are "newest"."""
        explains = set(self._why.values()) != {"newest"}
        names = {os.path.basename(path): text for path, text in self._why.items()}
        if explains or self._explains:
            try:
                self._backend.replace(KEPT, json.dumps(names, indent=1).encode() if explains else b"")
                self._explains = explains
            except OSError as error:  # not an error, because the file is only for users
                self._warn_once(f"Cannot record in {self._backend.root} why checkpoints are retained: {error}")

    def _warn_once(self, text: str) -> None:
        subject = text.partition(" in ")[0]
        if subject not in self._warned:
            self._warned.add(subject)
            _log.warning("stagereg: %s", text)


def _replaced(found: list[VerificationResult], by: list[Checkpoint]) -> set[str]:
    """Return the paths of those checkpoints in ``found`` for which ``by`` has a newer checkpoint of the same step."""
    last: dict[int | None, Checkpoint] = {each.manifest.step: each for each in reversed(by)}

    def is_older(each: VerificationResult, than: Checkpoint) -> bool:
        if each.manifest is None:  # the older save of a step has the plain name
            return each.name == plain_name(than.name)
        return each.path != than.path and each.manifest.order <= than.manifest.order

    return {each.path for each in found if each.step in last and is_older(each, last[each.step])}
