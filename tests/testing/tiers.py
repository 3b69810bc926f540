"""Tiers: the built-in ones, which keep the contract, and some that break one promise each."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from stagereg.extensions.tiers.disk import DiskTier
from stagereg.extensions.tiers.memory import MemoryTier
from stagereg.extensions.tiers.tier import Tier
from stagereg.testing import TierContract


class Disk(TierContract):
    kind: type[Tier] = DiskTier

    def make(self, dir: str, **options: Any) -> Tier:
        return type(self).kind(dir, **options)


class Memory(Disk):
    root = "/dev/shm"
    kind = MemoryTier


# -- tiers that break one promise each


class MadeAtOnce(DiskTier):
    def __init__(self, dir: str, **options: Any) -> None:
        super().__init__(dir, **options)
        self.prepare()


class OnlyNamed(DiskTier):
    def prepare(self) -> str:
        return self.dir


class TakesAnything(DiskTier):
    def __init__(self, dir: str, keep: int = 2, **options: Any) -> None:
        super().__init__(dir, keep=max(1, keep), **options)


class FolderOfAProcess(DiskTier):
    def prepare(self) -> str:
        self.dir = f"{self.dir}/{os.getpid()}"
        return super().prepare()


class StartsAnew(DiskTier):
    def prepare(self) -> str:
        shutil.rmtree(self.dir, ignore_errors=True)
        return super().prepare()


class SweepsHiddenFiles(DiskTier):
    def prepare(self) -> str:
        folder = super().prepare()
        for each in Path(folder).rglob(".*"):
            each.unlink()
        return folder


class OpenToAll(DiskTier):
    def prepare(self) -> str:
        folder = super().prepare()
        os.chmod(folder, 0o755)
        return folder


class NoFiles(DiskTier):
    def prepare(self) -> str:
        return "/proc/self"


class NeverLacks(DiskTier):
    def lacking(self, nbytes: int) -> str:
        return ""


class TriesByWriting(DiskTier):
    def lacking(self, nbytes: int) -> str:
        Path(self.dir, "trial").write_bytes(b"x")
        return super().lacking(nbytes)


class GoesElsewhere(DiskTier):
    def prepare(self) -> str:
        try:
            return super().prepare()
        except OSError:
            return tempfile.gettempdir()


class DurableMemory(MemoryTier):
    durable = True


class Hangs(DiskTier):
    def prepare(self) -> str:
        time.sleep(60)
        return super().prepare()


def of(kind: type[Tier]) -> type[TierContract]:
    base = Memory if issubclass(kind, MemoryTier) else Disk
    name = f"Of{kind.__name__}"
    globals()[name] = contract = type(name, (base,), {"kind": kind, "timeout_s": 2.0, "__module__": __name__})
    return contract


RIGHT = [Disk, Memory]
WRONG = [
    (promise, of(kind))
    for promise, kind in [
        ("test_making_it_touches_no_disk", MadeAtOnce),
        ("test_making_it_touches_no_disk", OnlyNamed),
        ("test_making_it_touches_no_disk", Hangs),
        ("test_options", TakesAnything),
        ("test_one_folder_a_machine", FolderOfAProcess),
        ("test_what_is_there_stays", StartsAnew),
        ("test_what_is_there_stays", SweepsHiddenFiles),
        ("test_for_this_user_alone", OpenToAll),
        ("test_ordinary_files", NoFiles),
        ("test_lacking", NeverLacks),
        ("test_lacking", TriesByWriting),
        ("test_no_place", GoesElsewhere),
        ("test_durable", DurableMemory),
    ]
]
