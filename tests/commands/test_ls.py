"""``stagereg ls``: the checkpoints of a directory, and the run that writes there."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from stagereg import cli
from stagereg.checkpoint.lock import DirectoryLock

from .checkpoint_directories import contents, path_of, save


def listed(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    capsys.readouterr()
    assert cli.main(["ls", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_each_checkpoint_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = int(time.time())
    save(tmp_path, 100, 200, ranks=4)
    seen = listed(capsys, tmp_path)
    assert (seen["root"], seen["held_by"]) == (str(tmp_path), None)
    newest, oldest = seen["checkpoints"]
    assert before <= newest.pop("time") <= time.time()
    assert newest == {
        "path": str(path_of(tmp_path, 200)),
        "step": 200,
        "files": 3,
        "bytes": sum(map(len, contents(200).values())),
        "ranks": 4,
        "storage": "dcp",
        "latest": True,
        "state": "complete",
        "damages": [],
        "why": "",
    }
    assert (oldest["step"], oldest["latest"]) == (100, False)


def test_a_person_gets_a_line_for_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 100, 200, 300)
    (path_of(tmp_path, 200) / "manifest.json").unlink()
    (path_of(tmp_path, 100) / "a").write_bytes(b"")
    (tmp_path / ".step-00000400.0123456789ab.tmp").mkdir()
    assert cli.main(["ls", str(tmp_path)]) == 0
    seen = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert seen[0] == [str(tmp_path)]
    saved = time.strftime("%Y-%m-%d")
    size = str(sum(map(len, contents(300).values())))
    assert seen[3][:2] == ["300", saved]
    assert seen[3][3:] == [size, "B", "2", "dcp", "complete", "latest"]
    assert seen[4] == ["200", "-", "-", "-", "-", "damaged", "manifest.json:", "missing"]
    assert seen[5][7:] == ["damaged", "a:", "truncated:", "0", "of", "120", "bytes"]
    assert seen[6] == ["400", "-", "-", "-", "-", "leftover", "of", "a", "dead", "run"]


def test_the_holder_is_named_and_an_unfinished_save_is_theirs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 100)
    (tmp_path / ".step-00000200.0123456789ab.tmp").mkdir()
    with DirectoryLock(tmp_path):
        seen = listed(capsys, tmp_path)
        assert seen["held_by"]["pid"] == os.getpid()
        assert [each["state"] for each in seen["checkpoints"]] == ["complete", "being written"]
        cli.main(["ls", str(tmp_path)])
        assert f"Held by process {os.getpid()} on " in capsys.readouterr().out
        with pytest.raises(Exception, match="in use"):  # looking has not taken the lock away
            DirectoryLock(tmp_path, patience=0)
    assert listed(capsys, tmp_path)["checkpoints"][1]["state"] == "leftover of a dead run"


def test_one_checkpoint_is_listed_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 100, 200)
    for asked, step in ((path_of(tmp_path, 100), 100), (tmp_path / "latest", 200)):
        assert [each["step"] for each in listed(capsys, asked)["checkpoints"]] == [step]


def test_nothing_is_an_error_and_a_leftover_is_something(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls", str(tmp_path)]) == 2
    seen = capsys.readouterr()
    assert (seen.out, seen.err.splitlines()[0].startswith(f"stagereg: There is no checkpoint in {tmp_path}.")) == (
        "",
        True,
    )
    assert len(seen.err.splitlines()) == 1
    (tmp_path / ".step-00000200.0123456789ab.tmp").mkdir()
    assert [each["step"] for each in listed(capsys, tmp_path)["checkpoints"]] == [200]


def test_a_checkpoint_that_cannot_be_read_is_not_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 100, 200)
    real = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path == path_of(tmp_path, 200) / "manifest.json":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    seen = listed(capsys, tmp_path)["checkpoints"]
    assert [each["state"] for each in seen] == ["unclear", "complete"]
    assert "Permission denied" in seen[0]["why"]


def test_latest_is_marked_also_behind_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "run", 100)
    (tmp_path / "link").symlink_to("run")
    (tmp_path / "run" / "latest").unlink(missing_ok=True)
    (tmp_path / "run" / "latest").symlink_to("step-00000100")
    for asked in ("run", "link", "run/latest", "link/latest"):
        assert [each["latest"] for each in listed(capsys, tmp_path / asked)["checkpoints"]] == [True]
