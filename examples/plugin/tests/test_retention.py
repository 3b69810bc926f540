"""Tests of the rule: its contract, and the retained checkpoints of a run, with the rule chosen in a config."""

from __future__ import annotations

from pathlib import Path

import stagereg
from hydra import compose, initialize_config_dir

from lean_export.retention_contract import ThinnedContract

CHOSEN = "checkpoint/keep=thinned"


class TestContract(ThinnedContract):
    """Inherits the tests of the contract. pytest collects only subclasses whose name begins with Test."""


def test_the_older_checkpoints_are_the_fewer_are_left(tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text("defaults: [stagereg, _self_]")
    root = tmp_path / "checkpoints"
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        cfg = compose("app", [f"checkpoint.dir={root}", CHOSEN, "checkpoint.keep.dense=2"])
    with stagereg.instantiate(cfg.checkpoint) as checkpointer:
        for step in range(1, 13):
            checkpointer.save(step, {"x": step})
            checkpointer.wait()
    left = sorted(int(each.name.partition("-")[2]) for each in root.glob("step-*"))
    assert left == [8, 10, 11, 12]
