"""The interfaces between a checkpointer and its extensions.

The checkpointer calls its extensions only through these interfaces, in the same order on all ranks (:mod:`.dispatch`).
Exceptions in :meth:`CheckpointExtension.targets`, ``start``, ``due`` and ``exit``, and in all methods of
:class:`RestoreExtension`, propagate to the program. Exceptions in other methods are logged, and do not make a save or
training fail. The methods have no time limit: a method that hangs blocks its thread.
"""

from __future__ import annotations

import datetime
import enum
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch.distributed as dist

    from stagereg.checkpoint.format.damage import Found, VerificationResult
    from stagereg.checkpoint.format.manifest import Checkpoint, Manifest
    from stagereg.checkpoint.ranks.rank_group import RankGroup
    from stagereg.checkpoint.state.optimizer_state import ParameterNames
    from stagereg.checkpoint.storage.protocol import Storage
    from stagereg.checkpoint.storage.reading import CheckpointFiles, Transfer
    from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
    from stagereg.checkpoint.targets import SaveTarget
    from stagereg.errors import CheckpointError


class Due(enum.IntEnum):
    """The action that an extension requests after a step. If requests differ, the largest value is used."""

    NO = 0
    SAVE = 1
    LEAVE = 2  # save, and exit on all ranks


@dataclass
class CheckpointStats:
    """The cost of the checkpoints of this process so far.

    Attributes:
        saves: number of committed checkpoints.
        tier_saves: number of steps that all ranks have written to the tier.
        bytes_staged: total bytes of tensor data that this rank has copied in committed saves.
        stall_seconds: time in seconds for which each call to ``save`` blocked the training loop, in order of the calls.
        write_seconds: time in seconds to write and commit each checkpoint in the background, in order of the commits.
        on_commit_calls: number of calls to all ``on_commit`` components, on rank 0.
        on_commit_failures: number of calls to ``on_commit`` components that raised an exception, timed out, were
            skipped, or ended after their checkpoint was deleted.
    """

    saves: int = 0
    tier_saves: int = 0
    bytes_staged: int = 0
    stall_seconds: list[float] = field(default_factory=list)
    write_seconds: list[float] = field(default_factory=list)
    on_commit_calls: int = 0
    on_commit_failures: int = 0


class Saves(Protocol):
    """The methods that a checkpointer provides to its extensions, for information about its saves."""

    stats: CheckpointStats
    targets: Sequence[SaveTarget]  # the destinations of saves; the checkpoint directory is the last element

    @property
    def newest(self) -> int | None:
        """The step of the newest valid checkpoint in the directory that this run has recorded. Any thread."""

    def note_newest(self, step: int | None) -> None:
        """Record the step of the newest valid checkpoint, or ``None`` if there is no valid one. Any thread."""

    def describe_newest(self) -> str:
        """Return a sentence for the log that names the newest valid checkpoint. Any thread."""

    def finish(self) -> bool:
        """Wait until all saves have ended and old checkpoints are deleted. Return False if a save hangs."""

    def ends_by(self, until: float) -> bool:
        """Wait until all saves to the directory have ended. Return False if a save still runs at the time ``until``."""

    def raise_failure(self) -> None:
        """Raise the first failure of a save that was not raised before. Called on the training thread."""


@dataclass(frozen=True)
class Setup:
    """The internal objects and options of a checkpointer, which its extensions receive before the first save."""

    ranks: RankGroup  # the ranks that save together, for exchanges on the training thread
    process_group: dist.ProcessGroup | None  # the option ``process_group``; extensions create their groups in it
    training: dist.ProcessGroup | None  # the process group that trains; ``None`` for a single process
    store: CheckpointStore  # the checkpoint directory, or the directory for only lock and records
    stores: bool  # whether checkpoints are saved to that directory
    storage: Storage  # the storage that writes the checkpoint files
    names: ParameterNames  # the parameter names that saves use
    every: int | None  # the number of steps between saves; ``None`` for a schedule without a fixed number
    dir: Path | str  # the directory, for messages
    token: str  # the unique name of this run; the same on all ranks
    resume: str  # the option ``resume``
    timeout: datetime.timedelta  # the timeout of a save
    lock: Callable[[], object]  # locks the directory; collective
    is_urged: Callable[[], bool]  # whether an extension on this rank requests an exit (``urges``)


class Rejection(NamedTuple):
    """The reason why a restore skips a checkpoint even though its files may be valid."""

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
    rejections: tuple[Rejection, ...] = ()  # the restore skips a rejected candidate

    @property
    def path(self) -> str:
        return self.found.path

    @property
    def manifest(self) -> Manifest | None:
        """The manifest, or ``None`` if the manifest cannot be read."""
        return self.found.manifest

    @property
    def step(self) -> int | None:
        return self.found.step

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint, or ``None`` if the candidate is rejected, corrupt or incomplete."""
        return None if self.rejections else self.found.checkpoint

    @property
    def word(self) -> str:
        """The word that completes "the checkpoint is ...", for messages about a skipped candidate."""
        return self.rejections[0].word if self.rejections else "corrupt"

    def lines(self) -> list[str]:
        """Return the reasons why the candidate is skipped, one per line."""
        return [*self.found.lines(), *(f"{each.about}: {each.why}" for each in self.rejections)]

    def __str__(self) -> str:
        return "; ".join(self.lines())


@dataclass(frozen=True)
class RestoreRequest:
    """The arguments of one restore. :class:`stagereg.Restore` documents fields that have no comment here."""

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
        """The path to restore from: one checkpoint, or the checkpoint directory."""
        return self.resume if self.is_path else self.store.root

    @property
    def is_path(self) -> bool:
        """Whether ``resume`` is the path of one checkpoint."""
        return self.resume not in ("auto", "latest")

    @property
    def failing(self) -> str:
        """The beginning of the message for an error in this restore."""
        return f"Nothing was restored from {self.where}"


class CheckpointSource:
    """A place to restore from: the checkpoint directory, a local tier, or directories that plain torch wrote.

    All methods run on the training thread. Their exceptions propagate to the program, on all ranks.
    """

    name = ""  # the unique name of the source, for :attr:`Candidate.source`
    shares_reads = True  # whether one rank may read files and send the data to the other ranks
    root = ""  # the directory for messages; ``""`` means the checkpoint directory

    def claims(self, path: str) -> bool:
        """Return whether only this source may read the checkpoint ``path``; equal on all ranks. Not collective."""
        return False

    def survey(self) -> bool:
        """Search for checkpoints before :meth:`insert` lists them; return whether at least one exists. Collective."""
        return False

    def insert(self, listed: list[Candidate], resume: str) -> list[Candidate]:
        """Insert the candidates of this source into ``listed``, newest first, and return the list. On rank 0.

        ``resume``: the user's option, but ``"latest"`` becomes ``"auto"`` if any source's :meth:`survey` returned True.
        """
        raise NotImplementedError

    def lease(self, candidate: Candidate) -> AbstractContextManager[None]:
        """Return a context manager that prevents other processes from deleting a candidate. On rank 0."""
        return nullcontext()

    def check(self, candidate: Candidate, rank: int, size: int) -> dict[str, Found]:
        """Check one of ``size`` portions of the files. Return the digest or the error of each file, by name.

        Called on each rank. The result is empty if the source checks the files while reading them.
        """
        return {}

    def is_complete(self, candidate: Candidate) -> bool:
        """Return whether this rank can access all files of a candidate. On each rank. Not collective."""
        return True

    def files(self, candidate: Candidate, index: bytes | None) -> CheckpointFiles:
        """Open the files of a candidate. ``index``: the index file's content, if known. Each rank. Not collective."""
        raise NotImplementedError

    def corrupt(self, candidate: Candidate) -> None:
        """Called after a candidate was found to be corrupt. On all ranks; not collective."""

    def restored(self, candidate: Candidate, files: CheckpointFiles) -> None:
        """Called after all ranks have restored a candidate, before ``files`` are closed. Collective."""


class SharedReader(Protocol):
    """Reads each byte of a checkpoint on only one rank, and sends the data to the ranks that need it."""

    def index(self, checkpoint: Checkpoint, ranks: RankGroup) -> bytes:
        """Return the index file's content. Collective. If a rank fails, all ranks raise ``CheckpointError``."""

    def begin(
        self, checkpoint: Checkpoint, files: CheckpointFiles, transfer: Transfer, ranks: RankGroup, check: bool
    ) -> Callable[[], Mapping[str, str]]:
        """Return a function that reads the data into the objects, and then returns the corrupt files.

        ``check``: whether to compare the checksums of all files with the manifest. This method and the function are
        collective. If one rank fails, all ranks raise ``CheckpointError``.
        """


class RestoreExtension:
    """The base class of extensions that take part in restores, on all ranks. By default the methods do nothing.

    The methods run on the training thread. Exceptions propagate to the program.
    """

    shared_reader: SharedReader | None = None

    def sources(self, request: RestoreRequest) -> Sequence[CheckpointSource]:
        """Return additional sources of checkpoints, which must be the same on all ranks. Not collective."""
        return ()

    def candidates(self, request: RestoreRequest, listed: list[Candidate]) -> list[Candidate]:
        """Reject or reorder candidates. Return the new list, which must be the same on all ranks. Collective."""
        return listed

    def restoring(self, request: RestoreRequest, candidate: Candidate) -> None:
        """Called before a candidate is read. On all ranks; not collective."""

    def restored(self, request: RestoreRequest, candidate: Candidate | None) -> None:
        """Called after a successful restore; ``candidate`` is ``None`` if there was no checkpoint. Not collective."""

    def refused(self, error: CheckpointError) -> None:
        """Called after a restore has failed. On all ranks; not collective."""


EXTENSIONS = "extensions"
"""The key under which the ranks compare the names of their extensions."""
_NONE: Mapping[str, Any] = {}


class CheckpointExtension(RestoreExtension):
    """The base class of extensions of a checkpointer. By default the methods do nothing.

    The docstring of this module lists the methods whose exceptions propagate. An extension must not keep a strong
    reference to its checkpointer, so that an unused checkpointer is freed immediately.
    """

    name = ""  # for messages; all ranks must have extensions with the same names in the same order
    options = _NONE  # must be the same on all ranks; by name without the prefix ``checkpoint.``

    # -- observe the saves of this rank; called on the training thread; must not block or be collective

    def given(self, state: Mapping[str, Any]) -> None:
        """Called after the program has passed a state. Objects inside containers have their own entries in it."""

    def end_step(self, step: int, state: MutableMapping[str, Any] | None) -> None:
        """Called at the end of a step; ``state`` is ``None`` if the program has not passed a state for this step."""

    def begin_save(self, step: int, state: Mapping[str, Any] | None, targets: Sequence[SaveTarget]) -> None:
        """Called when a save to ``targets`` begins; ``state`` is ``None`` if the program has not passed a state."""

    def capturing(
        self, state: Mapping[str, Any], captured: Mapping[str, Any]
    ) -> Callable[[dict[str, Any]], object] | None:
        """Called before the entries ``captured`` are copied. May return a function.

        The save thread then calls the function with the staged copy.
        """
        return None

    # -- take part in the work of the checkpointer

    def targets(self, setup: Setup) -> Sequence[SaveTarget]:
        """Return additional save targets. Collective. Called on the training thread, before :meth:`start`."""
        return ()

    def start(self, setup: Setup, saves: Saves) -> None:
        """Called at the end of the checkpointer's constructor, on the training thread. Collective."""

    def locked(self) -> None:
        """Called on rank 0, on the training thread, after this run has acquired the directory lock."""

    def due(self, step: int) -> Due:
        """Return the requested action after ``step``; equal on all ranks. On the training thread, once per step."""
        return Due.NO

    def urges(self) -> bool:
        """Return whether this rank requests an exit. Other ranks may not have agreed to the exit yet. Any thread."""
        return False

    def leaving(self) -> None:
        """Called on the training thread before all ranks save their last step and exit."""

    def exit(self, step: int, failure: CheckpointError | None, resume: str | None) -> None:
        """Raise ``SystemExit`` if this extension has requested the exit. Collective. Called on the training thread.

        ``failure``: why ``step`` could not be saved, or ``None``. ``resume``: the option of the run, or ``None`` if the
        run did not call ``restore()``.
        """

    def follow(self, over: bool) -> None:
        """Called on the training thread of a rank that has left the loop of a join, to take part in exchanges.

        ``over`` is True in the last call, after all ranks have left the loop. This call is made on all ranks.
        """

    def idle(self) -> None:
        """Take part in exchanges that this rank has missed. Called on the save thread, about once per second."""

    def manifest_fields(self, step: int) -> Mapping[str, Any]:
        """Return additional manifest fields, as JSON values. Called on rank 0, on the save thread.

        Invalid fields are logged like an exception, and omitted.
        """
        return {}

    def committed(self, step: int, where: str, checkpoint: Checkpoint | None) -> None:
        """Called after a save to the checkpoint directory (``"store"``) or to a tier (``"tier"``) is complete.

        Called on each rank, on the target's thread. ``checkpoint``: on rank 0, the new checkpoint in the directory.
        """

    def ending(self, error: BaseException | None) -> None:
        """Called on the training thread at the end of the ``with`` block. ``error``: the block's exception, if any."""

    def ended(self) -> None:
        """Called on the training thread, before the last save, if the ``with`` block ended normally on every rank."""

    def completed(self) -> None:
        """Called on the training thread, after the last save, if :meth:`ended` was called. Collective."""

    def outlook(self) -> str:
        """Return a sentence about unexpected behavior of the next start of the run, or ``""``. Called on rank 0."""
        return ""

    def close(self, in_time: bool) -> None:
        """Called on the training thread when the checkpointer closes; ``in_time`` is False if a save hangs."""
