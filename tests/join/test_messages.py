"""What cannot be joined is refused when the join is made, with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import stagereg
from stagereg.errors import ConfigError, JoinError
from stagereg.testing import run_ranks

from ..support.reference import JOINABLES
from ..testing.join_mutants import Sum


def sgd() -> SGD:
    return SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


def optioned(**options: Any) -> stagereg.Join:
    return stagereg.Join([Sum()], **options)


def bound(name: str, **objects: Any) -> Any:
    return stagereg.build("joinable", name, **objects)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: stagereg.Join([]), "at least one joinable"),
    "throw": (lambda: stagereg.Join([object()], throw=True), "no 'throw'. Did you mean 'throw_on_early_termination'"),
    "timeuot": (lambda: stagereg.Join([object()], timeuot=9), "no 'timeuot'. Did you mean 'timeout'"),
    "an optimizer alone": (lambda: stagereg.Join([sgd()]), "Put the DDP module first"),
    "a wrapped optimizer": (lambda: stagereg.Join([StepLR(sgd(), 1).optimizer]), "Put the DDP module first"),
    "a function alone": (lambda: stagereg.Join([print]), "Put the DDP module first"),
    "a number": (lambda: stagereg.Join([3]), "a int cannot take part"),
    "a string": (lambda: stagereg.Join("ddp"), "a str cannot take part"),
    "no list": (
        lambda: stagereg.Join(nn.Linear(1, 1)),
        r"must be a list, such as Join\(\[model, optimizer\]\), got a Linear",
    ),
    "None": (lambda: stagereg.Join(None), "must be a list"),
    "LBFGS": (lambda: stagereg.Join([LBFGS([nn.Parameter(torch.zeros(1))])]), "Leave the optimizer out of the list"),
    "a schedule that needs a metric": (lambda: stagereg.Join([ReduceLROnPlateau(sgd())]), "it needs metrics"),
    "a function with an argument": (lambda: stagereg.Join([lambda loss: None]), "it needs loss"),
    "no time": (lambda: optioned(timeout=0), r"Join\(timeout=\.\.\.\) must be a number of seconds greater than 0"),
    "no DDP": (lambda: bound("ddp", module=nn.Linear(1, 1)), "needs a DistributedDataParallel module"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_joined_is_refused(name: str) -> None:
    act, message = REFUSED[name]
    with pytest.raises(JoinError, match=message) as error:
        act()
    assert isinstance(error.value, (ValueError, stagereg.StageregError))
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(("option", "value", "near"), [("mode", "plannd", "planned"), ("average", "sample", "samples")])
def test_a_misspelt_option_is_refused_with_the_nearest_choice(option: str, value: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"Join\({option}=\.\.\.\) must be one of .*Did you mean '{near}'"):
        optioned(**{option: value})


def refused(rank: int, world_size: int) -> list[str]:
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    table = DistributedDataParallel(nn.Embedding(2, 1, sparse=True))
    overlapped = ZeroRedundancyOptimizer(ddp.parameters(), SGD, overlap_with_ddp=True, lr=0.1)
    messages = []
    for joinables in ([ddp, overlapped], [table])[1 - JOINABLES :]:
        with pytest.raises(JoinError) as error, stagereg.Join(joinables):
            pass
        messages.append(str(error.value))
    with stagereg.Join([table], enable=False):
        table(torch.tensor([0])).sum().backward()
    return [*messages, str(ddp._join_config.enable or table._join_config.enable)]


def test_what_cannot_be_shadowed_is_refused_on_every_rank() -> None:
    for *overlapped, sparse, enabled in run_ranks(refused, 2, timeout_s=30):
        assert [
            "overlap_with_ddp=True cannot be joined. Build the optimizer without" in each for each in overlapped
        ] == [True] * JOINABLES
        assert "sparse gradients cannot be joined" in sparse
        assert enabled == "False"
