"""Checkpoints in an S3-compatible store: complete or absent, retried where that helps, nothing else touched."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from stagereg import cli
from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.options import Leave
from stagereg.errors import CheckpointError
from stagereg.registry import build
from stagereg.testing.ranks import run_ranks

from .conftest import BUCKET, Store

BOUND_S = 90
PART = 5 << 20
LARGE = 3 * PART // 4 + 1000  # elements of four bytes: more than two parts of the least size


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


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Set the smallest parts that S3 takes; return the environment that does the same in another process."""
    monkeypatch.setitem(fsspec.config.conf, "s3", {"default_block_size": PART})
    return {"FSSPEC_S3": json.dumps({"default_block_size": PART})}


def test_a_url_holds_checkpoints_as_a_directory_does(store: Store) -> None:
    with Checkpointer(store.url, every=2, keep=2) as checkpointer:
        assert checkpointer.dir == store.url
        assert checkpointer.latest is None
        assert [step for step in range(7) if checkpointer.maybe_save(step, state(step))] == [2, 4, 6]
        checkpointer.wait()
        newest = str(checkpointer.latest)
        with pytest.raises(CheckpointError, match=rf"{re.escape(store.url)} is in use"):
            Checkpointer(store.url)
    whole = {".metadata", "__0_0.distcp", "index.json", "manifest.json"}
    assert steps(store) == dict.fromkeys((4, 6), whole)
    assert unfinished(store) == []
    assert newest.startswith(f"{store.url}/step-00000006")
    older = next(name.partition("/")[0] for name in store.names() if name.startswith("step-00000004"))
    for resume, step in (("auto", 6), ("latest", 6), (f"{store.url}/{older}", 4), (f"{store.url}/latest", 6)):
        expect_restored(store, step, resume=resume)


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


@pytest.mark.slow
def test_large_files_go_in_parts_and_plain_torch_reads_them(store: Store, small_parts: dict[str, str]) -> None:
    with Checkpointer(store.url) as checkpointer:
        store.server.fail({"method": "PUT", "contains": "partNumber=2", "do": "cut"})
        checkpointer.save(1, state(1, LARGE))
        checkpointer.wait()
        store.server.hit()
        newest = str(checkpointer.latest)
    parts = [query for method, _, query in store.server.seen if method == "PUT" and "partNumber" in query]
    assert len(parts) >= 2
    expect_restored(store, 1, LARGE)
    template = {"x": torch.zeros(LARGE)}
    dcp.load(template, storage_reader=FsspecReader(newest))
    assert (template["x"] == 1).all()


def uploads(store: Store) -> list[str]:
    """The keys of uploads that were begun and not ended."""
    return sorted(each["Key"] for each in store.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []))


def test_uploads_of_killed_runs_are_given_up_and_no_others(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    own = ["gpt/first/step-00000001.aaaaaaaaaaaa/__0_0.distcp", "gpt/first/step-00000002/x"]
    others = ["gpt/first-again/step-00000001/x", "gpt/first/mine", "gpt/step-00000001/x", "step-00000001/x"]
    for key in own + others:
        store.client.create_multipart_upload(Bucket=BUCKET, Key=key)
    with Checkpointer(store.url):
        assert uploads(store) == sorted(others)
        store.client.create_multipart_upload(Bucket=BUCKET, Key=own[0])  # as by the run itself
        with pytest.raises(CheckpointError, match="is in use"):
            Checkpointer(store.url)
        assert uploads(store) == sorted([own[0], *others])
    denied = {"method": "GET", "contains": "?uploads", "do": "refuse", "status": 403, "code": "AccessDenied"}
    store.server.fail(denied)
    with Checkpointer(store.url) as checkpointer:
        store.server.hit()
        assert "AbortIncompleteMultipartUpload" in caplog.text
        checkpointer.save(1, state(1))
    assert list(steps(store)) == [1]


LOG = """
import os, sys, time
with open(sys.argv[1], "a") as log:
    print(os.environ["STAGEREG_STEP"], sys.argv[2] == os.environ["STAGEREG_CHECKPOINT"], file=log, flush=True)
while not os.path.exists(sys.argv[1] + ".gate"):
    time.sleep(0.02)
"""


def test_follow_takes_each_checkpoint_once_and_keeps_what_it_is_at(store: Store, tmp_path: Path) -> None:
    log, gate = tmp_path / "log", tmp_path / "log.gate"
    follow = ["follow", store.url, "--poll", "50ms", "--name", "evaluate", "--until-step"]
    command = ["--", sys.executable, "-S", "-c", LOG, str(log), "{}"]
    seen: list[list[int]] = []

    def train() -> None:
        with Checkpointer(store.url, keep=1) as checkpointer:
            for step in (1, 2, 3):
                checkpointer.save(step, state(step))
                checkpointer.wait()
                ends = time.monotonic() + BOUND_S
                while not (log.exists() and log.read_text()) and time.monotonic() < ends:
                    time.sleep(0.02)
            seen.append(sorted(steps(store)))
            gate.touch()

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        assert cli.main([*follow, "3", *command]) == 0
        training.result(BOUND_S)
    assert seen == [[1, 3]]
    assert log.read_text().splitlines() == ["1 True", "3 True"]
    assert cli.main([*follow, "3", *command]) == 0
    with Checkpointer(store.url, keep=1) as checkpointer:
        checkpointer.save(4, state(4))
    assert cli.main([*follow, "4", *command]) == 0
    assert log.read_text().splitlines() == ["1 True", "3 True", "4 True"]
    assert [name for name in store.names() if name.startswith((".reading", ".follow-evaluate/.lock"))] == []


REFUSED = {"do": "refuse", "status": 503}
PASSING = {
    "file 503": {"method": "PUT", "contains": ".distcp", "times": 2, **REFUSED},
    "manifest's answer lost": {"method": "PUT", "contains": "manifest.json", "times": 1, "do": "lose"},
    "manifest 503": {"method": "PUT", "contains": "manifest.json", "times": 2, **REFUSED},
    "latest 503": {"method": "PUT", "contains": "/latest", "times": 2, **REFUSED},
    "cut": {"method": "PUT", "contains": ".metadata", "times": 1, "do": "cut"},
    "reading 503": {"method": "GET", "times": 2, **REFUSED},
}


@pytest.mark.parametrize(
    "name", [*list(PASSING)[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in list(PASSING)[2:])]
)
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
        Checkpointer("s3://nowhere/gpt")


ELEMENTS = 3 << 20


def save_and_restore(rank: int, world_size: int, url: str, save: bool) -> bool:
    """12 MiB that are the same on all ranks, and 12 MiB of each."""
    mine = f"mine.rank{rank}"
    with Checkpointer(url, leave=Leave(save_last=False), stager=build("stager", "blocking")) as checkpointer:
        if save:
            whole = torch.arange(ELEMENTS, dtype=torch.int32)
            checkpointer.save(1, {"whole": whole, mine: whole + rank})
            return True
        into = {"whole": torch.zeros(ELEMENTS, dtype=torch.int32), mine: torch.zeros(ELEMENTS, dtype=torch.int32)}
        assert checkpointer.restore(into) == 1
    expected = torch.arange(ELEMENTS, dtype=torch.int32)
    return torch.equal(into["whole"], expected) and torch.equal(into[mine], expected + rank)


def test_ranks_fetch_each_byte_of_a_checkpoint_once(store: Store) -> None:
    run_ranks(save_and_restore, nproc=3, args=(store.url, True))
    files = {f"__{rank}_0.distcp" for rank in range(3)} | {".metadata", "index.json", "manifest.json"}
    assert steps(store) == {1: files}
    found = store.client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
    stored = sum(each["Size"] for each in found if "/step-" in each["Key"])
    assert stored > 4 * 4 * ELEMENTS
    before = store.server.sent
    assert run_ranks(save_and_restore, nproc=3, args=(store.url, False)) == [True] * 3
    assert stored < store.server.sent - before + 100_000 < 1.1 * stored


PROGRAM = """
import sys, torch
from stagereg import Checkpointer
if __name__ == "__main__":
    with Checkpointer(sys.argv[1]) as checkpointer:
        for step, elements in ((1, 100), (2, int(sys.argv[2]))):
            checkpointer.save(step, {"x": torch.full((elements,), float(step)), "about": {"step": step}})
            checkpointer.wait()
            print(step, flush=True)
"""


def line_of(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], BOUND_S)
    return process.stdout.readline() if ready else b"nothing"


@pytest.fixture
def running(store: Store, small_parts: dict[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run of its own that has saved step 1 and cannot get the second part of step 2 through."""
    store.server.fail({"method": "PUT", "contains": "partNumber=2", "times": 9, "do": "hang"})
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, **small_parts, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program), store.url, str(LARGE)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    try:
        assert line_of(process) == b"1\n"
        yield process
    finally:
        process.kill()
        process.wait(BOUND_S)


@pytest.mark.slow
def test_what_a_killed_run_has_sent_is_deleted_and_listed_by_a_command(
    running: subprocess.Popen[bytes],
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store.server.hit()
    assert cli.main(["ls", store.url, "--leftovers"]) == 2  # the run is not disturbed
    running.kill()
    running.wait(BOUND_S)
    store.server.fail()
    assert len(uploads(store)) == 1
    capsys.readouterr()
    assert cli.main(["ls", store.url, "--leftovers", "--json"]) == 0
    (deleted,) = json.loads(capsys.readouterr().out)["deleted"]
    assert deleted.startswith(f"{store.url}/step-00000002.")
    assert unfinished(store) == uploads(store) == []
    assert [*steps(store)] == [1]


@pytest.mark.slow
def test_the_next_run_goes_on_where_one_was_killed(
    running: subprocess.Popen[bytes], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.server.hit()
    with pytest.raises(CheckpointError, match=str(running.pid)):  # a refused run disturbs nothing
        Checkpointer(store.url)
    running.kill()
    running.wait(BOUND_S)
    store.server.fail()
    assert len(uploads(store)) == 1
    monkeypatch.setattr("stagereg.checkpoint.store.lease.LEASE_S", 1.0)  # or else a minute would pass
    with Checkpointer(store.url) as checkpointer:
        assert unfinished(store) == uploads(store) == []
        into = state(0)
        assert checkpointer.restore(into) == 1
        assert holds(into, 1)
        checkpointer.save(2, state(2))
    assert sorted(steps(store)) == [1, 2]
