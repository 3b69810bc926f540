"""The protocol of a checkpoint store: a directory of checkpoints, local or remote.

Two kinds of calls. *Reading*: any process, any rank, at any time, and no lock is needed; what another process writes
meanwhile is either seen complete or not at all. *Writing*: the run that holds the lock, and of that rank 0 alone,
except for :meth:`CheckpointStore.files` and :meth:`CheckpointStore.mark`, with which each rank looks after its own
files.

The order of calls of one run: :meth:`CheckpointStore.probe` and :meth:`CheckpointStore.sweep` once; then for each save
:meth:`CheckpointStore.temporary`, the storage writes there, :meth:`CheckpointStore.files` and
:meth:`CheckpointStore.mark`, and then :meth:`CheckpointStore.publish`, or :meth:`CheckpointStore.discard` where
something has failed.

Paths are full paths, or URLs, as text. Errors of the file system are ``OSError`` unless said otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from stagereg.checkpoint.damage import Condition, Found, differences
from stagereg.checkpoint.lock import Owner, StoreLock
from stagereg.checkpoint.manifest import Checkpoint, FileMark

__all__ = ["CheckpointStore"]


class CheckpointStore(ABC):
    """A directory of checkpoints.

    Attributes:
        root: its path or URL, as messages name it; without a slash at its end.
        remote: whether ``root`` is a URL.
        distrusted: full paths of checkpoints that look complete and were found to be damaged, which retention neither
            counts nor deletes; whoever reads content adds them.
    """

    root: str
    remote: bool

    def __init__(self) -> None:
        self.distrusted: set[str] = set()
        self._hold: StoreLock | None = None

    # -- reading

    @abstractmethod
    def checkpoints(self) -> tuple[list[Checkpoint], dict[str, str]]:
        """Return the complete checkpoints, newest first, and why each other step directory is none, by its full path.

        Complete by manifest and sizes; no content is read. A store that does not exist has none.
        """

    @abstractmethod
    def condition(self, path: str) -> Condition:
        """Return what is wrong with one checkpoint by its manifest and the sizes; no content is read.

        Args:
            path: of a checkpoint's directory, or of a ``latest`` that points to one; need not lie in this store.
        """

    @abstractmethod
    def contents(self, path: str, names: Iterable[str]) -> dict[str, Found]:
        """Read files of the checkpoint in the directory ``path`` to their ends, and return what they are, by name.

        :func:`.damage.differences` compares them with the manifest. Any rank.
        """

    def open(self, path: str) -> Checkpoint | str:
        """Return one checkpoint if it is complete (sizes only, no content read), else the reason it is not.

        Args:
            path: as :meth:`condition` takes it.
        """
        condition = self.condition(path)
        return condition.checkpoint or str(condition)

    def examine(self, path: str) -> Condition:
        """Return what is wrong with one checkpoint, the content of its files included, which are read one by one.

        Of one that is replaced meanwhile, the new one is looked at; of one that is deleted, no manifest is left.
        """
        condition = self.condition(path)
        if condition.manifest is None:
            return condition
        found = self.contents(condition.path, condition.manifest.files)
        wrong = differences(condition.manifest, found)
        if wrong and self.condition(path).manifest != condition.manifest:
            return self.examine(path)
        return Condition(condition.path, condition.manifest, wrong)

    @abstractmethod
    def latest(self) -> Checkpoint | None:
        """Return what ``latest`` points to; ``None`` if that is nothing, or not complete."""

    @abstractmethod
    def holder(self) -> Owner | None:
        """Return who writes here at this moment, or ``None``; neither waits nor locks."""

    @abstractmethod
    def leftovers(self) -> list[str]:
        """Return the full paths of what is half-written, be it of a dead run or of one that is writing now."""

    # -- writing

    @abstractmethod
    def probe(self) -> None:
        """Create the directory if it does not exist and prove that files can be created in it."""

    @abstractmethod
    def lock(self) -> StoreLock:
        """Lock the store until the lock is released, so that no other run writes there; before :meth:`sweep`.

        From then on :meth:`publish` makes sure that it is still held.

        Raises:
            CheckpointError: another run holds it, which the message names.
        """

    @abstractmethod
    def sweep(self) -> None:
        """Delete what killed runs left half-written, and bring to its end what one of them had begun."""

    @abstractmethod
    def temporary(self, step: int, token: str) -> str:
        """Return the full path of the directory in which all ranks write one save; makes nothing.

        Args:
            step: the training step.
            token: distinguishes this save from all others (:func:`.manifest.new_token`); the same on all ranks.
        """

    @abstractmethod
    def files(self, written: str) -> list[str]:
        """Return the names of the files in the directory ``written``, in no order. Any rank."""

    @abstractmethod
    def put(self, written: str, name: str, data: bytes) -> FileMark:
        """Write one file into the directory ``written``, have it safely stored, and return its mark."""

    @abstractmethod
    def mark(self, written: str, name: str) -> FileMark:
        """Have one file in ``written`` safely stored, read it back, and return its mark. Any rank."""

    @abstractmethod
    def publish(
        self, written: str, step: int, world_size: int, storage: str, files: dict[str, FileMark], keep: int
    ) -> str:
        """Commit the checkpoint in ``written`` and delete all but the ``keep`` newest.

        Args:
            written: what :meth:`temporary` named; all of its files are written and safely stored.
            step: the training step.
            world_size: how many ranks wrote it.
            storage: what it was written through, for its manifest.
            files: the mark of every file in ``written``.
            keep: how many complete checkpoints stay, at least 1.

        Returns:
            The full path of the checkpoint.

        Raises:
            CheckpointError: a file does not have its mark.
        """

    @abstractmethod
    def discard(self, path: str) -> None:
        """Delete a directory or file of the store; what cannot be deleted stays and does no harm."""
