"""The protocols between a checkpointer and its extensions.

The core of the checkpointer uses extensions only by these protocols. It calls all of them in one order, which is the
same on all ranks (:mod:`.dispatch`). Exceptions of :meth:`CheckpointExtension.targets`, ``start``, ``due`` and
``exit``, and of all methods of :class:`RestoreExtension`, are raised in the program. Exceptions of other methods are
logged, and fail neither a save nor training. No method has a time limit: a method that hangs blocks its thread.
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
    """The action after a step. Of the results of several extensions, the largest one counts."""

    NO = 0
    SAVE = 1
    LEAVE = 2  # save, and exit on all ranks


class Saves(Protocol):
    """The interface of an extension to the saves of its checkpointer."""

    stats: CheckpointStats

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint in the directory that this run knows to be valid. Any thread."""

    def note_newest(self, step: int | None) -> None:
        """Record the step of the newest valid checkpoint in the directory; ``None`` for none. Any thread."""

    @property
    def targets(self) -> Sequence[SaveTarget]:
        """The targets of saves. The checkpoint directory is the last one."""

    def describe_newest(self) -> str:
        """Return a sentence about the newest checkpoint. Any thread."""

    def finish(self) -> bool:
        """Wait until all saves have ended and old checkpoints are deleted; return False if a save hangs."""

    def ends_by(self, until: float) -> bool:
        """Wait until all saves to the directory have ended or failed; return False if some have not at ``until``."""

    def raise_failure(self) -> None:
        """Raise the first failure that no call has raised yet. Training thread."""


@dataclass(frozen=True)
class Setup:
    """The parts and options of a checkpointer that its extensions receive before the first save."""

    ranks: RankGroup  # the ranks that save together, for exchanges on the training thread
    process_group: dist.ProcessGroup | None  # the option ``process_group``; extensions create their groups in it
    training: dist.ProcessGroup | None  # the process group that trains; ``None`` for a single process
    store: CheckpointStore  # the checkpoint directory; without one, the directory of the lock and records
    stores: bool  # whether checkpoints are saved to that directory
    storage: Storage  # the storage that writes the checkpoint files
    names: ParameterNames  # the names of the parameters in the state, as saves use them
    every: int | None  # the number of steps between saves; ``None`` for a schedule without a fixed number
    dir: Path | str  # the directory, for messages
    token: str  # the unique name of this run; the same on all ranks
    resume: str  # the option ``resume``
    timeout: datetime.timedelta  # the timeout of a save
    lock: Callable[[], object]  # locks the directory; collective
    is_urged: Callable[[], bool]  # whether an extension of this rank requests an exit (``urges``)


class Rejection(NamedTuple):
    """The reason why a restore skips a candidate; its files may be valid."""

    word: str  # the word that completes "the checkpoint is ...", such as ``"quarantined"``
    about: str  # the subject of the reason, such as the name of a corrupt file
    why: str  # the reason
    hint: str = ""  # the advice in the warning that the candidate is skipped
    advice: str = ""  # the advice in the error that all candidates are skipped


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that a restore may try."""

    found: VerificationResult  # the directory, its manifest and its corrupt files
    source: str  # the name of the source that reads the checkpoint
    rejections: tuple[Rejection, ...] = ()  # reasons to skip it; messages use the ``word`` of the first one

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
        """The word that completes "the checkpoint is ..." for a skipped candidate."""
        return self.rejections[0].word if self.rejections else "corrupt"

    def lines(self) -> list[str]:
        """Return the reasons why the candidate is skipped, one per line."""
        return [*self.found.lines(), *(f"{each.about}: {each.why}" for each in self.rejections)]

    def __str__(self) -> str:
        return "; ".join(self.lines())


@dataclass(frozen=True)
class RestoreRequest:
    """The arguments of one restore. :class:`stagereg.Restore` documents the fields without a comment."""

    store: CheckpointStore  # the directory of checkpoints
    resume: str  # ``"auto"``, ``"latest"`` or the path of a checkpoint
    own: bool  # whether the option ``resume`` chooses the checkpoint; otherwise the argument ``source``
    verify: str
    read: str
    cast: bool
    exact: bool
    rename: Mapping[str, str]
    allow_missing: Sequence[str]
    state: MutableMapping[str, Any]  # the objects and values to restore
    names: ParameterNames  # the names of the parameters in ``state``
    storage: Storage  # the storage of the checkpointer
    ranks: RankGroup  # the ranks that restore

    @property
    def where(self) -> str:
        """The checkpoint directory, or the path of the checkpoint, that is restored."""
        return self.resume if self.is_path else self.store.root

    @property
    def is_path(self) -> bool:
        """Whether ``resume`` is the path of one checkpoint."""
        return self.resume not in ("auto", "latest")

    @property
    def failing(self) -> str:
        """The beginning of error messages."""
        return f"Nothing was restored from {self.where}"


class CheckpointSource:
    """A place with checkpoints for one restore: the checkpoint directory, a local tier, or directories of plain torch.

    All methods run on the training thread. Their exceptions are raised in the program, on all ranks.

    Attributes:
        name: the unique name of the source, for :attr:`Candidate.source`.
        shares_reads: whether one rank may read the files for the other ranks.
        root: the directory that messages name, if it is not the checkpoint directory.
    """

    name = ""
    shares_reads = True
    root = ""

    def claims(self, path: str) -> bool:
        """Return whether only this source reads the checkpoint ``path``; the same on all ranks. Not collective."""
        return False

    def survey(self) -> bool:
        """Search for checkpoints before they are listed; return True if some are known to exist. Collective."""
        return False

    def insert(self, listed: list[Candidate], resume: str) -> list[Candidate]:
        """Return ``listed``, sorted newest first, with the candidates of this source inserted. On rank 0.

        ``resume`` is the request's, but ``"auto"`` instead of ``"latest"`` if :meth:`survey` of a source returned True.
        """
        raise NotImplementedError

    def lease(self, candidate: Candidate) -> AbstractContextManager[None]:
        """Return a context manager that prevents the deletion of a candidate. On rank 0."""
        return nullcontext()

    def check(self, candidate: Candidate, rank: int, size: int) -> dict[str, Found]:
        """Read and check the files that belong to ``rank`` of ``size`` ranks; return the results by name. On each rank.

        Empty if the source checks the bytes while it loads them.
        """
        return {}

    def is_complete(self, candidate: Candidate) -> bool:
        """Return whether this rank sees all files of a candidate. On each rank; not collective."""
        return True

    def files(self, candidate: Candidate, index: bytes | None) -> CheckpointFiles:
        """Open the files of a candidate; ``index`` is the content of its index, if known. Each rank; not collective."""
        raise NotImplementedError

    def corrupt(self, candidate: Candidate) -> None:
        """Called after a candidate was found to be corrupt. On all ranks; not collective."""

    def restored(self, candidate: Candidate, files: CheckpointFiles) -> None:
        """Called after all ranks have restored a candidate, before ``files`` are closed. Collective."""


class SharedReader(Protocol):
    """Reads each byte of a checkpoint on one rank, which sends it to the ranks that need it."""

    def index(self, checkpoint: Checkpoint, ranks: RankGroup) -> bytes:
        """Return the content of the index. Collective. Raises: ``CheckpointError``, on all ranks."""
        ...

    def begin(
        self, checkpoint: Checkpoint, files: CheckpointFiles, transfer: Transfer, ranks: RankGroup, check: bool
    ) -> Callable[[], Mapping[str, str]]:
        """Prepare a read without changing objects; return a function that reads, and then returns the corrupt files.

        With ``check``, it reads all files and compares them with the manifest. Both functions are collective. Both
        raise ``CheckpointError`` on all ranks.
        """
        ...


class RestoreExtension:
    """An extension of restores, on all ranks. Each method does nothing by default, and runs on the training thread.

    Exceptions of the methods are raised in the program.
    """

    shared_reader: SharedReader | None = None

    def sources(self, request: RestoreRequest) -> Sequence[CheckpointSource]:
        """Return sources in addition to the checkpoint directory; the same on all ranks. Not collective."""
        return ()

    def candidates(self, request: RestoreRequest, listed: list[Candidate]) -> list[Candidate]:
        """Return the candidates, with rejections added or in another order; the same on all ranks. Collective."""
        return listed

    def restoring(self, request: RestoreRequest, candidate: Candidate) -> None:
        """Called before a candidate is read. On all ranks; not collective."""

    def restored(self, request: RestoreRequest, candidate: Candidate | None) -> None:
        """Called at the end of a restore; ``None`` if there was no checkpoint. On all ranks; not collective."""

    def refused(self, error: CheckpointError) -> None:
        """Called after a restore has failed. On all ranks; not collective."""


class SaveObserver:
    """An observer of the saves of one rank. Each method does nothing by default.

    All methods are called on the training thread, and must not wait or be collective. Their exceptions are logged.
    """

    def given(self, state: Mapping[str, Any]) -> None:
        """Called after the program has passed a state to save. Objects in its containers are separate entries."""

    def end_step(self, step: int, state: MutableMapping[str, Any] | None) -> None:
        """Called at the end of a step; ``state`` is the state passed for it, or ``None`` if it was passed earlier."""

    def begin_save(self, step: int, state: Mapping[str, Any] | None, targets: Sequence[SaveTarget]) -> None:
        """Called when a save to ``targets`` begins; ``state`` is the program's dict, or ``None`` if it passed none."""

    def capturing(
        self, state: Mapping[str, Any], captured: Mapping[str, Any]
    ) -> Callable[[dict[str, Any]], object] | None:
        """Called before the ``captured`` entries of a state are staged.

        Return a function that the thread of the save calls with the staged copy, or ``None``.
        """
        return None


EXTENSIONS = "extensions"
"""The name of the option in which ranks compare the names of their extensions."""
_NONE: Mapping[str, Any] = {}


class CheckpointExtension(SaveObserver, RestoreExtension):
    """An extension of one checkpointer, on all ranks. Each method does nothing by default. See the module for errors.

    An extension must not keep a reference to its checkpointer, so that an unused checkpointer is freed immediately.

    Attributes:
        name: the name for messages. The extensions must have the same names in the same order on all ranks.
        options: values that must be the same on all ranks, by the name of the option below ``checkpoint``.
    """

    name = ""
    options = _NONE

    def targets(self, setup: Setup) -> Sequence[SaveTarget]:
        """Return targets in addition to the checkpoint directory. Collective; training thread, before :meth:`start`."""
        return ()

    def start(self, setup: Setup, saves: Saves) -> None:
        """Called after the checkpointer is constructed; ``saves`` lives as long. Collective; training thread."""

    def locked(self) -> None:
        """Called after this run has taken the directory lock. On rank 0; training thread."""

    def due(self, step: int) -> Due:
        """Return the action after ``step``; the same on all ranks. Training thread, once per step."""
        return Due.NO

    def urges(self) -> bool:
        """Return whether this rank requests an exit, on which the ranks may not have agreed yet. Any thread."""
        return False

    def leaving(self) -> None:
        """Called before all ranks save their last step and exit. Training thread."""

    def exit(self, step: int, failure: CheckpointError | None, resume: str | None) -> None:
        """Raise ``SystemExit`` if this extension has requested the exit of the ranks. Collective; training thread.

        ``step`` is saved, unless there is a ``failure``. ``resume`` is ``None`` if the run did not call ``restore()``.
        """

    def follow(self, over: bool) -> None:
        """Take part in the exchanges of ranks in a join's loop, on a rank that has left the loop. Training thread.

        ``over`` is True if no rank is in the loop any more; the method is then called on all ranks.
        """

    def idle(self) -> None:
        """Take part in exchanges that this rank has missed. Called about once per second, on the thread of saves."""

    def manifest_fields(self, step: int) -> Mapping[str, Any]:
        """Return additional manifest fields of a checkpoint, as JSON values. On rank 0, on the thread of the save.

        Invalid fields are logged like an exception, and omitted.
        """
        return {}

    def committed(self, step: int, where: str, checkpoint: Checkpoint | None) -> None:
        """Called after a save to the checkpoint directory (``"store"``) or to a tier (``"tier"``) is complete.

        ``checkpoint`` is the new checkpoint in the directory, on rank 0 only. On each rank, on the target's thread.
        """

    def ending(self, error: BaseException | None) -> None:
        """Called at the end of the ``with`` block; ``error`` is its exception, if any. Each rank; training thread."""

    def ended(self) -> None:
        """Called if all ranks' blocks ended without an exception, before the last save. Training thread."""

    def completed(self) -> None:
        """Called if all ranks' blocks ended without an exception, after the last save. Collective; training thread."""

    def outlook(self) -> str:
        """Return a sentence about unexpected behavior of the next start, or an empty text. On rank 0."""
        return ""

    def close(self, in_time: bool) -> None:
        """Called when the checkpointer closes; ``in_time`` is False if a save hangs. Training thread. Idempotent."""
