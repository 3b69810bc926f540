"""A checkpoint names the storage that wrote it, and that one reads it even if another package claims the name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import stagereg
from stagereg import registry
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.storage.lookup import name_of, named
from stagereg.errors import CheckpointError


@pytest.fixture
def claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another package announces a storage ``dcp``."""
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[stagereg.plugins]\nstorage.dcp = theirs:Storage\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry.REGISTRY.refresh()
    yield
    monkeypatch.undo()
    registry.REGISTRY.refresh()


@pytest.mark.usefixtures("claimed")
def test_a_storage_keeps_its_name_when_another_package_claims_it(recwarn: pytest.WarningsRecorder) -> None:
    assert "dcp@hydra-stagereg" in stagereg.names("storage")
    own = stagereg.build("storage", "torch_dcp")
    assert name_of(DcpStorage()) == "dcp"
    assert named("torch_dcp", own) is own
    for name in ("dcp", "direct"):  # the former name is in older manifests
        assert type(named(name, own)) is DcpStorage
    assert not recwarn


def test_an_unknown_storage_is_reported_with_the_list() -> None:
    with pytest.raises(CheckpointError, match=r"(?s)storage 'gone', which cannot be built.*There is: dcp, direct"):
        named("gone", DcpStorage())
