"""The lab of machines keeps what tests in it rely on: machines are apart, lose power and packets."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from .support.lab import LOCAL, Lab

TELL = f"hostname; cat /proc/sys/kernel/random/boot_id; cat /etc/hosts; ls {LOCAL} /dev/shm; ps -e -o pid= | wc -l"


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(machines=3) as machines:
        yield machines


def test_machines_differ_in_all_but_the_files_that_they_share(lab: Lab, tmp_path: Path) -> None:
    boot_ids = set()
    for number, machine in enumerate(lab.machines):
        write = f"echo {number} > {LOCAL}/mine-{number}; echo {number} > /dev/shm/mine-{number}; echo x >> all"
        assert machine.start(["sh", "-c", write], cwd=tmp_path).wait(20) == 0
        process = machine.start(["sh", "-c", TELL])
        process.wait(20)
        name, boot_id, *_ = process.output.splitlines()
        boot_ids.add(boot_id)
        assert name == machine.name == f"machine{number}"
        assert process.output.count("mine-") == process.output.count(f"mine-{number}") == 2
        assert all(f"{each.address} {each.name}" in process.output for each in lab.machines)
        assert int(process.output.split()[-1]) < 8, "sees processes of others"
        assert (machine.disk / f"mine-{number}").read_text() == (machine.shm / f"mine-{number}").read_text()
    assert len(boot_ids) == 3
    assert (tmp_path / "all").read_text() == "x\n" * 3


def test_without_power_all_processes_and_the_memory_are_gone_and_the_disk_is_not(lab: Lab) -> None:
    machine = lab.machines[1]
    script = f"touch {LOCAL}/kept /dev/shm/lost; cat /proc/sys/kernel/random/boot_id; (sleep 1000)& echo on; wait"
    process = machine.start(["sh", "-c", script])
    process.await_output("on", 20)
    machine.kill()
    assert process.wait(20) == 128 + signal.SIGKILL
    assert [path.name for path in machine.disk.iterdir()] == ["kept"]
    assert [*machine.shm.iterdir()] == []
    machine.reboot()
    again = machine.start(["sh", "-c", f"hostname; cat /proc/sys/kernel/random/boot_id; ls {LOCAL} /dev/shm"])
    again.wait(20)
    name, boot_id = again.output.splitlines()[:2]
    assert (name, "kept" in again.output, "lost" in again.output) == ("machine1", True, False)
    assert boot_id not in process.output
    machine.replace()
    assert [*machine.disk.iterdir()] == []
    assert (machine.name, machine.address) == ("machine3", "10.77.0.4")
    machine.replace(same_name=True)
    assert machine.name == "machine3"
    assert [*machine.disk.iterdir()] == []
