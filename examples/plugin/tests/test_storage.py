"""Tests of the storage: its contract, and smaller checkpoints, with the storage chosen in a config."""

from __future__ import annotations

from pathlib import Path

import stagereg
import torch
from hydra import compose, initialize_config_dir

from lean_export.storage_contract import ZippedContract

CHOSEN = "storage=zipped"


class TestContract(ZippedContract):
    """Inherits the tests of the contract. pytest collects only subclasses whose name begins with Test."""


def test_it_takes_less_room(tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text("defaults: [stagereg, _self_]")
    sizes = {}
    for chosen in (CHOSEN, "storage=dcp"):
        root = tmp_path / chosen
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            cfg = compose("app", [chosen, f"checkpoint.dir='{root}'"])
        with stagereg.instantiate(cfg.checkpoint) as checkpointer:
            checkpointer.save(1, {"w": torch.zeros(100_000)})
        sizes[chosen] = sum(file.stat().st_size for file in (root / "latest").iterdir())
    assert 10 * sizes[CHOSEN] < sizes["storage=dcp"]
