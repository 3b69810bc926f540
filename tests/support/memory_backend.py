"""A backend of checkpoint stores in the memory of one process, of which each change can be made to fail."""

from collections.abc import Callable, Iterable, Sequence
from io import BufferedReader

from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.format.damage import WHOLE, VerificationResult
from stagereg.checkpoint.format.manifest import (
    LATEST,
    MANIFEST,
    Checkpoint,
    FileDigest,
    Manifest,
    new_token,
    plain_name,
    step_name,
)
from stagereg.checkpoint.store.backend import Sink, T
from stagereg.checkpoint.store.lock import Owner, StoreLock, holder


class MemoryBackend:
    """Has ``files`` by their paths; the change number ``fails_at`` from now on fails. The lock alone is in ``root``."""

    def __init__(self, root: str) -> None:
        self.root, self.in_place, self.files, self.fails_at = root, False, dict[str, bytes](), 0

    remote, shared = False, False

    def attempt(self, doing: str, path: str, act: Callable[[], T]) -> T:
        return act()

    def in_time(self, seconds: float, act: Callable[[], T], give_back: Callable[[T], None]) -> T:
        return act()

    def fetch(self, path: str, part: range) -> bytes:
        return self.read(path)[part.start : part.stop]

    def open(self, path: str) -> BufferedReader:
        raise NotImplementedError

    def make(self, path: str) -> None:
        """There are none."""

    def create(self, path: str, direct: bool = False, mode: int = 0o666) -> Sink:
        raise NotImplementedError

    def _change(self, new: dict[str, bytes], gone: str = "\0") -> None:
        self.fails_at -= 1
        if self.fails_at == 0:
            raise OSError(5, "a change of the memory has failed", self.root)
        self.files = {path: x for path, x in self.files.items() if not f"{path}/".startswith(f"{gone}/")} | new

    def _below(self, path: str, there: str = "") -> dict[str, bytes]:
        return {there + name.removeprefix(path): x for name, x in self.files.items() if name.startswith(f"{path}/")}

    def list(self, path: str, files: Iterable[str] = ()) -> dict[str, int | str | None]:
        parts = {name[1:].partition("/"): len(x) for name, x in self._below(path).items()}
        return {name: None if below else size for (name, _, below), size in parts.items()}

    def resolve(self, path: str) -> str:
        folder, _, name = path.rpartition("/")
        return f"{folder}/{self.files.get(path, name.encode()).decode()}" if name == LATEST else path

    def read(self, path: str) -> bytes:
        if path not in self.files:
            raise FileNotFoundError(2, "No such file", path)
        return self.files[path]

    def mark(self, path: str, part: range = WHOLE, flush: bool = False) -> FileDigest:
        return FileDigest(len(data := self.read(path)[part.start : part.stop]), crc32(data))

    def holder(self) -> Owner | None:
        return holder(self.root)

    def lock(self) -> StoreLock:
        return StoreLock(self.root)

    def write(self, path: str, data: bytes) -> None:
        self._change({path: data})

    def replace(self, name: str, data: bytes) -> None:
        self._change({f"{self.root}/{name}": data} if data else {}, f"{self.root}/{name}")

    def delete(self, path: str) -> None:
        self._change({}, path)

    discard = delete

    def commit(self, written: str, manifest: Manifest) -> str:
        self.write(f"{written}/{MANIFEST}", manifest.dumps().encode())
        if self.list(final := f"{self.root}/{step_name(manifest.step)}"):
            final = f"{self.root}/{written.rpartition('/')[2][1:].removesuffix('.tmp')}"
        self._change(self._below(written, final), written)
        return final

    def point(self, name: str) -> None:
        self.replace(LATEST, name.encode())

    def link(self, checkpoint: Checkpoint) -> str:
        if free := not self.list(plain := f"{self.root}/{plain_name(checkpoint.name)}"):
            self._change(self._below(checkpoint.path, plain))
        return plain if free else ""

    def hide(self, each: VerificationResult) -> str:
        hidden = f"{self.root}/.{plain_name(each.name)}.{new_token()}.tmp"
        self._change(self._below(each.path, hidden), each.path)
        return hidden

    def bring_back(self, each: VerificationResult, hidden: str) -> None:
        self._change(self._below(hidden, each.path), hidden)

    def tidy(self) -> Sequence[str]:
        return []
