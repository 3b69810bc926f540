"""Checkpoints in an object store are complete or absent, and no object of others is touched."""

from __future__ import annotations

import datetime
import errno
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

import stagereg.checkpoint.store.checkpoint_store as checkpoint_store
import stagereg.extensions.buckets.object_store as objects
from stagereg import cli
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.format.manifest import Checkpoint, FileDigest, Manifest
from stagereg.checkpoint.options import Failure, Restore
from stagereg.checkpoint.storage.aligned import AlignedFile, make_buffers
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.local_files import PAGE
from stagereg.checkpoint.store.open_store import open_store
from stagereg.errors import CheckpointError
from stagereg.extensions.buckets.bucket import Bucket
from stagereg.extensions.buckets.object_store import ObjectStore, Upload

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def url() -> Iterator[str]:
    name = uuid.uuid4().hex
    yield f"memory://{name}/runs"
    fsspec.filesystem("memory").rm(f"/{name}", recursive=True)


def names(url: str) -> list[str]:
    memory = fsspec.filesystem("memory")
    below = memory._strip_protocol(url)
    return sorted(name.removeprefix(below + "/") for name in memory.find(below))


def write(url: str, step: int, token: str) -> tuple[str, dict[str, FileDigest]]:
    path = open_store(url).temporary(step, token)
    return path, {"__0_0.distcp": open_store(url).put(path, "__0_0.distcp", b"content")}


def publish(store: CheckpointStore, step: int, token: str, keep: int = 9) -> str:
    path, files = write(store.root, step, token)
    published = store.publish(path, Manifest(step, 1, 0, files), keep)
    store.retention.clear()
    return published.path


def complete(store: CheckpointStore) -> list[int]:
    return [checkpoint.manifest.step for checkpoint in store.checkpoints()[0]]


def test_a_checkpoint_is_there_when_its_manifest_is(url: str) -> None:
    store = open_store(url)
    path, files = write(url, 5, "aa")
    assert (complete(store), store.latest(), store.leftovers()) == ([], None, [path])
    assert str(store.look(path)) == "manifest.json: missing"
    for wrong in ({**files, "more": FileDigest(1, 2)}, {"__0_0.distcp": FileDigest(3, 4)}):
        with pytest.raises(CheckpointError, match=r"differ from the files.*(more: missing|too long: 7 of 3 bytes)"):
            store.publish(path, Manifest(5, 1, 0, wrong), 1)
    assert names(url) == ["step-00000005.aa/__0_0.distcp"]
    assert store.publish(path, Manifest(5, 2, 0, files), 1).path == path == f"{url}/step-00000005.aa"
    found = store.look(path).checkpoint
    assert isinstance(found, Checkpoint)
    assert (found, store.leftovers()) == (store.latest(), [])
    assert store.look(f"{url}/latest").checkpoint == found
    assert (found.manifest.step, found.manifest.world_size, found.manifest.files) == (5, 2, files)
    assert ObjectStore(url).get(f"{url}/latest") == b"step-00000005.aa"
    assert names(url) == ["latest", "step-00000005.aa/__0_0.distcp", "step-00000005.aa/manifest.json"]
    ObjectStore(url).put(f"{path}/__0_0.distcp", b"cOntent")
    assert store.look(path).checkpoint is not None
    assert "CRC-32 mismatch" in str(store.look(path, content=True))


def test_a_deletion_begins_with_the_manifest(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(url)
    old = publish(store, 1, "aa")
    monkeypatch.setattr(ObjectStore, "delete_below", lambda *_: None)  # as if it were killed right before
    publish(store, 2, "bb", keep=1)
    assert str(store.look(old)) == "manifest.json: missing"
    assert store.leftovers() == [old]


def test_sweeping_deletes_only_our_unfinished_saves(url: str) -> None:
    store = open_store(url)
    publish(store, 1, "aa")
    write(url, 2, "bb")
    for name in ("notes.txt", "step-100/.metadata", "step-0000abcd/x", "step-00000003.zz/x", "more/step-00000004.aa/x"):
        ObjectStore(url).put(f"{url}/{name}", b"somebody else's")
    before = names(url)
    store.sweep()
    assert names(url) == [name for name in before if "step-00000002.bb" not in name]
    for path in ("", "/", "/..", "/notes", "/step-00000001.aa/x", "x/step-1"):
        with pytest.raises(CheckpointError, match="Nothing was deleted"):
            store.backend.discard(f"{url}{path}")
    assert names(url) == [name for name in before if "step-00000002.bb" not in name]


@pytest.mark.parametrize("wrong", [b"step-00000001.aa", b"../../other/step-00000001.aa", b"/step-00000002.bb", b"\xff"])
def test_a_latest_that_points_elsewhere_is_corrected(url: str, wrong: bytes) -> None:
    store = open_store(url)
    publish(store, 1, "aa")
    newest = publish(store, 2, "bb")
    ObjectStore(url).put(f"{url}/latest", wrong)
    found = store.latest()
    assert (found.name if found is not None else "") == ("step-00000001.aa" if wrong.startswith(b"step") else "")
    store.sweep()
    assert ObjectStore(url).get(f"{url}/latest").decode() == newest.rpartition("/")[2]


@pytest.mark.parametrize(("size", "tensors"), [(5_000, 40), (60_000, 5)])
def test_each_byte_is_asked_for_about_once_when_it_is_restored(
    url: str, monkeypatch: pytest.MonkeyPatch, size: int, tensors: int
) -> None:
    monkeypatch.setattr(objects, "_BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(objects, "_READ_BYTES", 1 << 9)
    asked: list[int] = []
    real = MemoryFileSystem.cat_file

    def cat_file(self: Any, path: str, start: int | None = None, end: int | None = None, **more: Any) -> Any:
        asked.append((end or 0) - (start or 0) if path.endswith(".distcp") else 0)
        return real(self, path, start=start, end=end, **more)

    state = {"x": {index: torch.full((size,), float(index)) for index in range(tensors)}}
    with Checkpointer(url, restore=Restore(verify="fast")) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
        checkpointer.restore({"x": {index: torch.zeros(size) for index in range(tensors)}})
    assert sum(asked) < 1.2 * size * tensors * 4
    assert len([nbytes for nbytes in asked if nbytes]) < 30


# -- failures


def counting(monkeypatch: pytest.MonkeyPatch, at: int, error: Callable[[], BaseException]) -> list[str]:
    """Raise ``error`` right before the change of the store that has the number ``at``; return a list that grows."""
    made: list[str] = []

    def around(name: str) -> None:
        real = getattr(MemoryFileSystem, name)

        def change(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
            mode = kwargs.get("mode", args[0] if args else "rb")
            if name != "_open" or mode != "rb":
                made.append(f"{name} {path}")
                if len(made) - 1 == at:
                    raise error()
            return real(self, path, *args, **kwargs)

        monkeypatch.setattr(MemoryFileSystem, name, change)

    for name in ("pipe_file", "rm_file", "rm", "_open"):
        around(name)
    return made


@pytest.mark.parametrize("again", [0, 1])
def test_any_change_of_the_store_may_fail_for_once(url: str, monkeypatch: pytest.MonkeyPatch, again: int) -> None:
    monkeypatch.setattr("stagereg.extensions.buckets.retry.FIRST_S", 0.0)
    with Checkpointer(url, keep=1) as checkpointer:
        checkpointer.save(again, {"x": torch.zeros(3)})
        checkpointer.wait()
        for at in range(20):
            with monkeypatch.context() as patched:
                made = counting(patched, at, lambda: OSError(5, "for once"))
                checkpointer.save(1, {"x": torch.full((3,), float(at))})
                checkpointer.wait()
            state = {"x": torch.zeros(3)}
            assert checkpointer.restore(state) == 1
            assert (state["x"] == at).all()
            assert len([name for name in names(url) if name.endswith("manifest.json")]) == 1
            if len(made) <= at:
                break
        assert at > 5


def test_a_commit_stays_when_the_save_fails_afterwards(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(point: str) -> None:
        if point == "retained":
            raise CheckpointError("another rank has died")

    monkeypatch.setattr(checkpoint_store, "failpoint", end)
    with Checkpointer(url, keep=1) as checkpointer:
        checkpointer.save(2, {"x": torch.ones(3)})
        with pytest.raises(CheckpointError, match="another rank has died"):
            checkpointer.wait()
    assert complete(open_store(url)) == [2]


def refused(number: int, status: int) -> OSError:
    """An error as s3fs translates it."""
    error = OSError(number, "the store's message")
    answer = {"Error": {"Code": "X"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error.__cause__ = type("ClientError", (Exception,), {"response": answer})()
    return error


def test_a_conditional_write_is_refused_or_not_known(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [refused(errno.EINVAL, 412), refused(errno.ENOSYS, 501)]

    def pipe_file(self: Any, path: str, data: bytes, mode: str = "overwrite") -> None:
        raise errors.pop(0)

    ObjectStore(url).put(f"{url}/y", b"1")
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    assert ObjectStore(url).create(f"{url}/x", b"1") is False
    with pytest.raises(NotImplementedError):
        ObjectStore(url).create(f"{url}/x", b"1")


def test_a_start_gives_an_unresponsive_store_up_at_the_timeout(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, released = threading.Event(), threading.Event()
    lock = Bucket.lock

    def unresponsive(bucket: Bucket) -> Any:
        assert answer.wait(60)
        hold = lock(bucket)
        release = hold.release
        hold.release = lambda: (release(), released.set())  # type: ignore[method-assign]
        return hold

    monkeypatch.setattr(Bucket, "lock", unresponsive)
    with pytest.raises(CheckpointError, match=r"no response within 0\.1 s"):
        Checkpointer(url, failure=Failure(timeout=datetime.timedelta(seconds=0.1))).lock()
    assert names(url) == []
    answer.set()  # the store responds again, and the late request is carried out
    assert released.wait(60)
    monkeypatch.undo()
    with Checkpointer(url) as checkpointer:
        checkpointer.save(1, {"x": 1})


def test_commands_report_a_store_that_cannot_be_looked_at(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(open_store(url), 1, "aa")

    def forbidden(self: Any, path: str, **kwargs: Any) -> None:
        raise PermissionError("no credentials")

    monkeypatch.setattr(MemoryFileSystem, "ls", forbidden)
    for command in (["ls", url], ["verify", url], ["convert", url, "out.pt"]):
        assert cli.main(command) == 2
        assert f"stagereg: Cannot access {url}: " in capsys.readouterr().err


STATE = {f"x{i}": torch.arange(1000.0) + i for i in range(4)}


def test_torch_writes_and_reads_a_url_through_a_storage(url: str) -> None:
    storage, state = DcpStorage(), {**STATE, "large": torch.arange(3_000_000.0), "number": 1}
    dcp.save(state, checkpoint_id=url, storage_writer=storage, no_dist=True)
    store = open_store(url.rpartition("/")[0])
    assert storage.marks == {name: store.mark(url, name) for name in store.backend.list(url)}
    for reader in (storage.reader(url), FsspecReader(url)):
        template = {name: torch.zeros_like(x) if isinstance(x, torch.Tensor) else 0 for name, x in state.items()}
        dcp.load(template, storage_reader=reader, no_dist=True)
        assert template.pop("number") == 1
        assert all(torch.equal(x, state[name]) for name, x in template.items())


@pytest.mark.parametrize("state", [STATE, {"x": torch.ones(2_000_000).to_sparse()}], ids=["plain", "by torch"])
def test_the_stores_error_is_reported_not_torchs(
    url: str, monkeypatch: pytest.MonkeyPatch, state: dict[str, Any]
) -> None:
    def denied(*_: Any) -> int:
        raise PermissionError(errno.EACCES, "Access Denied")

    monkeypatch.setattr(MemoryFile, "write", denied)
    with pytest.raises(dcp.api.CheckpointException, match=r"Access Denied \(writing\)"):
        dcp.save(state, checkpoint_id=url, storage_writer=DcpStorage(), no_dist=True)


def test_an_upload_left_with_an_error_is_given_up(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given_up: list[MemoryFile] = []
    monkeypatch.setattr(MemoryFile, "discard", lambda self: given_up.append(self))
    target = Upload(ObjectStore(url), f"{url}/x")
    with pytest.raises(ZeroDivisionError), AlignedFile(target, make_buffers(PAGE)) as upload:  # noqa: PT012
        upload.write(b"half")
        raise ZeroDivisionError
    assert len(given_up) == 1
