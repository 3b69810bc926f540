"""Advice for the user after storage errors such as a full disk, also if such an error caused another exception."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from torch.distributed.checkpoint.api import CheckpointException

from stagereg.base.option_text import option

_FULL = (
    "The disk of {root} is full. Free space, or retain fewer checkpoints ({keep}). The disk needs room for one more "
    "checkpoint than is retained."
)
_READ_ONLY = "{root} is now mounted read-only. Linux does that after disk errors: see `dmesg`."
_FORBIDDEN = "This process may no longer write in {root}. Check the owner and the permissions of its files."
_DENIED = (
    "The storage rejects the credentials of this process, or denies it the right to write, list or delete in {root}. "
    "Renew the credentials if they have expired, correct the clock of this machine if it is wrong, or grant the right. "
    "A read-only bucket can be restored from, but not saved to."
)
_BROKEN = (
    "The disk or the server of {root} reports errors. Check `dmesg`, and check the older checkpoints with "
    "`stagereg verify {root}`."
)
_DELETED = "A file in {root} was deleted or moved during the save. Check whether another program deletes files there."
_AWAY = "The server of {root} does not respond. Check that the server is running and mounted."
_ADVICE = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL.replace("disk of {root} is full", "quota for {root} is used up"),
    errno.EFBIG: "A file has exceeded the limit of the file system of {root}, or of `ulimit -f`.",
    errno.EROFS: _READ_ONLY,
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EIO: _BROKEN,
    errno.ENOENT: _DELETED,
    errno.ENOTDIR: _DELETED,
    errno.ESTALE: _AWAY,
    errno.ETIMEDOUT: _AWAY,
    errno.EMFILE: "This process has too many files open: see `ulimit -n`.",
    errno.ENOMEM: "The memory of this machine, or of the job's cgroup, is used up.",
}


def advice(error: BaseException, root: str) -> str:
    """Return the advice for an error that was raised while writing to ``root``, or ``""`` for an unknown error."""
    for each in causes(error):
        if isinstance(each, OSError) and each.errno in _ADVICE:
            text = _DENIED if "://" in root and each.errno == errno.EACCES else _ADVICE[each.errno]
            return text.format(root=root, keep=option("checkpoint.keep"))
    return ""


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error``, and all causes, contexts and ``CheckpointException`` items of it. Each error comes only once."""
    found: list[BaseException | None] = [error]
    seen: set[int] = set()
    while found:
        each = found.pop(0)
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        wrapped = [inner for inner, _ in each.failures.values()] if isinstance(each, CheckpointException) else []
        found = [*wrapped, each.__cause__, each.__context__, *found]
