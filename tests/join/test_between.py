"""A joinable that runs collectives between a model's forward and backward: refused where a rank without data exists."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stagereg
from stagereg.testing import run_ranks


class Gathered(stagereg.Joinable):
    """Adds up one number a step over the ranks."""

    join_device = torch.device("cpu")
    join_process_group = property(lambda self: dist.group.WORLD)

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def gather(self, number: torch.Tensor) -> None:
        stagereg.Join.notify_join_context(self)
        self.take(number)

    def take(self, number: torch.Tensor) -> None:
        summed = number.detach().clone()
        dist.all_reduce(summed)
        self.total += float(summed)

    def join_hook(self, **kwargs: Any) -> stagereg.JoinHook:
        return self.make_hook(GatheredHook)


class GatheredHook(stagereg.JoinHook):
    def __init__(self, joinable: Gathered, /) -> None:
        self.joinable = joinable

    def main_hook(self) -> None:
        self.joinable.take(torch.zeros(()))


def train(rank: int, world: int, first: str, place: str, lengths: tuple[int, int], **options: Any) -> Any:
    """Return the sum over all steps, what was warned of, and the error of a rank."""
    torch.manual_seed(0)
    model, gathered = DistributedDataParallel(nn.Linear(4, 1)), Gathered()
    optimizer, one = torch.optim.SGD(model.parameters(), lr=0.01), torch.ones(())
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("stagereg.join.session").addHandler(handler)
    joinables = [model, gathered] if first == "model" else [gathered, model]
    batches = [torch.ones(2, 4)] * lengths[rank]
    iterates = options.pop("iterates", False)
    loader = None if options.get("mode") == "torch" or iterates else batches
    try:
        with stagereg.Join([*joinables, optimizer], loader=loader, timeout=10, **options) as join:
            for batch in join.iterate(batches) if iterates else batches:
                if place == "before":
                    gathered.gather(one)
                loss = model(batch).sum()
                if place == "between":
                    gathered.gather(one)
                loss.backward()
                if place == "after":
                    gathered.gather(one)
                optimizer.step()
                optimizer.zero_grad()
    except Exception as error:
        return gathered.total, warned, f"{type(error).__name__}: {error}"
    return gathered.total, warned, ""


MIDDLE = "in step {}, a Gathered runs collectives between the forward and the backward of {} (Linear). A rank without"


@pytest.mark.parametrize(
    ("first", "mode"), [("model", "planned"), ("model", "counted"), ("model", "torch"), ("", "torch")]
)
@pytest.mark.parametrize("longest", [0, 1])
def test_it_is_refused_as_soon_as_a_rank_has_no_data(first: str, mode: str, longest: int) -> None:
    lengths = (2, 3) if longest else (3, 2)
    seen = run_ranks(train, 2, args=(first, "between", lengths), kwargs={"mode": mode}, timeout_s=40)
    name = "0" if first == "model" else "1"
    _, warned, error = seen[longest]
    assert error.startswith(f"JoinError: {MIDDLE.format(3, name)}")
    assert "list it after the model. Or loop over join.iterate(loader)." in error
    assert MIDDLE.format(3, name) in seen[1 - longest][2]
    assert [MIDDLE.format(1, name) in each for each in warned] == [True]


@pytest.mark.parametrize(
    ("first", "place", "lengths", "options"),
    [
        ("model", "between", (3, 3), {}),
        ("model", "between", (3, 3), {"mode": "torch"}),
        ("", "between", (3, 3), {"mode": "torch"}),
        ("", "between", (4, 2), {}),  # as the forward has no collectives but in step 2
        ("model", "after", (2, 4), {}),
        ("model", "after", (4, 2), {"mode": "torch"}),
        ("", "before", (2, 4), {}),
        ("", "before", (4, 2), {"mode": "torch"}),
        ("model", "between", (2, 4), {"iterates": True}),
        ("", "between", (4, 2), {"iterates": True}),
    ],
)
def test_right_programs_stay_right(first: str, place: str, lengths: tuple[int, int], options: dict[str, Any]) -> None:
    seen = run_ranks(train, 2, args=(first, place, lengths), kwargs=options, timeout_s=40)
    iterates = options.get("iterates", False)
    total = float(max(lengths) * 2 if iterates else sum(lengths))
    assert [(each[0], each[2]) for each in seen] == [(total, "")] * 2
    warns = place == "between" and not iterates
    assert [len(warned) for _, warned, _ in seen] == [warns] * 2


def test_with_throw_no_rank_is_followed_so_nothing_is_warned_of() -> None:
    options = {"mode": "counted", "throw_on_early_termination": True}
    for total, warned, error in run_ranks(train, 2, args=("model", "between", (2, 3)), kwargs=options, timeout_s=40):
        assert (total, warned, error.partition(":")[0]) == (4.0, [], "UnevenInputsError")
