"""The programs with faults, their healthy twins and the healthy programs, as command lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ...support.forks import run_forked
from ...support.programs import LIMIT_S, TORCHRUN

PROGRAMS = Path(__file__).with_name("programs")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class Case:
    """A program, its arguments and its number of ranks; torchrun starts several ranks."""

    program: str
    arguments: tuple[str, ...] = ()
    ranks: int = 1
    resumed_ranks: int = 0  # the number of ranks after the restart, if it differs

    def line(self, root: Path, steps: int, out: Path | None = None) -> list[str]:
        """Return the program and its arguments."""
        path = str(PROGRAMS / f"{self.program}.py")
        if self.program == "uneven":
            return [path, f"dir={root}", f"steps={steps}", *([f"out={out}"] if out else []), *self.arguments]
        return [path, str(root), str(steps), *([f"--out={out}"] if out else []), *self.arguments]

    def command(self, *line: Any, ranks: int = 0) -> list[str]:
        """Return the command that starts the program."""
        ranks = ranks or self.ranks
        started = ranks > 1 or self.ranks > 1
        return [*([*TORCHRUN[:-1], str(ranks)] if started else [sys.executable]), *line]

    def run(self, root: Path, steps: int, out: Path | None = None, ranks: int = 0) -> int:
        """Run the program up to a step, and return its exit code."""
        line, environment = self.line(root, steps, out), {**os.environ, **ONE_THREAD}
        if self.ranks == 1:
            how: dict[str, Any] = {"cwd": root.parent, "environment": environment, "timeout_s": LIMIT_S}
            done = run_forked(Path(line[0]), *line[1:], forks_ranks=self.program == "uneven", **how)
        else:
            command = self.command(*line, ranks=ranks)
            done = subprocess.run(
                command, cwd=root.parent, env=environment, capture_output=True, text=True, timeout=LIMIT_S
            )
        print(done.stdout, done.stderr)
        return done.returncode


def results(out: Path, ranks: int) -> list[Any]:
    """Return what each rank has written to ``--out``."""
    return [torch.load(f"{out}.{rank}", weights_only=False) for rank in range(ranks)]


def single(program: str, *arguments: str) -> Case:
    return Case(program, arguments)


def ddp(*arguments: str) -> Case:
    return Case("ddp", arguments, ranks=2)


def faulty(program: str, fault: str, *arguments: str, ranks: int = 1, resumed_ranks: int = 0) -> Case:
    return Case(program, (f"--fault={fault}", *arguments), ranks, resumed_ranks)


FAULTS = {
    "sampler restarts its epoch": faulty("sampler", "restart"),
    "loader fetches ahead": faulty("sampler", "prefetch"),
    "loader draws its seed again": faulty("sampler", "seed"),
    "NumPy generator": faulty("augment", "numpy"),
    "Python generator": faulty("augment", "python"),
    "torch generator": faulty("augment", "torch"),
    "seeded again": faulty("augment", "reseed"),
    "scheduler stepped twice": faulty("schedule", "twice"),
    "weight decay of the config": faulty("schedule", "decay"),
    "learning rate of the config": faulty("schedule", "lr", "--schedule=drop"),
    "warm-up by a counter": faulty("schedule", "warmup", "--schedule=warmup"),
    "step repeated": faulty("schedule", "repeat"),
    "step skipped": faulty("schedule", "skip"),
    "optimizer state swapped": faulty("layers", "swapped"),
    "optimizer state swapped if latest": faulty("layers", "latest"),
    "average not restored": faulty("ema", "unrestored"),
    "average not saved": faulty("ema", "unsaved"),
    "copied average not saved": faulty("ema", "unsaved", "--kind=copy"),
    "scale of the loss": faulty("scaled", "scale"),
    "accumulation counter": faulty("accumulate", "counter"),
    "accumulated gradients": faulty("accumulate", "gradients"),
    "annealed weight": faulty("annealed", "weight"),
    "annealed temperature": faulty("annealed", "temperature"),
    "curriculum stage": faulty("annealed", "stage"),
    "weights untied": faulty("tied", "untied"),
    "optimizer of dead tensors": faulty("replaced", "dead"),
    "best model in place of the newest": faulty("replaced", "best"),
    "evaluation mode": faulty("modes", "eval"),
    "layers frozen again": faulty("modes", "frozen"),
    "scheduler not saved": faulty("modes", "plateau"),
    "buffer that is not persistent": faulty("modes", "queue"),
    "replay buffer": faulty("replay", "buffer"),
    "normalizer of observations": faulty("replay", "normalizer"),
    "momentum on one rank": faulty("ddp", "momentum", ranks=2),
    "buffers of another rank": faulty("ddp", "buffers", "--model=separate", ranks=2),
    "generators of another rank": faulty("ddp", "generators", ranks=2),
    "bit flipped before the save": faulty("ddp", "saved", ranks=2),
    "bit flipped after the restore": faulty("ddp", "restored", ranks=2),
    "data of another world size": faulty("resharded", "divided", ranks=2, resumed_ranks=1),
}

HEALTHY = {
    "sampler": single("sampler"),
    "generators in the state": single("augment"),
    "global generators": single("augment", "--own=global"),
    "schedule": single("schedule"),
    "learning rate that the program lowers": single("schedule", "--schedule=drop"),
    "warm-up by the step": single("schedule", "--schedule=warmup"),
    "optimizer by position": single("layers"),
    "average": single("ema"),
    "copied average": single("ema", "--kind=copy"),
    "scaler": single("scaled"),
    "accumulated gradients in the state": single("accumulate"),
    "accumulation within a step": single("accumulate", "--save=steps"),
    "annealed weights in the state": single("annealed"),
    "tied weights": single("tied"),
    "lowest loss": single("replaced"),
    "frozen layers and a plateau": single("modes"),
    "replay buffer in the state": single("replay"),
    "AdamW and dropout": single("plain"),
    "momentum": single("plain", "--optimizer=momentum"),
    "LBFGS": single("plain", "--optimizer=lbfgs"),
    "compiled model": single("plain", "--compiled=yes"),
    "workers of a loader": single("loader"),
    "validation": single("watched"),
    "times and means": single("watched", "--watch=times"),
    "saves of the program": single("watched", "--watch=saves"),
    "killed run": single("watched", "--watch=kill"),
    "two networks": single("gan"),
    "DDP": ddp(),
    "DDP and batch normalization": ddp("--model=batchnorm"),
    "own buffers of each rank": ddp("--model=separate"),
    "ZeRO": ddp("--optimizer=zero"),
    "FSDP2": Case("sharded", ranks=2),
    "uneven inputs": single("uneven"),
}


def mostly_slow(names: Iterable[str], *quick: str) -> list[Any]:
    """Return the parameters of a test, of which only those in ``quick`` run in the default tier."""
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in names]


def record(case: Case, root: Path) -> None:
    """Run a program for twelve steps, with saves at steps 4, 8 and 12; start it again if it was killed."""
    code = case.run(root, 12)
    if code == -signal.SIGKILL:
        code = case.run(root, 12)
    assert code == 0


def prove(case: Case, root: Path, step: int = 8) -> tuple[int, Any]:
    """Run ``stagereg prove`` on the checkpoint of a step. Return its exit code and the part of the JSON."""
    program = case.command(*case.line(root, 12), ranks=case.resumed_ranks)
    command = [sys.executable, "-m", "stagereg", "prove", f"{root}/step-{step:08d}", "--json", "--", *program]
    environment = {**os.environ, **ONE_THREAD}
    done = subprocess.run(
        command, cwd=root.parent, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    print(done.stdout, done.stderr)
    [found] = json.loads(done.stdout)["checkpoints"]
    return done.returncode, found
