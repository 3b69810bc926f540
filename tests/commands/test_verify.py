"""``stagereg verify``: any damage of a file is found and named, and the exit code shows it."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stagereg.checkpoint.format.manifest as layout
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.extensions.buckets.object_store import ObjectStore

from .checkpoint_directories import contents, flip, flipped, instead, path_of, save
from .conftest import Command


def damages(command: Command, *arguments: object, code: int) -> dict[str, list[str]]:
    """What is wrong with each checkpoint, by its name."""
    found = command("verify", *arguments, "--json", code=code).json["checkpoints"]
    return {Path(each["path"]).name: [f"{d['file']}: {d['what']}" for d in each["damages"]] for each in found}


def test_one_checkpoint_can_be_asked_for(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path, 100, 200)
    (path_of(tmp_path, 100) / "a").unlink()
    assert "1 checkpoint, all valid." in command("verify", "latest").out
    shutil.copytree("step-00000100", "renamed")
    for asked in (path_of(tmp_path, 100), "step-00000100/", "renamed"):
        seen = command("verify", asked, code=1).out
        assert "a: missing" in seen
        assert "newest valid" not in seen


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (lambda old, new: flip(new / "a"), ["a: CRC-32 mismatch"]),
        (lambda old, new: (new / "a").write_bytes(b""), ["a: truncated: 0 of "]),
        (lambda old, new: (new / "a").open("ab").write(b"more"), ["a: too long: "]),
        (lambda old, new: (new / "a").replace(new / "b"), ["a: missing", "b: "]),
        (lambda old, new: (old / "a").replace(new / "a"), ["a: CRC-32 mismatch", "a: missing"]),
        (lambda old, new: shutil.copy(old / "manifest.json", new), ["manifest.json: it belongs to step 100"]),
        (lambda old, new: (new / "manifest.json").unlink(), ["manifest.json: missing"]),
        (lambda old, new: (new / "manifest.json").write_text("[" * 10**5), ["manifest.json: corrupt (the man"]),
        (lambda old, new: os.truncate(new / "manifest.json", 1 << 40), ["manifest.json: corrupt (it has 1,099,511"]),
        (lambda old, new: instead(new / "manifest.json", os.mkfifo), ["manifest.json: not a regular file"]),
        (
            lambda old, new: instead(new / "c", lambda c: c.symlink_to(old / "c")),
            ["c: a link (cp -rL copies the file itself)"],
        ),
        (lambda old, new: instead(new / "c", Path.mkdir), ["c: not a regular file"]),
        (lambda old, new: instead(new / "c", os.mkfifo), ["c: not a regular file"]),
    ],
)
def test_the_damage_of_a_file_is_named(
    tmp_path: Path, command: Command, change: Callable[[Path, Path], Any], messages: list[str]
) -> None:
    save(tmp_path, 100, 200)
    change(path_of(tmp_path, 100), path_of(tmp_path, 200))
    seen = [text for each in damages(command, tmp_path, code=1).values() for text in each]
    assert [text[: len(message)] for text, message in zip(seen, messages, strict=True)] == messages
    # Without the content, only CRC-32 mismatch are not found.
    damages(command, tmp_path, "--fast", code=int(messages != ["a: CRC-32 mismatch"]))


def test_the_newest_good_one_is_named_beside_the_damaged(tmp_path: Path, command: Command) -> None:
    save(tmp_path, 100, 200, 300)
    nbytes = str(sum(map(len, contents(100).values())))
    seen = command("verify", tmp_path).out
    assert ["100", "3", nbytes, "B", "valid"] in [line.split() for line in seen.splitlines()]
    assert "Read the content of every file: 3 checkpoints, all valid." in seen
    (path_of(tmp_path, 300) / "b").unlink()
    seen = command("verify", tmp_path, code=1).out
    assert "3 checkpoints, 1 not valid." in seen
    assert f"The newest valid checkpoint is {path_of(tmp_path, 200)}" in seen
    fast = command("verify", tmp_path, "--fast", code=1).out
    assert f"The newest checkpoint with valid sizes is {path_of(tmp_path, 200)}" in fast
    assert any(line.split()[4:] == ["corrupt", "b:", "missing"] for line in seen.splitlines())


def test_a_url_is_looked_at_as_a_directory_is(command: Command) -> None:
    root = f"memory://{uuid.uuid4().hex}/run"
    first, second = save(root, 100, 200)
    objects = ObjectStore(root)
    objects.put(f"{root}/step-00000300.0123456789ab/a", b"on its way")
    for asked in (root, f"{root}/latest", first):
        command("verify", asked)
    objects.put(f"{second}/a", flipped(objects.get(f"{second}/a")))
    objects.delete(f"{first}/c")
    seen = damages(command, root, code=1)
    assert [text[:18] for text in seen[second.rpartition("/")[2]]] == ["a: CRC-32 mismatch"]
    assert seen[first.rpartition("/")[2]] == ["c: missing"]
    assert [line.split()[0] for line in command("ls", root).out.splitlines()[3:]] == ["200", "100", "300"]
    command("verify", "memory://nowhere/run/latest", code=2)


def test_where_there_are_no_checkpoints_is_an_error(tmp_path: Path, command: Command) -> None:
    save(tmp_path / "run" / "checkpoints", 100)
    for missing in (tmp_path / "nowhere", tmp_path / "run" / "checkpoints" / "step-00000300", tmp_path / "run"):
        assert f"There is no checkpoint in {missing}." in command("verify", missing, code=2).err


@pytest.mark.parametrize("asked", ["", "latest"])
def test_a_checkpoint_deleted_meanwhile_is_not_damaged(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    save(tmp_path, 100)
    read = CheckpointStore.contents

    def contents(store: CheckpointStore, path: str, names: Any) -> Any:
        if (gone := path_of(tmp_path, 100)).is_dir():
            gone.rename(tmp_path / f".step-00000100.{layout.new_token()}.tmp")
        return read(store, path, names)

    monkeypatch.setattr(CheckpointStore, "contents", contents)
    seen = command("verify", tmp_path / asked, code=2).err
    assert "a run replaced all checkpoints during the check. Run the command again." in seen
    if not asked:
        save(tmp_path, 200, 300)
        path_of(tmp_path, 200).rename(path_of(tmp_path, 100))
        command("verify", tmp_path)
