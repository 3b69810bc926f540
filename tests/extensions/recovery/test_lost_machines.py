"""Machines that die, freeze or lose their cable under a run: all ranks learn of it, end, and those left go on."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from stagereg.checkpoint.store.open_store import open_store

from ...support.app import App
from ...support.lab import PORT, Lab, Process, children_of
from ...support.programs import comes_true

START_S = 110.0
BOUND_S = 60.0  # on a busy machine, where 5 s and what the kernel's own time-outs would be (minutes) stay apart
SCRIPT = """
import os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import stagereg
import stagereg.checkpoint.store.failpoints as failpoints


def go_and_sleep(moment):
    if moment == "held":
        print("GOES", flush=True)
        time.sleep(5)


@stagereg.main(config_path="conf", config_name="app")
def train(cfg):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    state = {"model": model.module}
    if cfg.hangs == "in a step" and rank == 0:
        print("GOES", flush=True)
        time.sleep(1000)
    if cfg.hangs == "in a commit" and rank == 0:
        failpoints.watch(go_and_sleep)
    with stagereg.instantiate(cfg.checkpoint) as checkpointer:
        if cfg.hangs == "in restore" and rank == 1:
            print("GOES", flush=True)
            time.sleep(1000)
        begun = checkpointer.restore(state)
        for step in range((begun or 0) + 1, 1_000_000):
            model(torch.ones(4, 8)).sum().backward()
            time.sleep(0.05)
            checkpointer.maybe_save(step, state)
            if step == (begun or 0) + 10:
                print(f"GOES {rank} of {size} from {begun}\\n", end="", flush=True)


train()
"""
CONFIG = """
defaults: [stagereg, _self_]
heartbeat_timeout: 3
hangs: nowhere
checkpoint: {every: 5}
"""


pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def app(tmp_path: Path) -> App:
    return App(tmp_path, {"app.py": SCRIPT, "conf/app.yaml": CONFIG})


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(machines=3) as machines:
        yield machines


def started(lab: Lab, app: App, *overrides: str) -> list[Process]:
    """Start a rank on each machine, and wait until they train, or one hangs as it was told to."""
    job = lab.torchrun([str(app.folder / "app.py"), f"hydra.run.dir={app.folder}/run", *overrides])
    processes = [*job.processes.values()]
    waiting = processes[1:2] if "hangs=in restore" in overrides else processes[:1]
    for each in waiting if "hangs" in "".join(overrides) else processes:
        each.await_output("GOES", START_S)
    return processes


def end_for(processes: Sequence[Process], rank: int | str, machine: str) -> None:
    """Wait until these ranks end, and one has said for them that another one is lost, with its machine."""
    for process in processes:
        assert process.wait(BOUND_S)
    output = "".join(process.output for process in processes)
    assert re.search(rf"rank {rank} failed \(process \d+ on {machine}\): ", output), output


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cut", "kill", "freeze"])
def test_a_lost_machine_is_named_on_all_others_and_ends_itself(lab: Lab, app: App, loss: str) -> None:
    first, lost, last = started(lab, app)
    machine = lab.machines[1]
    getattr(machine, loss)()
    end_for((first, last), 1, machine.name)
    if loss == "freeze":
        machine.thaw()
        end_for((lost,), r"\d", r"\w+")  # others have had it for lost, and are gone
    if loss == "cut":
        end_for((lost,), 0, lab.machines[0].name)  # it cannot know whether it is cut off, or the other one is


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cut", "kill", "freeze"])
def test_without_the_machine_that_has_the_store_the_others_end_and_the_next_start_resumes(
    lab: Lab, app: App, loss: str
) -> None:
    first, *others = started(lab, app)
    getattr(lab.machines[0], loss)()
    end_for(others, 0, lab.machines[0].name)
    assert re.search("the rendezvous store of this run .* cannot agree on a step", "".join(x.output for x in others))
    lab.machines[0].kill()
    first.wait(BOUND_S)
    complete, damaged = open_store(f"{app.folder}/run/checkpoints").checkpoints()
    assert (damaged, loss == "cut" or complete[0].manifest.step % 5 == 0) == ([], True)
    again = lab.torchrun([str(app.folder / "app.py"), f"hydra.run.dir={app.folder}/run"], machines=[1, 2])
    for process in again.processes.values():
        process.await_output(f"of 2 from {complete[0].manifest.step}", START_S)


@pytest.mark.slow
@pytest.mark.parametrize("hangs", ["in a step", "in restore"])
def test_a_rank_that_is_not_in_a_collective_learns_of_a_loss_too(lab: Lab, app: App, hangs: str) -> None:
    first, _, last = started(lab, app, f"hangs={hangs}")
    lab.machines[1].cut()
    end_for((first, last), 1, lab.machines[1].name)


@pytest.mark.slow
def test_a_machine_that_freezes_in_a_commit_and_thaws_damages_nothing(lab: Lab, app: App) -> None:
    first, *others = started(lab, app, "hangs=in a commit")
    store = open_store(f"{app.folder}/run/checkpoints")
    lab.machines[0].freeze()
    end_for(others, 0, lab.machines[0].name)
    lab.machines[0].thaw()
    end_for((first,), r"\d", r"\w+")
    complete, damaged = store.checkpoints()
    steps = [each.manifest.step for each in complete]
    assert (damaged, len({*steps})) == ([], len(steps))


@pytest.mark.slow
def test_a_rank_that_is_stopped_in_a_commit_costs_no_step(lab: Lab, app: App) -> None:
    first, *others = started(lab, app, "hangs=in a commit")
    store = open_store(f"{app.folder}/run/checkpoints")
    assert first.pid is not None
    [rank] = children_of(first.pid)  # torchrun, which has the rendezvous store, goes on
    os.kill(rank, signal.SIGSTOP)
    end_for(others, 0, lab.machines[0].name)
    newest = store.checkpoints()[0][0]
    assert newest.manifest.lost, "the surviving ranks have taken the directory from a process that still has its lock"
    assert first.wait(BOUND_S)
    complete, damaged = store.checkpoints()
    steps = [each.manifest.step for each in complete]
    assert (complete[0], damaged, len({*steps})) == (newest, [], len(steps))


@pytest.mark.slow
def test_a_rank_that_is_cut_off_ends_at_a_signal_whatever_heartbeat_timeout_is(lab: Lab, app: App) -> None:
    _, lost, _ = started(lab, app, "heartbeat_timeout=3600", "checkpoint.preemption.grace_period=3000s")
    lab.machines[1].cut()
    lost.kill(signal.SIGTERM)
    end_for((lost,), 0, lab.machines[0].name)


@pytest.mark.slow
def test_those_who_are_left_go_on_below_elastic_torchrun(lab: Lab, app: App) -> None:
    meet = [f"--rdzv-endpoint={lab.machines[0].address}:{PORT}", "--rdzv-backend=c10d", "--rdzv-id=lab"]
    elastic = ["--nnodes=2:3", "--max-restarts=3", "--rdzv-conf=last_call_timeout=5", *meet]
    program = [str(app.folder / "app.py"), f"hydra.run.dir={app.folder}/run"]
    command = [sys.executable, "-m", "torch.distributed.run", *elastic, *program]
    first, lost, last = [machine.start(command, None, app.folder) for machine in lab.machines]
    for process in (first, lost, last):
        process.await_output("GOES", START_S)
    lab.machines[1].cut()
    goes_on = re.compile(r"GOES \d of 2 from \d+")
    for process in (first, last):
        assert comes_true(lambda process=process: goes_on.search(process.output) is not None, START_S), process.output
    assert comes_true(lambda: re.search(r"rank \d+ failed", lost.output), BOUND_S)


@pytest.mark.slow
def test_a_machine_that_is_cut_off_in_a_commit_with_the_store_costs_no_step(lab: Lab, app: App) -> None:
    first, *others = started(lab, app, "hangs=in a commit")
    lab.machines[0].cut()
    end_for(others, 0, lab.machines[0].name)
    assert first.wait(BOUND_S)
    newest = max(open_store(f"{app.folder}/run/checkpoints").checkpoints()[0], key=lambda each: each.manifest.step)
    output = "".join(each.output for each in (first, *others))
    assert newest.manifest.lost, output
    assert "has not ended" not in output  # which waited for the store's answers, one after the other
