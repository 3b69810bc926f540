"""A loop that carries gradients over from step to step, without ``no_sync``, has the numbers of a single process."""

from __future__ import annotations

import itertools
import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import stagereg
from stagereg.testing import run_ranks

from ..support.parallel import COLUMNS
from ..support.reference import EXACT, batch, difference

EPOCHS = 3


class Loop(NamedTuple):
    """A loop that steps its optimizer after every ``k``-th batch, counted over all epochs."""

    k: int
    lengths: tuple[int, int]
    column: str
    iterates: bool
    mode: str
    one_join: bool
    zero: bool = True  # gradients are set to None, or else to zeros
    listed: str = "advance"  # what the join is given beside the model; or the bare "optimizer"
    zeroes_in: str = "advance"  # ... the listed function, or else the "body" of the loop
    begin: int = 0  # of the counter


class Training:
    def __init__(self, loop: Loop) -> None:
        torch.manual_seed(0)
        self.loop, self.n = loop, loop.begin
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    def make_optimizer(self) -> None:
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.05)

    def advance(self) -> None:
        self.n += 1
        if self.n % self.loop.k == 0:
            self.optimizer.step()
            if self.loop.zeroes_in == "advance":
                self.optimizer.zero_grad(set_to_none=self.loop.zero)


def data(loop: Loop, rank: int, epoch: int) -> list[torch.Tensor]:
    return [batch(rank, epoch, step, 3 + (step + rank) % 2) for step in range(loop.lengths[rank])]


def one_process(loop: Loop) -> dict[str, Any]:
    training = Training(loop)
    training.make_optimizer()
    for epoch in range(EPOCHS):
        loaders = [data(loop, rank, epoch) for rank in (0, 1)]
        for i in range(max(loop.lengths)):
            given = [loader[i] for loader in loaders if i < len(loader)]
            sums = [training.net(x).square().sum() for x in given]
            total = sum(map(len, given))
            weights = [1 / total if loop.iterates else 1 / len(x) / 2 for x in given]
            torch.stack([loss * weight / loop.k for loss, weight in zip(sums, weights, strict=True)]).sum().backward()
            training.advance()
    column = COLUMNS["ddp"]()
    return {"params": column.params(training.net), "state": column.state(training.net, training.optimizer)}


def train(training: Training, rank: int) -> dict[str, Any]:
    loop, column = training.loop, COLUMNS[training.loop.column]()
    model: Any = column.wrap(training.net)
    training.make_optimizer()
    listed = [model, training.advance if loop.listed == "advance" else training.optimizer]
    epochs = [data(loop, rank, epoch) for epoch in range(EPOCHS)]
    options = {"timeout": 20, "mode": loop.mode, "loader": None if loop.iterates else epochs[0]}
    for joined in [epochs] if loop.one_join and loop.iterates else [[epoch] for epoch in epochs]:
        with stagereg.Join(listed, **options) as join:
            for x in itertools.chain.from_iterable(join.iterate(each) if loop.iterates else each for each in joined):
                loss = join.mean(model(x).square().sum(), len(x)) if loop.iterates else model(x).square().mean()
                if loop.zeroes_in == "body" and training.n % loop.k == 0:
                    training.optimizer.zero_grad()
                (loss / loop.k).backward()
                training.advance()
    return {"params": column.params(training.net), "state": column.state(training.net, training.optimizer)}


def train_all(rank: int, world_size: int, loops: list[Loop]) -> list[dict[str, Any]]:
    outcomes = []
    for loop in loops:
        try:
            outcomes.append(train(Training(loop), rank))
        except Exception as error:
            error.add_note(f"in {loop}")
            raise
    return outcomes


def refused(rank: int, world_size: int, loop: Loop) -> str | dict[str, Any]:
    try:
        return train(Training(loop), rank)
    except stagereg.StageregError as error:
        return str(error)


WAYS = [(True, "planned"), (True, "counted"), (False, "planned"), (False, "counted"), (False, "torch")]
LENGTHS = ((2, 5), (3, 6), (1, 6), (0, 5))
LOOPS = [
    Loop(k, lengths, column, *way, one_join, zero)
    for k, lengths, column in itertools.product((2, 3, 4), LENGTHS, ("ddp", "fsdp2"))
    for way, one_join, zero in itertools.product(WAYS, (True, False), (True, False))
    if way[0] or not one_join
]
QUICK = [
    Loop(2, (2, 5), "ddp", True, "planned", False),
    Loop(3, (3, 6), "ddp", True, "counted", True, False),
    Loop(2, (2, 5), "fsdp2", True, "counted", False),
    Loop(2, (3, 6), "ddp", False, "planned", False),
    Loop(4, (3, 6), "ddp", False, "torch", False, False),
    Loop(3, (1, 6), "fsdp2", False, "counted", False),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("loops", [QUICK, pytest.param(LOOPS, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_gradients_are_carried_over_as_in_one_process(loops: list[Loop]) -> None:
    outcomes = run_ranks(train_all, 2, args=(loops,), timeout_s=60 + 2 * len(loops))
    apart = {
        loop: max(difference(found, expected) for found in each)
        for loop, *each, expected in zip(loops, *outcomes, map(one_process, loops), strict=True)
    }
    assert {loop: value for loop, value in apart.items() if not value < EXACT} == {}


GUESSED = [
    # The optimizer in the list would step after every batch of the others.
    (
        Loop(3, (1, 2), "ddp", False, "planned", False, listed="optimizer"),
        "did not step equally often|began a step without gradients",
    ),
    (
        Loop(2, (4, 5), "ddp", False, "torch", False, listed="optimizer"),
        "did not step equally often|began a step without gradients",
    ),
    (
        Loop(3, (2, 5), "fsdp2", False, "counted", False, listed="optimizer"),
        "did not step equally often|began a step without gradients",
    ),
    # The body zeroes, which a rank that has left it does not run.
    (Loop(2, (3, 6), "ddp", False, "planned", False, zeroes_in="body"), "began a step without gradients"),
    (Loop(2, (3, 6), "fsdp2", False, "torch", False, zeroes_in="body"), "began a step without gradients"),
    # The only steps that rank 0 and the others had seen by then began without gradients. If the ranks are so far apart
    # that rank 0 reads of a later step in time, it follows.
    (Loop(3, (1, 5), "ddp", False, "counted", False, begin=2), "began a step with gradients"),
]


@pytest.mark.parametrize(
    ("loop", "text"),
    [pytest.param(*each, marks=[pytest.mark.slow] * (i not in (0, 3, 5))) for i, each in enumerate(GUESSED)],
)
def test_what_a_rank_without_data_cannot_know_is_an_error_on_all_ranks(loop: Loop, text: str) -> None:
    outcomes = run_ranks(refused, 2, args=(loop,), timeout_s=60)
    if loop.begin and not any(isinstance(each, str) for each in outcomes):
        assert max(difference(each, one_process(loop)) for each in outcomes) < EXACT
        return
    for error in outcomes:
        assert re.search(text, error), error
