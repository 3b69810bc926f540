"""Checkpoints in object stores of three makers, with the faults that each of them has its own words for."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any

import fsspec
import pytest
import torch

from stagereg.assembly import Checkpointer
from stagereg.checkpoint.format.manifest import MANIFEST
from stagereg.checkpoint.store.open_store import open_store
from stagereg.errors import CheckpointError
from stagereg.extensions.buckets.object_store import ObjectStore

from .conftest import Fault, Store


def state(step: int, elements: int = 100) -> dict[str, Any]:
    return {"x": torch.full((elements,), float(step)), "about": {"step": step}}


def save(store: Store, *steps: int, keep: int = 9, elements: int = 100) -> None:
    with Checkpointer(store.url, keep=keep) as checkpointer:
        for step in steps:
            checkpointer.save(step, state(step, elements))
            checkpointer.wait()


def committed(store: Store) -> list[int]:
    """The steps with a manifest, read without the code under test."""
    return [int(name[5:13]) for name in store.names() if name.startswith("step-") and name.endswith(MANIFEST)]


def expect_restored(store: Store, step: int, elements: int = 100) -> None:
    into = state(0, elements)
    with Checkpointer(store.url) as checkpointer:
        assert checkpointer.restore(into) == step
    assert bool((into["x"] == step).all())
    assert into["about"] == {"step": step}


def test_a_url_holds_checkpoints_as_a_directory_does(store: Store) -> None:
    with Checkpointer(store.url, keep=2) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(step))
            checkpointer.wait()
        assert ".lock" in store.names()
    assert committed(store) == [2, 3]
    assert [name for name in store.names() if not name.startswith("step-")] == ["latest"]
    expect_restored(store, 3)


@pytest.mark.slow
def test_a_large_file_goes_up_in_parts(store: Store) -> None:
    elements = 15_000_000  # above the parts that any of the packages uses by default
    save(store, 1, elements=elements)
    expect_restored(store, 1, elements)


def test_one_of_several_writers_makes_an_object(store: Store) -> None:
    objects, url = ObjectStore(store.url), f"{store.url}/one"
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: objects.create(url, str(number).encode()), range(8)))
    assert sum(made) == 1
    assert objects.get(url) == str(made.index(True)).encode()


@pytest.mark.slow  # Azure's own package waits 15 seconds before its second try
@pytest.mark.parametrize("name", ["distcp", "manifest.json"])
def test_a_server_that_is_asked_too_much_is_asked_again(store: Store, name: str) -> None:
    store.fail(Fault(store.maker.busy, name, times=2))
    save(store, 1)
    assert store.proxy.met == 2
    expect_restored(store, 1)


def test_credentials_that_expire_in_a_save_lose_nothing(store: Store) -> None:
    with Checkpointer(store.url) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.wait()
        store.fail(Fault(store.maker.denied, "step-00000002", ("PUT", "POST", "GET", "HEAD", "DELETE"), times=999))
        checkpointer.save(2, state(2))
        with pytest.raises(CheckpointError, match="refuses the credentials") as caught:
            checkpointer.wait()
        assert len(str(caught.value).splitlines()) <= 24
        assert 1 <= store.proxy.met <= 8  # not asked again and again
        store.fail()
        assert committed(store) == [1]
        checkpointer.save(3, state(3))
        checkpointer.wait()
    expect_restored(store, 3)


def test_a_clock_that_the_store_refuses_is_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    if store.maker.protocol != "s3":
        pytest.skip("this server looks at no date")
    save(store, 1)
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda *_: datetime.utcnow() + timedelta(hours=3))
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(CheckpointError, match="correct the clock of this machine") as caught:
        Checkpointer(store.url).lock()
    assert "difference between the request time and the server's time" in str(caught.value)
    monkeypatch.undo()
    assert committed(store) == [1]


@pytest.mark.slow
def test_an_object_ages_by_the_clock_of_the_store(store: Store) -> None:
    objects, url, probe = ObjectStore(store.url), f"{store.url}/.lock", f"{store.url}/.clock"
    objects.put(url, b"theirs")
    age = objects.age(url, probe)
    time.sleep(5)
    assert 4 <= objects.age(url, probe) - age <= 30
    assert store.names() == [".lock"]


def test_a_bucket_that_is_read_only_says_so_and_is_read(store: Store) -> None:
    save(store, 1)
    _, headers, body = store.maker.denied
    forbidden = 403, headers, body.replace("ExpiredToken", "AccessDenied").replace("401", "403")
    store.fail(Fault(forbidden, "", ("PUT", "POST", "DELETE"), times=999))
    with pytest.raises(CheckpointError, match="refuses the credentials"):
        Checkpointer(store.url).lock()
    assert store.proxy.met <= 8
    found = open_store(store.url).latest()
    assert found is not None
    assert found.manifest.step == 1


@pytest.mark.parametrize("hidden", ["step-00000002", "manifest.json", "distcp"])
def test_a_store_that_lists_late_loses_nothing(store: Store, hidden: str) -> None:
    save(store, 1)
    store.proxy.hidden = hidden
    save(store, 2)
    save(store, 3)  # which starts by deleting what is incomplete
    store.proxy.hidden = ""
    assert committed(store) == [1, 2, 3]
    store.proxy.hidden = hidden.replace("2", "3")
    expect_restored(store, 3)
