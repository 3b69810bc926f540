"""Locks a directory of checkpoints in a process of its own: ``lock_holder.py hold|fork|contest DIRECTORY ...``."""

from __future__ import annotations

import os
import sys

from stagereg.checkpoint.store.lock import StoreLock


def hold(root: str, patience: str = "60") -> None:
    """Hold it until the end of the standard input."""
    with StoreLock(root, float(patience)):
        print("held", flush=True)
        sys.stdin.read()


def fork(root: str, gate: str) -> None:
    """Release it while a forked child lives; end when somebody opens ``gate``, and the child after that."""
    held = StoreLock(root)
    inside, outside = os.pipe()
    if os.fork() == 0:
        os.close(outside)
        del held
        os.read(inside, 1)  # until its parent is gone
        print("forked child has ended", flush=True)
        os._exit(0)
    print("held", flush=True)
    sys.stdin.read()
    held.release()
    print("released", flush=True)
    sys.stdin.close()
    os.read(os.open(gate, os.O_RDONLY), 1)


def contest(root: str, times: str) -> None:
    """Hold it many times, and fail if another process does so at the same time."""
    for _ in range(int(times)):
        with StoreLock(root, patience=60):
            os.close(os.open(f"{root}/inside", os.O_CREAT | os.O_EXCL))
            os.unlink(f"{root}/inside")


if __name__ == "__main__":
    {"hold": hold, "fork": fork, "contest": contest}[sys.argv[1]](*sys.argv[2:])
