"""Which checkpoints of a store stay, and how the others go: :class:`.Keep` for the run that writes there.

A checkpoint is first hidden, in one step, and deleted later by :meth:`Retention.clear`; one that is read, or that
``latest`` points to, stays until a later save. A step that is saved again replaces the old one, and gets its plain name
when that is free.
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

_FILES = {MANIFEST, METADATA, "index.json"}  # one of these is in each checkpoint

_log = logging.getLogger(__name__)


class Retention:
    """The retention of the run that holds the lock.

    Attributes:
        distrusted: full paths of checkpoints that look complete, and are damaged or skipped after crashes; neither
            counted nor deleted.
        spared: full paths of checkpoints of an earlier run, neither counted nor deleted before this run reaches their
            step.
        check: raises if the lock of the store is lost; called before each checkpoint is hidden.
    """

    def __init__(self, backend: Backend, readers: Readers) -> None:
        self.distrusted: set[str] = set()
        self.spared: set[str] = set()
        self.check: Callable[[], object] = lambda: None
        self._backend, self._readers = backend, readers
        self._why: dict[str, str] = {}  # the last save has kept checkpoints, by their paths
        self._explains = True  # whether there is a file that says so, or may be
        self._again: set[int] = set()  # steps that this run has saved where they were already
        self._hidden: list[tuple[VerificationResult, str]] = []  # and where; not known yet whether they are read
        self._out_of_sight: list[str] = []
        self._warned: set[str] = set()

    def kept(self) -> dict[str, str]:
        """Return why the last save has kept checkpoints, by their names; nothing where all are simply the newest."""
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
        """Take out of sight what is not to be kept now that ``made`` is there beside ``before``; return what stays."""
        if not self._backend.in_place and made.name != plain_name(made.name):
            self._again.add(made.manifest.step)
        self._why, old = self._choose(before, made, keep)
        return [*self._remove(before, old), VerificationResult(made.path, made.manifest)]

    def use_plain_names(self, there: list[VerificationResult]) -> dict[str, str]:
        """Give steps that were saved again their plain names, if these are free; return the new paths by the old ones.

        At each moment ``latest``, and each reader, finds a whole checkpoint. Writes why each is kept.
        """
        plain: dict[str, str] = {}
        named = []
        for each in self.trusted(there):  # of a step the one committed last comes first
            try:
                path = self._backend.link(each)
            except OSError as error:
                where = self._backend.root
                self._warn_once(f"steps that are saved again keep a token in their names in {where}: {error}")
                continue
            if path:
                if self.pointed() == each.name:
                    self._backend.point(plain_name(each.name))
                    failpoint("repointed")
                named.append(VerificationResult(each.path, each.manifest))
                plain[each.path] = path
        self._remove(named, plain)
        self._why = {plain.get(path, path): text for path, text in self._why.items()}
        self._explain()
        return plain

    def settle(self, lock: StoreLock) -> None:
        """Give steps that this run has saved again their plain names, where somebody has read the old one until now."""
        if self._again:
            lock.check()
            found = [each for each in conditions(self._backend) if each.step in self._again]
            self.use_plain_names(self._remove(found, _replaced(found, self.trusted(found))))
            self.clear()

    def clear(self) -> None:
        """Delete what is no longer kept; it is out of sight already."""
        while self._out_of_sight:
            self._backend.discard(self._out_of_sight.pop())

    def pointed(self) -> str:
        """Return the name of the directory that ``latest`` points to, itself where it points to none."""
        return self._backend.resolve(f"{self._backend.root}/{LATEST}").rpartition("/")[2]

    def trusted(self, found: list[VerificationResult]) -> list[Checkpoint]:
        """Return the complete ones but those that are distrusted, the one committed last first."""
        return [each for each in complete(found) if each.path not in self.distrusted]

    def _choose(
        self, before: list[VerificationResult], made: Checkpoint, keep: Keep | GuardedRule
    ) -> tuple[dict[str, str], Collection[str]]:
        """Return why checkpoints are kept, and the paths of the others, also of steps that were saved again."""
        step = made.manifest.step
        self.distrusted.discard(made.path)
        spared = self.spared & {each.path for each in before if each.step is not None and each.step > step}
        trusted = self.trusted(before)
        replaced = _replaced(before, trusted) - spared | {each.path for each in before if each.step == step}
        counted = [each for each in trusted if each.path not in replaced | spared]
        why = keep.select([made, *counted], {each.path: each.manifest.metrics for each in [made, *counted]})
        if isinstance(keep, Keep):  # another rule logs what it has to
            for text in keep.warnings(made, [each for each in counted if each.path not in why]):
                self._warn_once(text)
        old = {each.path for each in counted} - why.keys() | replaced
        return why | dict.fromkeys(spared, "earlier run"), old

    def _remove(self, before: list[VerificationResult], old: Collection[str]) -> list[VerificationResult]:
        """Take those of the paths ``old`` out of sight that nobody reads; return what stays of ``before``."""
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
                text = "stagereg: the bad checkpoint %s is replaced: step %d was saved again."
                _log.warning(text, each.path, each.step)
        return [each for each in before if each.path not in gone]

    def _is_ours(self, each: VerificationResult) -> bool:
        """Whether a directory has, or had, a checkpoint; a user may have given another one such a name."""
        there = {MANIFEST} if each.manifest is not None else self._backend.list(each.path).keys()
        if there and not _FILES & there:
            where = self._backend.root
            self._warn_once(f"a directory of a step in {where} is not of a checkpoint, and stays: {each.path}")
            return False
        return True

    def _bring_back(self) -> set[str]:
        """Bring hidden checkpoints back that are read by now; return the paths that the others had.

        One listing finds the readers of all of them. If the listing fails, the next removal tries again.
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
        """Write why checkpoints are kept, where that is not simply since they are the newest."""
        explains = set(self._why.values()) != {"newest"}
        names = {os.path.basename(path): text for path, text in self._why.items()}
        if explains or self._explains:
            try:
                self._backend.replace(KEPT, json.dumps(names, indent=1).encode() if explains else b"")
                self._explains = explains
            except OSError as error:  # it is for people alone
                self._warn_once(f"why checkpoints are kept is not noted in {self._backend.root}: {error}")

    def _warn_once(self, text: str) -> None:
        subject = text.partition(" in ")[0]
        if subject not in self._warned:
            self._warned.add(subject)
            _log.warning("stagereg: %s", text)


def _replaced(found: list[VerificationResult], by: list[Checkpoint]) -> set[str]:
    """Return the paths of those of which ``by``, the newest first, has a later one of the same step."""
    last: dict[int | None, Checkpoint] = {each.manifest.step: each for each in reversed(by)}

    def is_older(each: VerificationResult, than: Checkpoint) -> bool:
        if each.manifest is None:  # a name has a token where the plain one was taken
            return each.name == plain_name(than.name)
        return each.path != than.path and each.manifest.order <= than.manifest.order

    return {each.path for each in found if each.step in last and is_older(each, last[each.step])}
