"""Prints what each kind of misbehaviour of an on_commit component does to a run.

``python tests/benchmarks/misbehave.py``. Each is a run of its own: five steps, each saved, ``keep=2``; of the third
checkpoint on the component misbehaves.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

KINDS = ("raises", "exits", "hangs", "deletes", "os._exit", "is preempted")
_PROGRAM = """
import datetime, os, shutil, signal, sys, threading
import stagereg

how, root = sys.argv[1:]
called = threading.Event()

def mine(checkpoint):
    if checkpoint.step < 3:
        return
    called.set()
    if how == "raises":
        raise ValueError("of the component")
    if how == "exits":
        sys.exit(3)
    if how == "os._exit":
        os._exit(4)
    if how == "deletes":
        shutil.rmtree(checkpoint.path)
    else:
        threading.Event().wait(600)

limit = datetime.timedelta(seconds=5 if how == "hangs" else 60)
failure = stagereg.Failure(timeout=limit)
with stagereg.Checkpointer(root, every=1, keep=2, failure=failure, on_commit={"mine": mine}) as checkpointer:
    for step in range(1, 6):
        if how == "is preempted" and step == 5:
            called.wait(60)
            os.kill(os.getpid(), signal.SIGTERM)
        checkpointer.maybe_save(step, {"x": step})
        checkpointer.wait()
        if checkpointer.saved == 4 and how == "os._exit":
            threading.Event().wait(60)
"""
_NEXT = """
import logging, sys
import stagereg

state = {"x": 0}
with stagereg.Checkpointer(sys.argv[1]) as checkpointer:
    print(checkpointer.restore(state))
"""


def report(how: str) -> str:
    """Run one, and return its block: exit code, what is there, what the next run goes on from, and what was logged."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "c")
        options = {"capture_output": True, "text": True, "timeout": 120, "cwd": Path(__file__).parents[2]}
        ran = subprocess.run([sys.executable, "-c", _PROGRAM, how, str(root)], **options)  # type: ignore[call-overload]
        there = ", ".join(str(int(path.name[5:13])) for path in sorted(root.glob("step-*")))
        again = subprocess.run([sys.executable, "-c", _NEXT, str(root)], **options)  # type: ignore[call-overload]
        lines = [f"{how}: exit code {ran.returncode}; there: {there}; the next run goes on from {again.stdout.strip()}"]
        told = ran.stderr.replace(str(root), "DIR").replace(f"{Path(__file__).parents[2]}/", "")
        for line in told.splitlines():
            lines += textwrap.wrap(line, 112, initial_indent="    ", subsequent_indent="      ")
        return "\n".join(lines)


if __name__ == "__main__":
    print("\n".join(map(report, KINDS)))
