"""Tests of the writer: its contract, and the content of a line, with the writer chosen in a config."""

from __future__ import annotations

import json
from pathlib import Path

import stagereg
from hydra import compose, initialize_config_dir

from lean_export.after_commit_contract import JournalContract

CHOSEN = "+on_commit@checkpoint.on_commit.mine=journal"


class TestContract(JournalContract):
    """Inherits the tests of the contract. pytest collects only subclasses whose name begins with Test."""


def test_a_line_says_where_the_checkpoint_is_and_how_good(tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text("defaults: [stagereg, _self_]")
    root, file = tmp_path / "checkpoints", tmp_path / "journal.jsonl"
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        cfg = compose("app", [f"checkpoint.dir={root}", CHOSEN, f"checkpoint.on_commit.mine.file={file}"])
    with stagereg.instantiate(cfg.checkpoint) as checkpointer:
        stagereg.log(7, loss=0.5)
        checkpointer.save(7, {"x": 1})
    (line,) = map(json.loads, file.read_text().splitlines())
    assert (line["step"], line["path"], line["metrics"]) == (7, str(root / "step-00000007"), {"loss": 0.5})
    assert line["bytes"] > 0
