"""The contract of a tier, a local folder for checkpoint copies on each machine: a class of tests to inherit.

The tests create the tier's folder, and use it as a training run does: several processes write, flush, rename, lock and
memory-map files. They do not test whether files survive a reboot.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from stagereg.base.machine import file_system
from stagereg.base.small_files import sync
from stagereg.errors import ConfigError, reason
from stagereg.extensions.tiers.tier import Tier
from stagereg.testing.contract import Contract

_OPTIONS = {"every": 7, "copies": 0, "keep": 3, "domain": "rack1", "host_memory": "1GiB"}
_TOO_MUCH = 1 << 60
_DATA = bytes(range(256)) * 64


class TierContract(Contract):
    """Tests of a tier. Inherit this class, and override :meth:`make`.

    Define the subclass at module level, so that the ranks of a test can import it.
    """

    root: ClassVar[str | None] = None  # parent folder on the tier's medium, such as /dev/shm; None: the temp folder

    def make(self, dir: str, **options: Any) -> Tier:
        """Return a new tier that uses the folder ``dir`` and other options of ``Tier``, such as ``copies``."""
        raise NotImplementedError(f"{type(self).__name__} must define make(self, dir, **options)")

    def test_making_it_touches_no_disk(self) -> None:
        """The constructor does not create the folder. prepare() creates the folder and returns its absolute path."""
        with self._folder() as folder:
            tier = self.make(folder)
            if os.path.lexists(folder):
                self.broken(f"{folder} was created by the constructor, before prepare()")
            path = self._prepared(tier)
            if not os.path.isabs(path) or not os.path.isdir(path):
                self.broken(f"prepare() returned {path!r}, which is not the full path of a folder")

    def test_options(self) -> None:
        """The constructor passes the common options, such as copies, to Tier, which rejects invalid values."""
        with self._folder() as folder:
            tier = self.make(folder, **_OPTIONS)
            if not isinstance(tier, Tier):
                self.broken(f"it is {type(tier).__name__}, which does not derive from {Tier.__module__}.Tier")
            plain = {name: str(value) for name, value in _OPTIONS.items()}
            if other := [name for name, value in plain.items() if str(getattr(tier, name)) != value]:
                self.broken(f"constructed with {other[0]}={_OPTIONS[other[0]]}, it has {getattr(tier, other[0])}")
            try:
                self.make(folder, keep=0)
            except ConfigError:
                return
            self.broken("keep=0 is accepted. Pass it to the constructor of Tier, which refuses it")

    def test_one_folder_a_machine(self) -> None:
        """All processes of a machine use the same folder, and files remain after the process that wrote them exits."""
        with self._folder() as folder:
            path = self._prepared(self.make(folder))
            paths = self.on_ranks("", 2, _written, type(self), folder)
            if set(paths) != {path}:
                self.broken(f"two other processes got {' and '.join(paths)}, not {path}")
            for file in (Path(path, "0"), Path(path, "1")):
                if not file.is_file() or file.read_bytes() != _DATA:
                    self.broken(f"{file} does not exist after the exit of the process that wrote it")

    def test_what_is_there_stays(self) -> None:
        """prepare() does not change files in the folder, including files that another process is writing."""
        with self._folder() as folder:
            path = Path(self._prepared(self.make(folder)))
            (path / "run" / "step-1.ab").mkdir(parents=True)
            kept = [path / "run" / "step-1.ab" / name for name in ("__0_0.distcp", ".part-0.json.tmp")]
            for each in kept:
                each.write_bytes(_DATA)
            self._prepared(self.make(folder))
            if lost := [each for each in kept if not each.is_file() or each.read_bytes() != _DATA]:
                self.broken(f"prepare() deleted or changed {lost[0].relative_to(path)}")

    def test_for_this_user_alone(self) -> None:
        """prepare() creates a folder that only this user can read and write, because it will contain model state."""
        with self._folder() as folder:
            path = self._prepared(self.make(folder))
            if (mode := os.stat(path).st_mode & 0o777) & 0o077:
                self.broken(f"{path} has mode {mode:03o}. Create it with mode 700")

    def test_ordinary_files(self) -> None:
        """Files in the folder can be flushed, locked, memory-mapped, and replaced by a rename while they are read."""
        with self._folder() as folder:
            path = Path(self._prepared(self.make(folder)))
            try:
                self.within(partial(self._use, path))
            except OSError as error:
                self.broken(f"files in {path} cannot be used: {reason(error)}")

    def test_lacking(self) -> None:
        """lacking(n) returns '' if n more bytes fit, or else a line with the reason. It does not change the folder."""
        with self._folder() as folder:
            tier = self.make(folder)
            path = self._prepared(tier)
            fits, not_ = self.within(lambda: (tier.lacking(0), tier.lacking(_TOO_MUCH)))
            if fits != "":
                self.broken(f"lacking(0) must be '', got {fits!r}")
            if not isinstance(not_, str) or not not_ or "\n" in not_:
                self.broken(f"lacking({_TOO_MUCH}) must be a line with the reason, got {not_!r}")
            if os.listdir(path):
                self.broken(f"{os.listdir(path)[0]} is in the folder after lacking()")

    def test_no_place(self) -> None:
        """If prepare() cannot create the folder, it raises OSError or ConfigError, and does not use another folder."""
        with self._folder() as folder:
            Path(folder).write_bytes(b"")
            try:
                path = self._prepared(self.make(f"{folder}/below"))
            except (OSError, ConfigError):
                return
            self.broken(f"{folder} is a file, but prepare() returned {path!r}")

    def test_durable(self) -> None:
        """``durable`` is False if the folder is in memory (tmpfs), because its files do not survive a reboot."""
        with self._folder() as folder:
            tier = self.make(folder)
            kind = file_system(Path(self._prepared(tier)))
            if not isinstance(tier.durable, bool):
                self.broken(f"durable must be True or False, got {tier.durable!r}")
            if tier.durable and kind in ("tmpfs", "ramfs"):
                self.broken(f"durable is True, but its folder is on {kind}, which does not survive a reboot")

    @contextmanager
    def _folder(self) -> Iterator[str]:
        """Yield the path of a folder that does not exist yet. Delete the folder at the end."""
        with tempfile.TemporaryDirectory(prefix="stagereg-", dir=self.root) as parent:
            yield f"{os.path.realpath(parent)}/tier"

    def _prepared(self, tier: Tier) -> str:
        return self.within(tier.prepare)

    def _use(self, path: Path) -> None:
        """Use the folder as a save does: write a new file, and rename it over an existing file that is open."""
        (path / "held").write_bytes(b"old")
        with open(path / ".next", "w+b") as file, open(path / "held", "rb") as old:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(_DATA)
            file.flush()
            os.fsync(file.fileno())
            os.replace(path / ".next", path / "held")
            sync(path)
            if old.read() != b"old":
                raise OSError(errno.EIO, "an open file changed when another file was renamed over it")
        with open(path / "held", "rb") as new, mmap.mmap(new.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            if mapped[:] != _DATA:
                raise OSError(errno.EIO, "a file does not contain the written bytes")


def _written(rank: int, world_size: int, kind: type[TierContract], folder: str) -> str:
    path = kind().make(folder).prepare()
    Path(path, f"{rank}").write_bytes(_DATA)
    return path
