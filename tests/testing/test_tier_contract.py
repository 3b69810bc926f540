"""The contract of a tier: the built-in ones keep it, and each promise catches the tier that breaks it."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from stagereg.extensions.tiers.disk import DiskTier
from stagereg.extensions.tiers.memory import MemoryTier
from stagereg.extensions.tiers.tier import Tier
from stagereg.testing import TierContract

PAGE = Path(__file__).parents[2] / "docs" / "contracts.md"


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


@pytest.mark.parametrize("contract", [Disk, Memory])
@pytest.mark.parametrize("promise", TierContract.promises())
def test_a_right_tier_keeps(promise: str, contract: type[TierContract]) -> None:
    outcome = contract.outcome(promise)
    assert outcome.kept, outcome.seen


@pytest.mark.parametrize(("promise", "contract"), WRONG, ids=lambda each: getattr(each, "__name__", each))
def test_a_wrong_tier_is_found(promise: str, contract: type[TierContract]) -> None:
    outcome = contract.outcome(promise)
    assert outcome.kept is False
    assert outcome.seen


def test_the_pages_example_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"## Tiers\n.*?```python\n(.*?)```", PAGE.read_text(), re.S)
    (tmp_path / "example_of_a_tier.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    contract = importlib.import_module("example_of_a_tier").TestFlash
    outcomes = [contract.outcome(name) for name in TierContract.promises()]
    assert [(each.kept, each.seen) for each in outcomes] == [(True, "")] * len(outcomes)


def test_each_promise_has_a_tier_that_breaks_it() -> None:
    assert {promise for promise, _ in WRONG} == set(TierContract.promises())
