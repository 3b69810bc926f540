"""What is found of the machine, and what ranks get of the C library: set once, never against the user's own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from stagereg.base import machine
from stagereg.base.machine import TUNABLES, tunables

THRESHOLD = "x86_non_temporal_threshold"


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="it is one of glibc on x86-64")
def test_the_threshold_is_set_unless_the_user_has_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    others, own = tunables({TUNABLES: "glibc.malloc.check=3"})[TUNABLES].split(":")
    assert others == "glibc.malloc.check=3"
    assert THRESHOLD in own
    assert tunables({TUNABLES: f"glibc.cpu.{THRESHOLD}=0x6300000"}) == {}
    loader = "/lib64/ld-linux-x86-64.so.2"
    if os.path.exists(loader):
        command, env = [loader, "--list-tunables"], {**os.environ, **tunables({})}
        listed = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30).stdout.splitlines()
        of_library = [line.split(":")[1].split()[0] for line in listed if THRESHOLD in line]
        assert of_library in ([], ["0x100000"])  # some versions of glibc list no such tunable
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert tunables({}) == {}


def test_the_file_system_of_a_folder_is_the_innermost_mount(tmp_path: Path) -> None:
    assert machine.file_system(Path("/proc/self")) == "proc"
    assert machine.file_system(tmp_path) not in ("", "proc")


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, 11),
        ({"LOCAL_WORLD_SIZE": "5", "SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}, 5),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_TASKS_PER_NODE": "8", "SLURM_NODEID": "1"}, 4),
        ({"SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}, 3),
        ({"SLURM_TASKS_PER_NODE": "11", "SLURM_NODEID": "0"}, 11),
        ({"SLURM_NTASKS": "11", "SLURM_NTASKS_PER_NODE": "4"}, 4),
        # The ranks are not the scheduler's tasks: it has started one, and that one the ranks.
        ({"SLURM_TASKS_PER_NODE": "1", "SLURM_NODEID": "0", "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1"}, 11),
    ],
)
def test_the_ranks_of_this_machine_are_what_the_launcher_or_slurm_says(
    variables: dict[str, str], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*os.environ]:
        if name.startswith("SLURM_") or name == "LOCAL_WORLD_SIZE":
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert machine.ranks_here(11) == ranks
