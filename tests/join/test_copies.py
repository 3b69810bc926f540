"""Inside a join, a model can be copied and pickled, and a compiled one is the model that it was compiled from."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import stagereg
from stagereg.testing import run_ranks

from ..support.reference import EXACT, Case, batch, difference, expected, net
from ..support.reference import Training as Lines

WAYS = [(True, "planned"), (True, "counted"), (False, "planned"), (False, "torch")]
"""Whether the loop iterates, and the mode."""


def hooks_of(module: nn.Module) -> list[Any]:
    parts = module.modules()
    return [hook for part in parts for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())]


def kept(*_: Any) -> None:
    """A hook of the user's, which stays in copies."""


def copied(rank: int, world_size: int, ways: list[tuple[bool, str, bool]]) -> list[str]:
    """What is wrong with copies made in the second step on ranks that run it."""
    wrong: list[str] = []
    for iterates, mode, throws in ways:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        net.register_forward_hook(kept)
        ddp = DistributedDataParallel(net)
        average = AveragedModel(ddp, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        data = [torch.ones(2, 4)] * (3 if throws else 2 + 2 * rank)
        options: dict[str, Any] = {"mode": mode, "loader": None if iterates else data, "timeout": 20}
        with stagereg.Join([ddp, optimizer], throw_on_early_termination=throws, **options) as join:
            for i, x in enumerate(join.iterate(data) if iterates else data):
                optimizer.zero_grad()
                ddp(x).square().sum().backward()
                if i == 1:
                    file = io.BytesIO()
                    torch.save(ddp.module, file)
                    file.seek(0)
                    loaded = torch.load(file, weights_only=False)
                    copies = [copy.deepcopy(ddp).module, AveragedModel(ddp).module.module, loaded]
                    whole = copy.deepcopy(ddp)
                    before = [value.clone() for value in net.state_dict().values()]
                optimizer.step()
                average.update_parameters(ddp)
        outside = vars(DistributedDataParallel(copy.deepcopy(net)))
        wrong += [f"{name} is left in the copy" for name in vars(whole).keys() - outside.keys()]
        wrong += ["the copy is in the join"] * (vars(whole)["_join_config"] != outside["_join_config"])
        wrong += [f"__getstate__ is left in {part}" for part in (ddp, net) if "__getstate__" in vars(part)]
        for one in copies:
            wrong += ["hooks of the join"] * (hooks_of(one) != [kept])
            apart = zip(before, one.state_dict().values(), strict=True)
            wrong += ["other weights"] * any(not torch.equal(one, other) for one, other in apart)
        whole.module(torch.ones(2, 4)).sum().backward()
        whole(torch.ones(2, 4)).sum().backward()  # as without a join, on all ranks
    return wrong


def test_copies_made_in_a_join_are_plain_modules() -> None:
    ways = [(*way, throws) for way in WAYS for throws in (False, True)]
    assert run_ranks(copied, 2, args=(ways,), timeout_s=100) == [[], []]


CASE = Case(lengths=(2, 5), epochs=2)


def compiled(rank: int, world_size: int, iterates: bool, mode: str, builds: bool) -> dict[str, Any]:
    lines = Lines(CASE, net(CASE))
    model = torch.compile(DistributedDataParallel(lines.module), backend="eager")
    listed = stagereg.build("joinable", "ddp", module=model) if builds else model
    for epoch in range(CASE.epochs):
        lengths = CASE.lengths[:: 1 if epoch % 2 == 0 else -1]
        data = [batch(rank, epoch, step) for step in range(lengths[rank])]
        options: dict[str, Any] = {"mode": mode, "loader": None if iterates else data, "timeout": 60}
        with stagereg.Join([listed, lines.optimizer], **options) as join:
            for x in join.iterate(data) if iterates else data:
                lines.optimizer.zero_grad()
                model(x).sum().backward()
                lines.optimizer.step()
    return {"params": lines.column.params(lines.module), "state": lines.column.state(lines.module, lines.optimizer)}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("iterates", "mode"), [*WAYS[3:], *(pytest.param(*way, marks=pytest.mark.slow) for way in WAYS[:3])]
)
def test_a_compiled_model_is_joined_as_the_model(iterates: bool, mode: str) -> None:
    whole = expected(CASE)
    train = functools.partial(compiled, iterates=iterates, mode=mode, builds=mode == "planned")
    for outcome in run_ranks(train, 2, timeout_s=200):
        assert difference(outcome, {name: whole[name] for name in outcome}) < EXACT
