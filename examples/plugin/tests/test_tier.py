"""The tier: the promises of its contract, and what it leaves free, chosen in a config."""

from __future__ import annotations

import os
from pathlib import Path

import stagereg
from hydra import compose, initialize_config_dir

from lean_export.tier_contract import LocalSsdContract

CHOSEN = "tier=local_ssd"


class TestContract(LocalSsdContract):
    """Inherits one test for each promise; a subclass is what pytest collects."""


def test_it_leaves_some_of_the_disk_free(tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text("defaults: [stagereg, _self_]")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        cfg = compose("app", [CHOSEN, f"tier.dir={tmp_path / 't'}", "tier.free=64GiB"])
    tier = stagereg.instantiate(cfg.tier)
    tier.prepare()
    disk = os.statvfs(tmp_path)
    room = disk.f_bavail * disk.f_frsize
    assert tier.lacking(0) == ""
    assert str(tmp_path / "t") in tier.lacking(max(1, room - 2**35))
