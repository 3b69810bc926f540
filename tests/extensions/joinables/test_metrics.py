"""Metrics in and after a join are sums over all ranks, also those that have left the loop."""

from __future__ import annotations

import gc
import math
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel

import stagereg
from stagereg.errors import JoinError
from stagereg.kernel.channel import resources_of
from stagereg.testing import run_ranks

from ...support.reference import Case, batch, net

LENGTHS = (2, 0, 5)


def part(rank: int, step: int) -> tuple[float, int]:
    """Sum and number of samples of a batch; they differ from rank to rank."""
    return 0.1 * (rank + 1) * (step + 1), 3 * rank + step + 1


def expected(first: int, last: int, lengths: tuple[int, ...] = LENGTHS) -> dict[str, float]:
    parts = [part(r, step) for r, length in enumerate(lengths) for step in range(first, min(last, length))]
    return {"loss": math.fsum(total for total, _ in parts) / sum(count for _, count in parts)}


def loop(rank: int, library: str | None, reset: bool) -> tuple[list[Any], Any]:
    """Two epochs of a loop; what each step's ``compute`` gave, and what it gave after each epoch."""
    ddp = stagereg.build("joinable", "ddp", module=DistributedDataParallel(net(Case())))
    metrics = stagereg.build("joinable", "metrics")
    kind: Any = TorchJoin if library == "torch" else stagereg.Join
    options = {} if library == "torch" else {"mode": library}
    inside, after = [], []
    for _ in range(2):
        seen = []
        with kind([ddp, metrics], **options):
            for step in range(LENGTHS[rank]):
                ddp.module(batch(rank, 0, step)).sum().backward()
                total, count = part(rank, step)
                as_tensor = step % 2 == 1  # a float32 tensor would lose digits before it is added
                metrics.add(loss=(torch.tensor(total, dtype=torch.float64) if as_tensor else total, count))
                seen.append(metrics.compute(reset=reset))
        inside.append(seen)
        after.append(metrics.compute())
        metrics.reset()
    return inside, after


def loops(rank: int, world_size: int) -> list[Any]:
    return [loop(rank, library, reset) for library in (None, "torch", "counted") for reset in (False, True)]


def test_means_are_exact_and_over_the_samples_of_all_ranks() -> None:
    outcomes = run_ranks(loops, 3, timeout_s=60)
    for rank, runs in enumerate(outcomes):
        for i, (inside, after) in enumerate(runs):
            reset = i % 2 == 1
            wanted = [expected(step if reset else 0, step + 1) for step in range(LENGTHS[rank])]
            assert inside == [[pytest.approx(each, rel=1e-15) for each in wanted]] * 2, (rank, i)
            end: Any = {} if reset else pytest.approx(expected(0, max(LENGTHS)), rel=1e-15)
            assert after == [end, end], (rank, i)


def odd(rank: int, world_size: int) -> list[Any]:
    metrics = stagereg.build("joinable", "metrics")
    results = [metrics.compute()]
    metrics.add(**({"only rank 1": (3.0, 2)} if rank == 1 else {}), none=(0.0, 0))
    metrics.add(large=(1e16 if rank == 0 else 1.0, 1))
    metrics.add(large=(-1e16 if rank == 2 else 0.0, 0), each=(torch.tensor([2.0], requires_grad=True), torch.tensor(4)))
    results += [metrics.compute(reset=True), metrics.compute()]
    return results


def test_names_of_some_ranks_count_and_empty_ones_are_left_out() -> None:
    means = {"only rank 1": 1.5, "large": 1 / 3, "each": 0.5}
    assert run_ranks(odd, 3, timeout_s=30) == [[{}, means, {}]] * 3


def abandoned(rank: int, world_size: int) -> dict[str, float]:
    metrics = stagereg.build("joinable", "metrics")
    hook = metrics.join_hook()
    metrics.attach(None)
    metrics.add(loss=(5.0, 1))
    if rank == 0:
        hook.on_exhausted()
    metrics.detach()  # without a post hook: the join has failed, and rank 0 still answers
    metrics.reset()
    metrics.add(loss=(2.0, 4))
    result: dict[str, float] = metrics.compute()
    return result


def test_a_rank_that_answers_in_a_failed_join_disturbs_no_other() -> None:
    assert run_ranks(abandoned, 2, timeout_s=20) == [{"loss": 0.5}] * 2


def apart(rank: int, world_size: int) -> tuple[list[dict[str, float]], bool]:
    """Rank 0 waits for longer than the time-out, but never for one step as long; in the second join as in the first."""
    ddp = DistributedDataParallel(net(Case()))
    found = []
    kept = stagereg.build("joinable", "metrics")
    for _ in range(2):
        passing = stagereg.build("joinable", "metrics")
        with stagereg.Join([ddp, kept, passing], mode="counted", timeout=1.5):
            for step in range(1 + 9 * rank):
                ddp(batch(rank, 0, step)).sum().backward()
                kept.add(loss=(rank + 1.0, 1))
                passing.add(loss=(rank + 1.0, 1))
                time.sleep(0.25 * rank)
        found.append(passing.compute())
        del passing
    gc.collect()
    names = [name for name in resources_of(dist.group.WORLD).channels if "metrics" in name]
    return [*found, kept.compute()], len(names) < 3  # a thread may still hold the last join


def test_ranks_may_be_apart_for_longer_than_the_timeout() -> None:
    mean = {"loss": pytest.approx(21 / 11)}
    assert run_ranks(apart, 2, timeout_s=60) == [([mean] * 3, True)] * 2


def refused(rank: int, world_size: int) -> str:
    ddp = DistributedDataParallel(net(Case()))
    metrics = stagereg.build("joinable", "metrics")
    text = ""

    def finish() -> None:
        nonlocal text
        try:
            if rank == 0:
                metrics.compute()
        except JoinError as error:
            text = str(error)

    with stagereg.Join([ddp, metrics, finish]):
        for step in range(rank):
            ddp(batch(rank, 0, step)).sum().backward()
    return text


def test_compute_on_a_rank_without_data_is_an_error() -> None:
    text, other = run_ranks(refused, 2, timeout_s=30)
    assert "in the loop or after the join" in text
    assert not other


def counted_by_the_batch(rank: int, world_size: int) -> dict[str, float]:
    ddp = DistributedDataParallel(net(Case()))
    metrics = stagereg.build("joinable", "metrics")
    data = [{"x": batch(rank, 0, step), "n": 3} for step in range(1 + 2 * rank)]
    with stagereg.Join([ddp, metrics]) as join:
        for each in join.iterate(data):
            loss = ddp(each["x"]).sum()
            loss.backward()
            metrics.add(ones=(torch.tensor(float(len(each["x"]))), each["n"]), own=(2.0, 1))
    result: dict[str, float] = metrics.compute()
    return result


def test_numbers_of_an_earlier_batch_are_no_samples() -> None:
    assert run_ranks(counted_by_the_batch, 2, timeout_s=30) == [{"ones": 1.0, "own": 2.0}] * 2


@pytest.mark.parametrize("given", [1.0, (1.0,), (torch.zeros(2), 2), ("a", 1), (1.0, 2, 3)])
def test_a_value_that_is_no_sum_and_count_is_refused(given: Any) -> None:
    metrics = stagereg.build("joinable", "metrics")
    with pytest.raises(JoinError, match="takes a sum and a count"):
        metrics.add(loss=given)
    assert metrics.compute() == {}
    metrics.add(loss=(1.0, 4))
    assert metrics.compute() == {"loss": 0.25}  # of a process alone
