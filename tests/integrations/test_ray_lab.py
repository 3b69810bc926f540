"""Ray on machines of a lab: one with its head, and those with a worker each, one of which is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="make frameworks installs it")

from ..support.lab import LOCAL, Lab
from ..support.programs import comes_true
from .test_ray import PROGRAM, RAY

PORT = 6379
DEATH_S = "3000"
"""Milliseconds in which Ray's head takes a machine for lost that does not answer."""
HEALTH = {f"RAY_health_check_{name}_ms": DEATH_S for name in ("timeout", "period", "initial_delay")}
ENV = {**RAY, **HEALTH, "RAY_health_check_failure_threshold": "2", "RAY_ADDRESS": ""}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("machines", [2, 3])
def test_a_run_goes_on_without_a_machine_that_is_lost(tmp_path: Path, machines: int) -> None:
    """Of three, two have a worker each, and the third one takes over; of two, the head's has room for both."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--object-store-memory=80000000"]
    with Lab(machines, shm_bytes=1 << 30) as lab:
        head, *others = lab.machines
        address = f"{head.address}:{PORT}"
        more = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={LOCAL}/ray"]
        started = {head: head.start([*ray, f"--node-ip-address={head.address}", *more, "--num-cpus=2"], ENV)}
        started[head].await_output("Ray runtime started", 120)
        for each in others:
            here = f"--node-ip-address={each.address}", f"--address={address}", "--num-cpus=2"
            started[each] = each.start([*ray, *here], ENV)
            started[each].await_output("Ray runtime started", 120)
        folder = tmp_path / "run"
        arguments = f"hydra.run.dir={folder}", "restarts=2", "steps=60", "spread=SPREAD", "nproc=2"
        job = head.start([sys.executable, str(PROGRAM), *arguments], {**ENV, "RAY_ADDRESS": address})
        names = folder / "rank-0.txt", folder / "rank-1.txt"
        assert comes_true((folder / "checkpoints" / "latest").exists, 200), job.output
        hosts = {path.read_text().split(" on ")[1].split()[0] for path in names}
        assert len(hosts) == 2  # one worker a machine
        lost = next(each for each in others if each.name in hosts)
        lost.kill()
        job.wait(300)
        assert job.returncode == 0, job.output
        for path in names:
            begun = [line.split() for line in path.read_text().splitlines() if line.startswith("begins")]
            assert len(begun) >= 2
            assert int(begun[-1][2]) > 0
        assert "step-00000060" in job.output
