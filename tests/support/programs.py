"""A user's program in a folder, started from a shell, and the processes that come of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .app import App
from .forks import run_forked

LIMIT_S = 110
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
STAGEREG_RUN = [sys.executable, "-m", "stagereg", "run", *TORCHRUN[3:]]

TRAIN = """
import json, logging, os, signal, time
import stagereg

log = logging.getLogger("train")


@stagereg.main(config_path="conf", config_name="app")
def train(cfg):
    import torch
    import torch.distributed as dist
    from hydra.core.hydra_config import HydraConfig

    rank, size = dist.get_rank(), dist.get_world_size()
    value = torch.tensor([0.0], dtype=torch.float64)
    state, folder = {"value": value}, HydraConfig.get().runtime.output_dir

    def answer(**more):
        about = {"rank": rank, "start": start, "value": value.item(), "stamp": cfg.stamp, "pid": os.getpid()}
        about |= {"agent": os.getcwd(), "run": folder, "job": os.path.basename(folder), **more}
        with open(os.path.join(cfg.answers, f"{rank}.json"), "a") as file:
            file.write(json.dumps(about) + "\\n")

    with stagereg.instantiate(cfg.checkpoint) as checkpointer:
        start = checkpointer.restore(state) or 0
        answer(ended=False)
        log.info("rank %d of %d starts at step %d", rank, size, start)
        data = iter(range(start, cfg.steps))
        if cfg.workers:
            data = iter(torch.utils.data.DataLoader(range(start, cfg.steps), None, num_workers=cfg.workers))
        for step, number in enumerate(data, start + 1):
            total = torch.tensor([float(rank + 1)], dtype=torch.float64)
            dist.all_reduce(total)
            value += total * (int(number) + 1)
            if start == 0 and rank < len(cfg.at) and step == cfg.at[rank]:
                launcher = int(os.environ.get("FORKED_BY") or os.getppid())
                os.kill(launcher if cfg.to == "parent" else os.getpid(), getattr(signal, cfg.signal))
                if cfg.what == "freeze":
                    os.kill(os.getpid(), signal.SIGSTOP)
            if cfg.what == "fail_at_signal" and rank == 1 and any(checkpointer.preemption.signal_flags()):
                raise KeyError("no cheese")
            try:
                checkpointer.maybe_save(step, state)
            except SystemExit:
                while cfg.what == "linger":
                    time.sleep(1)
                raise
            if step == 3 and start == 0 and cfg.what == "fail" and rank == size - 1:
                checkpointer.wait()
                raise KeyError("no cheese")
            if step == 3 and start == 0 and cfg.what == "go_on":
                checkpointer.wait()
                print("IN THE JOB", flush=True)
                while True:
                    dist.all_reduce(total)
    answer(ended=True)
    return value.item()


if __name__ == "__main__":
    train()
"""
"""Sums up over its steps, saves and resumes; on the way it fails, hangs, or gets a signal where its config says so."""

SAVING = """
defaults: [stagereg, _self_]
what: work
signal: SIGTERM
to: parent
workers: 0
answers: ???
stamp: ${now:%H-%M-%S.%f}
"""


class Program:
    """A script, its config, and a folder in which each rank writes a line for each of its jobs."""

    def __init__(self, folder: Path, config: str, script: str = TRAIN) -> None:
        self.folder = App(folder, {"conf/app.yaml": config, "train.py": script}).folder
        self.answers = folder / "answers"
        self.answers.mkdir()

    def command(self, *arguments: str, start: list[str] | None = None) -> list[str]:
        return [*(start or [sys.executable]), "train.py", *arguments, f"answers={self.answers}"]

    def run(
        self, *arguments: str, start: list[str] | None = None, forks_ranks: bool = True
    ) -> subprocess.CompletedProcess[str]:
        if start is not None:
            return run(self.command(*arguments, start=start), self.folder)
        _, script, *line = self.command(*arguments)
        how: dict[str, Any] = {"environment": plain(), "timeout_s": LIMIT_S, "forks_ranks": forks_ranks}
        return run_forked(Path(script), *line, cwd=self.folder, **how)

    def answers_of(self, rank: int) -> list[dict[str, Any]]:
        """What a rank wrote, a line for each job that it came to."""
        return [json.loads(line) for line in (self.answers / f"{rank}.json").read_text().splitlines()]

    def answer(self, rank: int, job: int = -1) -> dict[str, Any]:
        return self.answers_of(rank)[job]

    def run_folders(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.rglob(".hydra"))


def run(command: list[str], cwd: Path, given: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    env = plain() | variables
    return subprocess.run(command, cwd=cwd, env=env, input=given, capture_output=True, text=True, timeout=LIMIT_S)


def plain() -> dict[str, str]:
    """The environment of a user who has not said how many threads there are to be."""
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def await_job(programs: Iterable[subprocess.Popen[str]], ranks: int) -> None:
    """Wait until so many ranks of each have printed that they are in the job; the pipe ends when they die before."""
    for program in programs:
        seen = 0
        assert program.stdout is not None
        while seen < ranks:
            line = program.stdout.readline()
            assert line, "the ranks ended before their job"
            seen += line.count("IN THE JOB")  # ranks that print at once may share a line


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def await_port(port: int) -> None:
    """Wait until a process listens at a port, without connecting to it."""

    def listens() -> bool:
        tables = [Path(f"/proc/net/{table}") for table in ("tcp", "tcp6")]
        sockets = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
        return any(int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A" for fields in sockets)

    assert comes_true(listens), "nothing listens there"


def await_gone(*pids: int) -> bool:
    """Whether these processes end in a while; one that only waits to be reaped has ended."""
    return comes_true(lambda: not any(map(runs, pids)))


def comes_true(condition: Callable[[], bool], seconds: float = LIMIT_S) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def runs(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
