"""A directory of checkpoints is a path or a URL, and what cannot be one is told before anything is made."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest

from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.place.choice import is_url, path_or_url, place_around, place_of
from stagereg.checkpoint.place.local import LocalPlace
from stagereg.checkpoint.place.remote import RemotePlace
from stagereg.errors import CheckpointError, ConfigError
from stagereg.registry import build


def test_paths_are_local_and_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    given = {"a/b": "a/b", "~/x": "home/x", "file:relative": "file:relative", "a:b": "a:b"}
    for path, expected in given.items():
        place = place_of(path)
        assert isinstance(place, LocalPlace)
        assert place.root == str(tmp_path / expected)
    for path in (tmp_path / "x", f"{tmp_path}/x/", f"file://{tmp_path}/x", f"local://{tmp_path}/x"):
        assert place_of(path).root == str(tmp_path / "x")
    assert os.listdir(tmp_path) == []


def test_urls_are_remote_and_stay_what_they_are() -> None:
    for url in ("memory://a/b", "s3://bucket/runs/gpt"):
        place = place_of(f"{url}/")
        assert isinstance(place, RemotePlace)
        assert (place.root, place.remote, path_or_url(place.root)) == (url, True, url)
        assert place_around(f"{url}/step-00000001.ab").root == url
        assert is_url(url)
    assert not is_url(Path("s3://bucket"))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense://bucket/x", "fsspec knows no nonsense://"),
        ("abfs://container/x", "needs a package that is not installed"),
        ("simplecache::s3://bucket/x", "is a chain of URLs"),
        ("s3://", r"names no bucket.*s3://bucket/runs"),
    ],
)
def test_a_url_that_cannot_be_a_place_is_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Checkpointer(url)


def test_a_missing_package_of_ours_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(protocol: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(ConfigError, match=r"pip install 'stagereg\[s3\]'"):
        place_of("s3://bucket/x")


@pytest.mark.parametrize("storage", ["direct", "safetensors"])
def test_a_storage_that_cannot_write_to_a_url_is_refused_at_once(storage: str) -> None:
    with pytest.raises(CheckpointError, match=rf"storage={storage} writes to .* not to memory://x; use storage=dcp"):
        Checkpointer("memory://x", storage=build("storage", storage))
    with pytest.raises(CheckpointError, match="use storage=dcp"):
        build("storage", storage).reset("memory://x")
