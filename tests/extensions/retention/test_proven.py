"""Proven checkpoints stay longer than others, and refuted checkpoints take no place among the newest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import stagereg
import stagereg.extensions.retention.proven as proven
from stagereg.base.providers import has
from stagereg.checkpoint.store.open_store import open_store
from stagereg.errors import ConfigError
from stagereg.extensions.retention.proven import KeepProven
from stagereg.testing import KeepContract

from ...commands.checkpoint_directories import save
from ...support.keeping import composed, listed, steps
from ...support.noted import note

needs_notes = pytest.mark.skipif(not has("prove"), reason="only the extension prove reads verdicts")


def retained(root: Path, **options: int) -> dict[int, str]:
    there = open_store(root).checkpoints()[0]
    reasons = KeepProven(**options).select(there, {})
    return {each.manifest.step: reasons[each.path] for each in there if each.path in reasons}


@needs_notes
def test_the_newest_proven_checkpoints_stay_with_the_newest(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, 5, 6)
    for step in (1, 2, 3):
        note(tmp_path, step, "proven")
    note(tmp_path, 4, "refuted", "data: batches")
    assert retained(tmp_path, newest=1, proven=2) == {6: "newest", 3: "proven", 2: "proven"}
    assert retained(tmp_path, newest=2, proven=0) == {6: "newest", 5: "newest"}
    note(tmp_path, 6, "proven")
    assert retained(tmp_path, newest=1, proven=1) == {6: "newest"}


@needs_notes
def test_a_refuted_checkpoint_counts_only_if_it_is_the_newest_of_all(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4)
    for step in (2, 4):
        note(tmp_path, step, "refuted", "data: batches")
    note(tmp_path, 3)
    assert retained(tmp_path, newest=3, proven=0) == {4: "newest", 3: "newest", 1: "newest"}
    assert retained(tmp_path, newest=1, proven=0) == {4: "newest"}


@needs_notes
def test_a_config_selects_the_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "checkpoint/keep=proven", "checkpoint.keep.newest=1", "checkpoint.keep.proven=1"
    root = tmp_path / "run"
    seen: list[Any] = []
    with stagereg.instantiate(composed(tmp_path, *options, "checkpoint.save_last=false").checkpoint) as checkpointer:
        for step, verdict in enumerate(("proven", "", "refuted", "", ""), 1):
            checkpointer.save(step, {"x": step})
            checkpointer.wait()
            seen.append(steps(root))
            if verdict:
                note(root, step, verdict, "data: batches")
    assert seen == [[1], [1, 2], [1, 3], [1, 4], [1, 5]]
    assert listed(str(root), capsys) == {5: "newest", 1: "proven"}


def test_without_verdicts_the_newest_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, 2, 3)
    if has("prove"):
        for step in (1, 3):
            note(tmp_path, step, "proven")
    monkeypatch.setattr(proven, "providers", lambda module: iter(()))
    assert retained(tmp_path, newest=2, proven=1) == {3: "newest", 2: "newest"}


class Proven(KeepContract):
    def make(self) -> KeepProven:
        return KeepProven(newest=2, proven=1)


@pytest.mark.parametrize("promise", sorted({*KeepContract.promises()} - {"test_paths_are_only_names"}))
def test_the_rule_keeps_the_contract(promise: str) -> None:
    """Except that it reads the verdicts, from the directory that contains the checkpoints."""
    outcome = Proven.outcome(promise)
    assert outcome.kept, outcome.seen


def test_counts_below_their_minimum_are_refused() -> None:
    for options in ({"newest": 0}, {"proven": -1}):
        with pytest.raises(ConfigError, match=r"checkpoint\.keep\."):
            KeepProven(**options)
