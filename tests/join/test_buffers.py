"""Buffers that DDP shares: in a join those of the lowest rank with data count, which are those of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stagereg
from stagereg.testing import run_ranks


class Last(nn.Module):
    """Has the first value of its last batch as a buffer, and a parameter that a step changes by the buffer before."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.register_buffer("last", torch.full((), -1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * 0 + self.weight * self.last).sum()
        if len(x):
            self.last = x[0].detach().clone()
        return y


def trained(folder: Path | None, rank: int, lengths: tuple[int, int], until: int, mode: str) -> list[float]:
    """The buffer with which each step began on this rank, and the weight and the buffer in the end."""
    model = DistributedDataParallel(Last())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state = {"model": model, "optimizer": optimizer}
    batches = [torch.full((2,), 100.0 * rank + n) for n in range(lengths[rank])]
    seen: list[float] = []
    join = stagereg.Join([model, optimizer], mode=mode)
    with stagereg.Checkpointer(str(folder), every=1) as checkpointer, join:
        step = checkpointer.restore(state) or 0
        for x in join.iterate(batches[step:until]):
            model(x).backward()
            seen.append(float(model.module.last))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            checkpointer.maybe_save(step, state)
    return [*seen, float(model.module.weight), float(model.module.last)]


def resumed(rank: int, world_size: int, root: Path, mode: str) -> dict[str, list[float]]:
    found = {}
    for name, lengths in (("even", (5, 5)), ("uneven", (5, 3))):
        found[name] = trained(root / name, rank, lengths, 9, mode)[-2:]
        trained(root / f"{name} again", rank, lengths, 2, mode)
        found[f"{name} again"] = trained(root / f"{name} again", rank, lengths, 9, mode)[-2:]
    return found


@pytest.mark.parametrize("mode", ["planned", pytest.param("counted", marks=pytest.mark.slow)])
def test_a_resumed_join_goes_on_with_the_buffers_of_the_one_before(tmp_path: Path, mode: str) -> None:
    found = run_ranks(resumed, 2, args=(tmp_path, mode))
    for each in found:
        assert each["even"] == each["even again"]
        assert each["uneven"] == each["uneven again"]
    assert found[0] == found[1]
    assert found[0]["even"][1] == 4.0  # of rank 0's last batch, as without a join


def two_models(rank: int, world_size: int) -> str:
    """Rank 0 throws a forward of the first model away, between the steps of the two."""
    one, other = DistributedDataParallel(nn.Linear(2, 1)), DistributedDataParallel(nn.Linear(2, 1))
    try:
        with stagereg.Join([one, other]) as join:
            for n, x in enumerate(join.iterate([torch.ones(4, 2)] * 4)):
                one(x).sum().backward()
                if rank == 0 and n == 1:
                    one(x)
                other(x).sum().backward()
    except stagereg.StageregError as error:
        return str(error)
    return ""


def test_a_forward_thrown_away_between_two_models_is_named() -> None:
    for said in run_ranks(two_models, 2):
        assert "rank 0 reduced no gradients" in said
