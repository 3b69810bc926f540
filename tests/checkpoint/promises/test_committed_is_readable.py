"""Nothing is committed that the reader would refuse: the save fails instead, and the checkpoint before it stays."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stagereg
import stagereg.checkpoint.format.manifest as manifest
import stagereg.checkpoint.store.conditions as conditions
from stagereg.checkpoint.format.damage import InaccessibleFile, VerificationResult
from stagereg.checkpoint.format.encoding import Encoded, encode
from stagereg.checkpoint.format.index import Index, Readable, expect_readable
from stagereg.checkpoint.format.manifest import FileDigest, Manifest
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.store.backend import Backend
from stagereg.checkpoint.store.open_store import backend_of, open_store
from stagereg.errors import CheckpointError
from tests.support.places import PLACES, place
from tests.support.reading import opened
from tests.support.states import build


def save(root: Path | str, step: int, **more: Any) -> None:
    state = more.pop("state", {"x": torch.full((3,), float(step))})
    with stagereg.Checkpointer(str(root), every=1, stager=build("blocking"), resume="auto", **more) as checkpointer:
        checkpointer.restore({})
        checkpointer.save(step, state)


def restored(root: Path | str) -> float:
    state = {"x": torch.zeros(3)}
    with stagereg.Checkpointer(str(root), every=1, resume="auto") as checkpointer:
        checkpointer.restore(state)
    return float(state["x"][0])


class Shifted(DcpStorage):
    """Reports that all tensors lie behind the end of their file."""

    def write_files(self, rank: int, items: Any, planner: Any) -> list[Any]:
        results = super().write_files(rank, items, planner)
        return [dataclasses.replace(x, content=x.content + (1 << 30)) if hasattr(x, "content") else x for x in results]


def test_an_index_that_does_not_fit_the_files_is_not_committed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="are outside of their file"):
        save(tmp_path, 2, storage=Shifted())
    assert restored(tmp_path) == 1


@given(st.integers(190, 210), st.sampled_from(["list", "dict", "tensor", "tuple"]))
@settings(max_examples=12, deadline=None)
def test_deep_nesting_comes_back_or_is_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, depth: int, kind: str
) -> None:
    root = tmp_path_factory.mktemp("deep")
    value: Any = torch.ones(1) if kind == "tensor" else 7
    for _ in range(depth):
        value = {"a": value} if kind == "dict" else (value,) if kind == "tuple" else [value]
    with contextlib.ExitStack() as stack:
        if depth > 200:  # of a tensor that is the way to it, else the value itself
            stack.enter_context(pytest.raises(CheckpointError, match="deep"))
        save(root, 1, state={"deep": value})
    if depth > 200:
        assert not [*root.glob("step-*")]
        return
    with opened(root) as checkpoint:
        assert repr(checkpoint.entry("deep")) == repr(value)


@pytest.mark.parametrize("time", [-1_900_000_000.0, float(1 << 40)])
def test_a_clock_far_from_now_makes_no_checkpoint_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, time: float
) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr(manifest.time, "time", lambda: time)
    save(tmp_path, 2, keep=1)
    assert restored(tmp_path) == 2
    assert [each.name for each in tmp_path.glob("step-*")] == ["step-00000002"]


NAMES = st.one_of(
    st.text(st.characters(codec=None), max_size=6),
    st.sampled_from(
        ["", "\0", "\ud800", "a\nb", "..", "a/b", "a.b", "\x1b]0;x\x07", "x" * 300, "x" * 5000, "type", "\u0663"]
    ),
)
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    NAMES,
    st.binary(max_size=9),
    st.sampled_from([10**400, -(1 << 5000), 1j, {1}, range(2), (), [], {}, 5e-324, object]),
    st.builds(torch.full, st.sampled_from([(), (0,), (2,)]), st.floats(width=32)),
)
KEYS = st.one_of(NAMES, st.integers(-3, 3), st.none(), st.floats(), st.tuples(NAMES))
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner),
        st.dictionaries(
            st.one_of(NAMES, st.integers(-3, 3), st.none(), st.floats(), st.tuples(NAMES)), inner, max_size=3
        ),
    ),
    max_leaves=6,
)


@given(state=st.dictionaries(NAMES, VALUES, min_size=1, max_size=3))
@settings(max_examples=10, deadline=None)
def test_what_a_save_acknowledges_is_read_as_it_was_and_what_it_refuses_costs_nothing(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]
) -> None:
    root = tmp_path_factory.mktemp("odd")
    save(root, 1, keep=1)
    try:
        save(root, 2, keep=1, state=state)
    except CheckpointError:
        assert (steps(root), restored(root)) == ([1], 1)
        return
    assert steps(root) == [2]
    with opened(root) as checkpoint:
        for name, value in state.items():
            assert repr(checkpoint.entry(name)) == repr(value)


def steps(root: Path | str) -> list[int]:
    return [each.manifest.step for each in open_store(str(root)).checkpoints()[0]]


def losing(backend: type[Backend], name: str, data: bytes) -> Any:
    """Return a ``commit`` of a backend whose disk has something else in one file afterwards."""

    def commit(self: Any, written: str, manifest: Manifest) -> str:
        path = real(self, written, manifest)
        self.write(f"{path}/{name}", data or self.read(f"{path}/{name}")[::-1])
        return path

    real = backend.commit
    return commit


OTHER = Manifest(9, 1, 1, {}).dumps().encode()


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        ("manifest.json", b"{}", "not a manifest"),
        ("manifest.json", OTHER, "to step 9"),
        ("index.json", b"{", "truncated"),
        ("index.json", b"", "CRC-32 mismatch"),
    ],
)
def test_what_a_disk_loses_at_the_commit_is_not_acknowledged_and_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str, data: bytes, what: str
) -> None:
    root = place(kind, tmp_path)
    backend = type(backend_of(root))
    save(root, 1, keep=1)
    with monkeypatch.context() as patched:
        patched.setattr(backend, "commit", losing(backend, name, data))
        with pytest.raises(CheckpointError, match=f"does not read back as it was written.*{what}"):
            save(root, 2, keep=1)
    assert restored(root) == 1
    save(root, 3, keep=1)
    assert restored(root) == 3
    assert 1 not in steps(root)


@pytest.mark.parametrize("kind", PLACES)
def test_a_checkpoint_that_a_disk_has_lost_does_not_count_among_those_that_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    root = place(kind, tmp_path)
    backend = type(backend_of(root))
    with stagereg.Checkpointer(root, keep=2, stager=build("blocking")) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(3)})
        checkpointer.wait()
        with monkeypatch.context() as patched:
            patched.setattr(backend, "commit", losing(backend, "index.json", b""))
            checkpointer.save(2, {"x": torch.ones(3)})
            with pytest.raises(CheckpointError, match="does not read back as it was written"):
                checkpointer.wait()
        checkpointer.save(3, {"x": torch.ones(3)})
    assert steps(root) == [3, 2, 1]


def test_a_checkpoint_that_cannot_be_read_back_at_this_moment_stays_and_so_do_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, keep=1)
    with monkeypatch.context() as patched:
        look = conditions.look

        def failing(backend: Any, path: str) -> Any:
            return (
                VerificationResult(path, None, {"manifest.json": InaccessibleFile("timed out")})
                if "2" in path[-9:]
                else look(backend, path)
            )

        patched.setattr(conditions, "look", failing)
        save(tmp_path, 2, keep=1)
    assert "cannot read the checkpoint back: manifest.json: timed out" in caplog.text
    assert steps(tmp_path) == [2, 1]
    save(tmp_path, 3, keep=1)
    assert steps(tmp_path) == [3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"files": {"x" * 256: FileDigest(1, 1)}},
        {"files": {"a\nb": FileDigest(1, 1)}},
        {"step": 1 << 63},
        {"time": -1},
        {"metrics": {"m" * 300: 1.0}},
        {"lost": {"1": ["n" * 300]}},
        {"lost": {"9" * 5000: []}},
    ],
    ids=lambda wrong: str(wrong)[:30],
)
def test_a_manifest_that_would_be_refused_is_found_before_it_is_written(wrong: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="its manifest would be invalid"):
        Manifest(**{"step": 1, "world_size": 1, "serial": 1, "files": {}, **wrong}).expect_readable("there")


def tables(*names: str) -> str:
    found = {name: ["float32", [2], [[0, 8 * i, 8]]] for i, name in enumerate(names)}
    return json.dumps({"format": 1, "files": ["f"], "tensors": found, "objects": {}})


def check(own: str, state: dict[str, Encoded], before: Readable) -> Readable:
    texts = ", ".join(f"{json.dumps(name)}: {encoded.text}" for name, encoded in state.items())
    return expect_readable(f'{own[:-1]}, "state": {{{texts}}}}}'.encode(), own, state, {"f": 16}, before)


def test_an_index_is_read_again_only_where_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"m": encode({"a": torch.ones(2)}, "m"), "n": encode(1, "n")}
    known = check(tables("m.a"), state, Readable())
    loads: list[object] = []
    monkeypatch.setattr(Index, "loads", lambda *args: loads.append(args))
    known = check(tables("m.a"), state | {"n": encode(2, "n")}, known)
    assert not loads
    with pytest.raises(CheckpointError, match=r"'n'.*too deeply"):
        check(tables("m.a"), state | {"n": Encoded("[" * 300 + "]" * 300, [])}, known)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"no location for 'm\.a'"):
        check(tables("b"), state, known)
    with pytest.raises(CheckpointError, match="are outside"):
        check(tables("m.a", "b", "c"), state, known)
