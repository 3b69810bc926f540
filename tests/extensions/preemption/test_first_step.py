"""A signal that comes before the first step of a run ends the run with 75, since no step is lost by it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ...support.forks import run_forked
from ...support.programs import Program

TRAIN = """
import datetime, os, signal, sys, time
import stagereg


def reach(moment):
    number = int(os.environ.get("RANK", "0"))
    if f"moment={moment}" not in sys.argv or ("nproc=2" in sys.argv and "RANK" not in os.environ):
        return
    if "to=launcher" in sys.argv and number == 0:
        os.kill(int(os.environ["FORKED_BY"]), signal.SIGTERM)
    if "to=launcher" not in sys.argv and number == int("nproc=2" in sys.argv):
        os.kill(os.getpid(), signal.SIGTERM)
    from torch.distributed import HashStore
    HashStore().wait(["never"], datetime.timedelta(seconds=90))  # without a moment in which Python runs its handlers


reach("import")


@stagereg.main(config_path="conf", config_name="app")
def train(cfg):
    import torch

    reach("data")
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    reach("model")
    if cfg.moment == "stepped":
        optimizer.step()
    reach("stepped")
    with stagereg.instantiate(cfg.checkpoint) as checkpointer:
        reach("checkpointer")
        if cfg.moment == "read":
            checkpointer.close()
            reach("read")
        checkpointer.maybe_save(1, {"model": model, "optimizer": optimizer})
    reach("closed")


if __name__ == "__main__":
    train()
    reach("returned")
"""
CONFIG = """
defaults: [stagereg, _self_]
nproc: 1
to: self
moment: none
answers: ???
checkpoint: {every: 1, preemption: {grace_period: 0.2s}}
"""
LINE = "preempted by SIGTERM before the first step: no step is lost. To continue, run the same command.\n"


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path, CONFIG, TRAIN)


@pytest.mark.parametrize("moment", ["data", "model", "checkpointer", "read"])
def test_a_process_alone_exits_with_75_before_its_first_step(moment: str, program: Program) -> None:
    ended = program.run(f"moment={moment}")
    assert (ended.returncode, ended.stderr) == (75, LINE)


@pytest.mark.parametrize("moment", ["stepped", "closed", "returned"])
def test_after_a_step_without_a_checkpointer_a_signal_ends_a_process_as_any_other(
    moment: str, program: Program
) -> None:
    assert program.run(f"moment={moment}").returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("moment", "to"), [("import", "launcher"), ("model", "launcher"), ("data", "self"), ("checkpointer", "launcher")]
)
def test_a_launcher_exits_with_75_if_no_rank_has_taken_a_step(moment: str, to: str, program: Program) -> None:
    ended = program.run("nproc=2", f"moment={moment}", f"to={to}")
    assert (ended.returncode, ended.stderr) == (75, LINE)


@pytest.mark.parametrize(
    ("moment", "to", "code"), [("stepped", "launcher", 143), ("closed", "launcher", 143), ("stepped", "self", 1)]
)
def test_a_launcher_reports_the_signal_once_a_rank_has_taken_a_step(
    moment: str, to: str, code: int, program: Program
) -> None:
    ended = program.run("nproc=2", f"moment={moment}", f"to={to}")
    assert ended.returncode == code
    assert "preempted" not in ended.stderr


OWN = """
import select, signal, time
import stagereg.extensions.preemption.signals as preemption

preemption.exit_before_first_step()
signal.signal(signal.SIGTERM, lambda *_: print("own"))
for _ in range(2):  # the thread reads the second one when it is done with the first one
    signal.raise_signal(signal.SIGTERM)
    while select.select([preemption._listener._pipe[0]], [], [], 0)[0]:
        time.sleep(0.001)
handler = preemption.PreemptionHandler(60.0, str)
assert handler.listen()
signal.raise_signal(signal.SIGTERM)
signal.raise_signal(signal.SIGUSR1)
while handler.received is None:
    time.sleep(0.01)
print(handler.received.name)
"""


def test_a_handler_that_the_program_has_set_is_left_alone(tmp_path: Path) -> None:
    ended = run_forked(OWN, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "own\nown\nown\nSIGUSR1\n"), ended.stderr
