"""The type of a mount says whether other machines see what is in it."""

from __future__ import annotations

from pathlib import Path

import pytest

import stagereg.base.machine as machine

TABLE = """\
/dev/sda / ext4 rw 0 0
server:/home {root}/home nfs4 rw 0 0
/dev/sdb {root}/home/me/disk xfs rw 0 0
me@host: {root}/with\\040space fuse.sshfs rw 0 0
none {root}/overlay fuse.fuse-overlayfs rw 0 0
scratch {root}/scratch lustre rw 0 0
"""


def test_the_innermost_mount_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mounts"
    table.write_text(TABLE.format(root=tmp_path))
    monkeypatch.setattr(machine, "MOUNTS", table)
    shared = {"home", "home/me/runs", "with space/runs", "scratch"}
    local = {"home/me/disk/runs", "overlay/runs", "scratchy", ""}
    assert {name for name in shared | local if machine.is_on_network(tmp_path / name)} == shared
    (tmp_path / "link").symlink_to(tmp_path / "scratch")
    assert machine.is_on_network(tmp_path / "link")
    monkeypatch.setattr(machine, "MOUNTS", tmp_path / "none")
    assert not machine.is_on_network(tmp_path / "home")
