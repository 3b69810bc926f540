"""A rule decides which copies ``copy_to`` retains."""

from __future__ import annotations

from pathlib import Path

import stagereg
from stagereg.checkpoint.store.keep import Keep
from stagereg.extensions.callbacks.copy_to import CopyTo
from tests.support.keeping import OfSteps, composed, steps, train


def test_copies_are_kept_by_a_rule(tmp_path: Path) -> None:
    train(str(tmp_path / "run"), 9, range(1, 6), on_commit=CopyTo(str(tmp_path / "copies"), keep=OfSteps([2])))
    assert steps(tmp_path / "copies") == [2, 5]


def test_a_config_chooses_the_rule_of_copies(tmp_path: Path) -> None:
    at = "checkpoint.on_commit.backup"
    chosen = [f"+on_commit@{at}=copy_to", f"{at}.dir={tmp_path}", f"+keep@{at}.keep=of_steps", f"{at}.keep.steps=[1]"]
    config = composed(tmp_path, *chosen)
    with stagereg.instantiate(config.checkpoint) as checkpointer:
        assert checkpointer._target.keep == Keep()
    assert "OfSteps" in stagereg.instantiate(config.checkpoint.on_commit.backup).keep.name
