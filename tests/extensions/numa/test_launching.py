"""``numa=auto``: a rank and its threads stay on the node of its GPU, or one line says why not and the run goes on."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch.distributed import HashStore

import stagereg.extensions.numa.launching as launching
from stagereg.base.providers import has
from stagereg.errors import LaunchError
from stagereg.extensions.numa.launching import NumaLauncher, NumaRank
from stagereg.launch.run_store import RunStore

from ...support.forked import forked
from ...support.programs import SAVING, Program

AUTO = OmegaConf.create({"numa": "auto"})
NODES = {0: {0, 1, 2, 3}, 1: {4, 5, 6, 7}}
"""The CPUs of each node of the machine in these tests."""


@pytest.mark.parametrize(("given", "is_on"), [("auto", True), ("off", False), (False, False), (None, False)])
def test_a_single_rank_gets_a_process_that_can_be_bound(given: Any, is_on: bool) -> None:
    assert NumaLauncher().check(OmegaConf.create({"numa": given})) is is_on
    assert NumaLauncher().check(OmegaConf.create({})) is False


@pytest.mark.parametrize("given", ["on", True, "node", 1, [0]])
def test_another_value_is_refused_before_ranks_start(given: Any) -> None:
    with pytest.raises(LaunchError, match="numa must be off or auto, not "):
        NumaLauncher().check(OmegaConf.create({"numa": given}))


class Machine:
    """A machine with two nodes and two GPUs on each: what a process may use and is bound to, and what it reports."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allowed, self.bound, self.folder, self.threads = set(range(8)), dict[int, set[int]](), folder, 8
        for gpu in range(4):
            self.reports(gpu, str(gpu // 2))
        monkeypatch.setattr(launching, "_DEVICES", folder)
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
        monkeypatch.setattr("torch.cuda.get_device_properties", self.properties)
        name = "torch.numa.binding._get_cpu_indices_for_numa_node_MAYBE_NOT_ALLOWED"
        monkeypatch.setattr(name, lambda *, numa_node_index: NODES[numa_node_index])
        monkeypatch.setattr("os.sched_getaffinity", lambda thread: self.bound.get(thread, self.allowed))
        monkeypatch.setattr("os.sched_setaffinity", self.bound.__setitem__)
        monkeypatch.setattr("torch.get_num_threads", lambda: self.threads)
        monkeypatch.setattr("torch.set_num_threads", lambda count: setattr(self, "threads", count))
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def properties(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=0xA0 + gpu, pci_device_id=0)

    def reports(self, gpu: int, node: str) -> None:
        file = self.folder / f"0000:a{gpu}:00.0" / "numa_node"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"{node}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def run(monkeypatch: pytest.MonkeyPatch, store: Any = None, rank: int = 0, cfg: Any = AUTO) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    this: Any = SimpleNamespace(rank=rank, store=RunStore(store or HashStore(), rank, 8))
    with NumaRank().around(this, cfg):
        pass


@pytest.mark.parametrize(("local_rank", "node"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 0), (6, 1)])
def test_a_rank_is_bound_to_the_node_of_its_gpu(
    local_rank: int, node: int, machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run(monkeypatch, rank=local_rank)
    assert machine.bound[0] == NODES[node]
    text = f"Rank {local_rank} uses 4 CPUs of NUMA node {node}, the node of cuda:{local_rank % 4}."
    assert [record.getMessage() for record in caplog.records] == [text]


def test_a_rank_is_bound_to_the_cpus_that_a_cpuset_leaves_of_the_node(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.allowed = {3, 4, 5}
    run(monkeypatch, rank=2)
    assert machine.bound[0] == {4, 5}


@pytest.mark.parametrize(("before", "chosen", "after"), [(8, None, 4), (2, None, 2), (8, "8", 8)])
def test_torch_computes_on_no_more_threads_than_cpus_unless_the_user_chose_their_number(
    before: int, chosen: str | None, after: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.threads = before
    if chosen is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    run(monkeypatch)
    assert machine.threads == after


def test_nothing_is_bound_unasked(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for cfg in ({}, {"numa": "off"}, {"numa": False}):
        run(monkeypatch, cfg=OmegaConf.create(cfg))
    assert (machine.bound, machine.threads) == ({}, 8)


REASONS = {
    "cpuset": "this process may use no CPU of NUMA node 0, the node of cuda:0",
    "unknown node": "the system does not report the NUMA node of cuda:0",
    "no file": "No such file or directory",
    "no device": "there is no CUDA device",
    "no module": "torch.numa",
    "no function": "has no attribute '_get_allowed_logical_cpu_indices_for_numa_node'",
    "no address": "no attribute 'pci_domain_id'",
    "refused": "Operation not permitted",
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_rank_that_cannot_be_bound_runs_unbound_and_one_line_says_why(
    reason: str, machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    match reason:
        case "cpuset":
            machine.allowed = {4, 5}
        case "unknown node":
            machine.reports(0, "-1")
        case "no file":
            (machine.folder / "0000:a0:00.0" / "numa_node").unlink()
        case "no device":
            monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        case "no module":
            monkeypatch.setitem(sys.modules, "torch.numa.binding", None)
        case "no function":
            monkeypatch.delattr("torch.numa.binding._get_allowed_logical_cpu_indices_for_numa_node")
        case "no address":
            monkeypatch.setattr("torch.cuda.get_device_properties", lambda gpu: SimpleNamespace())
        case "refused":
            monkeypatch.setattr("os.sched_setaffinity", refuse)
    store = HashStore()
    for _ in range(2):  # of two ranks with one GPU, or of a rank that is started again
        run(monkeypatch, store)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("stagereg: numa=auto has no effect on rank 0: ")
    assert REASONS[reason] in line
    assert (machine.bound, machine.threads) == ({}, 8)


def refuse(*_: object) -> None:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_threads_that_exist_and_come_later_are_bound_and_others_left_as_they_are() -> None:
    program = """
import os, threading
from stagereg.extensions.numa.launching import bind

first, second, *_ = sorted(os.sched_getaffinity(0))
go, seen = threading.Event(), {}
def early(name, own):
    if own is not None:
        os.sched_setaffinity(0, own)
    ready.wait()
    go.wait(20)
    seen[name] = os.sched_getaffinity(0)
ready = threading.Barrier(3)
threads = [threading.Thread(target=early, args=each) for each in (("early", None), ("its own", {second}))]
for thread in threads: thread.start()
ready.wait()
bind({first})
threads.append(threading.Thread(target=lambda: seen.update(later=os.sched_getaffinity(0))))
threads[-1].start()
go.set()
for thread in threads: thread.join()
assert seen == {"early": {first}, "later": {first}, "its own": {second}}, seen
assert os.sched_getaffinity(0) == {first}
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


SCRIPT = """
import json, os, signal, time
import stagereg
import stagereg.extensions.numa.launching as launching

if NEAR:
    launching.find_cpus = lambda local_rank: ("cuda:0", 0, {sorted(os.sched_getaffinity(0))[local_rank]})


@stagereg.main(config_path="conf", config_name="app")
def train(cfg):
    attempt = int(os.environ["STAGEREG_ATTEMPT"])
    with open(f"/proc/{os.getppid()}/cmdline") as parent, open(f"{cfg.answers}/{os.environ['RANK']}.json", "a") as file:
        cpus, warm = sorted(os.sched_getaffinity(0)), "recovery.warm" in parent.read()
        file.write(json.dumps({"cpus": cpus, "warm": warm, "attempt": attempt}) + "\\n")
    if attempt == 0 and cfg.wait_s:
        time.sleep(cfg.wait_s)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    train()
"""


def program_in(folder: Path, near: bool) -> Program:
    return Program(folder, f"{SAVING}\nnproc: 2\nwait_s: 0\n", f"NEAR = {near}\n{SCRIPT}")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
@pytest.mark.parametrize("how", ["launcher", pytest.param("warm", marks=pytest.mark.slow)])
def test_each_rank_has_the_cpus_of_its_own_gpu_also_if_it_is_forked(how: str, tmp_path: Path) -> None:
    if how == "warm" and not has("recovery"):
        pytest.skip("no restarts")
    program, cpus = program_in(tmp_path, near=True), sorted(os.sched_getaffinity(0))
    more = ["restarts=1", "wait_s=30"] if how == "warm" else []
    ended = program.run("numa=auto", *more, forks_ranks=not more)
    assert ended.returncode == 0, ended.stderr
    for rank in (0, 1):
        answers = program.answers_of(rank)
        assert [each["cpus"] for each in answers] == [[cpus[rank]]] * (2 if more else 1)
        assert [each["warm"] for each in answers][1:] == ([True] if more else [])


def test_a_run_without_gpus_goes_on_with_one_line(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    program = program_in(tmp_path, near=False)
    ended = program.run("numa=auto")
    assert ended.returncode == 0, ended.stderr
    assert (ended.stderr + ended.stdout).count("numa=auto has no effect on rank") == 1
    refused = program.run("numa=always")
    assert refused.returncode == 1
    assert "numa must be off or auto, not always." in refused.stderr


def test_a_child_is_bound_on_its_own() -> None:
    def child() -> None:
        launching.bind({min(os.sched_getaffinity(0))})
        assert len(os.sched_getaffinity(0)) == 1

    before = os.sched_getaffinity(0)
    assert forked(child) == 0
    assert os.sched_getaffinity(0) == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_the_cpus_of_a_real_gpu_are_those_of_one_node() -> None:
    program = """
import json, sys
from pathlib import Path
from stagereg.extensions.numa.launching import bind, find_cpus
try:
    device, node, cpus = find_cpus(0)
except RuntimeError as error:
    print(json.dumps(str(error)))
else:
    bind(cpus)
    lists = Path("/sys/devices/system/node", f"node{node}", "cpulist").read_text().strip().split(",")
    ends = [[int(end) for end in each.split("-")] for each in lists]
    print(json.dumps(sorted(cpus - {cpu for each in ends for cpu in range(each[0], each[-1] + 1)})))
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=200, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == [] or "NUMA node" in found, "on one node, or a reason"
