"""The best checkpoints by a metric stay, each with its reason; without the extension such a rule is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

import stagereg
import stagereg.checkpoint.store.keep as policy
from stagereg.checkpoint.store.keep import Keep
from stagereg.errors import ConfigError
from tests.checkpoint.store.test_keep import checkpoint, logged


def test_each_is_kept_for_all_its_reasons() -> None:
    there = [checkpoint(step, serial) for serial, step in enumerate((500, 1000, 1500, 2000), 1)]
    values = {there[0].path: 0.125, there[1].path: 0.5, there[3].path: 0.25}
    policy = Keep(newest=1, every=1000, best=2, metric="loss")
    assert policy.select(there, logged(values)) == {
        there[3].path: "newest; every 1000; best 2 of 2 by loss=0.25",
        there[1].path: "every 1000",
        there[0].path: "best 1 of 2 by loss=0.125",
    }


def test_a_rule_by_metric_is_refused_without_the_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric that no checkpoint has would have the best ones deleted without a word, also in copies."""
    monkeypatch.setattr(policy, "has", lambda name: name != "retention")
    line = "best=.* needs stagereg/extensions/retention, which is missing in this installation"
    with pytest.raises(ConfigError, match=line):
        Keep(best=1, metric="loss")
    with pytest.raises(ConfigError, match=r"weights_after=2.* needs stagereg/extensions/retention"):
        Keep(weights_after=2)
    copies = {"_target_": "stagereg.extensions.callbacks.copy_to.CopyTo", "dir": str(tmp_path / "copies")}
    config = {"_target_": "stagereg.assembly.Checkpointer", "dir": str(tmp_path / "run")}
    given = OmegaConf.create({**config, "on_commit": {"copies": {**copies, "keep": {"best": 1, "metric": "loss"}}}})
    with pytest.raises(ConfigError, match=line):
        stagereg.instantiate(given)
    assert not (tmp_path / "run").exists()
