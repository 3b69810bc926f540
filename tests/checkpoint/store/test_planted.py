"""What somebody else plants beside checkpoints costs a note at the most: no wait, no memory, no file of the user."""

from __future__ import annotations

import ast
import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import stagereg.base.small_files as small_files
from stagereg.assembly import Checkpointer
from stagereg.base.providers import has
from stagereg.base.small_files import UnfitFileError, temporary
from stagereg.checkpoint.format.manifest import LATEST, MANIFEST, NOTES, RUN, Manifest, new_token
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.directory import Directory
from stagereg.checkpoint.store.local_files import DiskFile, mark_file
from stagereg.checkpoint.store.lock import LOCK, StoreLock
from stagereg.checkpoint.store.open_store import open_store
from stagereg.cli import main
from stagereg.errors import CheckpointError

from ...support.planted import KINDS, MINE, ends, plant

PACKAGE = Path(small_files.__file__).parents[1]
LEASE = ".reading.step-00000001.0123456789ab"
NAMES = (*NOTES, LEASE)
UNSAFE = {"read_bytes", "read_text", "write_bytes", "write_text", "touch", "open"}
ALLOWED = {  # why: see there
    "tiers.wire:Connection.receive_block.touch",  # a callback
    "store.lease:_lives.read_text",  # the kernel's
    "store.lock:_other.open",
    "interop.other_formats:_what.open",  # through a link of the user
    "buckets.bucket:Bucket.mark.open",  # not a file
    "buckets.bucket:StoredFiles.open.open",
    "buckets.object_store:Upload.__init__.open",
    "store.local_files:LocalFiles.fetch.open",  # which expects a regular file
    "buckets.object_store:ObjectStore.open.BufferedReader",
    "tiers.tier:available_memory.read_text",  # the kernel's
    "tiers.server:IncomingPart.write.open",  # made by this process, in a folder of its own
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save(tmp_path / "run", 1, 2)
    return tmp_path / "run"


def save(root: Path, *steps: int) -> None:
    with Checkpointer(str(root), keep=3) as checkpointer:
        checkpointer.restore({"x": 0})
        for step in steps:
            checkpointer.save(step, {"x": step})
            checkpointer.wait()


def use(root: Path) -> None:
    """List, restore, save, and list again."""
    assert main(["ls", str(root)]) == 0
    with Checkpointer(str(root), keep=3) as checkpointer:
        state = {"x": 0}
        assert (checkpointer.restore(state), state) == (2, {"x": 2})
        checkpointer.save(3, {"x": 3})
        checkpointer.wait()
    assert main(["ls", str(root)]) == 0
    assert [each.manifest.step for each in open_store(root).checkpoints()[0]] == [3, 2, 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_planted_note_costs_that_note_alone(
    root: Path, mine: Path, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    plant(kind, root / name, mine)
    error = ends(lambda: use(root))
    assert error is None
    assert "deleting old checkpoints failed" not in caplog.text
    if kind == "directory":
        assert (root / name / "mine").read_text() == MINE


@pytest.mark.parametrize("name", NAMES)
def test_a_planted_note_is_named_with_what_to_do(root: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(root / name)
    store = open_store(root)
    if name == LEASE:
        assert store.readers.found() == {}
    else:
        assert store.note(name) == b""
        with pytest.raises(UnfitFileError):
            store.note(name, needed=True)
    text = f"stagereg: skipped {root / name}: it is not a regular file. Delete it or move it away."
    assert [each.getMessage() for each in caplog.records] == [text]
    (root / name).unlink()
    assert store.readers.found() == {}


@pytest.mark.parametrize("kind", [*KINDS, "hard link"])
def test_leftovers_of_our_own_names_go_and_what_they_lead_to_stays(root: Path, mine: Path, kind: str) -> None:
    ours = [Path(temporary(root / name)) for name in NOTES]
    others = [root / f".{name}.tmp" for name in NOTES] + [root / ".notes.0123456789ab.tmp"]
    for path in (*ours, *others):
        plant(kind, path, mine)
    error = ends(lambda: save(root, 3))
    assert error is None
    assert [os.path.lexists(each) for each in others] == [True] * len(others)
    assert [os.path.lexists(each) for each in ours] == [kind == "directory"] * len(ours)
    for each in (*ours, *others) if kind == "directory" else ():
        assert (each / "mine").read_text() == MINE


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_a_planted_directory_of_a_save_is_deleted_and_a_link_to_it_is_not_followed(
    root: Path, tmp_path: Path, kind: str
) -> None:
    home, hidden = tmp_path / "home", root / ".step-00000001.abcdef123456.tmp"
    home.mkdir()
    (home / "thesis").write_text(MINE)
    if kind == "link":
        hidden.symlink_to(home)
    else:
        hidden.mkdir()
        (hidden / "link").symlink_to(home)
    save(root, 3)
    assert not os.path.lexists(hidden)
    assert (home / "thesis").read_text() == MINE


@pytest.mark.parametrize("kind", [*KINDS, "hard link"])
def test_a_planted_lock_is_refused_or_taken_and_no_file_is_overwritten(root: Path, mine: Path, kind: str) -> None:
    plant(kind, root / LOCK, mine)
    if kind in ("pipe", "sparse", "hard link"):
        assert ends(lambda: use(root)) is None
        return
    assert ends(lambda: main(["ls", str(root)])) is None
    error = ends(lambda: save(root, 3))
    assert isinstance(error, CheckpointError)
    assert f"Cannot lock {root / LOCK}: it is not a regular file. Delete it or move it away." in str(error)
    os.rename(root / LOCK, root / "away")
    save(root, 3)


def test_a_lock_with_two_names_is_held_against_others(tmp_path: Path, mine: Path) -> None:
    (tmp_path / LOCK).hardlink_to(mine)
    with StoreLock(tmp_path) as held:
        held.check()
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
        assert (tmp_path / LOCK).stat().st_nlink == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_latest_costs_no_checkpoint(root: Path, mine: Path, kind: str) -> None:
    (root / LATEST).unlink()
    plant(kind, root / LATEST, mine)
    if kind == "directory":  # it may be the user's
        error = ends(lambda: use(root))
        assert isinstance(error, CheckpointError)
        assert str(root / LATEST) in str(error)
        assert len(open_store(root).checkpoints()[0]) == 2
    else:
        assert ends(lambda: use(root)) is None
        assert os.readlink(root / LATEST) == "step-00000003"


def test_a_lease_that_was_replaced_by_a_link_is_renewed_beside_it(root: Path, mine: Path) -> None:
    store = open_store(root)
    with store.readers.read_lease(str(root / "step-00000001")):
        [lease] = root.glob(".reading.*")
        lease.unlink()
        lease.symlink_to(mine)
        store.backend.write(str(lease), b"renewed")
        assert lease.read_bytes() == b"renewed"
        assert not lease.is_symlink()
    half = Path(temporary(lease))
    half.write_bytes(b"")
    assert [*store.readers.found()] == ["step-00000001"]  # it may be in the hands of a reader


@pytest.mark.parametrize("kind", KINDS)
def test_the_manifest_and_the_files_of_a_save_are_new(root: Path, mine: Path, kind: str) -> None:
    store = CheckpointStore(Directory(root))
    written = Path(store.temporary(3, new_token()))
    written.mkdir()
    plant(kind, written / MANIFEST, mine)
    manifest = Manifest(3, 1, 0, {"a": store.put(str(written), "a", b"a")})
    plant(kind, written / "b", mine)
    error = ends(lambda: store.put(str(written), "b", b"b"))
    assert isinstance(error, OSError) if kind == "directory" else (written / "b").read_bytes() == b"b"
    error = ends(lambda: store.publish(str(written), manifest, 3))
    assert isinstance(error, OSError) if kind == "directory" else store.checkpoints()[0][0].manifest.step == 3


@pytest.mark.parametrize("kind", ["pipe", "endless", "directory", "link"])
def test_no_tensor_is_written_to_and_no_checksum_taken_of_another_thing(tmp_path: Path, mine: Path, kind: str) -> None:
    plant(kind, tmp_path / "file", mine)
    for direct in (False, True):
        assert isinstance(ends(lambda direct=direct: DiskFile(str(tmp_path / "file"), direct)), OSError)
    assert isinstance(ends(lambda: mark_file(tmp_path / "file")), OSError)


def test_nothing_opens_a_file_by_itself() -> None:
    found = set()
    rooms = ("checkpoint/store", "extensions/buckets", "extensions/tiers")
    for names in (*(f"{room}/*" for room in rooms), "extensions/interop/other_formats"):
        for file in sorted(PACKAGE.glob(f"{names}.py")):
            found |= {f"{file.parent.name}.{file.stem}:{where}" for where in _calls(ast.parse(file.read_text()), ())}
    assert found == {each for each in ALLOWED if (room := each.partition(".")[0]) == "store" or has(room)}


def _calls(node: ast.AST, names: tuple[str, ...]) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        names = (*names, node.name)
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, names)
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        is_safe = any(each.arg == "opener" and "open_regular" in ast.dump(each.value) for each in node.keywords)
        if name in UNSAFE | {"BufferedReader", "FileIO"} and not is_safe:
            yield ".".join((*names, name))


def test_the_names_of_all_notes_are_known() -> None:
    """Or a temporary name of a killed run would stay for ever."""
    noted = {RUN}
    for file in PACKAGE.rglob("*.py"):
        if ".note(" not in (text := file.read_text()) and "backend.replace(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                of = ast.unparse(node.func.value)
                if (node.func.attr == "note" and of.endswith(("store", "_notes"))) or (
                    node.func.attr == "replace" and of.endswith("backend")
                ):
                    module = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
                    noted.add(getattr(importlib.import_module(module), ast.unparse(node.args[0])))
    assert noted <= {*NOTES}
