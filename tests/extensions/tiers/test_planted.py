"""A tier takes no folder, note or file that somebody else made, shows nothing to others, and its `ls` never waits."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stagereg
from stagereg.checkpoint.store.lock import LOCK
from stagereg.cli import main
from stagereg.errors import CheckpointError, ConfigError
from stagereg.extensions.tiers.folder import BOOT, NOTE, MachineFolder, make_private
from stagereg.extensions.tiers.part import Part, PartFile, SaveId
from stagereg.extensions.tiers.server import IncomingPart
from stagereg.extensions.tiers.tier import made
from stagereg.testing import run_ranks

from ...support.planted import KINDS, MINE, ends, plant
from ...support.tier_parts import RUN, new_folder, write_part

STRANGER = 65_533
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")


@contextlib.contextmanager
def checkpointer(folder: Path, tier: Path, store: bool = True) -> Iterator[Any]:
    of = stagereg.build("tier", "disk", dir=str(tier), every=1, copies=0, keep=3)
    where = str(folder / "store") if store else None
    with contextlib.closing(stagereg.Checkpointer(where, every=100, tier=of, save_last=False)) as it:
        yield it  # and no end in good order


def train(folder: Path, tier: Path, steps: int = 2, store: bool = True, at: int | None = None) -> Path:
    """Restore step ``at``, save so many steps into the tier, and crash; return the folder of the run."""
    with checkpointer(folder, tier, store) as running:
        state = {"x": 0}
        assert running.restore(state) == at
        assert state == {"x": at or 0}
        for step in range((at or 0) + 1, (at or 0) + 1 + steps):
            running.maybe_save(step, {"x": step})
            running.wait()
        return Path(running._tiering.near.folder.path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return train(tmp_path, tmp_path / "tier")


def step_of(run: Path, step: int) -> Path:
    [path] = run.glob(f"step-{step:08d}.*")
    return path


def steps_in(run: Path) -> list[int]:
    return [each.save.step for each in MachineFolder(str(run.parent), run.name, durable=True).parts()]


# -- folders


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("kind", [pytest.param("another user's", marks=as_root), "open", "link", "pipe", "file"])
def test_a_planted_folder_of_the_run_is_refused_and_what_is_said_works(
    tmp_path: Path, run: Path, kind: str, store: bool
) -> None:
    if not store:
        if kind == "file":
            pytest.skip("a file is refused before, as of any directory")
        run = train(tmp_path, tmp_path / "near", store=False)
    planted = run if store else run.parent / "notes"
    away = planted.rename(tmp_path / "away")
    if kind == "link":
        planted.symlink_to(away)
    elif kind == "pipe":
        os.mkfifo(planted)
    elif kind == "file":
        planted.touch()
    else:
        planted.mkdir()
        planted.chmod(0o777)
    if kind == "another user's":
        os.chown(planted, STRANGER, STRANGER)
    error = ends(lambda: train(tmp_path, run.parent, store=store))
    assert isinstance(error, CheckpointError)
    assert f"{planted} " in str(error)
    assert "may be forged" in str(error)
    assert not planted.is_dir() or planted.is_symlink() or os.listdir(planted) == []
    if kind == "open":
        assert f"chmod go-w {planted}" in str(error)
        os.chmod(planted, planted.stat().st_mode & ~0o022)
        planted.rmdir()
        away.rename(planted)
        train(tmp_path, run.parent, store=store, at=2)
    else:
        assert "Delete it, or use another folder: Tier(dir=" in str(error)
        train(tmp_path, tmp_path / "other", store=store)


def plant_on_rank_1(rank: int, world_size: int, root: str) -> str:
    tier = Path(root, str(rank))
    try:
        with checkpointer(Path(root), tier) as running:
            running.restore({"x": 0})
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_planted_folder_on_one_machine_is_refused_on_all_ranks(tmp_path: Path) -> None:
    run = json.loads(_noted(tmp_path))["run"]
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / run).symlink_to(tmp_path)
    said = run_ranks(plant_on_rank_1, nproc=2, args=(str(tmp_path),))
    assert all(f"rank 1: {tmp_path}/1/{run} is a link or not a folder" in each for each in said), said


def _noted(folder: Path) -> str:
    train(folder, folder / "0", steps=1)
    return (folder / "store" / NOTE).read_text()


def test_a_folder_that_is_replaced_meanwhile_costs_its_steps_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with checkpointer(tmp_path, tmp_path / "tier") as running:
        running.restore({"x": 0})
        path = Path(running._tiering.near.folder.path)
        running.maybe_save(1, {"x": 1})
        running.wait()
        path.rename(tmp_path / "away")
        path.mkdir()
        path.chmod(0o777)
        running.maybe_save(2, {"x": 2})
        running.wait()
        assert f"{path} is writable by other users (mode 0777)" in caplog.text
        assert not [*path.rglob("__0_0.distcp")]
        path.chmod(0o700)
        running.maybe_save(3, {"x": 3})
        running.wait()
        assert [*path.rglob("part-0.json")]


@as_root
def test_a_link_or_folder_of_another_user_is_no_folder_of_a_tier(tmp_path: Path) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    assert made(str(link)) == str(folder)
    assert made(str(link / "below")) == str(folder / "below")
    os.lchown(link, STRANGER, STRANGER)
    for path, to in ((link, folder), (tmp_path / "loose", tmp_path / "nothing")):
        if path != link:
            path.symlink_to(to)
            os.lchown(path, STRANGER, STRANGER)
        with pytest.raises((ConfigError, OSError), match=r"belongs to another user|No such file"):
            made(str(path))
    assert made(str(link / "below")) == str(folder / "below")  # the way to it is the user's choice
    os.chown(folder, STRANGER, STRANGER)
    (tmp_path / "own").symlink_to(folder)
    for path in (folder, tmp_path / "own"):
        with pytest.raises(ConfigError, match="belongs to another user"):
            made(str(path))


@as_root
def test_a_shared_folder_of_root_serves_every_user_and_keeps_them_apart() -> None:
    def as_user(user: int, act: Callable[[], Any]) -> Any:
        os.seteuid(user)
        try:
            return act()
        finally:
            os.seteuid(0)

    with tempfile.TemporaryDirectory() as shared:
        os.chmod(shared, 0o1777)
        assert as_user(STRANGER, lambda: made(shared)) == shared
        folder = MachineFolder(shared, RUN, durable=False)
        as_user(STRANGER, folder.prepare)
        part = as_user(STRANGER, lambda: write_part(folder, {"__0_0.distcp": 3}))
        assert as_user(STRANGER, folder.parts) == [part]
        for user in (0, STRANGER - 1):
            with pytest.raises(CheckpointError, match=rf"belongs to another user \(uid {STRANGER}\)"):
                as_user(user, folder.prepare)


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o1777])
def test_an_existing_folder_of_the_user_works_whatever_the_umask_was(tmp_path: Path, mode: int) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "tier").mkdir()
    (tmp_path / "real" / "tier").chmod(mode)
    (tmp_path / "link").symlink_to("real")
    train(tmp_path, tmp_path / "link" / "tier")
    train(tmp_path, tmp_path / "link" / "tier", at=2)


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_nobody_else_may_read_what_is_in_a_tier(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        run = train(tmp_path, tmp_path / "tier", store=False)
        folder = MachineFolder(str(tmp_path / "tier"), run.name, durable=False)
        part = Part(SaveId(run.name, 9, 9, 9, "0" * 12, 2), 1, {"__1_0.distcp": PartFile.of_bytes(b"abc")})
        incoming = IncomingPart(part, folder, durable=False)
        incoming.write("__1_0.distcp", 0, memoryview(b"abc"))
        incoming.complete()
        folder.note_copied(part, ["a"])
        folder.make()
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in [tmp_path / "tier", *(tmp_path / "tier").rglob("*")]}
    assert {path.name for path in modes} >= {NOTE, BOOT, "part-0.json", "part-1.json.received", "part-1.json.copied"}
    expected = {path: 0o700 if path.is_dir() else 0o600 for path in modes if path.name != LOCK}
    assert {path: modes[path] for path in expected} == expected


# -- files


@as_root
@pytest.mark.parametrize("name", ["part-0.json", "__0_0.distcp"])
def test_a_forged_step_is_never_restored(
    tmp_path: Path, run: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    os.chown(step_of(run, 2) / name, STRANGER, STRANGER)
    assert steps_in(run) == [1]
    train(tmp_path, run.parent, at=1)
    assert "another user" in caplog.text or "not a regular file of this user" in caplog.text


@as_root
def test_a_file_that_is_forged_after_it_was_listed_is_not_read(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = MachineFolder.find

    def find(self: MachineFolder, save: SaveId, rank: int) -> Part | None:
        found = real(self, save, rank)
        os.chown(step_of(run, 2) / "__0_0.distcp", STRANGER, STRANGER)
        return found

    monkeypatch.setattr(MachineFolder, "find", find)
    train(tmp_path, run.parent, at=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["part-0.json", "__0_0.distcp", "index.json"])
def test_a_step_with_something_else_in_it_is_passed_over(
    tmp_path: Path, run: Path, mine: Path, name: str, kind: str
) -> None:
    path = step_of(run, 2) / name
    path.unlink()
    plant(kind, path, mine)
    assert steps_in(run) == [1]
    assert ends(lambda: train(tmp_path, run.parent, at=1)) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["store", "run", "tier"])
def test_what_notes_the_run_is_not_skipped_and_nothing_is_lost(
    tmp_path: Path, run: Path, mine: Path, where: str, kind: str
) -> None:
    store, at = where != "tier", 2
    if not store:
        run = train(tmp_path, tmp_path / "near", store=False)
    path = {"store": tmp_path / "store", "run": run, "tier": run.parent}[where] / NOTE
    content = path.read_bytes()
    path.unlink()
    plant(kind, path, mine)
    error = ends(lambda: train(tmp_path, run.parent, store=store))
    assert isinstance(error, CheckpointError)
    assert f"{path} identifies the run" in str(error)
    path.rename(tmp_path / "away")
    path.write_bytes(content)
    train(tmp_path, run.parent, store=store, at=at)


def test_a_damaged_note_of_the_run_is_not_taken_for_none(tmp_path: Path, run: Path) -> None:
    (tmp_path / "store" / NOTE).write_text('{"run": ')
    error = ends(lambda: train(tmp_path, run.parent))
    assert isinstance(error, CheckpointError)
    assert "Or delete it" in str(error)
    (tmp_path / "store" / NOTE).unlink()
    assert train(tmp_path, run.parent) != run
    assert len([*run.glob("step-*")]) == 2


@as_root
def test_a_note_of_another_user_does_not_say_which_run_it_is(tmp_path: Path) -> None:
    run = train(tmp_path, tmp_path / "near", store=False)
    os.chown(run.parent / NOTE, STRANGER, STRANGER)
    error = ends(lambda: train(tmp_path, run.parent, store=False))
    assert isinstance(error, CheckpointError)
    assert f"it belongs to another user (uid {STRANGER})" in str(error)


@pytest.mark.parametrize("name", ["..run.json.tmp", ".run.json.tmp"])
def test_no_note_is_written_through_a_link(tmp_path: Path, run: Path, mine: Path, name: str) -> None:
    for folder in (tmp_path / "store", run, run.parent):
        (folder / name).symlink_to(mine)
    train(tmp_path, run.parent, at=2)


def test_what_the_user_keeps_in_the_folder_of_a_run_stays(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "tier", durable=True)
    part = write_part(folder, {"__0_0.distcp": 3})
    home, inside = tmp_path / "home", Path(folder.path)
    for path in (home, inside / "mine", inside / "step-00000001"):
        path.mkdir()
        (path / "thesis").write_text(MINE)
    (inside / "step-00000002.abcdef123456").symlink_to(home)
    (inside / ".step-00000003.abcdef123456.tmp").symlink_to(home)
    folder.sweep()
    assert folder.parts() == [part]
    assert not os.path.lexists(inside / ".step-00000003.abcdef123456.tmp")
    folder.remove()
    assert folder.parts() == []
    for path in (home, inside / "mine", inside / "step-00000001"):
        assert (path / "thesis").read_text() == MINE


@pytest.mark.parametrize("durable", [True, False])
def test_a_run_that_has_ended_leaves_no_folder(tmp_path: Path, durable: bool) -> None:
    folder = new_folder(tmp_path, durable)
    write_part(folder, {"__0_0.distcp": 3})
    folder.note_copied(folder.parts()[0], ["a"])
    folder.remove()
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_made_is_private_and_may_be_there(tmp_path: Path) -> None:
    for _ in range(2):
        make_private(str(tmp_path / "new"))
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


# -- stagereg ls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [NOTE, BOOT, LOCK, "part-0.json", "part-1.json", "part-0.json.copied", "__0_0.distcp"])
def test_ls_of_a_tier_ends_and_says_what_it_skips(
    run: Path, mine: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = (run if name in (NOTE, BOOT, LOCK) else step_of(run, 2)) / name
    path.unlink(missing_ok=True)
    plant(kind, path, mine)
    assert ends(lambda: main(["ls", str(run.parent)])) is None
    seen = capsys.readouterr().out
    assert len([line for line in seen.splitlines() if line.split()[:1] in (["1"], ["2"])]) == 2
    if name in (NOTE, BOOT, "part-0.json.copied"):
        assert f"skipped {path}: it " in caplog.text
    elif name != LOCK:
        assert name in seen
    assert ends(lambda: main(["verify", str(run.parent)])) is None
