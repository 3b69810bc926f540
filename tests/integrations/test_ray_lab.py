"""Ray on two and three machines of a lab, one of which is lost."""

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
ENV = {**RAY, **HEALTH, "RAY_AUTH_MODE": "disabled", "RAY_health_check_failure_threshold": "2", "RAY_ADDRESS": ""}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("machines", [2, 3])
def test_a_run_goes_on_without_a_machine_that_is_lost(tmp_path: Path, machines: int) -> None:
    """Each has a worker, and those that are left, one with Ray's head, have room for all."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--object-store-memory=80000000"]
    with Lab(machines, shm_bytes=1 << 30) as lab:
        head, *others = lab.machines
        address = f"{head.address}:{PORT}"
        more = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={LOCAL}/ray"]
        for machine, options in {head: more, **{other: [f"--address={address}"] for other in others}}.items():
            here = f"--node-ip-address={machine.address}", "--num-cpus=2"
            machine.start([*ray, *here, *options], ENV).await_output("Ray runtime started", 120)
        folder = tmp_path / "run"
        arguments = f"hydra.run.dir={folder}", "restarts=2", "steps=60", "spread=SPREAD", f"nproc={machines}"
        job = head.start([sys.executable, str(PROGRAM), *arguments], {**ENV, "RAY_ADDRESS": address})
        names = [folder / f"rank-{rank}.txt" for rank in range(machines)]
        assert comes_true((folder / "checkpoints" / "latest").exists, 200), job.output
        hosts = {path.read_text().split(" on ")[1].split()[0] for path in names}
        assert hosts == {machine.name for machine in lab.machines}
        others[-1].kill()
        job.wait(300)
        assert job.returncode == 0, job.output
        for path in names:
            begun = [line.split() for line in path.read_text().splitlines() if line.startswith("begins")]
            assert len(begun) >= 2
            assert int(begun[-1][2]) > 0
        assert "step-00000060" in job.output
