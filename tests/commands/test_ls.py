"""``stagereg ls``: the checkpoints of a directory, and the run that writes there."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

import stagereg.checkpoint.store.directory as directory
from stagereg.checkpoint.format.manifest import Manifest
from stagereg.checkpoint.store.directory import Directory
from stagereg.checkpoint.store.lock import StoreLock

from .checkpoint_directories import contents, path_of, save
from .conftest import Command

UNFINISHED = ".step-00000400.0123456789ab.tmp"


def test_each_checkpoint_is_described(tmp_path: Path, command: Command) -> None:
    before = int(time.time())
    save(tmp_path, 100, 200, ranks=4)
    seen = command("ls", tmp_path, "--json").json
    assert (seen["root"], seen["held_by"]) == (str(tmp_path), None)
    newest, oldest = seen["checkpoints"]
    assert before <= newest.pop("time") <= time.time()
    assert newest == {
        "path": str(path_of(tmp_path, 200)),
        "step": 200,
        "files": 3,
        "bytes": sum(map(len, contents(200).values())),
        "ranks": 4,
        "lost": [],
        "exact": True,
        "dropped": [],
        "storage": "dcp",
        "latest": True,
        "kept": "",
        "state": "not verified",
        "damages": [],
        "why": "",
    }
    assert (oldest["step"], oldest["latest"]) == (100, False)


def test_a_checkpoint_that_is_not_exact_is_called_so(tmp_path: Path, command: Command) -> None:
    save(tmp_path, 100, 200)
    path = path_of(tmp_path, 200) / "manifest.json"
    path.write_text(dataclasses.replace(Manifest.loads(path.read_bytes()), lost={"1": ["random numbers"]}).dumps())
    newest, oldest = command("ls", tmp_path, "--json").json["checkpoints"]
    assert (newest["exact"], oldest["exact"]) == (False, True)
    assert newest["why"] == "not exact: lacks random numbers of rank 1"
    newest, oldest = command("ls", tmp_path).out.splitlines()[3:]
    assert re.split("  +", newest)[4:] == [
        "1 of 2",
        "dcp",
        "not verified",
        "latest; not exact: lacks random numbers of rank 1",
    ]
    assert "exact" not in oldest


def test_dropped_entries_are_listed(tmp_path: Path, command: Command) -> None:
    save(tmp_path, 100, 200)
    path = path_of(tmp_path, 100) / "manifest.json"
    path.write_text(dataclasses.replace(Manifest.loads(path.read_bytes()), dropped=["adam", "sgd"]).dumps())
    newest, oldest = command("ls", tmp_path, "--json").json["checkpoints"]
    assert (newest["dropped"], oldest["dropped"]) == ([], ["adam", "sgd"])
    assert command("ls", tmp_path).out.splitlines()[4].endswith("  weights only, without adam, sgd")


def test_a_person_gets_a_line_for_each(tmp_path: Path, command: Command) -> None:
    save(tmp_path, 100, 200, 300)
    (path_of(tmp_path, 200) / "manifest.json").unlink()
    (path_of(tmp_path, 100) / "a").write_bytes(b"")
    (tmp_path / UNFINISHED).mkdir()
    seen = [line.split() for line in command("ls", tmp_path).out.splitlines()]
    assert seen[0] == [str(tmp_path)]
    size = str(sum(map(len, contents(300).values())))
    assert seen[3][:2] == ["300", time.strftime("%Y-%m-%d")]
    assert seen[3][3:] == [size, "B", "2", "dcp", "not", "verified", "latest"]
    assert seen[4] == ["200", "-", "-", "-", "-", "corrupt", "manifest.json:", "missing"]
    assert seen[5][7:] == ["corrupt", "a:", "truncated:", "0", "of", "120", "bytes"]
    assert seen[6] == ["400", "-", "-", "-", "-", "leftover", "of", "a", "killed", "run"]


def test_a_shell_gets_what_is_verified_and_what_is_not(tmp_path: Path) -> None:
    save(tmp_path, 100, 200)
    (path_of(tmp_path, 200) / "a").write_bytes(contents(200)["a"][:-1] + b"?")  # of the same size

    def listed(*arguments: str | Path) -> list[list[str]]:
        command = [sys.executable, "-m", "stagereg", "ls", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return [re.split("  +", line)[6:] for line in done.stdout.splitlines()[3:]]

    assert listed(tmp_path) == [["not verified", "latest"], ["not verified"]]
    newest, *_, oldest = listed(tmp_path, "--verify")
    assert newest[0] == "corrupt"
    assert newest[1].startswith("latest; a: CRC-32 mismatch")
    assert oldest == ["valid"]
    (path_of(tmp_path, 200) / "a").unlink()
    assert listed(tmp_path) == [["corrupt", "a: missing"], ["not verified"]]


def test_the_holder_is_named_and_an_unfinished_save_is_theirs(tmp_path: Path, command: Command) -> None:
    save(tmp_path, 100)
    (tmp_path / UNFINISHED).mkdir()
    with StoreLock(tmp_path):
        seen = command("ls", tmp_path, "--json").json
        assert seen["held_by"]["pid"] == os.getpid()
        assert [each["state"] for each in seen["checkpoints"]] == ["not verified", "being written"]
        assert f"Locked by process {os.getpid()} on " in command("ls", tmp_path).out
        with pytest.raises(Exception, match="in use"):  # looking has not taken the lock away
            StoreLock(tmp_path, patience=0)


def test_one_checkpoint_is_listed_alone_also_behind_a_link(tmp_path: Path, command: Command) -> None:
    save(tmp_path / "run", 100, 200)
    (tmp_path / "link").symlink_to("run")
    for asked, step in (("run/step-00000100", 100), ("run/latest", 200), ("link/latest", 200)):
        (found,) = command("ls", tmp_path / asked, "--json").json["checkpoints"]
        assert (found["step"], found["latest"]) == (step, step == 200)
    for asked in ("run", "link"):
        found = command("ls", tmp_path / asked, "--json").json["checkpoints"]
        assert [each["latest"] for each in found] == [True, False]


def test_crashes_after_a_checkpoint_are_shown(tmp_path: Path, command: Command) -> None:
    save(tmp_path, 100, 200)
    newest, oldest = "step-00000200", "step-00000100"
    note = {"restored": oldest, "max_crashes": 3, "crashes": {newest: 3, oldest: 1, "tier/step-00000100": 9}}
    (tmp_path / ".restored.json").write_text(json.dumps(note))
    newest, oldest = command("ls", tmp_path, "--json").json["checkpoints"]
    assert (newest["why"], oldest["why"]) == ("quarantined after 3 crashes", "2 crashes after it was restored")
    assert "latest; quarantined after 3 crashes" in command("ls", tmp_path).out
    with StoreLock(tmp_path):
        assert command("ls", tmp_path, "--json").json["checkpoints"][1]["why"] == "1 crash after it was restored"


def test_nothing_is_an_error_and_a_leftover_is_something(tmp_path: Path, command: Command) -> None:
    seen = command("ls", tmp_path, code=2)
    assert seen.out == ""
    assert seen.err.startswith(f"stagereg: There is no checkpoint in {tmp_path}.")
    (tmp_path / UNFINISHED).mkdir()
    assert [each["step"] for each in command("ls", tmp_path, "--json").json["checkpoints"]] == [400]


def test_a_checkpoint_that_cannot_be_read_is_not_damaged(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 100, 200)
    real = directory.read_small

    def read_small(path: str, most: int) -> bytes:
        if path == str(path_of(tmp_path, 200) / "manifest.json"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, most)

    monkeypatch.setattr(directory, "read_small", read_small)
    seen = command("ls", tmp_path, "--json").json["checkpoints"]
    assert [each["state"] for each in seen] == ["unclear", "not verified"]
    assert "Permission denied" in seen[0]["why"]


def test_leftovers_of_killed_runs_are_deleted_and_listed(tmp_path: Path, command: Command) -> None:
    save(tmp_path, 300)
    (tmp_path / UNFINISHED).mkdir()
    (tmp_path / UNFINISHED / "a").write_bytes(b"x")
    (tmp_path / "notes.tmp").write_text("not ours")
    seen = command("ls", tmp_path, "--leftovers", "--json").json
    assert seen == {"root": str(tmp_path), "deleted": [str(tmp_path / UNFINISHED)], "not_deleted": []}
    assert sorted(each.name for each in tmp_path.iterdir() if each.name != ".lock") == [
        "latest",
        "notes.tmp",
        "step-00000300",
    ]
    command("verify", tmp_path)
    assert "deleted 0 leftovers of killed runs" in command("ls", tmp_path, "--leftovers").out


def test_a_leftover_that_stays_is_not_called_deleted(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 300)
    (tmp_path / UNFINISHED).mkdir()
    monkeypatch.setattr(Directory, "discard", lambda *_: None)
    seen = command("ls", tmp_path, "--leftovers", code=1).out
    assert "deleted 0 leftovers of killed runs" in seen
    assert f"Cannot delete {tmp_path / UNFINISHED}" in seen


def test_leftovers_are_those_of_the_run_that_writes_there(tmp_path: Path, command: Command) -> None:
    save(tmp_path, 300)
    (tmp_path / UNFINISHED).mkdir()
    with StoreLock(tmp_path):
        assert "in use" in command("ls", tmp_path, "--leftovers", code=2).err
    assert (tmp_path / UNFINISHED).is_dir()
    for what in (path_of(tmp_path, 300), tmp_path / "nothing"):
        command("ls", what, "--leftovers", code=2)
    assert not (tmp_path / "nothing").exists()


def manifest_with(**changed: object) -> str:
    """The text of a manifest whose own checksum fits what was changed in it."""
    data = {"format": 2, "step": 1, "world_size": 1, "serial": 1, "files": {}, "storage": "dcp", "time": 0, **changed}
    checked = json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**data, "crc32": zlib.crc32(checked)}, indent=1) + "\n"


ODD = ["[" * 90 + "]" * 90, '"\\ud800"', '"\\u0000\\u001b"', "-1", "1e999", "NaN", "null", "{}", "[{}]", '{"9": [[]]}']
FIELDS = ("step", "world_size", "serial", "files", "storage", "time", "metrics", "lost", "command")
BAD = [
    *(manifest_with(**{field: json.loads(odd)}) for field in FIELDS for odd in ODD),
    *(manifest_with(lost={rank: []}) for rank in ("9" * 5000, "9" * 19, "\u0663", "\u00b2", "1_0", " 1", "-1", "x")),
    *("[" * depth + "]" * depth for depth in (200, 900, 985, 990, 995, 100_000)),
    *("", "[]", "null", "9" * 5000, "\\", '"', '{"format": 2}', f'{{"format": {"9" * 5000}}}', "\0" * 99),
]


def test_whatever_reading_a_manifest_raises_costs_its_checkpoint(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 100, 200)
    loads = Manifest.loads

    def failing(text: bytes) -> Manifest:
        if b'"step": 200' in text:
            raise RecursionError("maximum recursion depth exceeded while getting the repr of an object")
        return loads(text)

    monkeypatch.setattr(Manifest, "loads", failing)
    found = command("ls", tmp_path, "--json").json["checkpoints"]
    assert [(each["step"], each["state"]) for each in found] == [(200, "corrupt"), (100, "not verified")]


def test_each_malformed_manifest_costs_its_checkpoint_and_not_the_listing(tmp_path: Path, command: Command) -> None:
    save(tmp_path, 900)
    for step, text in enumerate(BAD):
        (folder := tmp_path / f"step-{step:08d}").mkdir()
        (folder / "manifest.json").write_text(text)
    (tmp_path / "step-00000901").mkdir()
    (tmp_path / "step-00000901" / "manifest.json").write_bytes(b"\xff\xfe")
    (tmp_path / f"step-{'9' * 200}").mkdir()
    for name in ("ls", "verify"):
        found = command(name, tmp_path, "--json", code=int(name == "verify")).json["checkpoints"]
        valid = [each["step"] for each in found if each["state"] in ("valid", "not verified")]
        assert valid == [900]
        assert [each["state"] for each in found].count("corrupt") == len(BAD) + 1
        text = command(name, tmp_path, code=int(name == "verify")).out
        assert not re.search("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", text)
