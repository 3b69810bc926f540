"""The tier of a run, as one rank holds it: its machine's folder, what serves and sends, and what the ranks agree on.

Every rank has one and makes the same calls in the same order. On each machine the lowest of its ranks, its *leader*,
holds the folder's lock, sweeps it, and reports what lies there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import stagereg.base.record as record
import stagereg.extensions.tiers.inventory as inventory
from stagereg.base.machine import boot_id
from stagereg.base.option_text import option
from stagereg.base.output import size_text
from stagereg.base.small_files import UnfitFileError, replace_small
from stagereg.checkpoint.format.manifest import new_token, step_of
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.directory import Directory
from stagereg.checkpoint.store.lock import StoreLock
from stagereg.errors import CheckpointError, name_ranks
from stagereg.extensions.tiers.copying import CopyLag, CopyThread
from stagereg.extensions.tiers.folder import NOTE, MachineFolder, read_own
from stagereg.extensions.tiers.inventory import Lineage, TierStep
from stagereg.extensions.tiers.part import Part, SaveId
from stagereg.extensions.tiers.peer import Peer
from stagereg.extensions.tiers.placement import Machine, partners
from stagereg.extensions.tiers.server import PartServer
from stagereg.extensions.tiers.step_reader import Found, StepReader
from stagereg.extensions.tiers.tier import Tier

_log = logging.getLogger(__name__)

_SECRET_BYTES = 32
_SHOWN = 4  # machines that a line names


class Site(NamedTuple):
    machine: str  # what tells machines apart
    host: str
    domain: str
    address: tuple[str, int]  # of its server


class _Setup(NamedTuple):
    root: str  # the folder of the tier on its machine
    first: str  # that on rank 0's
    run: str
    secret: bytes


class _RankParts(NamedTuple):
    """What a rank tells of its parts when another save begins, by the folders of their saves."""

    busy: bool  # it still sends copies
    whole: tuple[str, ...]  # complete, in the order in which they were saved
    copied: tuple[str, ...]  # of these: as often as it should be


class _SaveRound(NamedTuple):
    """What the ranks have agreed on for one save of the tier."""

    save: SaveId
    stay: frozenset[str]  # folders of saves that stay; all others go before anything is written


class LocalTier:
    """The tier of one run. Constructing it is collective, and so is what says so.

    Args:
        tier: what was chosen.
        ranks: who saves together; a group of its own.
        store: the store of the run, in which rank 0 notes the run's id and branches.
        shared: whether that lasts; else each machine notes them for itself, in the folder of the tier.

    Attributes:
        folder: this machine's parts.
        here: the name of this machine.
        leads: whether this rank is the lowest of its machine.
        ranks_here: how many ranks this machine has.
        machines: the names of all.

    Raises:
        CheckpointError: on all ranks: a machine's folder cannot be made, or another process of the run holds it.
    """

    def __init__(self, tier: Tier, ranks: RankGroup, store: CheckpointStore, shared: bool = True) -> None:
        self.tier, self._ranks, self._store, self.shared = tier, ranks, store, shared
        self._server: PartServer | None = None
        self._lock: StoreLock | None = None
        self._whole: list[SaveId] = []  # whose parts of this rank are complete, the newest last
        self._copied: set[str] = set()  # the folders of those that are copied as often as they should be
        self._origin: int | None = -1  # the step that this run goes on from, -1 for none, until it saves
        self._serial = 0
        self._lag = CopyLag()
        self._is_over = False  # nothing of the run is needed here any more
        failing = f"{option('tier.dir', tier.dir)} cannot be used"
        agreed = ranks.round_trip(failing, self._prepare, self._agree, ranks.limit)
        self.folder = MachineFolder(agreed.root, agreed.run, tier.durable)
        self._path = MachineFolder(agreed.first, agreed.run, tier.durable).path
        self._secret = agreed.secret
        try:
            self._place(ranks.run_on_all(failing, self._start))
            self._threads = CopyThread(self._connect, self.folder, tier.copies)
            texts = ranks.run_on_all(failing, self._begin)
        except BaseException:
            self._let_go()
            raise
        self._lineage = inventory.lineage_of(chain(*texts), agreed.run) or Lineage(agreed.run)

    # -- starting

    def _prepare(self) -> tuple[str, list[bytes], bytes]:
        """Make the folder of the tier; return its path, what is noted of this run, and a secret for it."""
        root = self.tier.prepare()
        known: list[bytes] = []
        if not self.shared:
            known = _noted(f"{root}/{NOTE}")
        elif self._ranks.rank == 0:
            known = self._stored()
        return root, known, secrets.token_bytes(_SECRET_BYTES)

    def _stored(self) -> list[bytes]:
        """Return the note of this run in the store, which lasts."""
        return _noted(f"{self._store.root}/{NOTE}", lambda _: self._store.note(NOTE, needed=True), "")

    def _agree(self, found: list[tuple[str, list[bytes], bytes]]) -> list[_Setup]:
        """Return, on rank 0, each rank's folder, the run's id, which is new if nobody knows it, and its secret."""
        lineages = [inventory.lineage_of(known) for _, known, _ in found]
        runs = {each.run: name_ranks([rank]) for rank, each in enumerate(lineages) if each is not None}
        if len(runs) > 1:  # each could be the one that is meant, and its state would be taken for that of this run
            raise CheckpointError(
                f"without {option('checkpoint.dir')} {NOTE} in that folder says which run this is, and another run has "
                f"left its own: {' and '.join(runs.values())} have different ones. Delete it where it is of another "
                "run, or "
                f"give this run a folder of its own, {option('tier.dir', 'PATH')}."
            )
        lineage = inventory.lineage_of(text for _, known, _ in found for text in known)
        if lineage is None:
            lineage = Lineage(new_token())
            if self.shared:
                self._store.backend.replace(NOTE, lineage.dumps())
        (first, _, secret), run = found[0], lineage.run
        return [_Setup(root, first, run, secret) for root, *_ in found]

    def _start(self) -> Site:
        self.folder.make()
        self._server = PartServer(self.folder, self._secret, self.tier.durable, self.lacking)
        there = os.stat(self.folder.path)
        machine = f"{socket.gethostname()} {boot_id()} {there.st_dev} {there.st_ino}"  # who shares the folder
        return Site(machine, socket.gethostname(), self.tier.domain or boot_id(), self._server.address)

    def _place(self, sites: Sequence[Site]) -> None:
        """Know who is where, and who gets this machine's copies."""
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, site in enumerate(sites):
            ranks_of[site.machine].append(rank)
        hosts = [sites[ranks[0]].host for ranks in ranks_of.values()]
        names = {m: sites[r[0]].host if hosts.count(sites[r[0]].host) == 1 else m for m, r in ranks_of.items()}
        self.here = names[sites[self._ranks.rank].machine]
        self._ranks_on = {names[machine]: ranks for machine, ranks in ranks_of.items()}
        self._addresses = [site.address for site in sites]
        self.leads = self._ranks_on[self.here][0] == self._ranks.rank
        self.ranks_here, self.machines = len(self._ranks_on[self.here]), [*self._ranks_on]
        machines = [Machine(names[machine], sites[ranks[0]].domain) for machine, ranks in ranks_of.items()]
        self._partners = partners(machines, self.tier.copies)

    def _begin(self) -> list[bytes]:
        """Take this machine's folder, clear it, and return what is noted of the run's branches."""
        texts = self._stored() if self._ranks.rank == 0 and self.shared else []
        if self.leads:
            self._lock = StoreLock(self.folder.path)
            self.folder.prepare()
            self.folder.sweep()
            if not self.shared:
                self._store.backend.tidy()
                Directory(os.path.dirname(self.folder.path)).tidy()
            texts += _noted(f"{self.folder.path}/{NOTE}")
        return texts

    def _connect(self, machine: str) -> Peer:
        """Return a connection to a machine: to one of its ranks, so that theirs share the work."""
        ranks = self._ranks_on[machine]
        address = self._addresses[ranks[self._ranks.rank % len(ranks)]]
        return Peer(address, self._secret)

    def lacking(self, nbytes: int) -> str:
        """Return why so many more bytes do not fit on this machine; nothing if they do."""
        bound = self.tier.host_memory
        if bound is not None and (used := sum(each.nbytes for each in self.folder.parts())) + nbytes > bound:
            limit = option("tier.host_memory", str(bound))
            return f"{limit} would be passed: {size_text(used)} are there, {size_text(nbytes)} more come"
        return self.tier.lacking(nbytes)

    # -- branches

    def go_on_from(self, step: int | None) -> None:
        """The run goes on from ``step``, ``None`` from the beginning; what is beyond it is void once it saves."""
        self._origin = -1 if step is None else step

    def _begin_branch(self, step: int) -> None:
        """Void what was saved beyond ``step``. Collective."""

        def newest() -> int:
            there = self._store.checkpoints()[0] if self._ranks.rank == 0 else []
            return max((each.manifest.serial for each in there), default=0)

        failing = "The tier could not note where this run goes on from"
        stored = self._ranks.run_on_all(failing, newest)[0]
        self._lineage = self._lineage.branched(step, stored)
        self._serial, self._origin = 0, None
        self._ranks.run_on_all(failing, self._note)

    def _note(self) -> None:
        text = self._lineage.dumps()
        if self._ranks.rank == 0 and self.shared:
            self._store.backend.replace(NOTE, text)
        if self.leads:
            folder = self.folder.path
            for place in (folder, os.path.dirname(folder))[: 1 if self.shared else 2]:
                replace_small(f"{place}/{NOTE}", text, 0o600, self.tier.durable)

    # -- saving, on the background thread

    def begin_save(self, step: int) -> SaveId | None:
        """Agree on a save of the tier, and make room for it; ``None`` while copies are still being sent. Collective."""
        if self._origin is not None:
            self._begin_branch(self._origin)

        def look() -> _RankParts:
            busy, whole = self._threads.busy, tuple(each.folder for each in self._whole)
            if self._threads.copied:
                self._copied |= {*whole[-1:]}
            return _RankParts(busy, whole, tuple(each for each in whole if each in self._copied))

        def decide(found: list[_RankParts]) -> list[_SaveRound | None]:
            whole, copied = _in_common(found)
            busy = [rank for rank, each in enumerate(found) if each.busy]
            if busy or whole[-1:] != copied[-1:]:
                self._lag.note_late(f"{name_ranks(busy)} still sending copies" if busy else "copies have failed")
            else:
                self._lag.note_copied(step_of(copied[-1]) if copied else None)
            if busy:
                return [None] * len(found)
            token, numbers = new_token(), (self._lineage.branch, self._serial + 1, step)
            save = SaveId(self._lineage.run, *numbers, token, self._ranks.size)
            return [_SaveRound(save, frozenset({save.folder, *_staying(whole, copied, self.tier.keep)}))] * len(found)

        turn = self._ranks.round_trip(f"Step {step} is not in the tier", look, decide)
        if turn is None:
            return None
        self._serial += 1
        self._whole = [each for each in self._whole if each.folder in turn.stay]
        self._copied &= turn.stay
        with contextlib.suppress(OSError, CheckpointError):  # writing shows it, on all ranks
            self.folder.make(turn.save)
            if self.leads and not os.path.exists(f"{self.folder.path}/{NOTE}"):  # the folder was deleted
                self._note()
        if self.leads:
            self.folder.delete(turn.stay, keep=True)
        return turn.save

    def end_save(self, part: Part) -> None:
        """This rank's part is written, and so is every other's: complete it, and have it copied."""
        try:
            self.folder.complete(part)
        except OSError as error:
            _log.warning("stagereg: step %d is not complete in the tier: %s", part.save.step, error)
            return
        self._whole.append(part.save)
        self._threads.submit(part, self.folder.directory(part.save), self._partners[self.here])

    # -- restoring

    def steps(self) -> list[TierStep]:
        """Return the complete steps that this run may go on from, the newest first. Collective."""

        def look() -> tuple[str, list[inventory.ReportedPart]]:
            return self.here, inventory.report(self.folder.parts()) if self.leads else []

        def decide(found: list[tuple[str, list[inventory.ReportedPart]]]) -> list[list[TierStep]]:
            reports = {machine: parts for machine, parts in found if parts}
            complete, others = inventory.steps(reports, self._lineage)
            for line in others:
                _log.info("stagereg: in the tier: %s", line)
            return [complete] * len(found)

        return self._ranks.round_trip("What is in the tier could not be listed", look, decide, self._ranks.limit)

    def path_of(self, step: TierStep) -> str:
        """Return the folder of a step on rank 0's machine, by which all ranks name it."""
        return f"{self._path}/{step.save.folder}"

    def names(self, path: str) -> bool:
        """Whether a path is that of a step in the tier, which may be there no more; the same on all ranks."""
        return os.path.dirname(os.path.abspath(path)) == self._path

    def branch_of(self, serial: int) -> int:
        """Return in which branch of the run a checkpoint of the store was committed, by its serial number."""
        return self._lineage.branch_of(serial)

    @contextlib.contextmanager
    def reading(self, step: TierStep) -> Iterator[StepReader]:
        """Read a step on this rank; connections are closed afterwards."""
        with contextlib.ExitStack() as closing:

            @functools.cache
            def connect(machine: str) -> Peer:
                peer = self._connect(machine)
                closing.callback(peer.close)
                return peer

            yield closing.enter_context(StepReader(step, self.folder, self.here, connect))

    def restored(self, step: TierStep, found: Sequence[Found]) -> None:
        """Make the copies again that a restored step lacks, before anything else is sent. Collective.

        Older steps stay until another save begins, when they are made. ``found`` is what each rank has found, in rank
        order.
        """
        own = found[self._ranks.rank]
        if self._ranks.rank == 0:
            total = sum((each.sources for each in found), Counter[str]())
            sources = ", ".join(f"{size_text(nbytes)} from {machine}" for machine, nbytes in total.most_common(_SHOWN))
            more = f" and {len(total) - _SHOWN} machines more" if len(total) > _SHOWN else ""
            _log.info("stagereg: step %d was read in the tier: %s%s", step.save.step, sources, more)
        record.emit("restored", step=step.save.step, branch=step.save.branch, sources=dict(own.sources))
        bad = set().union(*(each.bad for each in found))
        step = step.without(bad)
        gone = [rank for machine, rank in bad if machine == self.here and machine not in step.parts[rank][1]]
        # A machine does not take a part that it has, so the ranks delete all corrupt copies before they send any.
        drop = functools.partial(self.folder.drop, step.save, gone if self.leads else [])
        self._ranks.run_on_all("Corrupt copies in the tier could not be deleted", drop)
        self._whole = [step.save]
        if self.leads:
            wanted = inventory.missing_copies(step, self._partners, self.tier.copies)
            for rank, machines in wanted.get(self.here, {}).items():
                if (part := self.folder.find(step.save, rank)) is not None:
                    have = [each for each in step.parts[rank][1] if each != self.here]
                    directory = self.folder.directory(step.save)
                    self._threads.submit(part, directory, machines, have)

    # -- ending

    def wait_for_copies(self) -> None:
        """Wait until every rank has made its copies, or cannot. Collective. Raises: ``CheckpointError``."""
        limit_s = 0.9 * self._ranks.limit.total_seconds()
        self._ranks.run_on_all("The last step may not be copied in the tier", lambda: self._threads.wait(limit_s))

    def clear(self) -> None:
        """Have :meth:`close` delete what this machine has: the run has come to its end, and the store has all of it."""
        self._is_over = True

    def close(self) -> None:
        """End all threads and let go of the folder. Twice is harmless."""
        self._threads.close()
        self._let_go()

    def _let_go(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._lock is not None:
            if self._is_over:
                self.folder.remove()
            self._lock.release()
            self._lock = None


def _in_common(ranks: Sequence[_RankParts]) -> tuple[list[str], list[str]]:
    """Return the folders of saves that are complete on all ranks, in their order, and of these the copied ones."""
    whole = [each for each in ranks[0].whole if all(each in rank.whole for rank in ranks)]
    return whole, [each for each in whole if all(each in rank.copied for rank in ranks)]


def _staying(whole: Sequence[str], copied: Sequence[str], most: int) -> Sequence[str]:
    """Return the folders of saves that stay when another one begins: the newest, and at least one that is copied."""
    if whole and copied and whole[-1] not in copied:  # it could not be copied, and goes before one that is
        return copied[-1:]
    return whole[-max(most - 1, 1) :]


def _noted(path: str, read: Callable[[str], bytes] = read_own, other: str = "tier.dir") -> list[bytes]:
    """Return the note of a run, if it exists. Raises: ``CheckpointError`` if it is something else; ``OSError``.

    Without this note the run would not find its steps, so it is not skipped as other notes are.
    """
    try:
        if text := read(path):
            Lineage.loads(text)
        return [text] if text else []
    except (UnfitFileError, ValueError) as error:
        more = f", or give this run another {option(other, 'PATH')}" if other else ""
        raise CheckpointError(
            f"{path}, which notes the run and its branches, cannot be used: {getattr(error, 'strerror', error)}. Bring "
            f"it back from a copy. Or delete it{more}: the run may then not find the steps in its tier."
        ) from error
