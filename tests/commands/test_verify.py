"""``stagereg verify``: any damage of a file is found and named, and the exit code shows it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stagereg.checkpoint.manifest as layout
from stagereg import cli
from stagereg.checkpoint.store.local_store import LocalStore
from stagereg.checkpoint.store.remote_store import RemoteStore

from .checkpoint_directories import contents, path_of, save


def verify(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    capsys.readouterr()
    code = cli.main(["verify", *map(str, arguments)])
    seen = capsys.readouterr()
    return code, seen.out + seen.err


def found(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, list[dict[str, str]]]:
    """What is wrong with each checkpoint, by its name."""
    code, seen = verify(capsys, *arguments, "--json")
    every = json.loads(seen)["checkpoints"]
    assert code == any(each["damages"] for each in every)
    return {Path(each["path"]).name: each["damages"] for each in every}


def test_good_ones_are_reported_with_their_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 100, 200)
    code, seen = verify(capsys, tmp_path)
    assert code == 0
    nbytes = str(sum(map(len, contents(100).values())))
    assert ["100", "3", nbytes, "B", "ok"] in [line.split() for line in seen.splitlines()]
    assert "The content of every file was read: 2 checkpoints, all good." in seen


@pytest.mark.parametrize("kind", ["path", "latest", "relative", "renamed"])
def test_one_checkpoint_can_be_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    save(tmp_path, 100, 200)
    (path_of(tmp_path, 100) / "a").unlink()
    monkeypatch.chdir(tmp_path)
    path_of(tmp_path, 100).rename(tmp_path / "renamed") if kind == "renamed" else None
    asked = {"path": path_of(tmp_path, 100), "latest": "latest", "relative": "step-00000100/", "renamed": "renamed"}
    code, seen = verify(capsys, asked[kind])
    assert code == (0 if kind == "latest" else 1)
    assert ("a: missing" in seen) == (kind != "latest")
    assert "newest good" not in seen


def flipped(content: bytes, at: int) -> bytes:
    changed = bytearray(content)
    changed[at // 8] ^= 1 << at % 8
    return bytes(changed)


Change = Callable[[Path, Path], Any]


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (
            lambda older, newer: (newer / "a").write_bytes(flipped((newer / "a").read_bytes(), 9)),
            ["a: flipped bits"],
        ),
        (lambda older, newer: (newer / "a").write_bytes(b""), ["a: truncated: 0 of "]),
        (lambda older, newer: (newer / "a").open("ab").write(b"more"), ["a: too long: "]),
        (lambda older, newer: (newer / "a").replace(newer / "b"), ["a: missing", "b: "]),
        (lambda older, newer: (older / "a").replace(newer / "a"), ["a: flipped bits", "a: missing"]),
        (lambda older, newer: shutil.copy(older / "manifest.json", newer), ["manifest.json: of step 100"]),
        (lambda older, newer: (newer / "manifest.json").unlink(), ["manifest.json: missing"]),
        (
            lambda older, newer: (newer / "manifest.json").write_text("[" * 10**5),
            ["manifest.json: damaged (it is n"],
        ),
        (lambda older, newer: replaced(newer / "c", lambda c: c.symlink_to(older / "c")), ["c: no regular file"]),
        (lambda older, newer: replaced(newer / "c", Path.mkdir), ["c: no regular file"]),
        (lambda older, newer: replaced(newer / "c", os.mkfifo), ["c: no regular file"]),
    ],
)
def test_the_damage_of_a_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Change, messages: list[str]
) -> None:
    save(tmp_path, 100, 200)
    change(path_of(tmp_path, 100), path_of(tmp_path, 200))
    seen = [f"{each['file']}: {each['what']}" for damages in found(capsys, tmp_path).values() for each in damages]
    assert len(seen) == len(messages)
    assert all(text.startswith(message) for text, message in zip(seen, messages, strict=True)), seen
    # Without the content, only flipped bits are not found.
    assert any(found(capsys, tmp_path, "--fast").values()) == (messages != ["a: flipped bits"])


def replaced(path: Path, by: Callable[[Path], Any]) -> None:
    path.unlink()
    by(path)


def test_the_newest_good_one_is_named_beside_the_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 100, 200, 300)
    (path_of(tmp_path, 300) / "b").unlink()
    code, seen = verify(capsys, tmp_path)
    assert code == 1
    assert "3 checkpoints, 1 not good." in seen
    assert f"The newest good one is {path_of(tmp_path, 200)}" in seen
    assert any(line.split()[4:] == ["damaged", "b:", "missing"] for line in seen.splitlines())


def test_a_url_is_looked_at_as_a_directory_is(capsys: pytest.CaptureFixture[str]) -> None:
    root = f"memory://{uuid.uuid4().hex}/run"
    first, second = save(root, 100, 200)
    objects = RemoteStore(root).objects
    objects.put(f"{root}/step-00000300.0123456789ab/a", b"on its way")
    assert verify(capsys, root)[0] == 0
    assert verify(capsys, f"{root}/latest")[0] == verify(capsys, first)[0] == 0
    objects.put(f"{second}/a", flipped(objects.get(f"{second}/a"), 5))
    objects.delete(f"{first}/c")
    seen = found(capsys, root)
    assert [(each["file"], each["what"][:12]) for each in seen[second.rpartition("/")[2]]] == [("a", "flipped bits")]
    assert seen[first.rpartition("/")[2]] == [{"file": "c", "what": "missing"}]
    cli.main(["ls", root])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[3:]] == ["200", "100", "300"]
    assert verify(capsys, "memory://nowhere/run/latest")[0] == 2


def test_where_there_are_no_checkpoints_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "run" / "checkpoints", 100)
    for missing in (tmp_path / "nowhere", tmp_path / "run" / "checkpoints" / "step-00000300", tmp_path / "run"):
        code, seen = verify(capsys, missing)
        assert code == 2
        assert f"There is no checkpoint in {missing}." in seen
    assert verify(capsys, tmp_path / "run", "--json")[0] == 2


def test_it_reads_without_importing_torch(tmp_path: Path) -> None:
    save(tmp_path, 100)
    program = (
        "import sys; from stagereg import cli; codes = [cli.main([name, sys.argv[1]]) for name in ('verify', 'ls')]; "
        "sys.exit(any(codes) or 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("asked", ["", "latest"])
def test_a_checkpoint_deleted_meanwhile_is_not_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    save(tmp_path, 100)
    read = LocalStore.contents

    def contents(store: LocalStore, path: str, names: Any) -> Any:
        if (gone := path_of(tmp_path, 100)).is_dir():
            gone.rename(tmp_path / f".step-00000100.{layout.new_token()}.tmp")
        return read(store, path, names)

    monkeypatch.setattr(LocalStore, "contents", contents)
    code, seen = verify(capsys, tmp_path / asked)
    assert code == 2
    assert "a run replaced all of them by newer ones meanwhile. Look again." in seen
    if not asked:
        save(tmp_path, 200, 300)
        path_of(tmp_path, 200).rename(path_of(tmp_path, 100))
        assert verify(capsys, tmp_path)[0] == 0
