"""Checkpoints from others: nothing in them is run, imported or opened, whatever is written anywhere in them.

Each attack is made in a checkpoint whose manifest is right, as whoever forges one would see to. The interpreter's audit
events record what happens while it is read.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import io
import json
import os
import pickle
import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

import stagereg
import stagereg.checkpoint.format.pickled as pickled
import stagereg.checkpoint.state.rng as rng
from stagereg import cli, registry
from stagereg.assembly import Checkpointer
from stagereg.base.providers import has
from stagereg.checkpoint.format.encoding import decode
from stagereg.checkpoint.format.index import INDEX, Index
from stagereg.checkpoint.format.manifest import MANIFEST, Checkpoint, Manifest
from stagereg.checkpoint.storage.reading import CheckpointFiles
from stagereg.checkpoint.store.local_files import mark_file
from stagereg.errors import CheckpointError
from stagereg.registry import build

from ...support import audit
from ...support.examples import examples

DATA = "__0_0.distcp"
FORBIDDEN_EVENTS = {"exec", "import", "open", "os.system", "os.exec", "os.posix_spawn", "pickle.find_class"}
FORBIDDEN_EVENTS |= {"socket.connect", "subprocess.Popen"}


def auditing(inside: Path) -> contextlib.AbstractContextManager[list[str]]:
    """The audit events of the block, except opening files below ``inside`` and errors that ranks send each other."""
    return audit.auditing(FORBIDDEN_EVENTS, str(inside), "'stagereg.errors'", "/dev/null", ".py'", "/proc/")


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
    for read in READERS:
        read(path)
    return path


@pytest.fixture
def forged(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / good.name))


def full_state() -> dict[str, Any]:
    model = {"w": torch.arange(6.0).reshape(2, 3), "v": torch.ones(4)}
    return {"model": model, "pair": (torch.ones(2), 1), "count": {3: "x"}}


def restore(path: Path, state: dict[str, Any]) -> None:
    with Checkpointer(str(path.parent), resume=str(path), stager=build("stager", "blocking")) as reading:
        reading.restore(state)


def seal(path: Path, **changes: Any) -> None:
    """Write a manifest that fits what is there now."""
    old = Manifest.loads((path / MANIFEST).read_text())
    files = {}
    for file in sorted(path.iterdir()):
        if file.name != MANIFEST and file.is_file():
            files[file.name] = mark_file(file)
    (path / MANIFEST).write_text(replace(old, files=files, **changes).dumps())


def index_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / INDEX).read_text())
    return found


def put_index(path: Path, index: Any) -> None:
    (path / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))
    seal(path)


def append(path: Path, blob: bytes) -> list[int]:
    """Put bytes behind the data file, and return their place for the index."""
    with (path / DATA).open("ab") as stream:
        return [0, stream.tell(), len(blob), stream.write(blob)][:3]


def saved(value: Any, **how: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **how)
    return stream.getvalue()


def read_all(path: Path) -> None:
    with stagereg.open_checkpoint(path) as checkpoint:
        assert len([*checkpoint.values(), *map(checkpoint.entry, checkpoint.entries)]) > 0


READERS: list[Callable[[Path], None]] = [read_all] if has("interop") else []


def refused(path: Path, seen: str = "") -> str:
    """Restore from a forged checkpoint, which is refused in a short message with nothing done; return the message."""
    state = full_state()
    state["model"]["w"].zero_()
    with auditing(path.parent) as audited, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointError, match=seen) as caught:
            restore(path, state)
        for read in READERS:
            with pytest.raises(CheckpointError, match=seen):
                read(path)
    assert audited == []
    assert state["model"]["w"].sum() == 0, "refused, and loaded"
    assert len(str(caught.value)) < 1500
    return str(caught.value)


# -- code


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_code_in_metadata_and_plain_entries_is_never_read(forged: Path, payload: Any) -> None:
    """They are there for torch alone."""
    (forged / ".metadata").write_bytes(pickle.dumps(payload))
    index, code, data = index_of(forged), pickle.dumps(payload), (forged / DATA).read_bytes()
    around = bytearray((code * (len(data) // len(code) + 1))[: len(data)])
    for _, begin, nbytes, *_ in [chunk for _, _, chunks in index["tensors"].values() for chunk in chunks]:
        around[begin : begin + nbytes] = data[begin : begin + nbytes]
    (forged / DATA).write_bytes(around)
    index["objects"] = {name: append(forged, saved((torch.ones(2), 1))) for name in index["objects"]}
    put_index(forged, index)
    state = full_state()
    state["model"]["w"].zero_()
    with auditing(forged.parent) as audited:
        restore(forged, state)
    assert audited == []
    assert state["model"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_code_in_objects_and_archives_is_refused(forged: Path, payload: Any) -> None:
    before = index_of(forged)
    older = saved(payload, _use_new_zipfile_serialization=False)
    old, refusal = pickle.dumps(payload), "not an archive"
    for blob, seen in ((saved(payload), "was not read"), (old, refusal), (older, refusal)):
        place = append(forged, blob)
        chunk = [*place, [0], [4], "archive"]
        in_a_tensor = {**before["tensors"], "model.v": ["uint8", [4], [chunk]]}
        for forgery, name in (({"objects": {"pair": place}}, "pair"), ({"tensors": in_a_tensor}, "model.v")):
            put_index(forged, {**before, **forgery})
            assert f"'{name}' was not read" in refused(forged, seen)


@pytest.mark.parametrize("storage", ["dcp", "torch_dcp", *["safetensors"] * has("interop")])
def test_torchs_reader_is_never_asked_where_the_index_is_empty(forged: Path, storage: str) -> None:
    registry.build("storage", storage)  # imports what it needs now, and not while it is watched which files are opened
    (forged / ".metadata").write_bytes(pickle.dumps(PAYLOADS["own"]))
    before = index_of(forged)
    no_place = {"tensors": {**before["tensors"], "model.v": ["float32", [4], None]}}
    for name, forgery in {"model.v": no_place, "pair": {"objects": {"pair": None}}}.items():
        put_index(forged, {**before, **forgery})
        seal(forged, storage=storage)
        refused(forged, f"has no offset of '{name}'")


STRUCTURES: dict[str, Any] = {
    "a function": {"type": "os.system", "value": "exit 3"},
    "a class": {"type": "builtins.object", "value": {}},
    "a method": {"type": "OrderedDict", "value": {}, "attributes": {"type": "dict", "value": {"items": 1}}},
    "another class": {"type": "OrderedDict", "value": {}, "attributes": {"type": "dict", "value": {"__class__": 1}}},
    "attributes of a dict": {"type": "dict", "value": {}, "attributes": {"type": "dict", "value": {"a": 1}}},
    "a key that is a list": {"type": "dict", "value": [[[1], 2]]},
    "a key that is a leaf": {"type": "dict", "value": [[{}, 2]]},
    "a leaf in a tuple": {"type": "tuple", "value": [{}]},
    "a leaf that is not stored": {"type": "dict", "value": {"x": {}}},
    "no base64": {"type": "bytes", "value": "?"},
    "no number": {"type": "float", "value": "fire()"},
    "a rank of many digits": {"type": "per_rank", "value": {"9" * 5000: 1}},
    "330 lists inside each other": json.loads("[" * 330 + "1" + "]" * 330),
    "no type": {"value": {}},
    "a type that is no text": {"type": ["dict"], "value": {}},
}


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
def test_structures_name_plain_data_only(forged: Path, structure: Any) -> None:
    index = index_of(forged)
    index["state"]["count"] = structure
    put_index(forged, index)
    refused(forged, "structure")


def test_no_ranks_are_connected_for_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch lists ``DeviceMesh`` as safe, and connects ranks by the environment of ``torchrun`` when it loads one."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 9}.items():
        monkeypatch.setenv(name, str(value))
    connected: list[Any] = []
    monkeypatch.setattr(torch.distributed.device_mesh, "init_process_group", connected.append)
    with pytest.raises(CheckpointError, match="DeviceMesh"):
        pickled.load("x", saved(Payload(DeviceMesh, "cpu", (0, 1))))
    with pytest.raises(CheckpointError, match="unknown type"):
        decode({"type": "torch.distributed.device_mesh.DeviceMesh", "value": {}}, "x")
    assert connected == []


def test_random_states_out_of_their_block_are_refused() -> None:
    """NumPy reads memory at its generator's position without checking it."""
    numpy = pytest.importorskip("numpy")
    names, payload = ("python", "torch", "numpy"), pickle.dumps(PAYLOADS["own"])
    stored = partial(torch.frombuffer, dtype=torch.uint8)
    bad: list[tuple[str, Any]] = [(name, stored(bytearray(payload))) for name in names]
    bad += [(which, value) for which in names for value in (payload, None, torch.zeros(3))]
    for position in (-1, 625, 1 << 30, 1.5):
        seen = json.loads(bytes(rng.as_tensors(rng.capture())["numpy"]))
        seen["state"]["pos"] = position
        bad.append(("numpy", stored(bytearray(json.dumps(seen).encode()))))
    saved = rng.as_tensors(rng.capture())
    random.random(), torch.rand(1), numpy.random.rand()
    before = rng.capture()
    for which, state in bad:
        with pytest.raises(CheckpointError, match="random number generators"):
            rng.restore({**saved, which: state})
        assert rng.capture() == before, "one of them was set"
    rng.restore(saved)
    assert all(torch.equal(x, saved[name]) for name, x in rng.as_tensors(rng.capture()).items())


# -- where files lie


@pytest.mark.parametrize("name", ["../private", "/etc/passwd", "..", "", "a\\b", "x\0", "private", 3, None, ["a"]])
def test_no_file_but_those_of_the_manifest_is_opened(forged: Path, name: Any) -> None:
    (forged.parent / "private").write_bytes((forged / DATA).read_bytes())
    index = index_of(forged)
    index["files"] = [name]
    put_index(forged, index)
    if name == "private":  # in the directory, and not in the manifest
        (forged.parent / "private").rename(forged / "private")
    refused(forged, "not in the manifest|index.json is invalid")


@pytest.mark.parametrize("file", [INDEX, DATA])
@pytest.mark.parametrize("kind", ["link", "fifo", "device", "directory"])
def test_what_is_no_regular_file_is_never_waited_for(forged: Path, file: str, kind: str) -> None:
    path = forged / file
    path.rename(forged.parent / "aside")
    {
        "link": lambda: path.symlink_to(forged.parent / "aside"),
        "fifo": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "directory": path.mkdir,
    }[kind]()
    refused(forged)
    checkpoint = Checkpoint(str(forged), Manifest.loads((forged / MANIFEST).read_text()))

    def opened() -> None:
        files = CheckpointFiles.of(checkpoint, build("storage", "dcp"))
        files.open_for([files.structure("pair")])

    with pytest.raises(CheckpointError, match="not a regular file"):
        opened()


# -- what the index claims


TENSORS: dict[str, tuple[Callable[[list[Any], int], Any], str]] = {
    "a terabyte": (lambda c, end: ["uint8", [1 << 40], [[0, 0, 1 << 40]]], "outside of"),
    "a terabyte of little": (lambda c, end: ["float32", [1 << 38], [c]], "stored size"),
    "more than there are addresses": (lambda c, end: ["float32", [1 << 32] * 3, [c]], "more elements"),
    "many dimensions": (lambda c, end: ["float32", [1] * 65, [c]], "invalid shape"),
    "a size below zero": (lambda c, end: ["float32", [-2, -3], [c]], "invalid size"),
    "a size that is true": (lambda c, end: ["uint8", [True], [[0, 0, 1]]], "invalid size"),
    "half a size": (lambda c, end: ["float32", [1.5, 4], [c]], "invalid size"),
    "no dtype": (lambda c, end: ["load", [2, 3], [c]], "load"),
    "past the file": (lambda c, end: ["float32", [2, 3], [[0, end - 8, 24]]], "outside of"),
    "before the file": (lambda c, end: ["float32", [2, 3], [[0, -8, 24]]], "outside of"),
    "no such file": (lambda c, end: ["float32", [2, 3], [[7, 0, 24]]], "index"),
    "a file below zero": (lambda c, end: ["float32", [2, 3], [[-1, 0, 24]]], "outside of"),
    "a huge offset": (lambda c, end: ["float32", [2, 3], [[0, 1 << 70, 24]]], "outside of"),
    "an offset of text": (lambda c, end: ["float32", [2, 3], [[0, "0", 24]]], "not an integer"),
    "overlapping": (lambda c, end: ["float32", [3, 3], [[0, c[1], 36]]], "overlaps"),
    "a hole": (lambda c, end: ["float32", [4, 3], [[*c, [0, 0], [2, 3]]]], "overlap or leave gaps"),
    "the same twice": (lambda c, end: ["float32", [4, 3], [[*c, [0, 0], [2, 3]]] * 2], "overlap or leave gaps"),
    "a part outside": (lambda c, end: ["float32", [2, 3], [[*c, [1, 0], [2, 3]]]], "outside of the tensor"),
    "a part of other dimensions": (lambda c, end: ["float32", [2, 3], [[*c, [0], [6]]]], "outside of the tensor"),
    "strides over others": (lambda c, end: ["float32", [2, 3], [[*c, [0, 0], [2, 3], [1, 1]]]], "overlap"),
    "strides far away": (lambda c, end: ["float32", [2, 3], [[*c, [0, 0], [2, 3], [1 << 40, 1]]]], "gaps"),
    "an archive too small": (
        lambda c, end: ["float32", [2, 3], [[0, 0, 9, [0, 0], [2, 3], "archive"]]],
        "stored size",
    ),
    "a size of 2^70 beside 0": (lambda c, end: ["float32", [0, 1 << 70], []], "invalid size"),
    "sizes of 2^63 - 1 beside 0": (lambda c, end: ["float32", [0, *[(1 << 63) - 1] * 2], []], "more elements"),
    "a stride below 0 of one": (lambda c, end: ["float32", [6, 1], [[*c, [0, 0], [6, 1], [1, -1]]]], "strides"),
    "a stride of 2^70 of one": (lambda c, end: ["float32", [6, 1], [[*c, [0, 0], [6, 1], [1, 1 << 70]]]], "strides"),
    "a stride that is true": (lambda c, end: ["float32", [6, 1], [[*c, [0, 0], [6, 1], [True, 1]]]], "strides"),
    "another layout": (lambda c, end: ["float32", [2, 3], [[*c, [0, 0], [2, 3], "zip"]]], "strides"),
    "nothing": (lambda c, end: [], "values"),
}


@pytest.mark.parametrize(("make", "seen"), TENSORS.values(), ids=TENSORS)
def test_a_forged_tensor_is_refused_before_there_is_memory(
    forged: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[list[Any], int], Any], seen: str
) -> None:
    index = index_of(forged)
    chunk = index["tensors"]["model.w"][2][0]
    index["tensors"]["model.w"] = make(chunk, (forged / DATA).stat().st_size)
    if seen == "overlaps":
        index["tensors"]["model.x"] = ["float32", [2], [[0, chunk[1] + 4, 8]]]
    put_index(forged, index)
    monkeypatch.setattr(torch, "empty", lambda *size, **how: pytest.fail("memory for what is not stored"))
    refused(forged, f"index.json is invalid: .*{seen}")


CONTENTS: dict[str, Any] = {
    "deep": '{"format": 1, "state": ' + "[" * 1_000_000 + "]" * 1_000_000 + "}",
    "no JSON": "{",
    "a list": [],
    "another format": {"format": 2},
    "no files": {"format": 1, "tensors": {}, "objects": {}, "state": {}},
    "a long number": '{"format": 1' + "0" * 10_000 + "}",
    "an object outside": {"format": 1, "files": [DATA], "tensors": {}, "objects": {"x": [0, 0, 1 << 40]}, "state": {}},
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_a_bad_index_is_refused_in_a_short_text(
    forged: Path, tmp_path: Path, content: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    put_index(forged, content)
    seen = refused(forged, "index.json is invalid").partition("could not be restored: ")[2]
    assert len(seen) < 400 + len(str(forged))
    if has("interop"):
        assert cli.main(["convert", str(forged), str(tmp_path / "x.pt")]) == 2
        assert capsys.readouterr().err.strip() == f"stagereg: {seen}"


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_a_damaged_index_is_refused_or_read_and_nothing_else(good: Path, data: st.DataObject) -> None:
    content = bytearray((good / INDEX).read_bytes())
    sizes = {file.name: file.stat().st_size for file in good.iterdir()}
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(32, 126))
    with auditing(good) as audited, contextlib.suppress(CheckpointError):
        index = Index.loads(bytes(content), sizes)
        for name in index.state:
            with contextlib.suppress(CheckpointError):
                decode(index.state[name], name)
    assert audited == []


def test_a_huge_rank_count_in_a_manifest_takes_no_time(forged: Path) -> None:
    path = forged / MANIFEST
    path.write_text(replace(Manifest.loads(path.read_text()), world_size=10**12).dumps())
    state: dict[str, Any] = {"count": None}
    restore(forged, state)
    assert state == {"count": {3: "x"}}


# -- what would not load back is refused when it is saved


class Colour(enum.Enum):
    RED = 1


class Mine(dict[str, Any]):
    pass


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("make", "seen"),
    [
        (lambda: [1, {"f": datetime.timedelta(1)}], "would not load back.*datetime.timedelta.*add_safe_globals"),
        (lambda: (Colour.RED,), "would not load back.*test_untrusted.Colour"),
        (lambda: torch.ones(2).as_subclass(Marked), "would not load back.*test_untrusted.Marked"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 2, torch.qint8), "it is quantized"),
        (lambda: torch.eye(2).to_sparse(), "it is torch.sparse_coo, not dense"),
        (lambda: torch.eye(2).to_sparse_csr(), "it is torch.sparse_csr, not dense"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "it is nested, not dense"),
        (lambda: {Colour.RED: 1}, "cannot be a key"),
        (lambda: Mine(b=1), "test_untrusted.Mine; save dict"),
        (lambda: {"f": lambda: 1}, "cannot be saved: it is a function"),
        (lambda: 1 << 2100, "torch refuses"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*quantize")
def test_save_refuses_what_would_not_load_back(tmp_path: Path, make: Callable[[], Any], seen: str) -> None:
    with Checkpointer(str(tmp_path), stager=build("stager", "blocking")) as saving:
        saving.save(1, {"x": {"a": torch.ones(1)}})
        saving.save(2, {"x": {"a": make()}})
        with pytest.raises(CheckpointError, match=rf"(?s)'x\.a(\.1)?(\.f)?' .*{seen}"):
            saving.wait()
        saving.save(3, {"x": 3})
        saving.wait()
        assert saving.restore({"x": None}) == 3


def test_a_type_that_the_program_allows_is_saved_and_read(tmp_path: Path) -> None:
    allowed: list[Any] = [Colour, datetime.timedelta]
    value = {"a": (Colour.RED,), "m": datetime.timedelta(2)}
    with torch.serialization.safe_globals(allowed):
        with Checkpointer(str(tmp_path), stager=build("stager", "blocking")) as saving:
            saving.save(1, {"x": value})
        state: dict[str, Any] = {"x": None}
        restore(tmp_path / "step-00000001", state)
        assert state["x"] == value
    with pytest.raises(CheckpointError, match=r"Colour|timedelta"):
        restore(tmp_path / "step-00000001", {"x": None})
