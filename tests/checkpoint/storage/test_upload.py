"""Files that are written to a URL: marked while written, complete or an error, retried where the store fails once."""

from __future__ import annotations

import errno
import uuid
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFile
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

import stagereg
from stagereg.checkpoint.manifest import FileMark
from stagereg.checkpoint.storage.aligned import PAGE, AlignedFile, Upload
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.store.remote_store import RemoteStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("stagereg.checkpoint.store.retry.FIRST_S", 0.0)
    name = uuid.uuid4().hex
    yield f"memory://{name}/one"
    if fsspec.filesystem("memory").exists(f"/{name}"):
        fsspec.filesystem("memory").rm(f"/{name}", recursive=True)


STATE = {f"x{i}": torch.arange(1000.0) + i for i in range(4)}


def loaded(url: str, **how: Any) -> bool:
    template = {name: torch.zeros(1000) for name in STATE}
    dcp.load(template, no_dist=True, **how)
    return all(torch.equal(template[name], value) for name, value in STATE.items())


def stored(url: str) -> dict[str, FileMark]:
    store = RemoteStore(url.rpartition("/")[0])
    return {name: store.mark(url, name) for name in store.files(url)}


@pytest.mark.parametrize("staged", [False, True])
def test_torch_writes_and_reads_a_url_through_a_storage(url: str, staged: bool) -> None:
    storage, stager = DcpStorage(), stagereg.build("stager", "pinned_cached", pin=False)
    stager.reserve_padding(*storage.padding)
    state = {**STATE, "large": torch.arange(3_000_000.0), "n": 1}
    dcp.save(stager.stage(state) if staged else state, checkpoint_id=url, storage_writer=storage, no_dist=True)
    assert storage.marks == stored(url)
    template = {"large": torch.zeros(3_000_000), "n": 0}
    dcp.load(template, storage_reader=FsspecReader(url), no_dist=True)
    assert torch.equal(template["large"], state["large"])
    assert template["n"] == 1
    assert loaded(url, storage_reader=storage.reader(url))
    assert loaded(url, storage_reader=FsspecReader(url))


class Fails:
    """Makes writes to the store fail, the first ``times`` of them that come after ``skip`` others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception, times: int, skip: int = 0) -> None:
        self.seen = 0
        real = MemoryFile.write

        def write(file: MemoryFile, data: Any) -> int:
            self.seen += 1
            if skip < self.seen <= skip + times:
                raise error
            return real(file, data)

        monkeypatch.setattr(MemoryFile, "write", write)


@pytest.mark.parametrize("skip", [0, 1])
def test_a_write_that_fails_for_once_is_made_again(
    url: str, monkeypatch: pytest.MonkeyPatch, skip: int, caplog: pytest.LogCaptureFixture
) -> None:
    fails = Fails(monkeypatch, ConnectionError(errno.ECONNRESET, "reset by peer"), times=1, skip=skip)
    storage = DcpStorage()
    dcp.save(STATE, checkpoint_id=url, storage_writer=storage, no_dist=True)
    assert fails.seen > skip + 1
    assert storage.marks == stored(url)
    assert loaded(url, storage_reader=storage.reader(url))
    assert caplog.text.count("Trying again") == 1


@pytest.mark.parametrize("state", [STATE, {"x": torch.ones(2_000_000).to_sparse()}], ids=["plain", "by torch"])
def test_the_stores_error_is_reported_not_torchs(
    url: str, monkeypatch: pytest.MonkeyPatch, state: dict[str, Any]
) -> None:
    Fails(monkeypatch, PermissionError(errno.EACCES, "Access Denied"), times=10**9)
    with pytest.raises(dcp.api.CheckpointException, match=r"Access Denied \(writing\)"):
        dcp.save(state, checkpoint_id=url, storage_writer=DcpStorage(), no_dist=True)


def test_an_upload_left_with_an_error_is_given_up(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given_up: list[MemoryFile] = []
    monkeypatch.setattr(MemoryFile, "discard", lambda self: given_up.append(self))
    with pytest.raises(ZeroDivisionError), AlignedFile(Upload(f"{url}/x"), PAGE) as upload:  # noqa: PT012
        upload.write(b"half")
        raise ZeroDivisionError
    assert len(given_up) == 1
