"""Which machine this is, and whether other machines see what lies under a path."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import uuid
from pathlib import Path

from stagereg.checkpoint.store.open_store import is_url

_BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a machine
MOUNTS = Path("/proc/self/mounts")
_NETWORK = re.compile(
    r"nfs\d?|lustre|gpfs|beegfs|ceph|cifs|smb\w*|9p|afs|ocfs2|gfs2|orangefs|pvfs2|panfs|wekafs|glusterfs|virtiofs"
    r"|fuse\.(?!fuse-overlayfs).*"
)


def machine_name() -> str:
    """Return what the processes that have this process's disks have in common, and no others."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {_BOOT.read_text().strip()}"
    return f"{socket.gethostname()} {uuid.getnode()}"


def is_shared(path: str) -> bool:
    """Whether ``path`` is a URL, or lies in a network file system by the type of its mount."""
    return is_url(path) or _NETWORK.fullmatch(_type_of(os.path.realpath(path))) is not None


def _type_of(path: str) -> str:
    """Return the type of the file system that a real path lies in; nothing where the system does not say."""
    try:
        lines = MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    fields = [line.split(" ") for line in lines]
    types = {re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), mount): kind for _, mount, kind, *_ in fields}
    above = [path, *map(str, Path(path).parents)]
    return next((types[each] for each in above if each in types), "")
