"""``torch.autograd.grad`` through a model is no step of it, and several steps on a batch are no batches."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stagereg
from stagereg.testing import run_ranks

from ..support.any_loop import EXACT, Loop, RankRun, assert_exact, data, train
from ..support.parallel import COLUMNS, full
from ..support.reference import JOINABLES

KINDS = ("penalty", "penalty last", "attack", "norms")
LOOPS = [
    Loop(lengths=lengths, grad=grad, iterates=iterates, mode=mode, listed="optimizer")
    for grad, lengths in itertools.product(KINDS, [(2, 5), (4, 1), (0, 3)])
    for iterates, mode in [(True, "planned"), (False, "planned"), (False, "counted"), (False, "torch")]
]


@pytest.mark.parametrize("loops", [LOOPS[::5], pytest.param(LOOPS, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_a_gradient_that_is_asked_for_ends_no_step(loops: list[Loop]) -> None:
    assert_exact(loops)


@pytest.mark.skipif(not JOINABLES, reason="needs the extension joinables")
@pytest.mark.parametrize("grad", ["attack", "penalty"])
def test_fsdp2_names_it_in_a_plain_loop(grad: str) -> None:
    loop = Loop(column="fsdp2", grad=grad, iterates=False)
    for text, seconds in run_ranks(train, 2, args=(loop,), timeout_s=60):
        assert "torch.autograd.grad ran through FSDPSequential in a plain loop" in text
        assert seconds < 10


def stopped(rank: int, world_size: int, cases: list[tuple[Loop, int]]) -> list[tuple[int, str]]:
    """After how many steps of an optimizer a join that throws has stopped, and its error."""
    found = []
    for loop, per_batch in cases:
        run, batches, text = RankRun(loop), data(loop, rank, 0), ""
        steps = 0
        loader = None if loop.iterates else batches
        join = stagereg.Join([run.models[0], run.optimizers[0]], True, True, mode=loop.mode, timeout=20, loader=loader)
        try:
            with join:
                for x in join.iterate(batches) if loop.iterates else batches:
                    for _ in range(per_batch):
                        run.optimizers[0].zero_grad()
                        run.models[0](x).sum().backward()
                        run.optimizers[0].step()
                        steps += 1
        except stagereg.UnevenInputsError as error:
            text = str(error)
        found.append((steps, text))
    return found


def test_with_throw_steps_on_one_batch_are_not_compared_with_batches() -> None:
    cases = [
        (Loop(lengths=lengths, iterates=iterates, mode="counted"), per_batch)
        for lengths, iterates, per_batch in itertools.product([(4, 6), (3, 3)], [True, False], [1, 2])
    ]
    for found in run_ranks(stopped, 2, args=(cases,), timeout_s=60):
        for (loop, per_batch), (steps, text) in zip(cases, found, strict=True):
            shortest = min(loop.lengths) * per_batch
            assert steps == shortest, (loop, per_batch, text)
            assert bool(text) == (loop.lengths == (4, 6))
            assert not text or f"after {shortest} steps" in text or f"after step {shortest}." in text


class Checkpointed(nn.Module):
    """A net whose parameters get their gradients from a backward within the backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.net, x.requires_grad_(), use_reentrant=True)


def checkpointed(rank: int, world_size: int, ways: list[tuple[str, str]]) -> list[tuple[int, torch.Tensor]]:
    found = []
    for column, mode in ways:
        model = COLUMNS[column]().wrap(Checkpointed())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        batches = data(Loop(iterates=False), rank, 0)
        loader = None if mode == "torch" else batches
        with stagereg.Join([model, optimizer], mode=mode, timeout=20, loader=loader) as join:
            for x in batches:
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
            assert join._session is not None
            steps = join._session.steps
        found.append((steps, torch.cat([full(param.detach()).flatten() for param in model.parameters()])))
    return found


def test_a_backward_within_the_backward_ends_a_step() -> None:
    ways = list(itertools.product(["ddp", "fsdp2"][: 1 + JOINABLES], ["planned", "counted", "torch"]))
    loaders = [data(Loop(iterates=False), rank, 0) for rank in (0, 1)]
    net = Checkpointed().net
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for given in itertools.zip_longest(*loaders):
        optimizer.zero_grad()
        torch.stack([net(x).mean() / 2 for x in given if x is not None]).sum().backward()
        optimizer.step()
    right = nn.utils.parameters_to_vector(net.parameters()).detach()
    for loader, found in zip(loaders, run_ranks(checkpointed, 2, args=(ways,), timeout_s=60), strict=True):
        for steps, values in found:
            assert steps == len(loader)
            assert float((values - right).abs().max()) < EXACT


def misused(rank: int, world_size: int, what: str, way: str) -> str:
    """The error of a join in which gradients would stay those of one rank."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    column = "fsdp2" if "FSDP2" in what else "ddp"
    model = COLUMNS[column]().wrap(net, **({"static_graph": True} if "static" in what else {}))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    batches = data(Loop(lengths=(2, 4), iterates=False), rank, 0)
    loader = batches if way in ("planned", "counted") else None
    try:
        with stagereg.Join(
            [model, optimizer], mode=None if way == "iterate" else way, timeout=20, loader=loader
        ) as join:
            for x in join.iterate(batches) if way == "iterate" else batches:
                optimizer.zero_grad()
                loss = model(x).sum()
                if "two forwards" in what:
                    other = model(x * 2).sum()
                if "static" in what:
                    torch.autograd.grad(loss, net[0].weight, retain_graph=True)
                loss.backward(retain_graph="retained" in what)
                if "retained" in what:
                    loss.backward()
                if "two forwards" in what:
                    other.backward()
                if "module itself" in what and len(x):
                    net(x).sum().backward()
                optimizer.step()
    except stagereg.StageregError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "way", "text"),
    [
        ("retained", "iterate", "a second backward ran through a forward of Sequential"),
        ("retained", "planned", "a second backward ran through a forward of Sequential"),
        ("two forwards", "iterate", "a second backward ran through a forward of Sequential"),
        ("two forwards", "torch", "a second backward ran through a forward of Sequential"),
        ("static", "iterate", "with static_graph=True before its first training step"),
        ("static", "torch", "with static_graph=True before its first training step"),
        *[
            ("FSDP2, retained", "counted", "a second backward after one forward ran through FSDPSequential"),
            ("FSDP2, retained", "iterate", ""),
        ][: 2 * JOINABLES],
        ("module itself", "planned", ""),
    ],
)
def test_gradients_of_one_rank_are_not_added_to_those_of_all(what: str, way: str, text: str) -> None:
    for found in run_ranks(misused, 2, args=(what, way), timeout_s=60):
        assert text in found
        assert bool(text) == bool(found)
