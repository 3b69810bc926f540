"""What a run does when its storage fails: real runs of a small program, one for each fault, and a table of them.

``python tests/benchmarks/faults.py`` prints the table (as root, for what needs a mount), or that of the faults whose
names are behind it. Each run is a process, which ends as any program does, with its own exit status.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import secrets  # noqa: F401  here, since a user who may not read the interpreter's folder cannot import it later on
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint

import stagereg
import stagereg.checkpoint.checkpointer
import stagereg.errors

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.faulty_storage import FaultyStorage

STEPS = 6
BREAKS = 3
"""The step before whose save the fault comes."""
MENDED = 5
"""The step before whose save it goes away, where it does."""
LIMIT_S = 60.0
UNPRIVILEGED_USER = 65534


def nothing(folder: Path) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Fault:
    """One run."""

    name: str  # in the table
    on_error: str = "raise"
    wreck: Callable[[Path], None] = nothing  # breaks its directory before the save of step 3
    mend: Callable[[Path], None] = nothing  # repairs it before the save of step 5
    storage: dict[str, Any] = field(default_factory=dict)  # arguments of a FaultyStorage
    timeout_s: float = 60.0
    mount_bytes: int = 0  # size of a file system of its own
    user: int = 0  # the id of the user that runs it
    released: bool = False  # whether what hangs goes on at step 5


@dataclass(frozen=True)
class Result:
    """How a run went: its exit status, standard error, and the steps whose checkpoints load, with the right values."""

    status: int
    saw: str
    loads: list[int]
    resumes: int | None

    def row(self, fault: Fault) -> str:
        """Return its row of the table of the documentation."""
        loads = ", ".join(map(str, self.loads))
        return f"| {fault.name} | {fault.on_error} | {self.status} | {loads} | {self.resumes} |"

    def block(self, fault: Fault) -> str:
        """Return it with everything that the run printed."""
        newest = f"{', '.join(map(str, self.loads))} (resumes from {self.resumes})"
        lines = [f"{fault.name}, {fault.on_error}: exit code {self.status}; loadable: {newest}"]
        for line in self.saw.splitlines() or ["(nothing)"]:
            lines += textwrap.wrap(line, 112, initial_indent="    ", subsequent_indent="      ", break_on_hyphens=False)
        return "\n".join(lines)


def fill(folder: Path) -> None:
    """Use up the disk."""
    with (folder.parent / "ballast").open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                pass


def free(folder: Path) -> None:
    """Free the disk again."""
    (folder.parent / "ballast").unlink()


def make_read_only(folder: Path) -> None:
    """As the system does after disk errors; by another mount on top, since this one is in use."""
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)


FAULTS = {
    "full": Fault("disk full", wreck=fill, mount_bytes=1 << 20),
    "full_warn": Fault("disk full until step 5", "warn", wreck=fill, mend=free, mount_bytes=1 << 20),
    "full_last": Fault("disk full to the end", "warn", wreck=fill, mount_bytes=1 << 20),
    "read_only": Fault("mounted read-only", wreck=make_read_only, mount_bytes=1 << 20),
    "permission": Fault("permission lost", wreck=lambda folder: folder.chmod(0o500), user=UNPRIVILEGED_USER),
    "deleted": Fault("directory deleted", wreck=shutil.rmtree),
    "eio": Fault("EIO after 1000 bytes", storage={"fault": "EIO", "after_bytes": 1000, "saves": [BREAKS]}),
    "eio_warn": Fault("EIO, once", "warn", storage={"fault": "EIO", "saves": [BREAKS]}),
    "eio_last": Fault("EIO from step 3 on", "warn", storage={"fault": "EIO", "saves": [*range(BREAKS, STEPS + 1)]}),
    "fsync": Fault("ENOSPC at fsync", storage={"fault": "ENOSPC", "at": "flushed", "saves": [BREAKS]}),
    "manifest": Fault("EIO at the manifest", storage={"fault": "EIO", "at": "held", "saves": [BREAKS]}),
    "rename": Fault("EIO at the rename", storage={"fault": "EIO", "at": "described", "saves": [BREAKS]}),
    "latest": Fault("EIO at latest", storage={"fault": "EIO", "at": "committed", "saves": [BREAKS]}),
    "hangs": Fault("write hangs", timeout_s=0.5, storage={"fault": "hang", "saves": [BREAKS]}),
    "hangs_warn": Fault("write hangs to the end", "warn", timeout_s=0.5, storage={"fault": "hang", "saves": [BREAKS]}),
    "slow": Fault(
        "write hangs until step 5", "warn", timeout_s=0.5, storage={"fault": "hang", "saves": [BREAKS]}, released=True
    ),
}


# -- one run


def train(fault: Fault, folder: Path, release: Path) -> None:
    """The program."""
    storage = FaultyStorage(**fault.storage, release=str(release)) if fault.storage else None
    with stagereg.Checkpointer(
        str(folder),
        every=1,
        keep=9,
        stager=stagereg.build("stager", "blocking"),
        storage=storage,
        failure=stagereg.Failure(fault.on_error, datetime.timedelta(seconds=fault.timeout_s)),  # type: ignore[arg-type]
    ) as checkpointer:
        for step in range(1, STEPS + 1):
            if step == BREAKS:
                fault.wreck(folder)
            if step == MENDED:
                fault.mend(folder)
                if fault.released:
                    release.touch()
                    while checkpointer._background.hanging:  # or the run is killed at its limit
                        time.sleep(0.01)
            checkpointer.maybe_save(step, _state(step))
            checkpointer.wait()


def _state(step: int) -> dict[str, Any]:
    return {"weights": torch.full((2000,), float(step)), "step": step}


def look(folder: Path) -> tuple[list[int], int | None]:
    """Return which steps load as they were saved, and from which one a run resumes."""

    def restored(resume: str) -> int | None:
        state = _state(0)
        with stagereg.Checkpointer(str(folder), resume=resume, stager=stagereg.build("stager", "blocking")) as there:
            step = there.restore(state)
        assert (state["weights"] == float(state["step"])).all()
        assert state["step"] == step
        return step

    return [step for path in sorted(folder.glob("step-*")) if (step := restored(str(path)))], restored("auto")


# -- all runs


def run(name: str) -> Result:
    """Run the program in a process of its own, and look at what it has left."""
    fault = FAULTS[name]
    with _home(fault) as home:
        folder = home / "run"
        folder.mkdir()
        if fault.user:
            for path in (home, folder):
                os.chown(path, fault.user, fault.user)
        command = [sys.executable, __file__, "--train", name, str(home)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False)
        if fault.wreck is make_read_only:
            subprocess.run(["umount", folder], check=True)
        if fault.user and folder.exists():
            folder.chmod(0o700)
        return Result(done.returncode, _plain(done.stderr, home), *look(folder))


@contextmanager
def _home(fault: Fault) -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix="stagereg-faults-"))
    if fault.mount_bytes:
        size = f"size={fault.mount_bytes}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", home], check=True, capture_output=True)
    try:
        yield home
    finally:
        if fault.mount_bytes:
            subprocess.run(["umount", "-l", home], check=True)
        shutil.rmtree(home)


def _one_line(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """As ``stagereg.main`` does with errors of the project."""
    if isinstance(error, stagereg.errors.StageregError):
        print(f"stagereg: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _plain(saw: str, home: Path) -> str:
    """What was seen, without what differs from run to run."""
    text = saw.replace(str(home / "run"), "DIR").replace(str(home), "HOME")
    text = re.sub(r"(step-\d+\.)[0-9a-f]{12}", r"\1TOKEN", text)
    text = re.sub(r"pid \d+", "pid PID", text)
    text = re.sub(r".*no accelerator is available.*\n", "", text)
    return re.sub(r"(after|in) \d+ s\b", r"\1 N s", text).strip()


def main() -> None:
    """Print the table, or the results of some as JSON (``--json``); with ``--train``: be the program."""
    if sys.argv[1:2] == ["--train"]:
        name, home = sys.argv[2], Path(sys.argv[3])
        os.chdir(home)
        if FAULTS[name].user:
            os.setuid(FAULTS[name].user)
        sys.excepthook = _one_line
        train(FAULTS[name], home / "run", home / "release")
        return
    for name in [name for name in sys.argv[1:] if not name.startswith("-")] or list(FAULTS):
        result = run(name)
        block = result.block(FAULTS[name])
        if "--json" in sys.argv:
            block = json.dumps(
                [name, {**vars(result), "on_error": FAULTS[name].on_error, "row": result.row(FAULTS[name])}]
            )
        print(block, flush=True)


if __name__ == "__main__":
    main()
