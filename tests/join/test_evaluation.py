"""An evaluation inside the loop, wherever and on whichever ranks: right numbers, or soon an error with the cause."""

from __future__ import annotations

import itertools
import re
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import stagereg
from stagereg.testing import run_ranks

from ..support.reference import JOINABLES


class Cell(NamedTuple):
    """One cell of the table."""

    what: str = "ddp"
    mode: str = "planned"  # "torch": in a plain loop; else in join.iterate
    throw: bool = False  # with even inputs; else one rank has half of them
    who: str = "nobody"
    where: str = ""
    how: str = ""

    @property
    def refused(self) -> str:
        """What the error says, where one is expected."""
        alone = self.who in ("rank 0", "without")
        after = self.where == "last" or (self.mode == "torch" and self.who == "without")
        if self.how in ("graph", "eval") and after and (alone or self.mode == "torch"):
            return "under torch.no_grad()|each call is a collective of all ranks"
        leaves = self.mode == "torch" and not self.throw and self.who == "all"  # half of them have
        return "each call is a collective of all ranks" if self.what == "fsdp2" and (alone or leaves) else ""


class Net(nn.Module):
    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        if counts:
            self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        if hasattr(self, "seen"):
            self.seen += 1
        return self.inner(x)


def evaluated(how: str, model: Any) -> None:
    x = torch.ones(2, 3)
    if how == "module":
        with torch.no_grad():
            model.module(x)
    elif how == "inference_mode":
        with torch.inference_mode():
            model(x)
    elif how in ("no_grad", "several"):
        with torch.no_grad():
            for _ in range(3 if how == "several" else 1):
                model(x)
    else:
        model.train(how != "eval")
        model(x)
        model.train()


def trained(rank: int, cell: Cell) -> list[float]:
    """The parameters in the end."""
    torch.manual_seed(0)
    net: Any = Net(cell.what == "ddp, buffers")
    model = net
    if "ddp" in cell.what:
        model = DistributedDataParallel(net)
    elif cell.what == "fsdp2":
        for layer in net.inner:
            fully_shard(layer)
        model = fully_shard(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    joinable = stagereg.build("joinable", "module", module=model) if cell.what == "plain" else model
    batches = [torch.full((2, 3), rank + n / 8) for n in range(4 if cell.throw or rank == 0 else 2)]

    def evaluate(where: str, n: int, has_data: bool) -> None:
        asked = {"rank 0": rank == 0 and n % 2, "all": n % 2, "without": not has_data}.get(cell.who, False)
        if asked and where == cell.where:
            evaluated(cell.how, model)

    with stagereg.Join([joinable, optimizer], throw_on_early_termination=cell.throw, mode=cell.mode) as join:
        for n, x in enumerate(batches if cell.mode == "torch" else join.iterate(batches)):
            evaluate("first", n, len(x) > 0)
            y = model(x)
            evaluate("between", n, len(x) > 0)
            y.sum().backward()
            if cell.what == "plain":
                for param in model.parameters():
                    dist.all_reduce(param.grad)
            optimizer.step()
            optimizer.zero_grad()
            evaluate("last", n, len(x) > 0)
        if cell.mode == "torch" and cell.who == "without" and rank == 1:
            evaluate(cell.where, 0, False)
    whole = (param.full_tensor() if isinstance(param, DTensor) else param for param in model.parameters())
    return [value for param in whole for value in param.flatten().tolist()]


def outcomes(rank: int, world_size: int, cells: list[Cell]) -> list[tuple[list[float] | str, float]]:
    """For each cell, parameters or error, and seconds. Each has a process group of its own, as an error ends it."""
    base = _get_default_store()
    seen: list[Any] = []
    ended: list[Any] = []  # else the collector meets one that still waits for an answer, and so waits in another cell
    for i, cell in enumerate(cells):
        ended.append(dist.group.WORLD)
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=PrefixStore(f"cell {i}", base), rank=rank, world_size=world_size)
        began = time.monotonic()
        try:
            result: Any = trained(rank, cell)
        except Exception as error:
            result = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        seen.append((result, time.monotonic() - began))
    return seen


def tried(cells: list[Cell]) -> None:
    """Try cells, each beside the same training with no evaluation."""
    cells = [cell for cell in cells if JOINABLES or cell.what != "fsdp2"]
    plain = list(dict.fromkeys(cell._replace(who="nobody", where="", how="") for cell in cells))
    found = zip(*run_ranks(outcomes, 2, args=(plain + cells,), timeout_s=60 + 12 * len(cells)), strict=True)
    right = dict(zip(plain, itertools.islice(found, len(plain)), strict=True))
    for cell, each in zip(cells, found, strict=True):
        expected = [numbers for numbers, _ in right[cell._replace(who="nobody", where="", how="")]]
        for (result, seconds), numbers in zip(each, expected, strict=True):
            if not cell.refused:
                assert result == numbers, cell
                continue
            assert isinstance(result, str), cell
            assert re.search(cell.refused, result), (cell, result)
            assert seconds < 60, (cell, seconds)
            assert "Error: " in result, cell


def test_an_evaluation_changes_nothing_or_soon_ends_with_its_cause() -> None:
    """The cells that users meet first."""
    tried(
        [
            Cell("ddp", "planned", True, "rank 0", "first", "no_grad"),
            Cell("ddp", "counted", False, "rank 0", "first", "no_grad"),
            Cell("ddp, buffers", "planned", False, "rank 0", "first", "several"),
            Cell("ddp, buffers", "counted", False, "without", "last", "no_grad"),
            Cell("ddp", "planned", False, "all", "last", "graph"),
            Cell("ddp", "planned", False, "rank 0", "last", "graph"),
            Cell("ddp", "counted", True, "rank 0", "first", "eval"),
            Cell("ddp", "torch", False, "rank 0", "last", "inference_mode"),
            Cell("fsdp2", "planned", False, "all", "first", "no_grad"),
            Cell("fsdp2", "counted", True, "all", "between", "several"),
            Cell("fsdp2", "planned", False, "rank 0", "first", "no_grad"),
            Cell("fsdp2", "torch", False, "all", "last", "no_grad"),
            Cell("plain", "counted", False, "rank 0", "first", "no_grad"),
            Cell("plain", "planned", False, "rank 0", "last", "eval"),
        ]
    )


def trained_without_outputs(rank: int, world_size: int) -> list[float]:
    """Where there are no samples, the loss is nothing of the parameters and uses no output."""
    model = DistributedDataParallel(Net(False))
    with stagereg.Join([model], mode="planned") as join:
        assert join._session is not None
        for x in join.iterate([torch.ones(2, 3)] * (4 if rank == 0 else 2)):
            y = model(x)
            (y.sum() if len(x) else 0 * sum(param.sum() for param in model.parameters())).backward()
        return list(join._session.peers.progress)


def test_a_loss_of_no_samples_that_uses_no_output_is_no_stray_step() -> None:
    one, other = run_ranks(trained_without_outputs, 2)
    assert one == other
