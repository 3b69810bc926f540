"""Checkpoints from others: nothing in them is run, imported or opened, whatever is written anywhere in them.

Each attack is made in a checkpoint whose manifest is right, as whoever forges one would see to. The interpreter's audit
events record what happens while it is read, and every wait has an end.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import datetime
import enum
import io
import json
import math
import os
import pickle
import random
import shutil
import signal
import struct
import sys
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy._core import multiarray
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import DeviceMesh

import stagereg.checkpoint.entries as entries
import stagereg.checkpoint.pickled as pickled
import stagereg.checkpoint.rng as rng
import stagereg.checkpoint.structure as structure
import stagereg.checkpoint.torchfiles as torchfiles
import stagereg.checkpoint.trusted as trusted
from stagereg import cli
from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.manifest import MANIFEST, Manifest, file_mark
from stagereg.checkpoint.storage.reader import CheckpointReader, read_metadata
from stagereg.errors import CheckpointError
from stagereg.registry import build

STORAGES = ("dcp", "direct", "safetensors")
FORBIDDEN_EVENTS = {"exec", "import", "open", "os.system", "os.exec", "os.posix_spawn", "pickle.find_class"}
FORBIDDEN_EVENTS |= {"socket.connect", "subprocess.Popen"}
armed: list[list[str]] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if armed and event in FORBIDDEN_EVENTS:
        armed[-1].append(f"{event} {arguments!r:.120}")


sys.addaudithook(_note)  # there is no way to take one back, so it only records while ``armed``


@contextlib.contextmanager
def auditing(inside: Path) -> Iterator[list[str]]:
    """The audit events of the block, except opening files below ``inside`` and errors that ranks send each other."""
    audited: list[str] = []
    armed.append(audited)
    try:
        yield audited
    finally:
        armed.pop()
        fine = (str(inside), "'stagereg.errors'", "/dev/null", ".py'", "/proc/")
        audited[:] = [event for event in audited if not any(part in event for part in fine)]


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    def expire(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it still waits after {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Payload:
    """Becomes a call when it is unpickled."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self.call = call, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def fire(*args: Any) -> None:
    raise SystemExit("the payload ran")


PAYLOADS = {
    "system": Payload(os.system, "exit 3"),
    "exec": Payload(exec, "fire()"),
    "import": Payload(__import__, "this"),
    "attribute": Payload(getattr, Payload(__import__, "os"), "system"),
    "own": {"deep": [(Payload(fire),)]},
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint to be forged, read once, so that what is imported once in a process is not the attack's doing."""
    root = tmp_path_factory.mktemp("untrusted")
    with Checkpointer(str(root), stager=build("stager", "blocking")) as saving:
        saving.save(1, full_state())
    path = root / "step-00000001"
    for state in (full_state(), {"missing": 0}):
        with contextlib.suppress(CheckpointError):
            restore(path, state)
    (path / "private").write_text("x")
    (path / "private").unlink()
    return path


@pytest.fixture
def forged(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / good.name))


def full_state() -> dict[str, Any]:
    return {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "note": ("text", 1), "count": 3}


def restore(path: Path, state: dict[str, Any]) -> None:
    with Checkpointer(str(path.parent), resume=str(path), stager=build("stager", "blocking")) as reading:
        reading.restore(state)


def seal(path: Path) -> None:
    """Write a manifest that fits what is there now."""
    old = Manifest.loads((path / MANIFEST).read_text())
    files = {}
    for file in sorted(path.iterdir()):
        if file.name != MANIFEST and file.is_file():
            with file.open("rb") as stream:
                files[file.name] = file_mark(stream)
    (path / MANIFEST).write_text(replace(old, files=files).dumps())


def metadata_of(path: Path) -> Metadata:
    found: Metadata = pickle.loads((path / ".metadata").read_bytes())
    return found


def put_metadata(path: Path, metadata: Any, protocol: int = 4) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
    seal(path)


def put_blob(path: Path, name: str, blob: bytes) -> None:
    """Have an entry be these bytes."""
    metadata = metadata_of(path)
    file = path / "__0_0.distcp"
    (index,) = (index for index in metadata.storage_data if index.fqn == name)
    metadata.storage_data[index] = _StorageInfo(file.name, file.stat().st_size, len(blob))
    with file.open("ab") as stream:
        stream.write(blob)
    put_metadata(path, metadata)


def saved(value: Any, **how: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **how)
    return stream.getvalue()


def refused(path: Path, seen: str = "") -> str:
    """Restore from a forged checkpoint, which is refused in a short message with nothing done; return the message."""
    state = full_state()
    state["model"]["w"].zero_()
    with within(20), auditing(path.parent) as audited, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointError, match=seen) as caught:
            restore(path, state)
    assert audited == []
    assert state["model"]["w"].sum() == 0, "refused, and loaded"
    assert len(str(caught.value)) < 1500
    return str(caught.value)


# -- code


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_code_instead_of_metadata_is_refused_before_it_runs(forged: Path, payload: Any) -> None:
    put_metadata(forged, payload)
    refused(forged, "names|no metadata")
    with auditing(forged) as audited:
        for protocol in range(6):
            with pytest.raises(CheckpointError):
                read_metadata(pickle.dumps(payload, protocol))
    assert audited == []


def test_code_anywhere_in_the_metadata_is_refused_before_it_runs(forged: Path) -> None:
    whole, payload = metadata_of(forged), PAYLOADS["own"]
    for forge in (
        lambda m: m.state_dict_metadata.update(x=payload),
        lambda m: m.planner_data.update(x=(payload,)),
        lambda m: m.storage_data.update({MetadataIndex("x"): payload}),
        lambda m: setattr(m.storage_meta, "checkpoint_id", payload),
        lambda m: setattr(m, "anything", payload),
    ):
        metadata = copy.deepcopy(whole)
        forge(metadata)
        put_metadata(forged, metadata)
        refused(forged, "metadata of .* was refused")


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_code_in_objects_tensors_and_structures_is_refused_before_it_runs(forged: Path, payload: Any) -> None:
    before = metadata_of(forged)
    for name, seen in (
        ("note", "'note' was not read"),
        ("model.w", "where a tensor belongs; nothing was run$"),
    ):
        put_blob(forged, name, saved(payload))
        refused(forged, seen)
        put_metadata(forged, before)
    put_blob(forged, "stagereg.structure.note", saved(pickle.dumps(payload)))
    refused(forged, "which is no plain data|structure of an entry")


FORGERIES: dict[str, Callable[[Metadata], Any]] = {
    "a long name": lambda m: m.state_dict_metadata.update({"n" * 100_000: BytesStorageMetadata()}),
    "a long file": lambda m: _put_info(m, _StorageInfo("f" * 100_000, 0, 1)),
    "a huge number": lambda m: _put_info(m, _StorageInfo("__0_0.distcp", 10**5000, 1)),
    "a number below zero": lambda m: _put_info(m, _StorageInfo("__0_0.distcp", -(10**4000), 1)),
    "a lost leaf": lambda m: (m.state_dict_metadata.pop("note"), m.storage_data.pop(MetadataIndex("note"))),
}


def _put_info(metadata: Metadata, info: _StorageInfo) -> None:
    metadata.storage_data[MetadataIndex("note")] = info


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_any_bad_metadata_is_refused_in_a_short_text_also_by_convert(
    forged: Path, tmp_path: Path, forge: Callable[[Metadata], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = metadata_of(forged)
    forge(metadata)
    put_metadata(forged, metadata)
    seen = refused(forged, "was refused|nothing of that is stored").partition("could not be restored: ")[2]
    assert len(seen) < 400
    assert cli.main(["convert", str(forged), str(tmp_path / "x.pt")]) == 2
    assert capsys.readouterr().err.strip() == f"stagereg: {seen}"


@pytest.mark.parametrize("how", ["older", "bare"])
def test_only_archives_of_torch_are_read(forged: Path, how: str) -> None:
    payload = PAYLOADS["own"]
    blob = saved(payload, _use_new_zipfile_serialization=False) if how == "older" else pickle.dumps(payload)
    put_blob(forged, "note", blob)
    refused(forged, "no archive")
    put_blob(forged, "model.w", blob)
    refused(forged, "no archive")


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_code_in_random_states_is_refused_before_it_runs(forged: Path, payload: Any) -> None:
    for which in ("python", "numpy"):
        state = {**rng.capture(), which: pickle.dumps(payload)}
        with auditing(forged) as audited, pytest.raises(CheckpointError, match="random number generators"):
            rng.restore(state)
        assert audited == []


def test_no_instruction_of_a_pickle_reaches_beyond_the_vocabulary() -> None:
    metadata = b"torch.distributed.checkpoint.metadata\n"
    attacks = {
        "INST": b"(S'exit 3'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nS'exit 3'\no.",
        "EXT1": b"\x82\x01.",
        "NEWOBJ_EX": b"\x80\x04" + b"c" + metadata + b"Metadata\n)}\x92.",
        "PERSID": b"Pname\n.",
        "BINPERSID": b"N" + b"Q.",
        "a call of what was made": b"c" + metadata + b"Metadata\n)\x81)R.",
        "a call of a value": b"c" + b"torch\nfloat32\n)R.",
        "a state for a class": b"c" + metadata + b"Metadata\n}(X\x01\x00\x00\x00aNub.",
        "an attribute of a class": b"c" + metadata + b"Metadata\nN}X\x0c\x00\x00\x00__setstate__K\x01s\x86b.",
        "a name with dots": b"\x80\x04\x8c\x05torch\x8c\x12serialization.load\x93.",
        "a name in a class": b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x15Metadata.__init__.__x\x93.",
        "getattr": b"cbuiltins\ngetattr\n(c" + metadata + b"Metadata\nX\x08\x00\x00\x00__init__tR.",
        "an empty stack": b"R.",
        "a mark that is not there": b"t.",
        "memory that is not there": b"h\x07.",
        "an end that does not come": b"N",
        "nothing": b"",
    }
    with auditing(Path(__file__)) as audited:
        for what, data in attacks.items():
            with pytest.raises(CheckpointError):
                pytest.fail(f"{what} gave {read_metadata(data)}")
    assert audited == []


def test_no_ranks_are_connected_for_a_mesh_that_a_file_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch lists ``DeviceMesh`` as safe, and connects ranks by the environment of ``torchrun`` when it loads one."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 9}.items():
        monkeypatch.setenv(name, str(value))
    mesh = Payload(DeviceMesh, "cpu", (0, 1))
    connected: list[Any] = []
    monkeypatch.setattr(torch.distributed.device_mesh, "init_process_group", connected.append)
    with pytest.raises(CheckpointError, match="DeviceMesh"):
        structure.load(pickle.dumps(mesh))
    with pytest.raises(CheckpointError, match="DeviceMesh"):
        pickled.load("x", io.BytesIO(saved(mesh)))
    assert connected == []


def test_random_states_out_of_their_block_are_refused_and_not_drawn_from() -> None:
    """NumPy reads memory at its generator's position without checking it."""
    state: Any = numpy.random.get_state()
    for position in (-1, 625, 1 << 30, 1.5):
        seen = json.loads(rng.capture()["numpy"])
        seen["state"]["pos"] = position
        older = pickle.dumps((*state[:2], position, *state[3:]), 4)
        for forged in (json.dumps(seen).encode(), older):
            with pytest.raises(CheckpointError, match="random number generators"):
                rng.restore({**rng.capture(), "numpy": forged})


# -- where files lie


@pytest.mark.parametrize(
    "name", ["../private", "/etc/passwd", "a/../../private", "..", ".", "", "a\\b", "x\0", "__0_0.distcp\n", "private"]
)
def test_no_file_is_opened_that_is_not_one_of_the_checkpoint(forged: Path, name: str) -> None:
    (forged.parent / "private").write_bytes((forged / "__0_0.distcp").read_bytes())
    metadata = metadata_of(forged)
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = replace(info, relative_path=name)
    put_metadata(forged, metadata)
    if name == "private":  # in the directory, and not in the manifest
        (forged.parent / "private").rename(forged / "private")
    refused(forged, "no file of")
    (forged / MANIFEST).unlink()
    if name != "private":
        with auditing(forged) as audited, pytest.raises(CheckpointError, match="no file of its directory"):
            CheckpointReader(forged).read_metadata()
        assert audited == []


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("kind", ["link", "fifo", "device", "directory"])
def test_a_file_that_is_no_regular_file_is_refused_and_never_waited_for(forged: Path, file: str, kind: str) -> None:
    path = forged / file
    path.rename(forged.parent / "aside")
    {
        "link": lambda: path.symlink_to(forged.parent / "aside"),
        "fifo": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "directory": path.mkdir,
    }[kind]()
    refused(forged)
    with within(20), pytest.raises(CheckpointError, match="no regular file"):
        torchfiles.shapes(build("storage", "dcp"), str(forged), ["note"])


@pytest.mark.parametrize("storage", STORAGES)
def test_the_reader_of_every_storage_refuses_a_link_instead_of_a_file(tmp_path: Path, storage: str) -> None:
    if storage == "safetensors":
        pytest.importorskip("safetensors")
    with Checkpointer(str(tmp_path), storage=build("storage", storage), stager=build("stager", "blocking")) as saving:
        saving.save(1, full_state())
    path = tmp_path / "step-00000001"
    reading = build("storage", storage)
    skeletons = torchfiles.shapes(reading, str(path), ["model", "note"])
    assert torchfiles.read(reading, str(path), skeletons, {})["note"] == ("text", 1)
    for file in [file for file in path.iterdir() if file.name not in (MANIFEST, ".metadata")]:
        file.rename(tmp_path / "aside")
        file.symlink_to(tmp_path / "aside")
        with pytest.raises(CheckpointError, match="no regular file"):
            torchfiles.read(reading, str(path), torchfiles.shapes(reading, str(path), ["model", "note"]), {})
        file.unlink()
        (tmp_path / "aside").rename(file)


def test_an_entry_outside_of_its_file_is_refused(forged: Path) -> None:
    whole = metadata_of(forged)
    size = (forged / "__0_0.distcp").stat().st_size
    for offset, length in ((size, 1), (0, size + 1), (-1, 5), (0, -5), (1 << 70, 1), (0, 1 << 70), (True, 1)):
        metadata = copy.deepcopy(whole)
        for index in metadata.storage_data:
            metadata.storage_data[index] = _StorageInfo("__0_0.distcp", offset, length)
        put_metadata(forged, metadata)
        refused(forged, "names bytes|number of bytes|where a int belongs")


# -- resources


@contextlib.contextmanager
def little_memory(most: int = 1 << 24) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most, "memory for what the file only claims to have"
    finally:
        tracemalloc.stop()


def test_no_memory_is_allocated_for_a_tensor_larger_than_its_stored_bytes(
    forged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, real = metadata_of(forged), torch.empty

    def empty(*size: Any, **how: Any) -> torch.Tensor:
        assert math.prod(size[0] if isinstance(size[0], tuple) else size) < 1 << 20, "memory for what is not stored"
        return real(*size, **how)

    monkeypatch.setattr(torch, "empty", empty)
    for size, chunk in (
        ((1 << 40,), (1 << 40,)),
        ((1 << 40,), (6,)),
        ((2, 1 << 61), (2, 3)),
        ((1 << 32,) * 3, (1,) * 3),
    ):
        metadata = copy.deepcopy(whole)
        for index in list(metadata.storage_data):
            if index.fqn == "model.w":
                info = metadata.storage_data.pop(index)
        start = torch.Size([0] * len(size))
        metadata.storage_data[MetadataIndex("model.w", start)] = info
        metadata.state_dict_metadata["model.w"] = TensorStorageMetadata(
            TensorProperties(), torch.Size(size), [ChunkStorageMetadata(start, torch.Size(chunk))]
        )
        put_metadata(forged, metadata)
        refused(forged, "larger than|of them stored|than memory has|part of")


def test_no_memory_is_allocated_for_lengths_that_a_pickle_only_claims() -> None:
    nested = b"\x80\x04" + b"]" * 50_000 + b"a" * 49_999 + b"."
    keys = b"\x80\x04}" + b")" + b"\x85" * 50_000 + b"Ns."
    laughs = (
        b"\x80\x04]\x94" + b"".join(b"](" + b"h" + bytes([i]) + b"h" + bytes([i]) + b"e\x94" for i in range(60)) + b"."
    )
    for data in (
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.",
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b".",
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.",
        b"\x8b" + struct.pack("<I", 1 << 30) + b"x.",
        b"Nr" + struct.pack("<I", (1 << 31) - 1) + b".",
        laughs,
    ):
        with within(20), little_memory():
            refused_by_both(data)
    for data in (nested, keys):
        with within(20):
            refused_by_both(data)


def test_mappings_that_python_would_free_recursively_do_not_end_the_process() -> None:
    chain = b"\x80\x04" + b"ccollections\ndefaultdict\n)RK\x01" * 100_000 + b"N" + b"s" * 100_000
    for end in (b".", b")R."):
        with pytest.raises(CheckpointError):
            structure.load(chain + end)


def test_a_short_pickle_that_expands_to_a_huge_value_is_refused() -> None:
    """Each of these would take gigabytes, or hours."""
    count = 3_000
    part = ChunkStorageMetadata(torch.Size([0]), torch.Size([0]))
    tensor = TensorStorageMetadata(TensorProperties(), torch.Size([0]), [part] * count)
    of_many: dict[str, Any] = {str(i): tensor for i in range(count)}
    way = ("a",) * count
    refs = b"h\x00" * count
    tuples = b"".join(b"(" + b"h" + bytes([i]) + (b"h" + bytes([i])) * count + b"t\x94" for i in range(3))
    for data in (
        pickle.dumps(Metadata(of_many, {}, {}), 4),
        pickle.dumps(Metadata({}, dict.fromkeys(map(str, range(count)), way), {}), 4),
        b"\x80\x04cpathlib\nPosixPath\n(X" + struct.pack("<I", 1 << 20) + b"a" * (1 << 20) + b"\x94" + refs + b"tR.",
        b"\x80\x04}(N\x85\x94" + tuples + b"Nu.",
    ):
        with within(20), little_memory(1 << 25):
            refused_by_both(data)


def refused_by_both(data: bytes) -> None:
    for load in (read_metadata, structure.load):
        with pytest.raises(CheckpointError):
            load(data)


def test_an_archive_that_would_grow_is_refused_before_it_does(forged: Path) -> None:
    before = metadata_of(forged)
    for name in ("note", "model.w"):
        with zipfile.ZipFile(io.BytesIO(saved(torch.zeros(1 << 20)))) as plain:
            records = {info.filename: plain.read(info) for info in plain.infolist()}
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as bomb:
            for record, data in records.items():
                bomb.writestr(record, data)
        assert len(stream.getvalue()) < 1 << 14
        with pytest.raises(CheckpointError, match="compressed"):  # as it comes from a third party's reader
            pickled.load(name, io.BytesIO(stream.getvalue()))
        put_blob(forged, name, stream.getvalue())
        refused(forged, "compressed")
        blob = saved(torch.zeros(10))
        claims = blob.replace(struct.pack("<2I", 40, 40), struct.pack("<2I", 1 << 31, 1 << 31))
        assert claims != blob
        put_blob(forged, name, claims)
        refused(forged, "claims to have")
        put_blob(forged, name, blob + b"\0")
        refused(forged, "no archive")
        put_metadata(forged, before)


def test_any_bad_manifest_is_refused_in_a_short_text() -> None:
    long = "x" * (1 << 20)
    name = '{"format": 1, "step": 1, "world_size": 1, "serial": 1, "files": {"%s": {"bytes": 1, "crc32": 1}}}'
    texts = [f'{{"format": "{long}"}}', name % long, name % f"/{long}", f'{{"format": 1, "storage": "{long}"}}']
    for depth in range(900, 1010):  # the deepest that can be read cannot be written again, for its checksum
        texts.append('{"format": 2, "crc32": 1, "x": ' + "[" * depth + "]" * depth + "}")
    for text in texts:
        with pytest.raises(ValueError, match=r"(?s)\A.{1,300}\Z"):
            Manifest.loads(text)


# -- what is not forged is still read


@pytest.mark.parametrize("storage", STORAGES)
def test_metadata_is_read_as_torch_reads_it(tmp_path: Path, storage: str) -> None:
    if storage == "safetensors":
        pytest.importorskip("safetensors")
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "t": torch.ones(2, dtype=torch.int8)}
    with Checkpointer(str(tmp_path), storage=build("storage", storage), stager=build("stager", "blocking")) as saving:
        saving.save(1, state)
    path = tmp_path / "step-00000001"
    ours, theirs = CheckpointReader(path).read_metadata(), FileSystemReader(path).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data
    assert ours.version == theirs.version
    for protocol in (2, 3, 4, 5):
        assert read_metadata(pickle.dumps(theirs, protocol)).storage_data == theirs.storage_data


def test_structures_and_random_states_of_older_checkpoints_are_read() -> None:
    pytest.importorskip("numpy")
    import numpy

    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn(), torch.rand(1).item()]

    random.gauss(0, 1)
    numpy.random.randn()
    older = {
        "python": pickle.dumps(random.getstate()),
        "torch": rng.capture()["torch"],
        "numpy": pickle.dumps(numpy.random.get_state(), 4),
    }
    newer = rng.capture()
    expected = draw()
    for state in (older, newer):
        rng.restore(state)
        assert draw() == expected
    counts: Any = collections.Counter({"a": ..., "b": ...})
    lists: Any = collections.defaultdict(list, {1: ...})
    ordered: Any = collections.OrderedDict(x=..., y={"z": [..., {}]})
    ordered._metadata = collections.OrderedDict({"": {"version": 1}})
    bones = {"c": counts, "l": lists, "o": ordered, 3: [{}, ...]}
    read = structure.load(pickle.dumps(bones))
    assert read == bones
    assert [type(read[key]) for key in "clo"] == [type(bones[key]) for key in "clo"]
    assert read["o"]._metadata == ordered._metadata
    assert read["l"]["new"] == []


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(plain, st.sampled_from([4, 5]))
def test_plain_data_is_read_as_pickle_reads_it(value: Any, protocol: int) -> None:
    assert trusted.loads(pickle.dumps(value, protocol), trusted.CONTAINERS) == value


@settings(max_examples=60, deadline=None)
@given(plain | st.sets(st.integers()) | st.complex_numbers(allow_nan=False) | st.integers(min_value=1 << 2000))
def test_every_value_that_save_accepts_loads_back(value: Any) -> None:
    try:
        pickled.expect_loadable("x", value)
    except CheckpointError:
        assert isinstance(value, int)
        assert value > 1 << 2000
        with pytest.raises(CheckpointError):
            pickled.load("x", io.BytesIO(saved(value)))
    else:
        assert pickled.load("x", io.BytesIO(saved(value))) == value


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_damaged_metadata_is_refused_or_read_and_never_anything_else(good: Path, data: st.DataObject) -> None:
    content = bytearray((good / ".metadata").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with auditing(good) as audited, contextlib.suppress(CheckpointError):
        assert isinstance(read_metadata(bytes(content)), Metadata)
    assert audited == []


# -- what would not load back is refused when it is saved


class Colour(enum.Enum):
    RED = 1


class Mine(dict[str, Any]):
    pass


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "name", "kind"),
    [
        ({"a": [1, {"when": datetime.timedelta(1)}]}, r"x\.a\.1\.when", "datetime.timedelta"),
        ({"a": (Colour.RED,)}, r"x\.a", "test_untrusted.Colour"),
        ({"a": frozenset({1})}, r"x\.a", "frozenset"),
        ({"a": Mine(b=1)}, r"x\.a", "test_untrusted.Mine"),
        ({"a": torch.ones(2).as_subclass(Marked)}, r"x\.a", "test_untrusted.Marked"),
        ({"a": random.Random(1)}, r"x\.a", "random.Random"),
    ],
)
def test_a_value_that_would_not_load_back_is_refused_by_save_with_its_path_and_the_remedy(
    tmp_path: Path, value: Any, name: str, kind: str
) -> None:
    with Checkpointer(str(tmp_path), stager=build("stager", "blocking")) as saving:
        saving.save(1, {"x": 1})
        saving.save(2, {"x": value})
        with pytest.raises(CheckpointError, match=rf"(?s)'{name}' would not load back.*{kind}.*add_safe_globals"):
            saving.wait()
        saving.save(3, {"x": 3})
        saving.wait()
        state = {"x": 0}
        assert saving.restore(state) == 3
        assert state == {"x": 3}


NUMBERS = [numpy.dtype(name).type(3) for name in "?bBhHiIlLefdFD"]


def test_numbers_of_numpy_load_back() -> None:
    value = {"best": NUMBERS, "pair": (numpy.float64(math.pi), 1)}
    pickled.expect_loadable("x", value)
    stream = io.BytesIO()
    torch.save(value, stream)
    found = pickled.load("x", stream)
    assert found == value
    assert list(map(type, found["best"])) == list(map(type, NUMBERS))


@pytest.mark.parametrize(
    "forged",
    [
        Payload(numpy.dtype, "O"),
        Payload(numpy.dtype, "f8,O"),
        Payload(numpy.dtype, "V4096"),
        Payload(multiarray.scalar, numpy.dtype("f8"), b"1234567"),
        Payload(multiarray.scalar, numpy.dtype("f8"), b"12345678" * 2),
        Payload(multiarray.scalar, numpy.dtype([("a", "f8")]), b"12345678"),
        Payload(multiarray.scalar, numpy.dtype(">f8"), b"12345678"),
        Payload(multiarray.scalar, "f8", b"12345678"),
        numpy.datetime64(1, "s"),
        numpy.arange(3),
        numpy.array([{}]),
    ],
)
def test_nothing_else_of_numpy_is_made(forged: Any) -> None:
    stream = io.BytesIO()
    torch.save(forged, stream)
    with pytest.raises(CheckpointError, match="was not read"):
        pickled.load("x", stream)


@pytest.mark.parametrize("storage", ["dcp", "direct"])
@pytest.mark.parametrize(
    ("make", "seen"),
    [
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 2, torch.qint8), "it is quantized"),
        (lambda: torch.eye(2).to_sparse(), "it is torch.sparse_coo, not dense"),
        (lambda: torch.eye(2).to_sparse_csr(), "it is torch.sparse_csr, not dense"),
        (lambda: {("x",) * 2000: 1}, "cannot be the key"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*quantize")
def test_other_tensors_than_dense_and_other_keys_are_refused_by_save(
    tmp_path: Path, storage: str, make: Callable[[], Any], seen: str
) -> None:
    with Checkpointer(str(tmp_path), storage=build("storage", storage), stager=build("stager", "blocking")) as saving:
        saving.save(1, {"x": {"a": torch.ones(1)}})
        saving.save(2, {"x": {"a": make()}})
        with pytest.raises(CheckpointError, match=rf"'x\.a' .*{seen}"):
            saving.wait()
        assert saving.restore({"x": None}) == 1


def test_keys_of_tuples_and_sets_load_back(tmp_path: Path) -> None:
    deep = ("a", ("b", ("c", ("d", ("e", ("f",))))))
    state = {"x": {"first": torch.ones(1)}}
    with Checkpointer(str(tmp_path), stager=build("stager", "blocking")) as saving:
        saving.save(1, state)
        state["x"] = {deep: torch.ones(1), frozenset({1, "b"}): torch.zeros(1)}  # type: ignore[dict-item]
        saving.save(2, state)
    found: dict[str, Any] = {"x": None}
    restore(tmp_path / "step-00000002", found)
    assert found == state


def test_a_value_that_cannot_be_pickled_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'x\.f' cannot be saved: it is a function"):
        torchfiles.skeletons({"x": {"f": lambda: 1}})


def test_a_type_that_the_program_allows_is_saved_and_read(tmp_path: Path) -> None:
    allowed: list[Any] = [Colour, Mine, datetime.timedelta]
    value = {"a": (Colour.RED,), "m": Mine(b=datetime.timedelta(2))}
    with torch.serialization.safe_globals(allowed):
        with Checkpointer(str(tmp_path), stager=build("stager", "blocking")) as saving:
            saving.save(1, {"x": value})
        state: dict[str, Any] = {"x": None}
        restore(tmp_path / "step-00000001", state)
        assert state["x"] == value
        assert type(state["x"]["m"]) is Mine
    with pytest.raises(CheckpointError, match=r"Colour|Mine|timedelta"):
        restore(tmp_path / "step-00000001", {"x": None})


def test_entries_of_the_project_itself_load_back() -> None:
    captured = entries.capture({"x": 1}, step=1, rank=0, world_size=1)
    for name, value in captured.items():
        structure.dump(value, name)


def test_a_huge_rank_count_in_a_manifest_takes_no_time(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), stager=build("stager", "blocking")) as saving:
        saving.save(1, {"x": 1})
    path = tmp_path / "step-00000001" / MANIFEST
    path.write_text(replace(Manifest.loads(path.read_text()), world_size=10**12).dumps())
    state = {"x": 0}
    with within(10):
        restore(tmp_path / "step-00000001", state)
    assert state == {"x": 1}
