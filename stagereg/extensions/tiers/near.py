"""The local tier of a run on one rank: combines the machine's folder, the part server and the copy thread.

Every rank has a :class:`LocalTier` and makes the same calls in the same order. On each machine the lowest rank, the
*leader*, holds the lock of the folder, deletes leftovers, and reports the parts in the folder.
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
_SHOWN = 4  # maximum number of machines named in a log line


class Site(NamedTuple):
    machine: str  # unique id of the machine
    host: str
    domain: str
    address: tuple[str, int]  # host and port of the part server of the rank


class _Setup(NamedTuple):
    root: str  # the folder of the tier on the machine of this rank
    first: str  # the folder of the tier on the machine of rank 0
    run: str
    secret: bytes


class _RankParts(NamedTuple):
    """The parts that a rank reports to rank 0 when a save begins, each by the name of its save's folder."""

    busy: bool  # whether the rank still sends copies
    whole: tuple[str, ...]  # complete parts, in the order of the saves
    copied: tuple[str, ...]  # complete parts with all peer copies


class _SaveRound(NamedTuple):
    """The decision of rank 0 about one save to the tier, which rank 0 sends to all ranks."""

    save: SaveId
    stay: frozenset[str]  # folders of retained saves; all others are deleted before the save writes


class LocalTier:
    """The local tier of one run, as used by one rank. The constructor is collective.

    Args:
        tier: the tier of the config.
        ranks: the ranks that save together.
        store: the checkpoint directory of the run, in which rank 0 records the run ID and the branches of the run.
        shared: whether all machines share ``store``. If not, each machine records run ID and branches in the tier.

    Attributes:
        folder: the parts on this machine.
        here: the name of this machine.
        leads: whether this rank is the lowest rank of its machine.
        ranks_here: the number of ranks on this machine.
        machines: the names of all machines.

    Raises:
        CheckpointError: a rank cannot create the folder, or another process holds its lock. Raised on all ranks.
    """

    def __init__(self, tier: Tier, ranks: RankGroup, store: CheckpointStore, shared: bool = True) -> None:
        self.tier, self._ranks, self._store, self.shared = tier, ranks, store, shared
        self._server: PartServer | None = None
        self._lock: StoreLock | None = None
        self._whole: list[SaveId] = []  # saves with a complete part of this rank, the newest last
        self._copied: set[str] = set()  # folders of the saves in _whole with all peer copies
        self._origin: int | None = -1  # the step that this run resumes from, -1 for none; None after the first save
        self._serial = 0
        self._lag = CopyLag()
        self._is_over = False  # whether close() deletes the parts of the run
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
            self._release()
            raise
        self._lineage = inventory.lineage_of(chain(*texts), agreed.run) or Lineage(agreed.run)

    # -- starting

    def _prepare(self) -> tuple[str, list[bytes], bytes]:
        """Create the folder of the tier. Return its path, the recorded lineages of this run, and a new secret."""
        root = self.tier.prepare()
        known: list[bytes] = []
        if not self.shared:
            known = _noted(f"{root}/{NOTE}")
        elif self._ranks.rank == 0:
            known = self._stored()
        return root, known, secrets.token_bytes(_SECRET_BYTES)

    def _stored(self) -> list[bytes]:
        """Return the lineage of this run that the checkpoint directory records, if any."""
        return _noted(f"{self._store.root}/{NOTE}", lambda _: self._store.note(NOTE, needed=True), "")

    def _agree(self, found: list[tuple[str, list[bytes], bytes]]) -> list[_Setup]:
        """On rank 0, return the :class:`_Setup` of each rank. The run ID is new if no rank has recorded one."""
        lineages = [inventory.lineage_of(known) for _, known, _ in found]
        runs = {each.run: name_ranks([rank]) for rank, each in enumerate(lineages) if each is not None}
        if len(runs) > 1:  # a wrong choice could restore the state of another run
            raise CheckpointError(
                f"{' and '.join(runs.values())} have {NOTE} files of different runs. Without "
                f"{option('checkpoint.dir')} this file identifies the run. Delete {NOTE} on the machines that have it "
                f"from another run, or use a separate folder for this run: {option('tier.dir', 'PATH')}."
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
        machine = f"{socket.gethostname()} {boot_id()} {there.st_dev} {there.st_ino}"  # equal if ranks share the folder
        return Site(machine, socket.gethostname(), self.tier.domain or boot_id(), self._server.address)

    def _place(self, sites: Sequence[Site]) -> None:
        """Derive from ``sites`` the machine of each rank, and the machines that receive copies from this machine."""
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
        """Lock the folder of this machine, delete leftovers, and return the lineages that are recorded for the run."""
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
        """Return a connection to a rank of ``machine``, selected by this rank's number to spread the load."""
        ranks = self._ranks_on[machine]
        return Peer(self._addresses[ranks[self._ranks.rank % len(ranks)]], self._secret)

    def lacking(self, nbytes: int) -> str:
        """Return why ``nbytes`` more bytes do not fit on this machine; empty if they fit."""
        bound = self.tier.host_memory
        if bound is not None and (used := sum(each.nbytes for each in self.folder.parts())) + nbytes > bound:
            limit = option("tier.host_memory", str(bound))
            return f"a save needs {size_text(nbytes)}, and {size_text(used)} of {limit} are used"
        return self.tier.lacking(nbytes)

    # -- branches

    def resume_from(self, step: int | None) -> None:
        """Set the step from which the run resumes; ``None``: from no step. The next save voids all later steps."""
        self._origin = -1 if step is None else step

    def _begin_branch(self, step: int) -> None:
        """Record that the run continues from ``step``, which voids all later steps of earlier branches. Collective."""

        def newest() -> int:
            there = self._store.checkpoints()[0] if self._ranks.rank == 0 else []
            return max((each.manifest.serial for each in there), default=0)

        failing = f"Cannot record in the local tier that this run resumes from step {step}"
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
        """Begin a save and delete old steps, or return ``None`` if a rank is still sending copies. Collective."""
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
                self._lag.note_late(f"copies from {name_ranks(busy)} are pending" if busy else "copies have failed")
            else:
                self._lag.note_copied(step_of(copied[-1]) if copied else None)
            if busy:
                return [None] * len(found)
            token, numbers = new_token(), (self._lineage.branch, self._serial + 1, step)
            save = SaveId(self._lineage.run, *numbers, token, self._ranks.size)
            return [_SaveRound(save, frozenset({save.folder, *_staying(whole, copied, self.tier.keep)}))] * len(found)

        turn = self._ranks.round_trip(f"Cannot save step {step} in the local tier", look, decide)
        if turn is None:
            return None
        self._serial += 1
        self._whole = [each for each in self._whole if each.folder in turn.stay]
        self._copied &= turn.stay
        with contextlib.suppress(OSError, CheckpointError):  # without the folder, the write fails on all ranks
            self.folder.make(turn.save)
            if self.leads and not os.path.exists(f"{self.folder.path}/{NOTE}"):  # the folder was deleted
                self._note()
        if self.leads:
            self.folder.delete(turn.stay, keep=True)
        return turn.save

    def end_save(self, part: Part) -> None:
        """Commit the part of this rank and queue its peer copies. Called after all ranks have written their parts."""
        try:
            self.folder.complete(part)
        except OSError as error:
            _log.warning("stagereg: cannot complete step %d in the local tier: %s", part.save.step, error)
            return
        self._whole.append(part.save)
        self._threads.submit(part, self.folder.directory(part.save), self._partners[self.here])

    # -- restoring

    def steps(self) -> list[TierStep]:
        """Return the complete steps that this run can resume from, the newest first. Collective."""

        def look() -> tuple[str, list[inventory.ReportedPart]]:
            return self.here, inventory.report(self.folder.parts()) if self.leads else []

        def decide(found: list[tuple[str, list[inventory.ReportedPart]]]) -> list[list[TierStep]]:
            reports = {machine: parts for machine, parts in found if parts}
            complete, others = inventory.steps(reports, self._lineage)
            for line in others:
                _log.info("stagereg: Skipped a step of the local tier: %s", line)
            return [complete] * len(found)

        return self._ranks.round_trip("Cannot list the steps of the local tier", look, decide, self._ranks.limit)

    def path_of(self, step: TierStep) -> str:
        """Return the path of a step: its folder on the machine of rank 0. All ranks return the same path."""
        return f"{self._path}/{step.save.folder}"

    def names(self, path: str) -> bool:
        """Return whether ``path`` names a step of this tier, existing or not. All ranks return the same value."""
        return os.path.dirname(os.path.abspath(path)) == self._path

    def branch_of(self, serial: int) -> int:
        """Return the number of the branch that committed checkpoint ``serial`` of the checkpoint directory."""
        return self._lineage.branch_of(serial)

    @contextlib.contextmanager
    def reading(self, step: TierStep) -> Iterator[StepReader]:
        """Yield a reader of a step for this rank, and close its connections afterwards."""
        with contextlib.ExitStack() as closing:

            @functools.cache
            def connect(machine: str) -> Peer:
                peer = self._connect(machine)
                closing.callback(peer.close)
                return peer

            yield closing.enter_context(StepReader(step, self.folder, self.here, connect))

    def restored(self, step: TierStep, found: Sequence[Found]) -> None:
        """Delete corrupt copies of a restored step, then queue its missing copies. Collective.

        ``found`` is what each rank read, in rank order. Older steps are not deleted until the next save begins.
        """
        own = found[self._ranks.rank]
        if self._ranks.rank == 0:
            total = sum((each.sources for each in found), Counter[str]())
            sources = ", ".join(f"{size_text(nbytes)} from {machine}" for machine, nbytes in total.most_common(_SHOWN))
            more = f" and {len(total) - _SHOWN} more machines" if len(total) > _SHOWN else ""
            _log.info("stagereg: Read step %d from the local tier: %s%s.", step.save.step, sources, more)
        record.emit("restored", step=step.save.step, branch=step.save.branch, sources=dict(own.sources))
        bad = set().union(*(each.bad for each in found))
        step = step.without(bad)
        gone = [rank for machine, rank in bad if machine == self.here and machine not in step.parts[rank][1]]
        # A machine rejects a part that it already has, so the ranks delete all corrupt copies before they send parts.
        drop = functools.partial(self.folder.drop, step.save, gone if self.leads else [])
        self._ranks.run_on_all("Cannot delete corrupt copies of the local tier", drop)
        self._whole = [step.save]
        if self.leads:
            wanted = inventory.missing_copies(step, self._partners, self.tier.copies)
            for rank, machines in wanted.get(self.here, {}).items():
                if (part := self.folder.find(step.save, rank)) is not None:
                    have = [each for each in step.parts[rank][1] if each != self.here]
                    self._threads.submit(part, self.folder.directory(step.save), machines, have)

    # -- ending

    def wait_for_copies(self) -> None:
        """Wait, for a bounded time, until all peer copies of all ranks have succeeded or failed. Collective."""
        limit_s = 0.9 * self._ranks.limit.total_seconds()
        self._ranks.run_on_all("The last step may lack peer copies", lambda: self._threads.wait(limit_s))

    def clear(self) -> None:
        """Make :meth:`close` delete the parts on this machine. Called if the checkpoint directory has the last step."""
        self._is_over = True

    def close(self) -> None:
        """Stop all threads and release the lock of the folder. Idempotent."""
        self._threads.close()
        self._release()

    def _release(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._lock is not None:
            if self._is_over:
                self.folder.remove()
            self._lock.release()
            self._lock = None


def _in_common(ranks: Sequence[_RankParts]) -> tuple[list[str], list[str]]:
    """Return the saves that are complete on all ranks, in order, and the subset of saves with all peer copies."""
    whole = [each for each in ranks[0].whole if all(each in rank.whole for rank in ranks)]
    return whole, [each for each in whole if all(each in rank.copied for rank in ranks)]


def _staying(whole: Sequence[str], copied: Sequence[str], most: int) -> Sequence[str]:
    """Return the saves to retain: the newest; or, if the newest lacks peer copies, only the newest copied one."""
    if whole and copied and whole[-1] not in copied:  # copies of the newest step failed, so retain a copied step
        return copied[-1:]
    return whole[-max(most - 1, 1) :]


def _noted(path: str, read: Callable[[str], bytes] = read_own, other: str = "tier.dir") -> list[bytes]:
    """Return the lineage in the file ``path``, in a list; an empty list if the file does not exist.

    Raises: ``CheckpointError`` if the file is invalid, because without it the run would not find its steps.
    """
    try:
        if text := read(path):
            Lineage.loads(text)
        return [text] if text else []
    except (UnfitFileError, ValueError) as error:
        more = f", or use another folder: {option(other, 'PATH')}" if other else ""
        raise CheckpointError(
            f"{path} identifies the run and its branches, but it is unusable: {getattr(error, 'strerror', error)}. "
            f"Restore the file from a backup. Or delete it{more}; then the run may not find the steps of its tier."
        ) from error
