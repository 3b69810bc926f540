"""The server of these tests fails and keeps its content as it is set to."""

from __future__ import annotations

import urllib.error

import fsspec
import pytest

from .conftest import BUCKET, Store


def test_acknowledged_objects_outlive_the_server(store: Store) -> None:
    store.write("gpt/a b", b"first")
    first = store.pid
    store.kill()
    with pytest.raises(urllib.error.URLError):
        store.objects()
    store.start()
    assert store.pid != first
    assert store.objects() == ["gpt/a b"]
    assert store.read("gpt/a b") == b"first"
    assert fsspec.filesystem("s3").cat_file(f"{BUCKET}/gpt/a b") == b"first"


def test_the_server_fails_as_asked_and_only_then(store: Store) -> None:
    store.fail({"method": "PUT", "contains": "/gpt/", "after": 1, "times": 1, "do": "refuse", "status": 503})
    store.write("gpt/1", b"passes")
    with pytest.raises(urllib.error.HTTPError, match="503"):
        store.write("gpt/2", b"is refused")
    store.write("gpt/3", b"passes")
    store.fail({"contains": "/gpt/4", "do": "lose"}, {"contains": "/gpt/5", "do": "cut"})
    for name in "45":
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            store.write(f"gpt/{name}", b"is or is not stored")
    assert store.objects() == ["gpt/1", "gpt/3", "gpt/4"]
    assert ("PUT", f"/{BUCKET}/gpt/2", "") in store.seen()


def test_the_server_dies_in_the_middle_of_an_upload_when_asked(store: Store) -> None:
    store.fail({"contains": "/gpt/1", "do": "die"})
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        store.write("gpt/1", b"x" * 100_000)
    store.died()
    store.start()
    assert store.objects() == []
