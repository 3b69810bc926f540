"""Planned and counted joins give the numbers that torch's wire gives, and send only the collectives documented."""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.distributed_c10d import _world
from torch.nn.parallel import DistributedDataParallel

import stagereg
from stagereg.errors import JoinError
from stagereg.kernel.channel import control_channel, resources_of
from stagereg.testing import run_ranks
from stagereg.testing.worker import new_group

from .reference import EXACT, Case, batch, difference, mlp, net
from .test_numbers import CASES, differences

MODES = ["planned", "counted"]
WAYS = ["plain", "iterate"]


def covering() -> list[str]:
    """Cases, each of which has something that none of those before it has; together they have all there is."""
    seen: set[str] = set()
    chosen = []
    for name, case in CASES.items():
        alike = {"lengths": (0 in case.lengths, len(set(case.lengths))), "epochs": case.epochs > 1}
        own = {repr(item) for item in {**asdict(case), **alike}.items()}
        if not own <= seen:
            chosen.append(name)
            seen |= own
    return chosen


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        pytest.param("counted", covering(), id="counted, what covers all options"),
        pytest.param("counted", list(CASES), id="counted, all", marks=pytest.mark.slow),
        pytest.param("planned", list(CASES), id="planned, all", marks=pytest.mark.slow),
    ],
)
def test_every_case_gives_the_references_numbers_on_every_rank(mode: str, names: list[str]) -> None:
    apart = differences({name: CASES[name] for name in names}, mode)
    assert {where: value for where, value in apart.items() if not value < EXACT} == {}


def sent() -> int:
    """How many collectives this rank has begun, in all process groups and their control channels."""
    groups = list(_world.pg_map)
    channels = [backend for group in groups for backend in resources_of(group).backends()]
    return sum(group._get_sequence_number_for_group() for group in [*groups, *channels])


def steps(rank: int, mode: str | None, throw: bool, way: str) -> list[int]:
    """The collectives of each step."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(mlp().double())
    data = [batch(rank, 0, step) for step in range(7)]
    seen = []
    join = stagereg.Join([ddp], enable=mode is not None, throw_on_early_termination=throw, mode=mode, loader=data)
    with join:
        for x in join.iterate(data) if way == "iterate" else data:
            before = sent()
            loss = join.mean(ddp(x).sum(), len(x), over="world") if way == "iterate" else ddp(x).sum()
            loss.backward()
            seen.append(sent() - before)
    return seen


SENDING = [(None, False), *((mode, throw) for mode in MODES for throw in (False, True))]


def all_steps(rank: int, world_size: int) -> dict[Any, list[int]]:
    return {(mode, throw, way): steps(rank, mode, throw, way) for mode, throw in SENDING for way in WAYS}


def test_a_planned_step_sends_nothing_of_its_own_and_a_counted_one_a_single_sum() -> None:
    for sent in run_ranks(all_steps, 2, timeout_s=60):
        for (mode, throw, way), found in sent.items():
            without = sent[None, False, way]
            assert len(without) == 7
            assert found == [each + (mode == "counted") for each in without], (mode, throw, way)


def epochs(rank: int, world_size: int) -> list[int]:
    """The number of keys in the store after each of some planned joins over uneven inputs."""
    ddp = DistributedDataParallel(mlp().double())
    group: Any = dist.group.WORLD
    counts = []
    for epoch in range(6):
        data = [batch(rank, epoch, step) for step in range(10 + rank)]
        with stagereg.Join([ddp], mode="planned", loader=data):
            for x in data:
                ddp(x).sum().backward()
        idle = threading.Event()
        control_channel(group, "membership").thread.submit(idle.set)  # after what deletes the keys of the join before
        idle.wait(20)
        dist.barrier()
        counts.append(group.get_group_store().num_keys())
        dist.barrier()
    return counts


def test_planned_joins_leave_no_more_keys_than_those_of_the_last_one() -> None:
    for counts in run_ranks(epochs, 2, timeout_s=60):
        assert max(counts[1:]) - min(counts[1:]) < 10, counts


def ahead(rank: int, world_size: int, mode: str) -> int:
    """Rank 1 begins no step before rank 0 is in the forward of that step."""
    store = dist.distributed_c10d._get_default_store()
    ddp = DistributedDataParallel(mlp().double())
    step = 0
    # DDP's own forward waits for others, in the second step, so this looks just before it.
    ddp.register_forward_pre_hook(lambda *_: store.set(f"in forward/{step}", "1") if rank == 0 else None)
    with stagereg.Join([ddp], throw_on_early_termination=True, mode=mode, loader=range(4), timeout=20):
        for step in range(4):
            if rank == 1:
                store.get(f"in forward/{step}")
            ddp(batch(rank, 0, step)).sum().backward()
    return step


@pytest.mark.parametrize("mode", MODES)
def test_no_rank_waits_for_another_before_its_forward(mode: str) -> None:
    assert run_ranks(ahead, 2, args=(mode,), timeout_s=30) == [3, 3]


def two_steps_a_batch(rank: int, world_size: int) -> list[list[torch.Tensor]]:
    return [sharpened(rank, mode) for mode in MODES]


def sharpened(rank: int, mode: str) -> list[torch.Tensor]:
    """As with SAM, or an optimizer's closure; rank 0 has no batch from the second one on."""
    ddp = DistributedDataParallel(net(Case()))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    join = stagereg.Join([ddp, optimizer], mode=mode, divide_by_initial_world_size=False)
    with join:
        for x in join.iterate([batch(rank, 0, step) for step in range(1 + rank)]):
            for _ in range(2):
                optimizer.zero_grad()
                join.mean(ddp(x).sum(), len(x), over="samples").backward()
                optimizer.step()
    return [p.detach() for p in ddp.parameters()]


def test_two_steps_on_one_batch_count_ranks_without_data_in_neither() -> None:
    module = net(Case())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(3):
        batches = [batch(rank, 0, step) for rank in range(3) if step < 1 + rank]
        for _ in range(2):
            optimizer.zero_grad()
            (sum(module(x).sum() for x in batches) / sum(map(len, batches))).backward()
            optimizer.step()
    for outcomes in run_ranks(two_steps_a_batch, 3, timeout_s=30):
        for mode, params in zip(MODES, outcomes, strict=True):
            assert difference(params, [p.detach() for p in module.parameters()]) < EXACT, mode


class Sealed:
    """A batch that cannot be cut and has no length."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Unkept(list[Any]):
    """Has a length, and gives nothing."""

    def __iter__(self) -> Any:
        return iter(())


def looped(data: list[Any], read: Any, mode: str | None = None, example: Any = None) -> list[int] | str:
    """The samples of each batch, or the error of the loop."""
    ddp = DistributedDataParallel(net(Case() if mode == "planned" else Case(net="norm")).eval())
    join = stagereg.Join([ddp], mode=mode, timeout=20)
    lengths = []
    try:
        with join:
            for b in join.iterate(data, example=example):
                ddp(x := read(b)).sum().backward()
                lengths.append(len(x))
    except JoinError as error:
        return str(error)
    return lengths


def odd_batches(rank: int, world_size: int) -> dict[str, list[int] | str]:
    boxes = [Sealed(batch(rank, 0, step)) for step in range(2)]

    def dicts() -> list[Any]:
        return [{"x": batch(rank, 0, step)} for step in range(2)]

    def unkept() -> list[Any]:
        return Unkept(dicts()) if rank == 0 else dicts()

    def read(box: Sealed) -> torch.Tensor:
        return box.x

    empty = Sealed(torch.zeros(0, 4, dtype=torch.float64))
    found = {
        "even": looped(boxes, read),
        "popped": looped(dicts() * rank, lambda taken: taken.pop("x")),
        "example": looped(boxes * rank, read, example=empty),
        "counted": looped(boxes, read, "counted"),
        "unkept": looped(unkept(), lambda taken: taken.pop("x"), "counted"),
    }
    found["sealed"] = looped(boxes * rank, read, "counted")
    new_group()  # a failed join may have aborted this one
    return found | {"wrong plan": looped(unkept(), lambda taken: taken.pop("x"), "planned")}


def test_only_batches_that_a_rank_may_need_have_to_be_emptied() -> None:
    first, second = run_ranks(odd_batches, 2, timeout_s=60)
    for found in (first, second):
        assert found["even"] == found["counted"] == [3, 3]
        assert "a batch that is a Sealed cannot be emptied" in found["sealed"]
        assert "gave no batch at all, so it is not known what an empty one is" in found["wrong plan"]
    assert first["popped"] == first["example"] == first["unkept"] == [0, 0]
    assert second["popped"] == second["example"] == second["unkept"] == [3, 3]


def among_torchs(rank: int, world_size: int) -> list[torch.Tensor]:
    """``mode="torch"`` with ``iterate`` on some ranks, torch's ``Join`` on the others."""
    ddp = DistributedDataParallel(net(Case()))
    data = [batch(rank, 0, step) for step in range(1 + 2 * rank)]
    if rank == 1:
        with TorchJoin([ddp]):
            for x in data:
                ddp.zero_grad()
                ddp(x).sum().backward()
    else:
        join = stagereg.Join([ddp], mode="torch")
        with join:
            for x in join.iterate(data):
                ddp.zero_grad()
                ddp(x).sum().backward()
    return [p.grad.clone() for p in ddp.parameters()] if rank == 2 else []


def test_iterate_on_torchs_wire_is_a_plain_loop_among_ranks_that_run_torchs_join() -> None:
    module = net(Case())
    (module(batch(2, 0, 4)).sum() / 3).backward()
    *_, last = run_ranks(among_torchs, 3, timeout_s=30)
    assert difference(last, [p.grad for p in module.parameters()]) < EXACT


def lengthless(rank: int, world_size: int) -> dict[tuple[str, str], str]:
    return {(mode, way): without_a_length(rank, mode, way) for mode in ("planned", "auto") for way in WAYS}


def without_a_length(rank: int, mode: str, way: str) -> str:
    ddp = DistributedDataParallel(mlp().double())
    data: Any = [batch(rank, 0, step) for step in range(1 + rank)]
    loader = iter(data) if rank == 1 else data
    try:
        join = stagereg.Join([ddp], mode=mode, loader=loader if way == "plain" else None)
        with join:
            for x in join.iterate(loader) if way == "iterate" else data:
                ddp(x).sum().backward()
    except JoinError as error:
        return str(error)
    return type(join).__name__


def test_a_plan_needs_every_ranks_length_and_auto_counts_without() -> None:
    for errors in run_ranks(lengthless, 3, timeout_s=30):
        for way in WAYS:
            assert "that of rank 1 has none" in errors["planned", way]
            assert "join.mode=counted" in errors["planned", way]
            assert errors["auto", way] == "Join"


def unplanned(rank: int, world_size: int) -> str:
    ddp = DistributedDataParallel(mlp().double())
    try:
        with stagereg.Join([ddp], mode="planned"):
            ddp(batch(rank, 0, 0)).sum().backward()
    except JoinError as error:
        return str(error)
    return ""


def test_the_error_of_a_planned_join_without_a_loader_shows_how_to_pass_it() -> None:
    for message in run_ranks(unplanned, 2, timeout_s=30):
        assert "join.iterate(loader)" in message
        assert "loader=loader" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "plannd"}, "Did you mean 'planned'"),
        ({"average": "sample"}, "Did you mean 'samples'"),
        ({"timeout": 0}, "join.timeout must be a number of seconds above 0"),
    ],
)
def test_a_wrong_option_is_refused_with_the_nearest_name(options: dict[str, Any], message: str) -> None:
    joinable = stagereg.build("joinable", "collective", collectives=[{"op": "all_reduce"}])
    with pytest.raises(JoinError, match=message):
        stagereg.Join([joinable], **options)


def thrown(
    rank: int, world_size: int, mode: str, sized: bool, way: str, lengths: tuple[int, ...], announced: int
) -> Any:
    """The steps that this rank has trained when the join throws, its parameters, and the error."""
    ddp = DistributedDataParallel(net(Case()))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    data = [batch(rank, 0, step) for step in range(lengths[rank])]
    length = range(max(announced, lengths[rank]))
    loader: Any = data if way == "iterate" and sized else iter(data) if way == "iterate" else length if sized else None
    steps = 0
    join = stagereg.Join(
        [ddp, optimizer], throw_on_early_termination=True, mode=mode, loader=None if way == "iterate" else loader
    )
    try:
        with join:
            for x in join.iterate(loader) if way == "iterate" else data:
                optimizer.zero_grad()
                ddp(x).sum().backward()
                optimizer.step()
                steps += 1
    except stagereg.UnevenInputsError as error:
        after = ddp(batch(rank, 1, 0)).sum()  # the module is as good as before
        after.backward()
        return steps, [p.detach() for p in ddp.parameters()], str(error), error.rank
    return steps, [p.detach() for p in ddp.parameters()], "", None


THROWS = [
    (sized, way, lengths)
    for sized in (True, False)
    for way in ("plain", "iterate")
    for lengths in ((4, 2, 3), (3, 3, 3), (0, 1, 1))
]


def all_thrown(rank: int, world_size: int, mode: str) -> list[Any]:
    return [thrown(rank, world_size, mode, *each, 0) for each in THROWS if each[0] or mode == "counted"]


def after_steps(lengths: tuple[int, ...], steps: int) -> list[torch.Tensor]:
    module = net(Case())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        for rank, length in enumerate(lengths):
            if step < length:
                (module(batch(rank, 0, step)).sum() / len(lengths)).backward()
        optimizer.step()
    return [p.detach() for p in module.parameters()]


def test_a_counted_throw_stops_all_ranks_after_the_shortest_length_with_equal_models() -> None:
    for rank, outcomes in enumerate(run_ranks(all_thrown, 3, args=("counted",), timeout_s=60)):
        for (_, _, lengths), (steps, params, text, who) in zip(THROWS, outcomes, strict=True):
            assert steps == min(lengths)
            assert difference(params, after_steps(lengths, min(lengths))) < EXACT
            uneven = len(set(lengths)) > 1
            assert ("exhausted all inputs" in text) == uneven
            assert who == (rank if uneven and lengths[rank] == min(lengths) else None)


def test_a_rank_that_leaves_before_its_announced_length_is_thrown_for_with_equal_models() -> None:
    for steps, params, text, _ in run_ranks(thrown, 3, args=("counted", True, "plain", (4, 2, 4), 4), timeout_s=30):
        assert "exhausted all inputs" in text
        assert steps in (2, 3)  # it takes part in the step that the others had begun
        assert difference(params, after_steps((4, 2, 4), 3)) < EXACT


def test_a_planned_throw_comes_before_the_first_step_and_names_every_length() -> None:
    for outcomes in run_ranks(all_thrown, 3, args=("planned",), timeout_s=60):
        for (_, _, lengths), (steps, _, text, _) in zip(THROWS, outcomes, strict=False):
            uneven = len(set(lengths)) > 1
            assert steps == (0 if uneven else lengths[0])
            each = ", ".join(f"rank {rank} has {length}" for rank, length in enumerate(lengths))
            assert (f"{each} batches" in text) == uneven
