"""A failed rank is known to all others in seconds, however it has failed; a rank that is busy has not failed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagereg.extensions.recovery.heartbeat import _state

from ...support.lab import children_of
from ...support.programs import await_gone, comes_true

BOUND_S = 30.0
TIMEOUT_S = 2.0
RANK = """
import ctypes, json, sys, time
from pathlib import Path
from stagereg.extensions.recovery.failure_monitor import FailureMonitor

rank, root, what = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]

def meet(hub):
    if hub is not None:
        (root / "hub.tmp").write_text(json.dumps(hub))
        (root / "hub.tmp").rename(root / "hub")
        return hub
    while not (root / "hub").exists():
        time.sleep(0.01)
    return json.loads((root / "hub").read_text())

timeout_s = 60.0 if what == "is asked to end" else 2.0
monitor = FailureMonitor(rank, 3, timeout_s, "sesame", meet, lambda text: print(text, flush=True))
print("UP", flush=True)
if what == "needs time":
    monitor.give_time(100)
if what == "holds the lock of the interpreter":
    ctypes.PyDLL(None).usleep(5_000_000)
if what == "is asked to end":
    while not (root / "asked").exists():
        time.sleep(0.01)
    if rank == 2:
        monitor.shorten_timeout()
if what == "ends":
    time.sleep(1)
    monitor.close()
    sys.exit()
time.sleep(1000)
"""


class Ranks:
    """Processes with a failure monitor each; what they print goes to files."""

    def __init__(self, root: Path) -> None:
        self.root, self.processes = root, list[subprocess.Popen[bytes]]()
        self.master = "127.0.0.1"  # so all ranks are on this machine

    def start(self, *whats: str) -> None:
        for rank, what in enumerate(whats):
            with (self.root / f"out{rank}").open("wb") as out:
                command = [sys.executable, "-c", RANK, str(rank), str(self.root), what]
                how = {"cwd": self.root, "env": {**os.environ, "MASTER_ADDR": self.master}}
                self.processes.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, **how))
        assert comes_true(lambda: all("UP" in self.said(rank) for rank in range(len(whats))), BOUND_S)

    def said(self, rank: int) -> str:
        return (self.root / f"out{rank}").read_text()

    def end(self) -> None:
        for each in self.processes:
            each.kill()
            each.wait()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    started = Ranks(tmp_path)
    yield started
    started.end()
    assert comes_true(lambda: not heartbeats_of(tmp_path), BOUND_S), "a heartbeat process outlives its rank"


def heartbeats_of(root: Path) -> list[str]:
    """Processes that know where the hub of these ranks is."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"heartbeat.py" in place.read_bytes() and os.readlink(place.parent / "cwd") == str(root):
                found.append(place.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("failed", [0, 1])
@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_stopped_is_named_on_all_others(
    ranks: Ranks, failed: int, harm: signal.Signals
) -> None:
    why = {signal.SIGKILL: "its process has terminated", signal.SIGSTOP: "its process was suspended"}[harm]
    ranks.start("", "", "")
    gone = ranks.processes[failed]
    gone.send_signal(harm)
    for rank in {0, 1, 2} - {failed}:
        assert comes_true(
            lambda rank=rank: f"rank {failed} failed (process {gone.pid} on " in ranks.said(rank), BOUND_S
        )
        assert why in ranks.said(rank)
    if harm == signal.SIGSTOP:  # nobody counts on it any more, and it must not go on
        assert await_gone(gone.pid)


def test_if_a_rank_is_asked_to_end_all_detect_a_failure_soon(ranks: Ranks) -> None:
    ranks.start(*["is asked to end"] * 3)
    ranks.processes[1].send_signal(signal.SIGSTOP)
    (ranks.root / "asked").touch()
    for rank in (0, 2):
        assert comes_true(lambda rank=rank: "rank 1 failed" in ranks.said(rank), BOUND_S)


def test_a_rank_that_hears_nothing_of_the_hub_is_ended_unless_it_was_given_time(ranks: Ranks) -> None:
    ranks.start("", "", "needs time")
    [hub] = children_of(ranks.processes[0].pid)
    os.kill(hub, signal.SIGSTOP)
    for rank in (1, 2):
        assert comes_true(lambda rank=rank: "rank 0 failed" in ranks.said(rank), BOUND_S)
        assert "no heartbeat for 2 s" in ranks.said(rank)
    ranks.processes[1].wait(BOUND_S)
    time.sleep(TIMEOUT_S)
    assert ranks.processes[2].poll() is None, "it was given time before rank 0 had failed, since another one had"
    os.kill(hub, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_all_processes_is_none_to_a_heartbeat_process(ranks: Ranks, number: signal.Signals) -> None:
    """As Slurm sends it to each process of a step: the rank saves, and must not be taken for failed meanwhile."""
    ranks.start("", "")
    heartbeats = [each for rank in ranks.processes for each in children_of(rank.pid)]
    assert len(heartbeats) == 2
    for each in heartbeats:
        os.kill(each, number)
    ranks.processes[1].kill()
    assert comes_true(lambda: "rank 1 failed" in ranks.said(0), BOUND_S), "the heartbeats go on"
    assert " failed (" not in ranks.said(1)


@pytest.mark.parametrize(("what", "busy"), [("ends", 0), ("ends", 1), ("holds the lock of the interpreter", 1)])
def test_a_rank_that_is_busy_or_ends_in_order_has_not_failed(ranks: Ranks, what: str, busy: int) -> None:
    ranks.start(*(what if rank == busy else "" for rank in range(3)))
    time.sleep(3 * TIMEOUT_S)
    assert [ranks.said(rank) for rank in {0, 1, 2} - {busy}] == ["UP\n", "UP\n"]


def test_a_rank_that_a_debugger_holds_has_not_failed(ranks: Ranks) -> None:
    ranks.start("", "", "")
    hold = (
        f"import ctypes, time; assert not ctypes.CDLL(None).ptrace(16, {ranks.processes[1].pid}, 0, 0); time.sleep(100)"
    )
    debugger = subprocess.Popen([sys.executable, "-c", hold])
    try:
        assert comes_true(lambda: _state(ranks.processes[1].pid) == "t", BOUND_S)
        time.sleep(3 * TIMEOUT_S)
        assert [ranks.said(rank) for rank in (0, 2)] == ["UP\n", "UP\n"]
    finally:
        debugger.kill()
        debugger.wait()


def kill_heartbeat(process: subprocess.Popen[bytes]) -> None:
    [heartbeat] = children_of(process.pid)
    os.kill(heartbeat, signal.SIGKILL)
    assert comes_true(lambda: children_of(process.pid) not in ([], [heartbeat]), BOUND_S), "it is not started again"


@pytest.mark.parametrize("master", ["127.0.0.1", ""], ids=["one machine", "several"])
@pytest.mark.parametrize("whose", [[0], [1], [0, 1, 2]], ids=["of the hub", "of another", "of all"])
def test_a_heartbeat_process_that_is_killed_costs_no_rank_and_is_started_again(
    ranks: Ranks, whose: list[int], master: str
) -> None:
    ranks.master = master
    ranks.start("", "", "")
    for rank in whose:
        kill_heartbeat(ranks.processes[rank])
    time.sleep(2 * TIMEOUT_S)  # in which a silent rank would fail
    assert not any(" failed (" in ranks.said(rank) for rank in range(3)), [ranks.said(rank) for rank in range(3)]
    ranks.processes[2].kill()
    for rank in (0, 1):
        assert comes_true(lambda rank=rank: "rank 2 failed" in ranks.said(rank), BOUND_S)
        assert "its process has terminated" in ranks.said(rank)


@pytest.mark.parametrize("ends", [0, 1])
def test_a_rank_that_ends_while_a_heartbeat_process_is_away_is_named(ranks: Ranks, ends: int) -> None:
    """The next hub is given the ranks of the previous hub, and a closed port means that rank 0 has ended."""
    ranks.start("", "", "")
    [hub] = children_of(ranks.processes[0].pid)
    os.kill(ranks.processes[0].pid, signal.SIGSTOP)  # so that it starts no heartbeat process now
    os.kill(hub, signal.SIGKILL)
    ranks.processes[ends].kill()
    if ends != 0:
        os.kill(ranks.processes[0].pid, signal.SIGCONT)
    for rank in {0, 2} - {ends}:
        assert comes_true(lambda rank=rank: f"rank {ends} failed" in ranks.said(rank), BOUND_S)
    assert "its process has terminated" in ranks.said(2)


@pytest.mark.parametrize("whose", [0, 1])
def test_the_run_continues_without_a_heartbeat_process_that_is_killed_again_and_again(ranks: Ranks, whose: int) -> None:
    ranks.start("", "", "")

    def continues_without() -> bool:
        for heartbeat in children_of(ranks.processes[whose].pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(heartbeat, signal.SIGKILL)
        return "The run continues, but rank failures are no longer detected quickly." in ranks.said(whose)

    assert comes_true(continues_without, BOUND_S)
    assert ranks.said(whose).count("it is being restarted") == 4
    time.sleep(2 * TIMEOUT_S)
    assert not any(" failed (" in ranks.said(rank) for rank in range(3)), [ranks.said(rank) for rank in range(3)]
    assert all(each.poll() is None for each in ranks.processes)
    if whose == 0:
        assert all("Rank 0 has no heartbeat process" in ranks.said(rank) for rank in (1, 2))
    else:
        ranks.processes[2].kill()
        assert comes_true(lambda: "rank 2 failed" in ranks.said(0), BOUND_S), "the others go on as before"


def test_a_rank_that_ends_in_order_after_its_heartbeat_process_was_killed_has_not_failed(ranks: Ranks) -> None:
    ranks.start("", "ends", "")
    [heartbeat] = children_of(ranks.processes[1].pid)
    os.kill(heartbeat, signal.SIGKILL)
    assert ranks.processes[1].wait(BOUND_S) == 0
    time.sleep(2 * TIMEOUT_S)
    assert not any(" failed (" in ranks.said(rank) for rank in (0, 2)), [ranks.said(rank) for rank in range(3)]
