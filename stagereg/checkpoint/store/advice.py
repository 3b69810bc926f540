"""What to do about an error of the storage, found among all the errors behind the one that was raised; names in one."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from torch.distributed.checkpoint.api import CheckpointException

from stagereg.base.option_text import option

_FULL = (
    "The disk of {root} is full: free some space, or keep fewer checkpoints ({keep}); there must be room for "
    "one more than that."
)
_READ_ONLY = "{root} cannot be written any more: it is mounted read-only. Systems do so after disk errors: see `dmesg`."
_FORBIDDEN = "This process may not write in {root} any more: look at the owner and the permissions of what is there."
_DENIED = (
    "The store refuses the credentials of this process, or the right to write, list or delete in {root}. Renew them if "
    "they have expired, set the clock of this machine if it is off, or grant that right; a bucket that is read-only "
    "can only be read."
)
_BROKEN = (
    "The disk or the server below {root} fails: look at `dmesg`, and at the older checkpoints with "
    "`stagereg verify {root}`."
)
_DELETED = "Something in {root} was deleted or moved while it was written: is another program cleaning up there?"
_AWAY = "The server of {root} does not answer as it did: is it still mounted, and up?"
_ADVICE = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL.replace("disk of {root} is full", "quota for {root} is used up"),
    errno.EFBIG: "A file has become larger than the file system of {root}, or `ulimit -f`, allows.",
    errno.EROFS: _READ_ONLY,
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EIO: _BROKEN,
    errno.ENOENT: _DELETED,
    errno.ENOTDIR: _DELETED,
    errno.ESTALE: _AWAY,
    errno.ETIMEDOUT: _AWAY,
    errno.EMFILE: "This process has too many files open: see `ulimit -n`.",
    errno.ENOMEM: "The memory of this machine, or of the job's group, is used up.",
}


def advice(error: BaseException, root: str) -> str:
    """Return what to do about ``error``, raised while ``root`` was written; empty if unknown."""
    for each in causes(error):
        if isinstance(each, OSError) and each.errno in _ADVICE:
            text = _DENIED if "://" in root and each.errno == errno.EACCES else _ADVICE[each.errno]
            return text.format(root=root, keep=option("checkpoint.keep"))
    return ""


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and every error behind it, once each: those of ranks in torch's, causes and contexts."""
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
