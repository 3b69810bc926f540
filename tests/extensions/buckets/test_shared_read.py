"""``read=once``: each byte is read by one rank, and arrives wherever it is wanted, bit for bit and checked."""

from __future__ import annotations

import errno
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import stagereg.checkpoint.store.local_files as local_files
import stagereg.extensions.buckets.shared_read as shared_read
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.options import Restore
from stagereg.checkpoint.storage.reading import File
from stagereg.errors import CheckpointError
from stagereg.extensions.buckets.shared_read import SharedRead
from stagereg.registry import build
from stagereg.stagers.blocking import BlockingAsyncStager
from stagereg.testing.ranks import run_ranks

from ...support.faulty_storage import flip

DATA = "__0_0.distcp"
PIECE = 4000


def count() -> Counter[str]:
    """Count, in this process, how often it is read so, and the bytes that are fetched, broadcast and received."""
    seen: Counter[str] = Counter()
    run, fetch = SharedRead.run, File.fetch_into

    def running(self: SharedRead) -> Any:
        seen["runs"] += 1
        return run(self)

    def fetching(self: File, offset: int, memory: memoryview) -> None:
        seen["fetched"] += len(memory)
        fetch(self, offset, memory)

    def broadcasting(data: torch.Tensor, *args: Any, **options: Any) -> Any:
        seen["broadcast"] += data.nbytes
        return dist.broadcast(data, *args, **options)

    def receiving(data: torch.Tensor, *args: Any, **options: Any) -> Any:
        seen["received"] += data.nbytes
        return dist.irecv(data, *args, **options)

    SharedRead.run, File.fetch_into = running, fetching  # type: ignore[method-assign]
    passing = {name: getattr(dist, name) for name in ("isend", "all_reduce", "all_to_all_single")}
    passing |= {"irecv": receiving, "broadcast": broadcasting}
    shared_read.dist = SimpleNamespace(**passing)  # type: ignore[attr-defined]
    return seen


def small(piece: int = PIECE) -> None:
    """Let there be many pieces of a small checkpoint."""
    shared_read._PIECE_BYTES = shared_read._LEAST_BYTES = piece
    shared_read._FETCH_BYTES = piece // 3
    shared_read._GAP_BYTES = 16


# -- how much is read, and passed on


def state(rank: int, step: int) -> dict[str, Any]:
    """A model that is the same on all ranks, a shard of each rank, a tensor in another order, and an object."""
    values = torch.arange(5000.0) + step
    turned = torch.zeros(50, 40).t().copy_(values[:2000].view(40, 50))
    plain = {"x": values[:4000].clone(), "turned": turned, "pair": (values[:3].clone(), step)}
    return {"plain": plain, f"shard{rank}": values + rank, "n": step}


def holds(of: dict[str, Any], rank: int, step: int) -> bool:
    expected = state(rank, step)
    same = torch.equal(of[f"shard{rank}"], expected[f"shard{rank}"]) and of["n"] == step
    plain, other = of["plain"], expected["plain"]
    same = same and all(torch.equal(plain[key], other[key]) for key in ("x", "turned"))
    return same and torch.equal(plain["pair"][0], other["pair"][0]) and plain["pair"][1] == step


def save_steps(root: str, rank: int, *steps: int) -> None:
    with Checkpointer(root, keep=9, stager=BlockingAsyncStager(), resume="never") as checkpointer:
        for step in steps:
            checkpointer.save(step, state(rank, step))


def bytes_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.name not in ("index.json", "manifest.json"))


def restore_counting(rank: int, world_size: int, root: str) -> dict[str, Any]:
    small()
    save_steps(root, rank, 1)
    seen, found = count(), {}
    for name, own, how in (
        ("full", state(rank, 0), Restore(read="once")),
        ("fast", {"plain": state(rank, 0)["plain"]}, Restore(verify="fast", read="once")),
        ("shards", {f"shard{rank}": state(rank, 0)[f"shard{rank}"]}, Restore(read="once")),
    ):
        seen.clear()
        with Checkpointer(root, restore=how) as checkpointer:
            assert checkpointer.restore(own) == 1
        assert holds({**state(rank, 1), **own}, rank, 1)
        found[name] = dict(seen)
    return found


@pytest.mark.parametrize("nproc", [1, 3])
def test_each_byte_is_read_once_and_goes_where_it_is_wanted(tmp_path: Path, nproc: int) -> None:
    results = run_ranks(restore_counting, nproc=nproc, args=(str(tmp_path),))
    every = bytes_of(tmp_path / "step-00000001")

    def total(name: str, what: str) -> int:
        return sum(int(each[name].get(what, 0)) for each in results)

    assert total("full", "fetched") == total("shards", "fetched") == every
    assert 16_000 < total("fast", "fetched") < every - 20_000 * nproc + 2 * PIECE * nproc
    shares = [each["full"]["fetched"] for each in results]
    assert max(shares) - min(shares) <= PIECE
    if nproc > 1:
        assert total("full", "broadcast") > 16_000
        wanted = 20_000 + 8_192 + 5_056  # and its random-number states
        assert 0 < total("shards", "received") < wanted * nproc, "what a rank wants of others' pieces alone"


def restore_as_chosen(rank: int, world_size: int, root: str) -> list[int]:
    save_steps(root, rank, 1)
    seen, found = count(), []
    for read, shared in (("auto", False), ("auto", True), ("each", True), ("once", False)):
        local_files.is_on_network = lambda path, shared=shared: shared and rank == 1  # type: ignore[assignment]
        seen.clear()
        into = state(rank, 0)
        with Checkpointer(root, restore=Restore(read=read)) as checkpointer:  # type: ignore[arg-type]
            assert checkpointer.restore(into) == 1
        assert holds(into, rank, 1)
        found.append(seen["runs"])
    return found


def test_auto_reads_once_where_one_of_several_ranks_shares(tmp_path: Path) -> None:
    assert run_ranks(restore_as_chosen, args=(str(tmp_path),)) == [[0, 1, 0, 1]] * 2
    state: dict[str, Any] = {"n": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_files, "is_on_network", lambda path: True)
        patch.setattr(SharedRead, "run", lambda self: pytest.fail("one process reads for itself"))
        with Checkpointer(str(tmp_path)) as checkpointer:
            assert checkpointer.restore(state) == 1


# -- damage


def restore_damaged(rank: int, world_size: int, root: str, folder: str, verify: Any) -> tuple[Any, bool, bool, Any]:
    small()
    if rank == 0:
        flip(Path(root, folder, DATA))
    dist.barrier()
    into = state(rank, 0)
    x, found = into["plain"]["x"], None
    with Checkpointer(root, restore=Restore(read="once", verify=verify), keep=9, save_last=False) as checkpointer:
        try:
            found = checkpointer.restore(into)
        except CheckpointError as error:
            return str(error), bool((x == state(rank, 0)["plain"]["x"]).all()), False, None
    return found, False, holds(into, rank, found or 0), x is into["plain"]["x"]


def save_two(rank: int, world_size: int, root: str) -> None:
    save_steps(f"{root}/two", rank, 1, 2)
    save_steps(f"{root}/one", rank, 2)


def test_damage_found_on_the_way_is_overwritten_or_reported(tmp_path: Path) -> None:
    run_ranks(save_two, args=(str(tmp_path),))
    for found, _, is_older, is_live in run_ranks(
        restore_damaged, args=(str(tmp_path / "two"), "step-00000002", "full")
    ):
        assert (found, is_older, is_live) == (1, True, True)
    for message, is_unchanged, _, _ in run_ranks(
        restore_damaged, args=(str(tmp_path / "one"), "step-00000002", "full")
    ):
        assert f"step-00000002: {DATA}: CRC-32 mismatch" in message
        assert "The objects now mix their own values" in message
        assert not is_unchanged


def restore_where_reading_fails(rank: int, world_size: int, root: str) -> list[tuple[str, bool]]:
    small()
    save_steps(root, rank, 1)
    real, found = File.fetch_into, []
    for passing in (0, 40):
        calls = Counter[str]()

        def fail(self: File, offset: int, memory: memoryview, calls: Any = calls, passing: int = passing) -> None:
            calls["all"] += rank == 1
            if calls["all"] > passing:
                raise OSError(errno.EACCES, "Permission denied")
            real(self, offset, memory)

        File.fetch_into = fail  # type: ignore[method-assign]
        into = state(rank, 0)
        with Checkpointer(root, restore=Restore(read="once"), save_last=False) as checkpointer:
            try:
                checkpointer.restore(into)
            except CheckpointError as error:
                found.append((str(error), holds(into, rank, 0)))
    return found


def test_a_failure_before_anything_is_passed_on_changes_nothing(tmp_path: Path) -> None:
    results = run_ranks(restore_where_reading_fails, args=(str(tmp_path),))
    for (first, unchanged), (later, _) in results:
        assert "rank 1: PermissionError" in first
        assert "mixture" not in first
        assert unchanged
        assert "rank 1: PermissionError" in later
        assert "The objects now mix their own values" in later
    assert not all(unchanged for _, (_, unchanged) in results)


# -- memory

MIB = 1 << 20


def peak_of_restoring(rank: int, world_size: int, root: str) -> tuple[float, bool]:
    def tensors(value: float) -> dict[str, Any]:
        return {"x": {str(i): torch.full((8 * MIB,), value + i) for i in range(8)}}

    with Checkpointer(root, stager=BlockingAsyncStager(), resume="never") as checkpointer:
        checkpointer.save(1, tensors(1))
    into = tensors(0)
    with Checkpointer(
        root, restore=Restore(read="once"), stager=build("stager", "blocking"), save_last=False
    ) as checkpointer:
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        checkpointer.restore(into)
        peak = status("VmHWM") - before
    return peak, all(bool((into["x"][str(i)] == 1 + i).all()) for i in range(8))


def status(name: str) -> float:
    """Memory of this process in MiB, by the name that Linux has for it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


@pytest.mark.slow
def test_two_buffers_are_all_the_memory_it_needs(tmp_path: Path) -> None:
    for peak, whole in run_ranks(peak_of_restoring, args=(str(tmp_path),), timeout_s=240):
        assert whole
        assert peak < 128 + 32, "of 256 MiB that are there already"
