"""The known ways to lose a checkpoint silently: each shown with torch's stager or writer, and absent with ours.

Where torch loses only a race, a writer that waits at a gate makes the loss certain. What a crash at any moment leaves
on disk is in ``tests/checkpoint/kills``; torch's half-new checkpoint (an old index over new data) is shown here
by a failing write instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.errors import CheckpointError
from stagereg.stagers.async_stager import AsyncStager

from .states import OPTIONS, PATIENCE_S, GatedWriter, build, settled


def written(response: Any) -> None:
    getattr(response, "upload_completion", response).result(timeout=60)


# -- a: a second save while the first is being written


@pytest.mark.parametrize("name", ["torch_default", *OPTIONS])
def test_a_the_next_stage_during_a_write(name: str, tmp_path: Path) -> None:
    """torch overwrites the copy that is being written: checkpoint 1 has the values of step 2, without an error."""
    stager, state = build(name), {"w": torch.full((50_000,), 1.0)}
    slow = GatedWriter(tmp_path / "1")
    first = dcp.async_save(state, storage_writer=slow, async_stager=stager)
    stager.synchronize_staging()
    state["w"].fill_(2)
    settled(stager.stage(state))
    slow.open.set()
    written(first)
    found = {"w": torch.zeros(50_000)}
    dcp.load(found, checkpoint_id=tmp_path / "1")
    assert found["w"].unique().tolist() == ([2.0] if name == "torch_default" else [1.0])
    stager.close()


# -- d: a staging error that is not raised


class FailsToStage(AsyncStager):
    """Returns a future that has failed already."""

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        failed: Future[dict[str, Any]] = Future()
        failed.set_exception(RuntimeError("out of memory"))
        return failed


def test_d_torchs_save_reports_a_failed_staging_as_complete(tmp_path: Path) -> None:
    response = dcp.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "x", async_stager=FailsToStage())
    assert response.staging_completion.result(timeout=60) is None
    with pytest.raises(RuntimeError):
        response.upload_completion.result(timeout=60)


def test_d_ours_raises_where_training_is(tmp_path: Path) -> None:
    checkpointer = Checkpointer(str(tmp_path), stager=FailsToStage())
    with pytest.raises(CheckpointError, match="out of memory"):
        checkpointer.save(1, {"w": torch.ones(2)})
    checkpointer.close()
    assert checkpointer.latest is None


# -- e: a write that fails


DISK_FULL = """
import concurrent.futures, resource, sys, torch
import torch.distributed.checkpoint as dcp
import stagereg

folder, kind = sys.argv[1:]
def full():
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.RLIM_INFINITY))
def empty():
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
old, new = {"w": torch.full((40_000,), 1.0)}, {"w": torch.full((40_000,), 2.0)}
found = {"w": torch.zeros(40_000)}
if kind == "torch":
    dcp.async_save(old, checkpoint_id=folder).result()
    full()
    future = dcp.async_save(new, checkpoint_id=folder)
    concurrent.futures.wait([future], 60)
    empty()
    try:
        dcp.load(found, checkpoint_id=folder)
    except BaseException:  # torch's CheckpointException is no Exception
        print("old checkpoint lost")
    # The future is not read, as in a training loop that saves every now and then.
else:
    with stagereg.Checkpointer(folder) as checkpointer:
        checkpointer.save(1, old)
        checkpointer.wait()
        full()
        checkpointer.save(1, new)
        try:
            checkpointer.wait()
        finally:
            empty()
            dcp.load(found, checkpoint_id=checkpointer.latest)
            print("old checkpoint", "whole" if found["w"].eq(1).all() else "changed")
"""


@pytest.mark.parametrize(
    ("kind", "state", "fails"),
    [pytest.param("torch", "lost", False, marks=pytest.mark.slow), ("ours", "whole", True)],
)
def test_e_a_full_disk_while_a_step_is_saved_again(kind: str, state: str, fails: bool, tmp_path: Path) -> None:
    """torch destroys the old checkpoint and exits with 0 if the future is not read; ours keeps it and exits with 1."""
    command = [sys.executable, "-W", "ignore", "-c", DISK_FULL, str(tmp_path / "run"), kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert f"old checkpoint {state}" in done.stdout, done.stderr[-3000:]
    assert (done.returncode != 0) is fails, done.stderr[-3000:]
    assert ("CheckpointError" in done.stderr) is fails


# -- f: what was damaged on the disk; ours is in tests/checkpoint/test_damaged.py


def flip_one_byte(folder: Path, value: float) -> None:
    (file,) = folder.glob("*.distcp")
    content = bytearray(file.read_bytes())
    at = content.find(torch.full((8,), value).numpy().tobytes())
    assert at > 0
    content[at + 2] ^= 64
    file.write_bytes(content)


def test_f_torch_loads_a_damaged_file_without_an_error(tmp_path: Path) -> None:
    dcp.save({"w": torch.full((100,), 7.0)}, checkpoint_id=tmp_path)
    flip_one_byte(tmp_path, 7.0)
    found = {"w": torch.zeros(100)}
    dcp.load(found, checkpoint_id=tmp_path)
    assert found["w"].ne(7).sum() == 1


# -- g: two saves into one directory at once


def test_g_torch_mixes_two_saves_that_both_succeed(tmp_path: Path) -> None:
    one, two = GatedWriter(tmp_path, before="index"), FileSystemWriter(tmp_path)
    first = dcp.async_save({"a": torch.ones(9000)}, storage_writer=one)
    assert one.reached.wait(PATIENCE_S)
    written(dcp.async_save({"b": torch.ones(5)}, storage_writer=two))
    one.open.set()
    written(first)
    for state in ({"a": torch.zeros(9000)}, {"b": torch.zeros(5)}):
        with pytest.raises((Exception, CheckpointException)):  # whichever error the reader meets first
            dcp.load(state, checkpoint_id=tmp_path)


def test_g_ours_keeps_the_last_of_two_saves_of_a_step_whole(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.save(1, {"a": torch.ones(9000)})
        checkpointer.save(1, {"b": torch.ones(5)})
        checkpointer.wait()
        found = {"b": torch.zeros(5)}
        assert checkpointer.restore(found) == 1
        assert found["b"].eq(1).all()
