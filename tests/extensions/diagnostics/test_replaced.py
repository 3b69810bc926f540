"""Options of the program that a restore replaces are logged with lines that work, and nothing else is."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.optim.lr_scheduler as schedulers
from torch.optim import SGD, AdamW, Optimizer

from stagereg.assembly import Checkpointer

STEPS = 4


@dataclass
class Warmup:
    steps: int

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / self.steps)


class OfProgram(schedulers.LRScheduler):
    """Changes attributes of its own as it steps."""

    def __init__(self, optimizer: Optimizer, period: int = 3) -> None:
        self.period, self.turns = period, 0
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        self.turns += 1
        return [rate / (1 + self.turns // self.period) for rate in self.base_lrs]


def sequence(optimizer: Optimizer, first: int, total: int) -> schedulers.LRScheduler:
    parts = [schedulers.LinearLR(optimizer, total_iters=first), schedulers.CosineAnnealingLR(optimizer, total)]
    return schedulers.SequentialLR(optimizer, parts, [first])


SCHEDULERS: dict[str, tuple[Callable[[Optimizer, Any], Any], Any, Any, list[str]]] = {
    "step": (schedulers.StepLR, 2, 3, ["step_size"]),
    "several": (schedulers.MultiStepLR, [2], [2, 3], ["milestones"]),
    "linear": (lambda opt, n: schedulers.LinearLR(opt, total_iters=n), 5, 9, ["total_iters"]),
    "polynomial": (lambda opt, n: schedulers.PolynomialLR(opt, 9, power=n), 1.0, 2.0, ["power"]),
    "exponential": (schedulers.ExponentialLR, 0.9, 0.8, ["gamma"]),
    "cosine": (schedulers.CosineAnnealingLR, 20, 40, ["T_max"]),
    "restarts": (lambda opt, n: schedulers.CosineAnnealingWarmRestarts(opt, n, T_mult=2), 2, 3, ["T_0"]),
    "plateau": (lambda opt, n: schedulers.ReduceLROnPlateau(opt, patience=n), 1, 2, ["patience"]),
    "cyclic": (lambda opt, n: schedulers.CyclicLR(opt, 0.1, n), 0.5, 0.6, ["max_lrs"]),
    "one cycle": (
        lambda opt, n: schedulers.OneCycleLR(opt, 0.5, total_steps=n),
        20,
        40,
        ["total_steps", "_schedule_phases"],
    ),
    "factor": (lambda opt, n: schedulers.LambdaLR(opt, Warmup(n)), 3, 6, ["lr_lambdas[0].steps"]),
    "function": (lambda opt, n: schedulers.LambdaLR(opt, lambda step: 1 / (step + n)), 3, 6, []),
    "sequence": (lambda opt, n: sequence(opt, n, 9), 2, 3, ["_milestones", "_schedulers[0].total_iters"]),
    "chained": (
        lambda opt, n: schedulers.ChainedScheduler([schedulers.ExponentialLR(opt, n), schedulers.ConstantLR(opt)]),
        0.9,
        0.8,
        ["_schedulers[0].gamma"],
    ),
    "of the program": (OfProgram, 3, 4, ["period"]),
}


def train(path: Path, state: dict[str, Any], start: int = 0) -> None:
    """Take steps, and save at the end."""
    with Checkpointer(path, every=1000) as checkpointer:
        checkpointer.restore(state)
        for step in range(start + 1, start + STEPS + 1):
            each = state.get("optimizer")
            if each is not None:
                each.step()
            for scheduler in (x for x in state.values() if hasattr(x, "last_epoch")):
                scheduler.step(*([1.0] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else []))
            checkpointer.maybe_save(step, state)


def restored(path: Path, state: dict[str, Any], caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Restore, and return what is logged of replaced options."""
    caplog.clear()
    caplog.set_level(logging.INFO, "stagereg")
    with Checkpointer(path) as checkpointer:
        checkpointer.restore(state)
    return [record for record in caplog.records if record.name.endswith(".restoring")]


def run_lines(record: logging.LogRecord, state: dict[str, Any]) -> list[str]:
    lines = [line.strip() for line in record.getMessage().splitlines()[1:]]
    for line in lines:
        exec(line, {"state": state, "collections": collections})
    return lines


def options(scheduler: Any) -> dict[str, Any]:
    moving = ("last_epoch", "T_cur", "T_i", "best", "num_bad_epochs", "turns", "optimizer", "_")
    found = {key: x for key, x in vars(scheduler).items() if not key.startswith(moving) or key == "_schedule_phases"}
    return {key: (type(x), x) for key, x in found.items()}


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_an_option_of_a_scheduler_that_is_given_anew_is_named_and_nothing_that_moves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    make, old, new, named = SCHEDULERS[name]

    def program(option: Any) -> dict[str, Any]:
        optimizer = SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "scheduler": make(optimizer, option)}

    train(tmp_path, program(old))
    assert restored(tmp_path, program(old), caplog) == []

    state, wanted = program(new), program(new)
    found = restored(tmp_path, state, caplog)
    assert len(found) == bool(named)
    for record in found:
        assert record.levelno == logging.WARNING
        lines = run_lines(record, state)
        assert [line.partition(" = ")[0] for line in lines] == [f"state['scheduler'].{each}" for each in named]
        for each in (state, wanted):
            each["inner"] = getattr(each["scheduler"], "_schedulers", [each["scheduler"]])
        assert [*map(options, state["inner"])] == [*map(options, wanted["inner"])]


def test_options_of_an_optimizer_are_named_by_group_and_restored_by_the_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def program(decays: tuple[float, float], betas: tuple[float, float], rate: float) -> dict[str, Any]:
        model = torch.nn.Linear(2, 2)
        groups = [{"params": [x], "weight_decay": y} for x, y in zip(model.parameters(), decays, strict=True)]
        return {"model": model, "opts": {"a": AdamW(groups, lr=rate, betas=betas)}}

    train(tmp_path, program((0.1, 0.0), (0.9, 0.95), 0.1))
    assert restored(tmp_path, program((0.1, 0.0), (0.9, 0.95), 0.1), caplog) == []
    state = program((0.3, 0.0), (0.9, 0.99), 0.1)
    [record] = restored(tmp_path, state, caplog)
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "stagereg: restore() set options of state['opts']['a'] to their saved values, as load_state_dict() of torch "
        "does, but the program has other values. To use the values of the program, write after restore():\n"
        "  for group in state['opts']['a'].param_groups: group['betas'] = [0.9, 0.99]  # saved: [0.9, 0.95]\n"
        "  state['opts']['a'].param_groups[0]['weight_decay'] = 0.3  # saved: 0.1"
    )
    assert state["opts"]["a"].param_groups[0]["weight_decay"] == 0.1
    run_lines(record, state)
    assert [group["weight_decay"] for group in state["opts"]["a"].param_groups] == [0.3, 0.0]
    assert [tuple(group["betas"]) for group in state["opts"]["a"].param_groups] == [(0.9, 0.99)] * 2

    state = program((0.1, 0.0), (0.9, 0.95), 0.5)
    [record] = restored(tmp_path, state, caplog)
    assert record.levelno == logging.INFO  # a program may set the rate in each step
    run_lines(record, state)
    assert {group["lr"] for group in state["opts"]["a"].param_groups} == {0.5}


def test_a_learning_rate_that_a_scheduler_multiplies_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def program(rate: float) -> dict[str, Any]:
        optimizer = SGD(torch.nn.Linear(2, 2).parameters(), lr=rate)
        return {"optimizer": optimizer, "scheduler": schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step))}

    train(tmp_path, program(0.1))
    assert restored(tmp_path, {"optimizer": program(0.5)["optimizer"]}, caplog) == []  # its scheduler sets the rate
    [record] = restored(tmp_path, state := program(0.5), caplog)
    run_lines(record, state)
    state["optimizer"].step()
    state["scheduler"].step()
    assert state["optimizer"].param_groups[0]["lr"] == 0.5 / (STEPS + 2)


def test_the_message_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def program(decay: float) -> dict[str, Any]:
        params = [torch.nn.Parameter(torch.ones(1)) for _ in range(40)]
        groups = [{"params": [x], "weight_decay": decay * at} for at, x in enumerate(params)]
        return {"model": torch.nn.ParameterList(params), "optimizer": SGD(groups, lr=0.1)}

    train(tmp_path, program(1.0))
    [record] = restored(tmp_path, program(2.0), caplog)
    assert len(record.getMessage().splitlines()) == 12
    assert record.getMessage().endswith("  # and 29 more")
