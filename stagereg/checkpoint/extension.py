"""The protocols by which extensions plug into a checkpointer.

The core calls what is written here, and knows nothing else of extensions. All extensions of a checkpointer are called
in one order, the same on all ranks (:mod:`.dispatch`). What an extension raises in :meth:`CheckpointExtension.targets`,
``start``, ``due``, ``exit`` or a method of :class:`RestoreExtension` reaches the program. What an extension raises in
another method is logged, and fails neither a save nor training. No method has a time limit: one that hangs holds its
thread.
"""

from __future__ import annotations

import datetime
import enum
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch.distributed as dist

    from stagereg.checkpoint.format.damage import Found, VerificationResult
    from stagereg.checkpoint.format.manifest import Checkpoint, Manifest
    from stagereg.checkpoint.ranks.rank_group import RankGroup
    from stagereg.checkpoint.state.optimizer_state import ParameterNames
    from stagereg.checkpoint.stats import CheckpointStats
    from stagereg.checkpoint.storage.protocol import Storage
    from stagereg.checkpoint.storage.reading import CheckpointFiles, Transfer
    from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
    from stagereg.checkpoint.targets import SaveTarget
    from stagereg.errors import CheckpointError


class Due(enum.IntEnum):
    """What is to happen after a step. Of several answers the largest one counts."""

    NO = 0
    SAVE = 1
    LEAVE = 2  # save, and exit on all ranks


class Saves(Protocol):
    """The saves of a checkpointer, as its extensions see them."""

    stats: CheckpointStats

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint in the directory that this run knows to be good. Any thread."""

    def note_newest(self, step: int | None) -> None:
        """Note that ``step`` is the newest good checkpoint in the directory, ``None`` for no checkpoint. Any thread."""

    @property
    def targets(self) -> Sequence[SaveTarget]:
        """Where saves go, the checkpoint directory last."""

    def describe_newest(self) -> str:
        """Return a sentence on the newest checkpoint. Any thread."""

    def finish(self) -> bool:
        """Wait until all saves have ended, and old checkpoints are deleted; False if a save hangs."""

    def ends_by(self, until: float) -> bool:
        """Wait until all saves to the directory have ended, well or not; False if they have not at ``until``."""

    def raise_failure(self) -> None:
        """Raise the first failure that no call has raised yet. Training thread."""


@dataclass(frozen=True)
class Setup:
    """The parts of a checkpointer, before it can save."""

    ranks: RankGroup  # the ranks that save together, for exchanges on the training thread
    process_group: dist.ProcessGroup | None  # the option, in which an extension makes groups of its own
    training: dist.ProcessGroup | None  # the process group that trains, ``None`` for a rank that is alone
    store: CheckpointStore  # the checkpoint directory; without one, a directory of notes
    stores: bool  # whether checkpoints go to that directory
    storage: Storage  # writes their files
    names: ParameterNames  # of the parameters in the state, as the saves see them
    every: int | None  # the number whose multiples are saved, ``None`` for another schedule
    dir: Path | str  # the directory, for messages
    token: str  # names this run; the same on all ranks
    resume: str  # the option
    timeout: datetime.timedelta  # of a save
    lock: Callable[[], object]  # locks the directory; collective
    is_urged: Callable[[], bool]  # whether an extension of this rank has a reason to leave (``urges``)


class Rejection(NamedTuple):
    """Why a restore skips a candidate whose files may all be good."""

    word: str  # completes "the checkpoint is ...", such as ``"quarantined"``
    about: str  # the subject of the reason, such as the name of a corrupt file
    why: str  # the reason
    hint: str = ""  # what to do, for the warning that the candidate is skipped
    advice: str = ""  # what to do, for the error if every candidate is skipped


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that a restore may try."""

    found: VerificationResult  # the directory and its manifest, and which files are corrupt
    source: str  # the name of the source that reads the checkpoint
    rejections: tuple[Rejection, ...] = ()  # why it is skipped; the first one names the candidate in messages

    @property
    def path(self) -> str:
        return self.found.path

    @property
    def manifest(self) -> Manifest | None:
        """The manifest; ``None`` if the manifest cannot be read."""
        return self.found.manifest

    @property
    def step(self) -> int | None:
        return self.found.step

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint; ``None`` if the candidate is skipped."""
        return None if self.rejections else self.found.checkpoint

    @property
    def word(self) -> str:
        """Completes "the checkpoint is ..." for a candidate that is skipped."""
        return self.rejections[0].word if self.rejections else "corrupt"

    def lines(self) -> list[str]:
        """Return why the candidate is skipped, one line a reason."""
        return [*self.found.lines(), *(f"{each.about}: {each.why}" for each in self.rejections)]

    def __str__(self) -> str:
        """The reasons on one line."""
        return "; ".join(self.lines())


@dataclass(frozen=True)
class RestoreRequest:
    """One call of :meth:`.Checkpointer.restore`. Fields that are not explained are as in :class:`stagereg.Restore`."""

    store: CheckpointStore  # the directory of checkpoints
    resume: str  # ``"auto"``, ``"latest"`` or the path of a checkpoint
    own: bool  # whether the option ``resume`` chooses the checkpoint, and not the argument ``source``
    verify: str
    read: str
    cast: bool
    exact: bool
    rename: Mapping[str, str]
    allow_missing: Sequence[str]
    state: MutableMapping[str, Any]  # the argument of ``restore``
    names: ParameterNames  # of the parameters of ``state``
    storage: Storage  # the checkpointer's
    ranks: RankGroup  # the ranks that restore

    @property
    def where(self) -> str:
        """The directory or the path that is restored from."""
        return self.resume if self.is_path else self.store.root

    @property
    def is_path(self) -> bool:
        """Whether ``resume`` is the path of one checkpoint."""
        return self.resume not in ("auto", "latest")

    @property
    def failing(self) -> str:
        """How the message of an error begins."""
        return f"Nothing was restored from {self.where}"


class CheckpointSource:
    """Where one restore finds checkpoints: the checkpoint directory, a local tier, directories of plain torch.

    All methods run on the training thread. What a method raises reaches the program, on all ranks.

    Attributes:
        name: in :attr:`Candidate.source`; unique.
        shares_reads: whether one rank may read the files for the other ranks.
        root: the directory that messages name, if it is not the checkpoint directory.
    """

    name = ""
    shares_reads = True
    root = ""

    def claims(self, path: str) -> bool:
        """Whether ``path`` is a checkpoint that this source alone reads. The same on all ranks; not collective."""
        return False

    def survey(self) -> bool:
        """Look for checkpoints; return whether there are some, if that is known before they are listed. Collective."""
        return False

    def insert(self, listed: list[Candidate], resume: str) -> list[Candidate]:
        """Return ``listed``, in which the newest is first, with the candidates of this source. On rank 0.

        ``resume`` is the one of the request, or ``"auto"`` for ``"latest"`` if another source has checkpoints.
        """
        raise NotImplementedError

    def lease(self, candidate: Candidate) -> AbstractContextManager[None]:
        """Return what keeps a candidate from being deleted. On rank 0."""
        return nullcontext()

    def check(self, candidate: Candidate, rank: int, size: int) -> dict[str, Found]:
        """Read the share of one of ``size`` ranks of all files, and return what was found. On each rank.

        A source that checks bytes as it reads them returns nothing.
        """
        return {}

    def is_complete(self, candidate: Candidate) -> bool:
        """Whether this rank sees all files of a candidate. On each rank; not collective."""
        return True

    def files(self, candidate: Candidate, index: bytes | None) -> CheckpointFiles:
        """Return the files of a candidate, opened; ``index`` is the content of the index, if it is read already.

        On each rank; not collective.
        """
        raise NotImplementedError

    def corrupt(self, candidate: Candidate) -> None:
        """A candidate is corrupt. On all ranks; not collective."""

    def restored(self, candidate: Candidate, files: CheckpointFiles) -> None:
        """All ranks have restored a candidate from these files, which are still open. Collective."""


class SharedReader(Protocol):
    """Reads each byte of a checkpoint on one rank, which passes the byte on to the ranks that need it."""

    def index(self, checkpoint: Checkpoint, ranks: RankGroup) -> bytes:
        """Return the content of the index. Collective. Raises: ``CheckpointError``, on all ranks."""
        ...

    def begin(
        self, checkpoint: Checkpoint, files: CheckpointFiles, transfer: Transfer, ranks: RankGroup, check: bool
    ) -> Callable[[], Mapping[str, str]]:
        """Begin to read, and change no object yet; return what reads all, and then returns the corrupt files.

        With ``check`` all files are read and compared with the manifest. Both are collective. Raises:
        ``CheckpointError``, on all ranks.
        """
        ...


class RestoreExtension:
    """Accompanies restores, on all ranks. Each method does nothing here, and runs on the training thread.

    What a method raises reaches the program.
    """

    shared_reader: SharedReader | None = None

    def sources(self, request: RestoreRequest) -> Sequence[CheckpointSource]:
        """Return what a restore reads beside the checkpoint directory: the same on all ranks. Not collective."""
        return ()

    def candidates(self, request: RestoreRequest, listed: list[Candidate]) -> list[Candidate]:
        """Return the candidates, with more rejections or in another order: the same on all ranks. Collective."""
        return listed

    def restoring(self, request: RestoreRequest, candidate: Candidate) -> None:
        """A candidate is about to be read. On all ranks; not collective."""

    def restored(self, request: RestoreRequest, candidate: Candidate | None) -> None:
        """A restore has ended; ``None``: there was nothing to restore. On all ranks; not collective."""

    def refused(self, error: CheckpointError) -> None:
        """A restore has failed. On all ranks; not collective."""


class SaveObserver:
    """Observes what one rank saves. Each method does nothing here.

    All methods are called on the training thread, and must neither wait nor be collective. What one raises is logged.
    """

    def given(self, state: Mapping[str, Any]) -> None:
        """The program has given a state, which is kept for saves; objects in containers are entries of their own."""

    def end_step(self, step: int, state: MutableMapping[str, Any] | None) -> None:
        """A step has ended, with the state that was given for it, ``None`` if that was given earlier."""

    def begin_save(self, step: int, state: Mapping[str, Any] | None, targets: Sequence[SaveTarget]) -> None:
        """The program saves ``step`` in ``targets``; ``state`` is its own dict, ``None`` if it never gave one."""

    def capturing(
        self, state: Mapping[str, Any], captured: Mapping[str, Any]
    ) -> Callable[[dict[str, Any]], object] | None:
        """Entries of a state are ``captured``, and about to be staged.

        Return what is to be called with the staged copy, on the thread of the save.
        """
        return None


EXTENSIONS = "extensions"
"""What ranks compare the names of their extensions as."""
_NONE: Mapping[str, Any] = {}


class CheckpointExtension(SaveObserver, RestoreExtension):
    """Accompanies one checkpointer on all ranks. Each method does nothing here. See the module for errors.

    A checkpointer that the program has dropped is to be collected at once, so an extension keeps no reference to it.

    Attributes:
        name: in messages; ranks have the same extensions if they have the same names in one order.
        options: what has to be the same on all ranks, by the name of the option below ``checkpoint``.
    """

    name = ""
    options = _NONE

    def targets(self, setup: Setup) -> Sequence[SaveTarget]:
        """Return where saves go besides the checkpoint directory. Collective; training thread, before :meth:`start`."""
        return ()

    def start(self, setup: Setup, saves: Saves) -> None:
        """The checkpointer is constructed; ``saves`` is as long-lived as it. Collective; training thread."""

    def locked(self) -> None:
        """The run has the lock of the checkpoint directory from now on. On rank 0, training thread."""

    def due(self, step: int) -> Due:
        """Return what to do after ``step``: the same on all ranks. Training thread, once a step."""
        return Due.NO

    def urges(self) -> bool:
        """Whether this rank has a reason to leave, on which the ranks may not have agreed yet. Any thread."""
        return False

    def leaving(self) -> None:
        """All ranks are about to save their last step, and then to exit. Training thread."""

    def exit(self, step: int, failure: CheckpointError | None, resume: str | None) -> None:
        """Raise ``SystemExit`` if the ranks leave by the answer of this extension.

        ``step`` is saved, unless there is a ``failure``. ``resume`` is the option, ``None`` if the run has not called
        ``restore()``. Collective; training thread.
        """

    def follow(self, over: bool) -> None:
        """Take part in exchanges that ranks in the loop of a join have begun, on a rank that has left it.

        ``over``: no rank is in the loop any more; called on all ranks. Training thread.
        """

    def idle(self) -> None:
        """Take part in exchanges that this rank has missed. About once a second, on the thread of saves."""

    def manifest_fields(self, step: int) -> Mapping[str, Any]:
        """Return fields of the manifest of a checkpoint, as JSON. On rank 0; the thread of the save.

        Fields that a manifest cannot have are logged as an error is, and left out.
        """
        return {}

    def committed(self, step: int, where: str, checkpoint: Checkpoint | None) -> None:
        """A save is complete in the target ``where``, the checkpoint directory, ``"store"``, or ``"tier"``.

        ``checkpoint`` is the new one in the checkpoint directory, on rank 0. On each rank; a thread of saves, which
        waits.
        """

    def ending(self, error: BaseException | None) -> None:
        """The ``with`` block of the checkpointer ends, in ``error`` or well. On this rank; training thread."""

    def ended(self) -> None:
        """The blocks of all ranks end well; their last step is still to be saved. Training thread."""

    def completed(self) -> None:
        """The blocks of all ranks have ended well, and the last step is saved. Collective; training thread."""

    def outlook(self) -> str:
        """Return what the next start does that a user may not expect, as a sentence; else nothing. On rank 0."""
        return ""

    def close(self, in_time: bool) -> None:
        """The checkpointer is closed; ``in_time`` unless a save hangs. Training thread; idempotent."""
