"""The scripts of docs/slurm.md on a real Slurm cluster: as they are printed, but for what a user replaces.

`make slurm` runs these tests. `make test` does not: they start daemons.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagereg.checkpoint.store.open_store import open_store

from ..support.app import App
from ..support.lab import CHECKOUT, LOCAL
from ..support.programs import comes_true
from ..support.slurm import Slurm

START_S = 120.0  # of two ranks, on a busy machine
SCRIPT = """
import os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import stagereg


@stagereg.main(config_path="conf", config_name="app")
def train(cfg):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model.module, "optimizer": optimizer}
    with stagereg.instantiate(cfg.checkpoint) as checkpointer:
        begun = checkpointer.restore(state) or 0
        if dist.get_rank() == 0:
            print(f"BEGINS after {begun} of {dist.get_world_size()}", flush=True)
        for step in range(begun + 1, cfg.steps + 1):
            optimizer.zero_grad()
            model(torch.full((4, 8), float(step))).square().mean().backward()
            optimizer.step()
            stagereg.log(step, loss=1.0 / step)
            time.sleep(cfg.step_s)
            checkpointer.maybe_save(step, state)
            if step == cfg.fails_at and begun == 0:
                raise ValueError("no cheese")
            if dist.get_rank() == 0 and step == begun + 20:
                print(f"GOES {step}", flush=True)
    if dist.get_rank() == 0:
        print(f"ENDS after {cfg.steps}", flush=True)
    return 1.0


if __name__ == "__main__":
    train()
"""
CONFIG = """
defaults: [stagereg, _self_]
nproc: 1
heartbeat_timeout: 5
steps: 40
step_s: 0.02
fails_at: 0
checkpoint: {every: 10}
"""
REPLACED = {
    "/shared/runs/gpt7": "{run}",
    "#SBATCH --gpus-per-node=8\n": "",
    "#SBATCH --cpus-per-task=64\n": "#SBATCH --cpus-per-task=2\n",
    "#SBATCH --nodes=4\n": "#SBATCH --nodes=2\n",
    "--nproc-per-node=8": "--nproc-per-node=1",
    "nproc=8": "nproc=2",
    "=ib0": "=eth0",
}
"""What a user replaces in the scripts of the page."""
AFTER_A_SIGNAL = "[[ $code =~ ^(75|138|143)$ ]]"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif("STAGEREG_SLURM" not in os.environ, reason="make slurm runs these: they start Slurm's daemons"),
]


def script_of(page: str, heading: str) -> str:
    """Return the first script of a section of the page."""
    section = (CHECKOUT / "docs" / page).read_text().split(f"\n{heading}\n", 1)[1]
    found = re.search(r"```bash\n(#!/bin/bash\n.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


class Job:
    """A script of the page, submitted; what it prints is in one file, of all its starts."""

    def __init__(
        self,
        slurm: Slurm,
        app: App,
        heading: str,
        *options: str,
        overrides: str = "",
        name: str = "job",
        when: str = "",
    ) -> None:
        self.slurm, self.app, self.run = slurm, app, app.folder / name
        text = script_of("slurm.md", heading)
        text = text.replace(AFTER_A_SIGNAL, when or AFTER_A_SIGNAL)
        for old, new in REPLACED.items():
            text = text.replace(old, new.format(run=self.run))
        script = app.folder / f"{name}.sh"
        script.write_text(text.replace('hydra.run.dir="$run"', f'hydra.run.dir="$run" {overrides}'))
        self._file = app.folder / f"{name}.out"
        self.number = slurm.submit(script, f"--output={self._file}", "--open-mode=append", *options)

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._file.read_text() if self._file.exists() else ""

    def await_output(self, text: str, seconds: float = START_S) -> str:
        """Wait until it has printed something that matches, and return that."""
        assert comes_true(lambda: re.search(text, self.output) is not None, seconds), self.told()
        found = re.search(text, self.output)
        assert found is not None
        return found[0]

    def end(self) -> str:
        """Wait until it has come to its end, and return what it has printed."""
        self.slurm.await_job(self.number, "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "CANCELLED", seconds=480)
        assert self.slurm.state(self.number) == "COMPLETED", self.told()
        return self.output

    def begun(self) -> list[int]:
        """Return after which steps it has begun."""
        return [int(each) for each in re.findall(r"BEGINS after (\d+) ", self.output)]

    def steps(self) -> list[int]:
        """Return the steps of its checkpoints."""
        return [each.manifest.step for each in open_store(f"{self.run}/checkpoints").checkpoints()[0]]

    def told(self) -> str:
        return f"{self.output[-6000:]}\n{self.slurm.fields(self.number)}"


@pytest.fixture
def app(tmp_path: Path) -> App:
    return App(tmp_path, {"train.py": SCRIPT, "conf/app.yaml": CONFIG})


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm"), nodes=3) as cluster:
        yield cluster


MACHINES, ALONE = "## Several nodes", "## One node"


@pytest.mark.parametrize("heading", [MACHINES, ALONE])
def test_a_job_that_another_one_takes_the_nodes_of_goes_on_later(slurm: Slurm, app: App, heading: str) -> None:
    job = Job(slurm, app, heading, "--exclusive", overrides="steps=400 step_s=0.05")
    job.await_output("GOES 20")
    slurm.run("sbatch", "--partition=urgent", "--nodes=3", "--exclusive", "--wrap=sleep 5", cwd=app.folder)
    saved = int(re.findall(r"\d+", job.await_output(r"preempted by \w+: step \d+ is saved"))[0])
    output = job.end()
    assert job.begun() == [0, saved], output


@pytest.mark.parametrize("heading", [MACHINES, ALONE])
def test_a_job_that_is_preempted_before_it_can_save_goes_on_later(slurm: Slurm, app: App, heading: str) -> None:
    job = Job(slurm, app, heading, "--exclusive")
    slurm.await_job(job.number, "RUNNING")
    time.sleep(3)  # the processes are there, and import
    slurm.run("sbatch", "--partition=urgent", "--nodes=3", "--exclusive", "--wrap=sleep 5", cwd=app.folder)
    assert "ENDS after 40" in job.end()
    assert slurm.fields(job.number)["Restarts"] == "1"
    assert "preempted by" not in job.output


@pytest.mark.parametrize("heading", [MACHINES, ALONE])
def test_a_job_whose_time_is_over_goes_on_in_a_new_one(slurm: Slurm, app: App, heading: str) -> None:
    job = Job(slurm, app, heading, "--time=3", "--signal=B:USR1@60", overrides="steps=400 step_s=0.3")
    saved = int(re.findall(r"step (\d+)", job.await_output(r"preempted by SIGUSR1: step \d+ is saved", 200))[0])
    output = job.end()
    assert job.begun()[:2] == [0, saved], output


@pytest.mark.parametrize("heading", [MACHINES, ALONE])
def test_a_job_that_is_canceled_has_saved_its_step(slurm: Slurm, app: App, heading: str) -> None:
    job = Job(slurm, app, heading, overrides="steps=100000 checkpoint.every=100000")
    job.await_output("GOES 20")
    slurm.run("scancel", job.number)
    slurm.await_job(job.number, "CANCELLED")
    job.await_output("preempted by SIGTERM: step")
    assert job.steps()
    time.sleep(15)  # longer than it takes to start a job that was put back into the queue
    assert slurm.state(job.number) == "CANCELLED", job.told()


@pytest.mark.parametrize("how", ["down", "power"])
def test_a_job_that_loses_a_node_goes_on_with_another_one(slurm: Slurm, app: App, how: str) -> None:
    job = Job(slurm, app, MACHINES, overrides="steps=2000 step_s=0.02 checkpoint.every=5")
    job.await_output("GOES 20")
    first = slurm.run("scontrol", "show", "hostnames", slurm.fields(job.number)["NodeList"]).split()[0]
    lost = next(each for each in slurm.nodes if each.name == first)
    if how == "down":
        slurm.run("scontrol", "update", f"nodename={lost.name}", "state=down", "reason=test")
    else:
        lost.kill()
    output = job.end()
    assert len(job.begun()) == 2, output
    assert job.begun()[1] > 0, output


def test_a_job_goes_on_from_what_its_nodes_have_kept(slurm: Slurm, app: App) -> None:
    folder = f"{LOCAL}/t"
    given = "steps=1500 step_s=0.02 checkpoint.every=100000 tier.every=5 tier.copies=1"
    given += " checkpoint.preemption.grace_period=null"
    job = Job(slurm, app, MACHINES, overrides=f"{given} tier=disk tier.dir={folder}")
    job.await_output("GOES 20")
    slurm.run("scontrol", "requeue", job.number)
    output = job.end()
    assert len(job.begun()) == 2, output
    assert job.begun()[1] > 0, output
    assert re.search(f"resumed from {folder}", output), output


def test_a_job_that_has_failed_goes_on_where_its_script_says_so(slurm: Slurm, app: App) -> None:
    text = (CHECKOUT / "docs" / "slurm.md").read_text()
    found = re.search(r"\n`(\[ \"\$code\" .*)`\.\n", text)
    assert found is not None
    job = Job(slurm, app, MACHINES, overrides="fails_at=35", when=found[1])
    output = job.end()
    assert job.begun() == [0, 30], output
    assert len(re.findall(r"^ValueError: no cheese", output, re.MULTILINE)) == 1, output


def test_jobs_of_an_array_have_a_directory_each(slurm: Slurm, app: App) -> None:
    job = Job(slurm, app, ALONE, "--array=0-1", name="job-$SLURM_ARRAY_TASK_ID")
    assert comes_true(lambda: job.output.count("ENDS after 40") == 2, START_S), job.told()


def test_a_sweep_of_jobs_on_two_nodes_each_ends_in_one_report(slurm: Slurm, app: App) -> None:
    text = (CHECKOUT / "docs" / "slurm.md").read_text()
    found = re.search(r"```yaml\n# conf/hydra/launcher/cluster.yaml\n(.*?)```", text, re.DOTALL)
    assert found is not None
    config = re.sub(r"gpus_per_node: 8\n", "", found[1]).replace("cpus_per_task: 64", "cpus_per_task: 1")
    app.write("conf/hydra/launcher/cluster.yaml", config.replace("=ib0", "=eth0"))
    given = ["hydra/launcher=cluster", "nproc=1", "stager=pinned_cached,blocking", f"hydra.sweep.dir={app.folder}/all"]
    sweep = slurm.start([sys.executable, "train.py", "-m", *given], app.folder)
    assert sweep.wait(400) == 0, sweep.output + slurm.story()
    assert re.search(r"pinned_cached.*\n.*blocking|blocking.*\n.*pinned_cached", sweep.output), sweep.output
    outputs = "".join(path.read_text() for path in (app.folder / "all").glob("**/*_0_log.out"))
    assert outputs.count("BEGINS after 0 of 2") == 2, outputs
