"""Tests of the tier: its contract, and the space that it leaves free, with the tier chosen in a config."""

from __future__ import annotations

import os
from pathlib import Path

import stagereg
from hydra import compose, initialize_config_dir

from lean_export.tier_contract import LocalSsdContract

CHOSEN = "tier=local_ssd"


class TestContract(LocalSsdContract):
    """Inherits the tests of the contract. pytest collects only subclasses whose name begins with Test."""


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
