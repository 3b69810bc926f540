"""Whatever fails, and whenever: a run goes on, trains on each sample once an epoch, and ends as if nothing had been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ..support.lab import CHECKOUT, missing
from .ledger import Ledger, dealt

SEEDS = {"on one machine": 101, "on three machines, below torchrun": 202}
STEPS, LOST = 60, 23  # steps of the run; the first attempt took so many, and the second one went on from the one before


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", SEEDS)
def test_a_run_goes_on_after_random_failures(tmp_path: Path, where: str) -> None:
    if reason := missing():
        pytest.skip(reason)
    asked = ["--failures", "4", "--chain", "4", "--seed", str(SEEDS[where])]
    command = [sys.executable, "-m", "tests.benchmarks.failures", *asked]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=CHECKOUT, env=env, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-8000:]}"


# -- the ledger itself


def written(folder: Path, change: Callable[[list[dict[str, object]]], object] = lambda lines: None) -> Ledger:
    """Write what two ranks would whose run was failed once, with a change to what rank 1 writes."""
    ledger = Ledger(folder)
    samples = list(dealt([2] * STEPS))
    for rank in (0, 1):
        lines: list[dict[str, object]] = []
        for attempt, (first, last) in enumerate([(0, LOST), (LOST - 1, STEPS)]):
            own = {"attempt": attempt, "rank": rank, "host": "here", "pid": attempt, "t": 0.0}
            lines.append({**own, "start": first, "size": 2, "source": ""})
            for step in range(first + 1, last + 1):
                lines += [
                    {**own, "step": step, "samples": samples[step - 1][rank]},
                    {**own, "step": step, "checksum": step},
                ]
            lines += [{**own, "ended": last, "checksum": last}] if last == STEPS else []
        change(lines) if rank else None
        (folder / "ledger" / str(rank)).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return ledger


CHANGES: dict[str, Callable[[list[dict[str, object]]], object]] = {
    "another sample": lambda lines: lines[-4].update(samples=[0, 1]),
    "a step that was left out": lambda lines: [each.update(step=each["step"] + 1) for each in lines[-12:-1]],  # type: ignore[operator]
    "another state on a rank": lambda lines: lines[-4].update(checksum=1),
    "another state at the end": lambda lines: lines[-1].update(checksum=1),
    "another step restored than was taken": lambda lines: lines[1 + 2 * LOST].update(start=LOST + 1),
    "another step restored on a rank": lambda lines: lines[1 + 2 * LOST].update(start=LOST - 2),
}


def test_a_ledger_shows_what_is_wrong(tmp_path: Path) -> None:
    references = {2: [*range(1, STEPS + 1)]}
    (tmp_path / "right").mkdir()
    assert written(tmp_path / "right").check(references) == (STEPS, True)
    for number, change in enumerate(CHANGES.values()):
        (folder := tmp_path / str(number)).mkdir()
        with pytest.raises((AssertionError, ValueError)):
            written(folder, change).check(references)
