"""Checkpoints in an S3-compatible store: complete or absent, retried where that helps, nothing else touched."""

from __future__ import annotations

import re
import urllib.parse
from typing import Any

import pytest
import torch

from stagereg.assembly import Checkpointer
from stagereg.errors import CheckpointError

from .conftest import BUCKET, Store


def steps(store: Store) -> dict[int, set[str]]:
    """The names in each directory of a step that has a manifest, by its step."""
    found: dict[str, set[str]] = {}
    for name in store.names():
        folder, _, file = name.partition("/")
        if folder.startswith("step-"):
            found.setdefault(folder, set()).add(file)
    return {int(folder[5:13]): files for folder, files in found.items() if "manifest.json" in files}


def unfinished(store: Store) -> list[str]:
    """Directories of steps without a manifest."""
    names = store.names()
    folders = {name.partition("/")[0] for name in names if name.startswith("step-")}
    return sorted(folder for folder in folders if f"{folder}/manifest.json" not in names)


def state(step: int, elements: int = 100) -> dict[str, Any]:
    return {"x": torch.full((elements,), float(step)), "about": {"step": step}}


def holds(into: dict[str, Any], step: int) -> bool:
    return bool((into["x"] == step).all()) and into["about"] == {"step": step}


def expect_restored(store: Store, step: int, elements: int = 100, **options: Any) -> None:
    into = state(0, elements)
    with Checkpointer(store.url, **options) as checkpointer:
        assert checkpointer.restore(into) == step
    assert holds(into, step)
    assert unfinished(store) == []


def test_a_url_holds_checkpoints_as_a_directory_does(store: Store) -> None:
    with Checkpointer(store.url, every=2, keep=2) as checkpointer:
        assert checkpointer.dir == store.url
        assert checkpointer.latest is None
        assert [step for step in range(7) if checkpointer.maybe_save(step, state(step))] == [2, 4, 6]
        checkpointer.wait()
        newest = str(checkpointer.latest)
        with pytest.raises(CheckpointError, match=rf"{re.escape(store.url)} is in use"):
            Checkpointer(store.url).lock()
    whole = {".metadata", "__0_0.distcp", "index.json", "manifest.json"}
    assert steps(store) == dict.fromkeys((4, 6), whole)
    assert unfinished(store) == []
    assert newest.startswith(f"{store.url}/step-00000006")
    older = next(name.partition("/")[0] for name in store.names() if name.startswith("step-00000004"))
    for resume, step in (("auto", 6), ("latest", 6), (f"{store.url}/{older}", 4), (f"{store.url}/latest", 6)):
        expect_restored(store, step, resume=resume)


def test_a_bucket_that_does_not_exist_is_named_before_a_run_starts_from_scratch(store: Store) -> None:
    message = "The bucket rnus of s3://rnus/gpt does not exist. Create the bucket, or correct the URL."
    with Checkpointer("s3://rnus/gpt") as checkpointer, pytest.raises(CheckpointError, match=re.escape(message)):
        checkpointer.restore(state(0))
    with Checkpointer(store.url) as checkpointer:
        assert checkpointer.restore(state(0)) is None


def test_a_restore_without_credentials_says_what_to_do(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.server.fail({"times": 99, "do": "refuse", "status": 403, "code": "AccessDenied"})
    with Checkpointer(store.url) as checkpointer, pytest.raises(CheckpointError, match="refuses the credentials"):
        checkpointer.restore(state(0))
    store.server.fail()


def test_nothing_outside_of_the_url_is_listed_written_or_deleted(store: Store) -> None:
    others = ["gpt/first-again/step-00000001.aaaaaaaaaaaa/x", "gpt/step-00000001.aaaaaaaaaaaa/x", "gpt/firs", "x"]
    for key in others:
        store.write(key, b"somebody else's")
    before = len(store.server.seen)
    with Checkpointer(store.url, keep=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step))
        checkpointer.wait()
        checkpointer.restore(state(0))
    below = "gpt/first/"
    for method, path, query in store.server.seen[before:]:
        asked = urllib.parse.parse_qs(query)
        key = urllib.parse.unquote(path).removeprefix(f"/{BUCKET}").lstrip("/")
        whole_bucket = key == "" and method in ("GET", "HEAD", "POST")
        reached = asked.get("prefix", [below if "delete" in query else ""])[0] if whole_bucket else key
        assert f"{reached}/".startswith(below), (method, path, query)
    assert [key for key in store.objects() if not key.startswith(below)] == sorted(others)


def uploads(store: Store) -> list[str]:
    """The keys of uploads that were begun and not ended."""
    return sorted(each["Key"] for each in store.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []))


def test_uploads_of_killed_runs_are_given_up_and_no_others(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    own = ["gpt/first/step-00000001.aaaaaaaaaaaa/__0_0.distcp", "gpt/first/step-00000002/x"]
    others = ["gpt/first-again/step-00000001/x", "gpt/first/mine", "gpt/step-00000001/x", "step-00000001/x"]
    for key in own + others:
        store.client.create_multipart_upload(Bucket=BUCKET, Key=key)
    with Checkpointer(store.url) as checkpointer:
        checkpointer.lock()
        assert uploads(store) == sorted(others)
        store.client.create_multipart_upload(Bucket=BUCKET, Key=own[0])  # as by the run itself
        with pytest.raises(CheckpointError, match="is in use"):
            Checkpointer(store.url).lock()
        assert uploads(store) == sorted([own[0], *others])
    denied = {"method": "GET", "contains": "?uploads", "do": "refuse", "status": 403, "code": "AccessDenied"}
    store.server.fail(denied)
    with Checkpointer(store.url) as checkpointer:
        checkpointer.lock()
        store.server.hit()
        assert "AbortIncompleteMultipartUpload" in caplog.text
        checkpointer.save(1, state(1))
    assert list(steps(store)) == [1]


REFUSED = {"do": "refuse", "status": 503}
PASSING = {
    "file 503": {"method": "PUT", "contains": ".distcp", "times": 2, **REFUSED},
    "manifest's answer lost": {"method": "PUT", "contains": "manifest.json", "times": 1, "do": "lose"},
}


@pytest.mark.parametrize("name", PASSING)
def test_a_passing_error_is_retried(name: str, store: Store) -> None:
    with Checkpointer(store.url, keep=1) as checkpointer:
        store.server.fail(PASSING[name])
        checkpointer.save(1, state(1))
        checkpointer.wait()
    store.server.hit()
    store.server.fail()
    assert list(steps(store)) == [1]
    expect_restored(store, 1)


def test_a_lasting_error_is_reported_at_once(store: Store) -> None:
    with Checkpointer(store.url) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.wait()
        denied = {"do": "refuse", "status": 403, "code": "AccessDenied"}
        store.server.fail({"method": "PUT", "contains": "step-00000002", "times": 99, **denied})
        before = len(store.server.seen)
        checkpointer.save(2, state(2))
        with pytest.raises(CheckpointError) as caught:
            checkpointer.wait()
        tried = [path for method, path, _ in store.server.seen[before:] if method == "PUT" and "step-00000002" in path]
    assert len(tried) <= 2
    assert len(str(caught.value).splitlines()) <= 24
    assert list(steps(store)) == [1]
    with pytest.raises(CheckpointError, match="s3://nowhere"):  # a missing bucket
        Checkpointer("s3://nowhere/gpt").lock()
