"""The settings of the C library that ranks get: each is set once, and never against the user's own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from stagereg import machine
from stagereg.machine import TUNABLES, tunables

pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="the threshold is one of glibc on x86-64"
)


def test_a_users_other_tunables_are_kept() -> None:
    both = tunables({TUNABLES: "glibc.malloc.check=3"})[TUNABLES]
    assert both.split(":")[0] == "glibc.malloc.check=3"
    assert "x86_non_temporal_threshold" in both


def test_a_users_own_threshold_is_kept() -> None:
    assert tunables({TUNABLES: "glibc.cpu.x86_non_temporal_threshold=0x6300000"}) == {}


def test_other_machines_get_no_tunable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert tunables({}) == {}


def test_the_library_accepts_the_tunable() -> None:
    loader = f"/lib64/ld-linux-{platform.machine().replace('_', '-')}.so.2"
    if not os.path.exists(loader):
        pytest.skip("there is no loader to ask at the usual path")
    listed = subprocess.run(
        [loader, "--list-tunables"], env={**os.environ, **tunables({})}, capture_output=True, text=True, timeout=30
    )
    line = next((line for line in listed.stdout.splitlines() if "x86_non_temporal_threshold" in line), None)
    if line is None:
        pytest.skip("this version of glibc lists no such tunable")
    assert line.split(":")[1].split()[0] == "0x100000"


@pytest.mark.parametrize(("load", "cores", "noisy"), [(1.01, 2, True), (1.0, 2, False), (8.0, 64, False)])
def test_a_load_above_half_of_the_cores_is_called_noisy(load: float, cores: int, noisy: bool) -> None:
    assert bool(machine.noise_warning(load, cores)) is noisy


def test_the_file_system_of_a_folder_is_the_innermost_mount(tmp_path: Path) -> None:
    assert machine.file_system(Path("/proc/self")) == "proc"
    assert machine.file_system(tmp_path) not in ("", "proc")
