"""The harness returns in every case, names which rank did what, and leaves no process behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stagereg.testing import RankFailure, run_ranks

from ..support.programs import comes_true, runs


@dataclass
class Number:
    """A class of a test module that cannot be imported by name."""

    value: int


def add_up(rank, world_size, number, *, step=0):
    total = torch.tensor([float(number.value + step * rank)])
    dist.all_reduce(total)
    print("from Python")
    os.system("echo from below Python")
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "CHEESE", "FROM_CALLER"]
    surroundings = os.getcwd(), torch.get_num_threads(), *map(os.environ.get, names)
    return Number(int(total)), *surroundings


def parent(rank, world_size):
    return os.getppid()


def raise_on(rank, world_size, culprit, others):
    if rank == culprit:
        raise KeyError(f"no cheese on rank {rank}")
    others()


def hang_on(rank, world_size, sleeper, folder):
    Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
    if rank == sleeper:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(folder, f"{rank}.child").write_text(str(child.pid))
        child.wait()
    return rank


def sleep_long():
    time.sleep(600)


def die_on(rank, world_size, culprit, signal_number):
    if rank == culprit:
        print("these are the last lines", flush=True)
        if signal_number is None:
            os._exit(3)
        os.kill(os.getpid(), signal_number)
    dist.barrier()


def watch_rank_0(rank, world_size):
    pids = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        return
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        assert runs(pids[0])


def return_a_generator(rank, world_size):
    return (n for n in range(3))


def test_ranks_return_in_order_and_have_the_callers_surroundings(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FROM_CALLER", "yes")
    results = run_ranks(add_up, 3, args=(Number(1),), kwargs={"step": 10}, env={"CHEESE": "gouda"})
    printed = capsys.readouterr().out
    for rank, seen in enumerate(results):
        assert seen == (Number(33), str(tmp_path), 1, str(rank), str(rank), "3", "1", "gouda", "yes")
        assert f"[rank {rank}] from Python\n" in printed
        assert f"[rank {rank}] from below Python\n" in printed


def test_a_raising_rank_is_named_and_the_others_end():
    with pytest.raises(RankFailure, match="1 of 2 ranks failed: rank 1\n") as caught:
        run_ranks(raise_on, args=(1, sleep_long))
    failure = pickle.loads(pickle.dumps(caught.value))
    assert (list(failure.failed), failure.hung) == ([1], {})
    assert "no cheese on rank 1" in failure.failed[1]
    assert "in raise_on" in failure.failed[1]
    assert multiprocessing.active_children() == []
    with pytest.raises(RankFailure, match="3 of 3 ranks failed: rank 1, then "):  # the cause before what follows
        run_ranks(raise_on, 3, args=(1, dist.barrier))


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGKILL, signal.SIGSEGV, None])
def test_a_rank_that_dies_is_named_with_its_end_and_last_output(number):
    with pytest.raises(RankFailure) as caught:
        run_ranks(die_on, args=(1, number))
    ended = f"was killed by {number.name}" if number else "exited with code 3"
    assert caught.value.failed[1].startswith(f"{ended} before it returned")
    assert "these are the last lines" in caught.value.failed[1]


def test_a_hung_rank_is_named_with_stack_and_no_process_stays(tmp_path):
    started = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 1 hung: still running after 4 s; finished in time: rank 0") as caught:
        run_ranks(hang_on, args=(1, str(tmp_path)), timeout_s=4)
    assert time.monotonic() - started < 60
    assert caught.value.returned == {0: 0}
    assert list(caught.value.hung) == [1]
    assert "hang_on" in caught.value.hung[1]
    pids = [int(file.read_text()) for file in tmp_path.iterdir()]
    assert comes_true(lambda: not any(map(runs, pids)), 5.0)
    assert multiprocessing.active_children() == []


def test_what_other_processes_cannot_find_or_read_is_refused():
    with pytest.raises(RankFailure, match="cannot pickle 'generator'"):
        run_ranks(return_a_generator, 1)
    with pytest.raises(ValueError, match="Define it with `def` at the top of a module"):
        run_ranks(lambda rank, world_size: None)
    with pytest.raises(ValueError, match="cannot be sent to other processes"):
        run_ranks(add_up, args=((n for n in range(3)),))


def test_the_server_that_forks_the_ranks_has_run_no_thread():
    (server,) = run_ranks(parent, 1)
    assert len(os.listdir(f"/proc/{server}/task")) == 1


CALLER = """
import os, sys, time
from stagereg.testing import run_ranks

def hold(rank, world_size):
    with open(f"{sys.argv[1]}/{rank}.tmp", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{sys.argv[1]}/{rank}.tmp", f"{sys.argv[1]}/{rank}.pid")
    time.sleep(600)

if __name__ == "__main__":
    run_ranks(hold, 2, timeout_s=300)
"""


def test_ranks_end_when_their_caller_is_killed(tmp_path):
    script = tmp_path / "caller.py"
    script.write_text(CALLER)
    with subprocess.Popen([sys.executable, str(script), str(tmp_path)]) as caller:
        try:
            assert comes_true(lambda: len(list(tmp_path.glob("*.pid"))) == 2, 40.0)
        finally:
            caller.kill()
    pids = [int(file.read_text()) for file in tmp_path.glob("*.pid")]
    assert comes_true(lambda: not any(map(runs, pids)), 5.0)


def test_no_rank_takes_the_group_away_before_all_are_done():
    assert run_ranks(watch_rank_0) == [None, None]
