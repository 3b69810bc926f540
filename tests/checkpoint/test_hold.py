"""A directory that is another one on some machine is refused at the start, and looking for that leaves no file."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

import stagereg.checkpoint.hold as hold
from stagereg import Checkpointer
from stagereg.checkpoint.hold import DirectoryLock
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.open_store import open_store
from stagereg.errors import CheckpointError, ConfigError
from stagereg.testing import RankFailure, run_ranks


def refusals(rank: int, world_size: int, root: str) -> str:
    """Take a directory that rank 1 has elsewhere; then one that rank 1 sees a little later."""

    def store(name: str) -> CheckpointStore:
        return open_store(f"{root}/{'' if rank == 0 else 'elsewhere/'}{name}")

    ranks = RankGroup()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(hold, "_PATIENCE_S", 0.2)
        with pytest.raises(ConfigError) as taken:
            DirectoryLock(store("a"), ranks, 10, "auto").open("a")
        held = DirectoryLock(open_store(f"{root}/held"), ranks, 10, "auto")
        held.open("held")
        held.acquire_on_all()
        DirectoryLock(store(f"{hold.SCRATCH}x"), ranks, 10, "auto").open(
            f"{hold.SCRATCH}x"
        )  # to which nothing is saved
    assert "hydra" not in sys.modules  # importing it takes longer than all of this
    if rank == 0:  # which deletes, after all have looked
        there = sorted(path.relative_to(root).as_posix() for path in Path(root).rglob("*"))
        assert there == ["a", "held", "held/.lock"]
    dist.barrier()
    if rank == 1:
        os.mkdir(f"{root}/elsewhere")
        threading.Timer(0.3, os.symlink, (f"{root}/late", f"{root}/elsewhere/late")).start()
    DirectoryLock(store("late"), ranks, 10, "auto").open("late")
    held.release()
    return str(taken.value)


def test_ranks_that_see_another_directory_are_named_and_no_file_of_the_look_stays(tmp_path: Path) -> None:
    first, second = run_ranks(refusals, 2, args=(str(tmp_path),))
    assert second == first.replace(f"{tmp_path}/", f"{tmp_path}/elsewhere/")
    assert first.startswith('dir="a" is not the same directory on all machines')
    assert f"is missing on {socket.gethostname()} (rank 1). Give" in first


def is_killed(rank: int, world_size: int, root: str) -> None:
    if rank == 0:
        hold._look = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    Checkpointer(root)


def test_the_next_start_deletes_what_a_killed_look_has_left(tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        run_ranks(is_killed, 2, args=(str(tmp_path),))
    assert [path.name for path in tmp_path.glob(".reading.*")] != []
    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.lock()
        assert os.listdir(tmp_path) == [".lock"]


@pytest.mark.parametrize("restores", [True, False])
def test_a_run_does_not_replace_what_another_run_has_saved_since_it_began(
    tmp_path: Path, restores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hold, "command_key", lambda: "another")  # so restore() takes no lock
    with Checkpointer(str(tmp_path)) as first:
        first.save(10, {"x": 10})
    late = Checkpointer(str(tmp_path), save_last=False)
    if restores:
        assert late.restore({"x": 0}) == 10
    with Checkpointer(str(tmp_path)) as other:
        other.restore({"x": 0}, source=str(tmp_path / "step-00000010"))
        other.save(20, {"x": 20})
    with contextlib.closing(late), pytest.raises(CheckpointError, match="another run has saved a checkpoint there"):
        late.maybe_save(100, {"x": 100})
    with Checkpointer(str(tmp_path)) as again:
        assert again.restore({"x": 0}) == 20
