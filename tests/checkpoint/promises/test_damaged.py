"""Damaged files: each is found and named before anything is loaded, and the newest good checkpoint is loaded."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import stagereg.checkpoint.store.directory as local
from stagereg.assembly import Checkpointer
from stagereg.base import record
from stagereg.checkpoint.format.index import INDEX
from stagereg.checkpoint.load.store_source import StoreSource
from stagereg.checkpoint.options import Restore
from stagereg.checkpoint.storage.reading import CheckpointFiles
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.errors import CheckpointError
from stagereg.testing.ranks import run_ranks

from ...support.faulty_storage import flip

DATA = "__0_0.distcp"


def state_of(step: float = 0.0) -> dict[str, Any]:
    return {"x": torch.full((50,), float(step)), "n": step}


def save(root: Path | str, *steps: int, keep: int = 9) -> None:
    with Checkpointer(str(root), keep=keep, resume="never") as checkpointer:
        for step in steps:
            checkpointer.save(step, state_of(step))


def restore(root: Path, **options: Any) -> tuple[int | None, dict[str, Any]]:
    state: dict[str, Any] = {"x": torch.zeros(50), "n": 0}
    with Checkpointer(str(root), **options) as checkpointer:
        try:
            return checkpointer.restore(state), state
        finally:
            assert state["n"] == float(state["x"][0]) == float(state["x"][-1]), "half of it was loaded"


def path_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def seen(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of checkpoints since the last time, but that nobody has trained here."""
    messages = [each.getMessage() for each in caplog.records if each.name.startswith("stagereg.checkpoint")]
    caplog.clear()
    return [each for each in messages if "NO STEP WAS TAKEN" not in each]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("good")
    save(root, 100, 200)
    return root


@pytest.fixture
def root(tmp_path: Path, good: Path) -> Path:
    """A directory with good checkpoints of the steps 100 and 200, to be damaged."""
    return Path(shutil.copytree(good, tmp_path / "run", symlinks=True))


@pytest.mark.parametrize("how", ["flip", "cut", "grow", "remove", "other"])
@given(data=st.data())
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_is_named_and_the_one_before_is_loaded(
    tmp_path: Path, good: Path, caplog: pytest.LogCaptureFixture, how: str, data: st.DataObject
) -> None:
    root = tmp_path / "run"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(good, root, symlinks=True)
    name = data.draw(st.sampled_from([".metadata", DATA, INDEX, "manifest.json"]))
    path = path_of(root, 200) / name
    size = path.stat().st_size
    if how == "flip":
        flip(path, data.draw(st.integers(0, 8 * size - 1)))
    elif how == "cut":
        path.write_bytes(path.read_bytes()[: data.draw(st.integers(0, size - 1))])
    elif how == "grow":
        path.write_bytes(path.read_bytes() + b"x")
    elif how == "remove":
        path.unlink()
    else:
        other = path_of(root, 100) / name
        assume(other.read_bytes() != path.read_bytes())
        shutil.copy(other, path)
    caplog.clear()
    step, _ = restore(root)
    assert step == 100
    block, end = seen(caplog)
    assert block.startswith(f"{path_of(root, 200)} is corrupt and was skipped:\n  {name}: ")
    expected = {"flip": "CRC-32 mismatch", "cut": "truncated: ", "grow": "too long: ", "remove": "missing"}
    expected["other"] = "CRC-32 mismatch"
    if name == "manifest.json":
        expected |= {"flip": "corrupt (", "cut": "corrupt (", "grow": "corrupt (", "other": "to step 100"}
    assert expected[how] in block
    assert end == "Resumed from step 100 instead of step 200: 100 steps are repeated."


def test_a_fast_check_reads_the_index_and_no_other_content(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "contents", lambda *_: pytest.fail("it was read"))
        assert restore(root, restore=Restore(verify="fast"))[0] == 200
    index = path_of(root, 200) / INDEX
    index.write_bytes(b"\0" * index.stat().st_size)
    step, state = restore(root, restore=Restore(verify="fast"))
    assert (step, state["n"]) == (100, 100)
    assert f"{INDEX}: CRC-32 mismatch" in seen(caplog)[0]


def test_damage_found_while_reading_changes_no_object(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file disappears between the check and the read, which may run at the same time."""
    contents, files, gone = CheckpointStore.contents, StoreSource.files, threading.Event()

    def check(self: CheckpointStore, path: str, names: Any) -> Any:
        found = contents(self, path, names)
        (path_of(root, 200) / DATA).unlink(missing_ok=True)
        gone.set()
        return found

    def read(self: StoreSource, *arguments: Any) -> Any:
        assert gone.wait(60)
        return files(self, *arguments)

    monkeypatch.setattr(CheckpointStore, "contents", check)
    monkeypatch.setattr(StoreSource, "files", read)
    assert restore(root)[0] == 100
    assert f"{DATA}: missing" in seen(caplog)[0]


def test_a_fallback_is_recorded_and_without_a_good_one_an_error(root: Path, tmp_path: Path) -> None:
    flip(path_of(root, 200) / DATA)
    with record.recording(tmp_path, 0, 1):
        restore(root)
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    [event] = [each for each in events if each["event"] == "fallback"]
    assert (event["step"], event["damaged"], event["lost"]) == (100, 200, 100)
    assert event["why"].startswith(f"{DATA}: CRC-32 mismatch")
    (path_of(root, 100) / "manifest.json").unlink()
    with pytest.raises(CheckpointError) as refused:
        restore(root)
    for part in (
        "step-00000200: __0_0.distcp: CRC-32 mismatch",
        "step-00000100: manifest.json: missing",
        'resume="never"',
    ):
        assert part in str(refused.value)
    assert restore(root, resume="never")[0] is None


@pytest.mark.parametrize("resume", ["latest", "path", "path of latest"])
@pytest.mark.parametrize("damage", ["flip", "cut", "manifest"])
def test_a_damaged_checkpoint_asked_for_is_an_error(root: Path, resume: str, damage: str) -> None:
    save(root, 300)
    asked = {"path": str(path_of(root, 300)), "path of latest": str(root / "latest")}.get(resume, resume)
    file = path_of(root, 300) / ("manifest.json" if damage == "manifest" else DATA)
    flip(file) if damage != "cut" else file.write_bytes(b"")
    with pytest.raises(CheckpointError) as refused:
        restore(root, resume=asked)
    assert f"step-00000300 is not a complete checkpoint: it is corrupt:\n  {file.name}: " in str(refused.value)
    assert str(refused.value).endswith(f"`stagereg verify {root}` lists the valid checkpoints.")


def test_retention_neither_counts_nor_deletes_damaged_ones(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(root, 300)
    (path_of(root, 300) / DATA).write_bytes(b"")
    flip(path_of(root, 200) / DATA)
    with Checkpointer(str(root), keep=1) as checkpointer:
        state = {"x": torch.zeros(50), "n": 0}
        assert checkpointer.restore(state) == 100
        checkpointer.save(150, state)
        checkpointer.wait()
        assert sorted(path.name for path in root.glob("step-*")) == [path_of(root, s).name for s in (150, 200, 300)]
        seen(caplog)
        checkpointer.save(200, state)
        checkpointer.save(300, state)
        checkpointer.wait()
    assert [path.name.partition(".")[0] for path in root.glob("step-*")] == ["step-00000300"]
    assert seen(caplog) == [
        f"stagereg: the corrupt or skipped checkpoint {path_of(root, step)} was replaced: step {step} was saved again."
        for step in (200, 300)
    ]
    assert restore(root)[0] == 300


def test_a_restored_file_does_not_make_its_checkpoint_the_newest(root: Path) -> None:
    content = (path_of(root, 200) / DATA).read_bytes()
    (path_of(root, 200) / DATA).write_bytes(b"")
    save(root, 150)
    (path_of(root, 200) / DATA).write_bytes(content)
    assert restore(root)[0] == 150


def test_an_old_damaged_one_is_reported_but_costs_no_steps(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(root, 300)
    (path_of(root, 300) / "manifest.json").unlink()
    assert restore(root)[0] == 200
    assert len(seen(caplog)) == 2
    save(root, 250)
    seen(caplog)
    assert restore(root)[0] == 250
    assert seen(caplog) == [f"{path_of(root, 300)} is corrupt and was skipped:\n  manifest.json: missing"]
    assert restore(root, resume="latest")[0] == 250


@pytest.mark.parametrize(("number", "step"), [(errno.EIO, 100), (errno.EACCES, None), (errno.ESTALE, None)])
def test_an_io_error_is_damage_and_a_lost_server_an_error(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int, step: int | None
) -> None:
    real = local.mark_file

    def mark_file(path: Path, part: range) -> Any:
        if Path(path) == path_of(root, 200) / DATA:
            raise OSError(number, errno.errorcode[number])
        return real(path, part)

    monkeypatch.setattr(local, "mark_file", mark_file)
    if step is not None:
        assert restore(root)[0] == step
        return
    with pytest.raises(
        CheckpointError, match=rf"could not be read: rank 0: {DATA}: cannot be read \({errno.errorcode[number]}"
    ):
        restore(root)


def test_a_directory_that_cannot_be_listed_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(str(root)) as checkpointer:
        real = os.scandir

        def scandir(path: Path) -> Any:
            if Path(path) == root:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(path)

        monkeypatch.setattr(os, "scandir", scandir)
        with pytest.raises(CheckpointError, match=r"Nothing was restored from .*Permission denied"):
            checkpointer.restore({"n": 0})
        monkeypatch.undo()


def test_an_error_of_load_state_dict_is_not_reported_as_damage(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(str(root)) as checkpointer:
        for verify in ("full", "fast"):
            checkpointer.restore_options = Restore(verify=verify)
            with pytest.raises(CheckpointError, match="The checkpoint has no 'y'"):
                checkpointer.restore({"y": 0})
    assert seen(caplog) == []


open_files = CheckpointFiles.open_for


def unreadable(files: CheckpointFiles, leaves: Any) -> Any:
    if "step-00000002" in files.path:
        raise OSError(errno.EIO, "Input/output error")
    return open_files(files, leaves)


def restore_on_two_ranks(rank: int, world_size: int, root: str) -> tuple[list[tuple[int | str, int, float]], list[str]]:
    found: list[tuple[int | str, int, float]] = []
    logged: list[str] = []
    logging.getLogger("stagereg.checkpoint.load.choosing").addFilter(lambda each: logged.append(each.getMessage()))
    own = f"own.rank{rank}"
    with Checkpointer(root, keep=9) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"n": step, own: torch.full((50,), step)})
        checkpointer.wait()

        def again() -> None:
            state: dict[str, Any] = {"n": 0, own: torch.zeros(50)}
            seen: int | str
            try:
                seen = checkpointer.restore(state) or 0
            except CheckpointError as error:
                seen = str(error)
            found.append((seen, state["n"], float(state[own][0])))
            checkpointer._ranks.run_on_all("", int)

        again()
        real = CheckpointStore.contents
        if rank == 1:
            CheckpointStore.contents = lambda self, path, names: dict.fromkeys(names, "missing")  # type: ignore
        again()
        CheckpointStore.contents = real  # type: ignore[method-assign]
        if rank == 0:
            flip(path_of(Path(root), 2) / "__1_0.distcp")
        checkpointer._ranks.run_on_all("", int)
        again()
        checkpointer.restore_options = Restore(verify="fast")
        if rank == 1:
            CheckpointFiles.open_for = unreadable  # type: ignore[method-assign]
        again()
        CheckpointFiles.open_for = open_files  # type: ignore[method-assign]
    return found, logged


def test_ranks_load_nothing_before_all_have_read(tmp_path: Path) -> None:
    results = run_ranks(restore_on_two_ranks, nproc=2, args=(str(tmp_path),))
    for (whole, blind, flipped, unreadable), _ in results:
        assert whole == (2, 2, 2.0)
        assert blind[1:] == (0, 0.0)
        assert "exists on rank 0, but not on rank 1" in str(blind[0])
        assert flipped == (1, 1, 1.0)
        assert unreadable == (1, 1, 1.0), "rank 0 could read all of its own, and has taken nothing of it"
    (_, first), (_, second) = results
    assert first[0].startswith(f"{path_of(tmp_path, 2)} is corrupt and was skipped")
    assert first[1].startswith("Resumed from step 1 instead of step 2")
    assert second == [], "rank 0 alone logs what all have found"
