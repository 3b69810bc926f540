"""A URL that cannot be a store is an error before anything is created."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from stagereg.assembly import Checkpointer
from stagereg.checkpoint.store.open_store import is_url, open_parent_store, open_store, path_or_url
from stagereg.errors import CheckpointError, ConfigError
from stagereg.extensions.buckets.bucket import Bucket
from stagereg.registry import build


def test_urls_are_remote_and_not_changed() -> None:
    for url in ("memory://a/b", "s3://bucket/runs/gpt"):
        store = open_store(f"{url}/")
        assert isinstance(store.backend, Bucket)
        assert (store.root, path_or_url(store.root)) == (url, url)
        assert open_parent_store(f"{url}/step-00000001.ab").root == url
        assert is_url(url)
    assert not is_url(Path("s3://bucket"))
    assert open_parent_store("memory://bucket").root == "memory://bucket"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense://bucket/x", "fsspec does not support nonsense://"),
        ("abfs://container/x", "needs a package that is not installed"),
        ("simplecache::s3://bucket/x", "fsspec does not support simplecache::s3://"),
        ("s3://", r"has no bucket name. Write s3://BUCKET/PATH"),
        ("s3:///runs", r"has no bucket name. Write s3://BUCKET/PATH"),
        ("://x", r"fsspec does not support ://"),
        ("memory://runs/gpt[12]*", r"fsspec would treat .* as a pattern.*without \*, \? and brackets"),
        ("ftp://user:secret@host/x", r"ftp://\*\*\*@host/x has a password.*FSSPEC_FTP_PASSWORD"),
    ],
)
def test_a_url_that_cannot_be_a_store_is_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        Checkpointer(url)
    assert "secret" not in str(refused.value)


def test_a_missing_package_of_ours_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(protocol: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(ConfigError, match=r"pip install '\./stagereg\[s3\]'"):
        open_store("s3://bucket/x")


def test_a_storage_that_cannot_write_to_a_url_is_refused_at_once() -> None:
    storage = build("storage", "safetensors")
    with pytest.raises(
        CheckpointError, match=r'storage="safetensors" writes only to .* not to memory://x\. Use storage="dcp"'
    ):
        Checkpointer("memory://x", storage=storage)
    with pytest.raises(CheckpointError, match='Use storage="dcp"'):
        storage.reset("memory://x")
