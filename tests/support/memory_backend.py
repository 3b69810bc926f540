"""A backend of checkpoint stores in the memory of one process, of which each change can be made to fail."""

from __future__ import annotations

import errno
from collections.abc import Callable

from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.format.damage import WHOLE, Condition
from stagereg.checkpoint.format.manifest import LATEST, MANIFEST, Checkpoint, FileMark, Manifest, plain_name, step_name
from stagereg.checkpoint.store.lock import Owner, StoreLock, holder


class MemoryBackend:
    """A dict of files by their paths; a change replaces all of it, so each is made in one step, or not at all.

    Attributes:
        files: their contents.
        fails_at: which change from now on fails, after the ones before it were made; 0 for none.
    """

    in_place = False

    def __init__(self, root: str) -> None:
        self.root, self.files, self.fails_at = root, dict[str, bytes](), 0

    def _change(self, gone: str = "", **new: bytes) -> None:
        """Put the ``new`` files there, and have nothing at or below ``gone``."""
        self.fails_at -= 1
        if self.fails_at == 0:
            raise OSError(errno.EIO, "a change of the memory has failed", self.root)
        self.files = {path: each for path, each in self.files.items() if not f"{path}/".startswith(f"{gone}/")} | new

    def _below(self, path: str, there: str = "") -> dict[str, bytes]:
        found = {
            name.removeprefix(f"{path}/"): each for name, each in self.files.items() if name.startswith(f"{path}/")
        }
        return {f"{there}/{name}": each for name, each in found.items()}

    def list(self, path: str) -> dict[str, int | str | None]:
        parts = {name[1:].partition("/"): len(each) for name, each in self._below(path).items()}
        return {name: None if below else size for (name, _, below), size in parts.items()}

    def resolve(self, path: str) -> str:
        folder, _, name = path.rpartition("/")
        return f"{folder}/{self.files.get(path, name.encode()).decode()}" if name == LATEST else path

    def read(self, path: str) -> bytes:
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "No such file", path)
        return self.files[path]

    def mark(self, path: str, part: range = WHOLE, flush: bool = False) -> FileMark:
        data = self.read(path)[part.start : part.stop]
        return FileMark(len(data), crc32(data))

    def holder(self) -> Owner | None:
        return holder(self.root)

    def lock(self) -> StoreLock:
        return _Lock(self.root)

    def write(self, path: str, data: bytes) -> None:
        self._change(**{path: data})

    def replace(self, name: str, data: bytes) -> None:
        self.write(f"{self.root}/{name}", data) if data else self.delete(f"{self.root}/{name}")

    def delete(self, path: str) -> None:
        self._change(path)

    def commit(self, written: str, manifest: Manifest) -> str:
        self.write(f"{written}/{MANIFEST}", manifest.dumps().encode())
        final = f"{self.root}/{step_name(manifest.step)}"
        if self.list(final):
            final = f"{self.root}/{written.rpartition('/')[2][1:].removesuffix('.tmp')}"
        self._change(written, **self._below(written, final))
        return final

    def point(self, name: str) -> None:
        self.replace(LATEST, name.encode())

    def link(self, checkpoint: Checkpoint) -> str:
        plain = f"{self.root}/{plain_name(checkpoint.name)}"
        if self.list(plain):
            return ""
        self._change(**self._below(checkpoint.path, plain))
        return plain

    def remove(self, each: Condition, is_read: Callable[[str], bool]) -> str:
        hidden = f"{self.root}/.{plain_name(each.name)}.0123456789ab.tmp"
        self._change(each.path, **self._below(each.path, hidden))
        if each.manifest is None or not is_read(each.name):
            return hidden
        self._change(hidden, **self._below(hidden, each.path))
        return ""

    def discard(self, path: str) -> None:
        self._change(path)

    def tidy(self) -> None:
        pass


class _Lock(StoreLock):
    def _make(self) -> bool:
        return True

    def _is_ours(self) -> bool:
        return True

    def _release(self) -> None:
        pass
