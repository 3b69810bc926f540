"""Without the extensions, a directory of others is not a checkpoint, and a URL is an error that names the folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import stagereg.checkpoint.store.foreign as foreign
import stagereg.checkpoint.store.open_store as opening
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.store.located import located
from stagereg.checkpoint.store.open_store import open_store
from stagereg.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "providers", lambda name: iter(()))
    monkeypatch.setattr(opening, "providers", lambda name: iter(()))


@pytest.mark.usefixtures("alone")
def test_what_torch_wrote_is_neither_counted_nor_deleted(tmp_path: Path) -> None:
    dcp.save({"x": torch.ones(3)}, checkpoint_id=tmp_path / "step-00000001", no_dist=True)
    before = {each.name: each.read_bytes() for each in (tmp_path / "step-00000001").iterdir()}
    with Checkpointer(str(tmp_path), keep=1) as checkpointer:
        assert checkpointer.restore({"x": torch.zeros(3)}) is None
        for step in (1, 2, 3):
            checkpointer.save(step, {"x": torch.zeros(3)})
    store = open_store(tmp_path)
    assert [each.manifest.step for each in store.checkpoints()[0]] == [3]
    assert (store.checkpoints()[1], store.of_torch(), store.of_torch(every=True)) == ([], [], [])
    assert {each.name: each.read_bytes() for each in (tmp_path / "step-00000001").iterdir()} == before
    assert store.look(str(tmp_path / "step-00000001")).checkpoint is None
    shutil.rmtree(tmp_path / "step-00000003")
    (tmp_path / "latest").unlink()
    with pytest.raises(CheckpointError, match="There is no checkpoint in"):
        located(str(tmp_path))


@pytest.mark.usefixtures("alone")
def test_a_url_names_the_extension_that_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"s3://bucket/runs is a URL, which needs stagereg/extensions/buckets, which"):
        Checkpointer("s3://bucket/runs")
