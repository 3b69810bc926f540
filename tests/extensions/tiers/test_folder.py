"""The folder of a run on a machine: parts are complete or absent, leftovers go, other runs stay."""

from __future__ import annotations

from pathlib import Path

import pytest

import stagereg.extensions.tiers.folder as folder_module
from stagereg.extensions.tiers.folder import MachineFolder, notes_of_part
from stagereg.extensions.tiers.part import Part, manifest_name
from tests.support.tier_parts import new_folder, write_part


def written(folder: MachineFolder, step: int = 1, rank: int = 0) -> Part:
    return write_part(folder, {f"__{rank}_0.distcp": 3}, step, rank, token=f"{step:08x}")


@pytest.fixture(params=[True, False], ids=["durable", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> MachineFolder:
    return new_folder(tmp_path, request.param)


def test_parts_are_listed_the_latest_first_with_who_has_copies(folder: MachineFolder) -> None:
    parts = [written(folder, step, rank) for step in (1, 2) for rank in (0, 1)]
    folder.note_copied(parts[0], ["b", "c"])
    assert [(each.save.step, each.rank) for each in folder.parts()] == [(2, 0), (2, 1), (1, 0), (1, 1)]
    assert folder.find(parts[0].save, 0) == parts[0]
    assert notes_of_part(folder.directory(parts[0].save), manifest_name(0)) == (("b", "c"), False)


@pytest.mark.parametrize("how", ["cut", "missing", "manifest", "renamed"])
def test_a_part_that_is_not_whole_is_none(folder: MachineFolder, how: str) -> None:
    part = written(folder)
    where = Path(folder.directory(part.save))
    file, manifest = where / "__0_0.distcp", where / manifest_name(0)
    if how == "cut":
        file.write_bytes(b"ab")
    elif how == "missing":
        file.unlink()
    elif how == "manifest":
        manifest.write_bytes(manifest.read_bytes()[:-3])
    else:
        manifest.rename(where / manifest_name(1))
    assert folder.parts() == []
    assert folder.find(part.save, 0) is None
    folder.sweep()
    assert not where.exists()


def test_sweeping_leaves_what_is_complete_and_nothing_else(folder: MachineFolder) -> None:
    part = written(folder)
    where = Path(folder.directory(part.save))
    folder.note_copied(part, ["b"])
    for name in (".part-1.json.tmp", "__1_0.distcp", "other"):
        (where / name).write_text("x")
    (Path(folder.path) / ".step-00000001.x.tmp").mkdir()
    folder.sweep()
    assert sorted(each.name for each in where.iterdir()) == ["__0_0.distcp", "part-0.json", "part-0.json.copied"]
    assert folder.parts() == [part]
    assert not (Path(folder.path) / ".step-00000001.x.tmp").exists()


def test_deleting_names_what_goes_or_what_stays(folder: MachineFolder) -> None:
    parts = [written(folder, step) for step in (1, 2, 3)]
    folder.delete([parts[0].save.folder])
    folder.delete([parts[2].save.folder], keep=True)
    assert [each.save.step for each in folder.parts()] == [3]


def test_a_bad_part_is_dropped_and_the_others_of_its_save_stay(folder: MachineFolder) -> None:
    part = written(folder, rank=0)
    written(folder, rank=1)
    folder.drop(part.save, [0])
    assert [each.rank for each in folder.parts()] == [1]


def test_two_runs_in_one_tier_do_not_see_each_other(folder: MachineFolder, tmp_path: Path) -> None:
    written(folder)
    other = MachineFolder(str(tmp_path), "ffffffff", True)
    other.prepare()
    assert other.parts() == []
    other.sweep()
    other.remove()
    assert len(folder.parts()) == 1


@pytest.mark.parametrize("durable", [True, False])
def test_a_reboot_makes_void_what_was_in_memory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    folder = new_folder(tmp_path, durable)
    written(folder)
    folder.prepare()
    assert len(folder.parts()) == 1
    monkeypatch.setattr(folder_module, "boot_id", lambda: "after the reboot")
    folder.prepare()
    assert len(folder.parts()) == durable
