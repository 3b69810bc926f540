"""``DcpWriter`` commits as a whole or not at all, ``DcpReader`` loads what is undamaged; torch's own work with both."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.staging
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import stagereg
import stagereg.extensions.interop.dcp_writer as dcp_writer
from stagereg.checkpoint.store.failpoints import watch
from stagereg.errors import ConfigError, StagerClosedError
from stagereg.testing.ranks import run_ranks

from ...support.forks import run_forked
from ...support.watching import watching

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(value: float) -> dict[str, Any]:
    """Some MiB, a shard of each rank where there are ranks, and a plain value."""
    sharded = torch.arange(40_000.0).view(8, 5000) + value
    if dist.is_initialized():
        sharded = distribute_tensor(sharded, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    return {"x": torch.full((300_000,), value), "sharded": sharded, "epoch": int(value), "none": {}}


def unread(why: str) -> str:
    """What ``dcp.load`` raises where the reader has refused the metadata: torch before 2.13 does not pass on why."""
    return "AssertionError" if torch.__version__ < "2.13" else why


def plain(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(plain(one[key]), plain(other[key])) for key in ("x", "sharded")) and (
        one["epoch"] == other["epoch"]
    )


def holds(path: Any, value: float, **options: Any) -> bool:
    """Whether the reader finds the state with this value there."""
    found = state(0)
    dcp.load(found, storage_reader=stagereg.DcpReader(path), **options)
    return same(found, state(value))


def round_trips(rank: int, world_size: int, root: str) -> None:
    """Save in each way, over what is there too, and load through both readers."""
    for number, save in enumerate((dcp.save, lambda *a, **k: dcp.async_save(*a, **k).result(timeout=60)), 1):
        for value in (number, number + 10):
            save(state(value), storage_writer=stagereg.DcpWriter(f"{root}/{number}"))
            for reader in (stagereg.DcpReader, dcp.FileSystemReader):
                found = state(0)
                dcp.load(found, storage_reader=reader(f"{root}/{number}"))
                assert same(found, state(value)), (number, value, reader)
    writer = stagereg.DcpWriter(f"{root}/of-{rank}")
    dcp.save({"x": torch.ones(3)}, storage_writer=writer, no_dist=True)
    for value in (3, 13, 23, 33):  # one writer, and plans that torch keeps from one save to the next
        path = f"{root}/{4 if value == 33 else 3}"
        given = {"checkpoint_id": path} if value in (3, 33) else {}
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state(value), storage_writer=writer, planner=planner, **given)
        assert holds(path, value), value
    if rank == 0:
        assert sorted(os.listdir(root)) == ["1", "2", "3", "4", "of-0", "of-1"]
        names = [".metadata", *(f"__{each}_0.distcp" for each in range(world_size)), "checksums.json"]
        assert sorted(os.listdir(f"{root}/1")) == names


def test_ranks_save_and_load_in_each_way_torch_has(tmp_path: Path) -> None:
    run_ranks(round_trips, nproc=2, args=(str(tmp_path),))


def test_one_process_saves_and_loads_without_ranks(tmp_path: Path) -> None:
    writer = stagereg.DcpWriter()
    for value in (1, 2):
        dcp.save(state(value), checkpoint_id=tmp_path / f"step-{value}", storage_writer=writer)
    found = state(0)
    dcp.load(found, checkpoint_id=tmp_path / "step-1", storage_reader=stagereg.DcpReader(tmp_path / "step-2"))
    assert same(found, state(1))
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]


def stages(rank: int, world_size: int, root: str) -> None:
    """As torch's writer: the copy is complete when the call returns, and what it returns is a future of the save."""
    writers = [stagereg.DcpWriter(f"{root}/{value}") for value in (1, 2)]
    assert isinstance(writers[0], dcp.staging.AsyncStager)
    stager = stagereg.build("stager", "pinned_cached", pin=False)
    for value, writer, own in ((1, writers[0], None), (2, writers[1], None), (3, writers[1], stager)):
        given, at = state(value), f"{root}/{value}"
        saved = dcp.async_save(given, checkpoint_id=at, storage_writer=writer, async_stager=own)
        given["x"].zero_()
        saved.result(timeout=60)
        assert holds(at, value)
    stager.close()
    pool = dcp_writer._default_stager()._copier.pool
    del saved
    gc.collect()
    assert pool.in_flight == 0, "writers share memory, and the copies have gone"
    assert pickle.loads(pickle.dumps(writers[0])).path == writers[0].path
    for _ in range(2):
        writers[0].close()
    with pytest.raises(StagerClosedError):
        pool.check_open()
    assert torch.equal(writers[1].stage({"x": torch.ones(3)})["x"], torch.ones(3))


def test_async_save_stages_with_the_default_stager_or_a_given_one(tmp_path: Path) -> None:
    run_ranks(stages, nproc=1, args=(str(tmp_path),))


def test_plan_caching_of_torch_writes_the_new_values(tmp_path: Path) -> None:
    for value in (1, 2, 3):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state(value), storage_writer=stagereg.DcpWriter(tmp_path / str(value)), planner=planner, no_dist=True)
    for value in (1, 2, 3):
        assert holds(tmp_path / str(value), value, no_dist=True)


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(data[:-1])
    elif how == "too long":
        path.write_bytes(data + b"\0")
    elif how == "a pipe":
        path.unlink()
        os.mkfifo(path)
    else:
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])


DAMAGES = {
    (name, how): f"{name}: {how}"
    for name in (".metadata", "__0_0.distcp")
    for how in ("missing", "truncated", "too long", "CRC-32 mismatch")
}
DAMAGES |= {("checksums.json", "CRC-32 mismatch"): "checksums.json is corrupt"}
DAMAGES |= {("checksums.json", "a pipe"): "not a regular file"}


@pytest.mark.parametrize(("name", "how"), DAMAGES)
def test_a_damaged_file_is_named_and_nothing_is_loaded(tmp_path: Path, name: str, how: str) -> None:
    dcp.save(state(1), storage_writer=stagereg.DcpWriter(tmp_path / "a"), no_dist=True)
    damage(tmp_path / "a" / name, how)
    found, named = state(0), DAMAGES[name, how]
    with pytest.raises(CheckpointException, match=named if name == "__0_0.distcp" else unread(named)):
        dcp.load(found, storage_reader=stagereg.DcpReader(tmp_path / "a"), no_dist=True)
    assert same(found, state(0))


def damaged(rank: int, world_size: int, root: str) -> None:
    """Damage of any file is an error on all ranks, also where a part of them loads."""
    dcp.save(state(1), storage_writer=stagereg.DcpWriter(f"{root}/a"))
    groups = [dist.new_group([each]) for each in range(world_size)]
    for name in ("__0_0.distcp", "__1_0.distcp"):
        dist.barrier()
        before = Path(root, "a", name).read_bytes()
        dist.barrier()
        if rank == 0:
            damage(Path(root, "a", name), "CRC-32 mismatch")
        dist.barrier()
        for options in ({}, {"process_group": groups[rank]}, {"no_dist": True}):
            found = {"x": torch.zeros(300_000)}
            with pytest.raises(CheckpointException, match=f"{name}: CRC-32 mismatch"):
                dcp.load(found, storage_reader=stagereg.DcpReader(f"{root}/a"), **options)
            assert not found["x"].any()
        dist.barrier()
        if rank == 0:
            Path(root, "a", name).write_bytes(before)
    dist.barrier()
    dcp.load(found, storage_reader=stagereg.DcpReader(f"{root}/a"))
    assert (found["x"] == 1).all()


def test_each_rank_refuses_what_any_of_them_finds_damaged(tmp_path: Path) -> None:
    run_ranks(damaged, nproc=2, args=(str(tmp_path),))


def test_ranks_read_equal_shares_of_the_bytes_to_check(tmp_path: Path) -> None:
    shares = run_ranks(checked, nproc=2, args=(str(tmp_path),))
    whole = sum(path.stat().st_size for path in (tmp_path / "a").iterdir() if path.name != "checksums.json")
    assert sum(shares) == whole
    assert max(shares) < 0.51 * whole


def checked(rank: int, world_size: int, root: str) -> int:
    """Return how many bytes this rank has read of the data, to check them."""
    dcp.save(state(1), storage_writer=stagereg.DcpWriter(f"{root}/a"))
    read = []

    class Counting(stagereg.DcpReader):
        def prepare_local_plan(self, plan: Any) -> Any:
            found = super().prepare_local_plan(plan)
            read.extend(each.bytes for each in found.storage_data.values())
            return found

    dcp.load(state(0), storage_reader=Counting(f"{root}/a"))
    return sum(read)


def test_what_torchs_writer_wrote_is_loaded_with_a_warning_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dcp.save(state(1), checkpoint_id=tmp_path / "a", no_dist=True)
    found = state(0)
    with caplog.at_level(logging.WARNING, logger="stagereg"):
        dcp.load(found, storage_reader=stagereg.DcpReader(tmp_path / "a"), no_dist=True)
    assert same(found, state(1))
    assert [each.getMessage() for each in caplog.records if "checksums.json" in each.getMessage()] == [
        f"{tmp_path / 'a'} has no checksums.json, so it is loaded without verification."
    ]
    dcp.save(state(2), storage_writer=stagereg.DcpWriter(tmp_path / "a"), no_dist=True)
    assert holds(tmp_path / "a", 2, no_dist=True)


def test_without_an_exchange_of_directories_two_renames_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: None)
    for value in (1, 2):
        dcp.save(state(value), storage_writer=stagereg.DcpWriter(tmp_path / "a"), no_dist=True)
    assert holds(tmp_path / "a", 2, no_dist=True)
    assert os.listdir(tmp_path) == ["a"]


def test_leftovers_of_a_killed_save_get_into_no_checkpoint(tmp_path: Path) -> None:
    left = tmp_path / ".a.0123456789ab.tmp"
    left.mkdir()
    (left / "__7_0.distcp").write_bytes(b"of more ranks")
    dcp.save(state(1), storage_writer=stagereg.DcpWriter(tmp_path / "a"), no_dist=True)
    assert os.listdir(tmp_path) == ["a"]
    assert sorted(os.listdir(tmp_path / "a")) == [".metadata", "__0_0.distcp", "checksums.json"]


def test_a_directory_with_other_files_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointException, match=r"notes\.txt"):
        dcp.save(state(1), storage_writer=stagereg.DcpWriter(tmp_path), no_dist=True)
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_a_save_beside_another_to_the_same_path_is_refused(tmp_path: Path) -> None:
    """One would delete and overwrite what the other writes, and the good checkpoint that is there would go."""
    written, goes_on = threading.Event(), threading.Event()

    def hold(point: str) -> None:
        if point == "written" and not written.is_set():
            written.set()
            assert goes_on.wait(60)

    save = partial(dcp.save, no_dist=True)
    save(state(1), storage_writer=stagereg.DcpWriter(tmp_path / "a"))
    with watching(hold), ThreadPoolExecutor(1) as pool:
        first = pool.submit(save, state(2), storage_writer=stagereg.DcpWriter(tmp_path / "a"))
        assert written.wait(60)
        try:
            save(state(4), storage_writer=stagereg.DcpWriter(tmp_path / "b"))
            with pytest.raises(CheckpointException, match="still being written"):
                save(state(3), storage_writer=stagereg.DcpWriter(tmp_path / "a"))
        finally:
            goes_on.set()
        first.result(60)
    assert holds(tmp_path / "a", 2, no_dist=True)
    save(state(3), storage_writer=stagereg.DcpWriter(tmp_path / "a"))


def test_a_save_that_failed_blocks_no_later_one(tmp_path: Path) -> None:
    """What fails on another rank, or in the planner, does not call the writer again; torch ends the thread then."""

    class Failing(dcp.DefaultSavePlanner):
        def finish_plan(self, *args: Any) -> Any:
            raise ValueError("mine")

    save = partial(dcp.save, state(1), no_dist=True)
    with ThreadPoolExecutor(1) as pool:
        failed = pool.submit(save, storage_writer=stagereg.DcpWriter(tmp_path / "a"), planner=Failing())
        with pytest.raises(CheckpointException, match="mine"):
            failed.result(60)
        with pytest.raises(CheckpointException, match="save again from the same thread, or end that thread"):
            save(storage_writer=stagereg.DcpWriter(tmp_path / "a"))
        pool.submit(save, storage_writer=stagereg.DcpWriter(tmp_path / "a")).result(60)
        save(storage_writer=stagereg.DcpWriter(tmp_path / "a"))
        with pytest.raises(CheckpointException, match="mine"):
            pool.submit(save, storage_writer=stagereg.DcpWriter(tmp_path / "a"), planner=Failing()).result(60)
    save(storage_writer=stagereg.DcpWriter(tmp_path / "a"))
    assert holds(tmp_path / "a", 1, no_dist=True)


ODD = {
    "torch.sparse_coo": lambda: torch.eye(3).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3, 3), 0.5, 1, torch.qint8),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
def test_a_tensor_that_torch_would_not_fill_is_refused_with_its_name(tmp_path: Path, kind: str) -> None:
    """torch's reader leaves a sparse target as it is, and fills a quantized one in its own scale."""
    state = {"a": {"x": ODD[kind]()}}
    dcp.save({"a": {"x": torch.ones(3, 3)}}, storage_writer=dcp.FileSystemWriter(tmp_path / "torchs"), no_dist=True)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=stagereg.DcpReader(tmp_path / "torchs"), no_dist=True)
    assert f"'a.x' cannot be loaded: it is {kind}" in str(caught.value)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=stagereg.DcpWriter(tmp_path / "ours"), no_dist=True)
    assert f"'a.x' cannot be saved: it is {kind}" in str(caught.value)
    assert not (tmp_path / "ours").exists()


def overlapping(rank: int, world_size: int, root: str) -> None:
    """Two saves with one writer, each of which goes on when the other one has come as far."""
    writer, both = stagereg.DcpWriter(), threading.Barrier(2)

    def hold(point: str) -> None:
        if point in ("made", "written", "described"):
            both.wait(60)

    watch(hold)
    saving = [dcp.async_save(state(x), checkpoint_id=f"{root}/{x}", storage_writer=writer) for x in (1, 2)]
    for each in saving:
        each.result(timeout=60)
    watch(None)
    for value in (1, 2):
        assert holds(f"{root}/{value}", value)


def test_saves_that_overlap_may_share_a_writer(tmp_path: Path) -> None:
    run_ranks(overlapping, nproc=1, args=(str(tmp_path),))
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_a_url_is_refused_when_a_writer_or_reader_is_made() -> None:
    for kind in (stagereg.DcpWriter, stagereg.DcpReader):
        with pytest.raises(ConfigError, match="s3://bucket/a"):
            kind("s3://bucket/a")
    with pytest.raises(ConfigError, match="requires the directory of a checkpoint"):
        stagereg.DcpReader(None)  # type: ignore[arg-type]
    with pytest.raises(CheckpointException, match="DcpWriter has no directory"):
        dcp.save(state(1), storage_writer=stagereg.DcpWriter(), no_dist=True)


def failing(rank: int, world_size: int, root: str) -> None:
    dcp.save(state(1), storage_writer=stagereg.DcpWriter(f"{root}/a"))

    def fail(point: str) -> None:
        if point == "writing" and rank == 1:
            raise OSError(28, "No space left on device")

    watch(fail)
    with pytest.raises(CheckpointException, match="No space left"):
        dcp.save(state(2), storage_writer=stagereg.DcpWriter(f"{root}/a"))
    watch(None)
    dcp.save(state(3), storage_writer=stagereg.DcpWriter(f"{root}/b"))
    for name, value in (("a", 1), ("b", 3)):
        assert holds(f"{root}/{name}", value)


def test_a_rank_that_cannot_write_fails_the_save_on_all(tmp_path: Path) -> None:
    run_ranks(failing, nproc=2, args=(str(tmp_path),))


# Imports torch once and forks a child for each moment, before torch has run any thread.
KILLED = """
import os, shutil, signal, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp
import stagereg
from stagereg.checkpoint.store.failpoints import watch
from tests.support.forked import forked

root = Path(sys.argv[1])

def save(value, number=None):
    seen = [0]
    def kill(point):
        if seen[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        seen[0] += 1
    watch(kill)
    dcp.save({"x": torch.full((1000,), float(value))}, storage_writer=stagereg.DcpWriter(root / "a"), no_dist=True)

def check(over, killed):
    if over or (root / "a").exists():
        found = {"x": torch.zeros(1000)}
        dcp.load(found, storage_reader=stagereg.DcpReader(root / "a"), no_dist=True)
        assert found["x"][0] in (1, 2) and (found["x"] == found["x"][0]).all()
        assert killed or found["x"][0] == 2
    save(3)
    assert os.listdir(root) == ["a"], os.listdir(root)

for over in (False, True):
    number, killed = 0, signal.SIGKILL
    while killed:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        assert not over or forked(save, 1) == 0
        killed = forked(save, 2, number)
        assert killed in (0, signal.SIGKILL), killed
        assert forked(check, over, killed) == 0, (over, number)
        number += int(sys.argv[2])
    print(number)
"""


@pytest.mark.parametrize("apart", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_leaves_all_or_nothing(tmp_path: Path, apart: int) -> None:
    """At each of the moments, or at every sixth."""
    done = run_forked(KILLED, tmp_path / "root", apart, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    assert all(int(count) > 9 for count in done.stdout.split()), done.stdout


def test_what_comes_to_the_path_during_a_save_is_not_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save = partial(dcp.save, no_dist=True)
    save(state(1), storage_writer=stagereg.DcpWriter(tmp_path / "a"))

    def come(point: str) -> None:
        if point == "described":
            (tmp_path / "a" / "notes\x1b.txt").write_text("mine")

    with watching(come):
        save(state(2), storage_writer=stagereg.DcpWriter(tmp_path / "a"))
    assert holds(tmp_path / "a", 2, no_dist=True)
    [kept] = tmp_path.glob("*/notes*.txt")
    assert kept.read_text() == "mine"
    assert (
        f"Did not delete {kept.parent}: notes\\x1b.txt was written to {tmp_path / 'a'} during the save" in caplog.text
    )
    save(state(3), storage_writer=stagereg.DcpWriter(tmp_path / "a"))
    assert kept.exists()
