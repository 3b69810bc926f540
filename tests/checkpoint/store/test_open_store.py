"""A directory of checkpoints is a path; anything else is an error before anything is created."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stagereg import cli
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.store.directory import Directory
from stagereg.checkpoint.store.open_store import open_store
from stagereg.errors import ConfigError


def test_paths_are_local_and_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    unchanged = ("a/b", "file:relative", "a:b")
    for path, expected in {**dict.fromkeys(unchanged), "~/x": "home/x"}.items():
        store = open_store(path)
        assert type(store.backend) is Directory
        assert store.root == str(tmp_path / (expected or path))
    for same in (tmp_path / "x", f"{tmp_path}/x/", f"file://{tmp_path}/x"):
        assert open_store(same).root == str(tmp_path / "x")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("~nobody-here/x", r"home of an unknown user. For a file of that name, write \./~nobody-here/x"),
        ("file://host/x", "names another machine. Write a directory of this machine as file:///runs"),
    ],
)
def test_a_path_that_cannot_be_a_directory_is_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Checkpointer(url)


def test_one_checkpoint_is_named_by_a_file_url_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.save(3, {"x": 1})
    url = f"file://{tmp_path}/step-00000003"
    with Checkpointer(str(tmp_path / "other"), resume=url) as checkpointer:
        assert checkpointer.restore({"x": 0}) == 3
    assert cli.main(["ls", url]) == 0
    assert "not verified" in capsys.readouterr().out
