"""``join.mean`` counts the samples that are there, whatever the batch is and however the program counts them."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel

import stagereg
from stagereg.errors import JoinError
from stagereg.join import counts
from stagereg.join.batches import empty_batch
from stagereg.join.counts import Index, SampleCounter
from stagereg.testing import run_ranks

from ..support.examples import examples


class Graphs:
    """A batch of a class of one's own."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.num_graphs = x, len(x)


class Plain:
    """Likewise, without a function that empties it."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.num_graphs = x, len(x)


def stacked(samples: Any) -> torch.Tensor:
    return torch.stack(list(samples)) if len(samples) else torch.zeros(0, 6)


# How a batch is made of a tensor [samples, 6], and how the loop's body reads tensor and count of it.
KINDS: dict[str, tuple[Any, Any]] = {
    "tensor": (lambda x: x, lambda b: (b, len(b))),
    "int": (lambda x: {"x": x, "n": len(x)}, lambda b: (b["x"], b["n"])),
    "float": (lambda x: (x, float(len(x))), lambda b: b),
    "0-dim": (lambda x: (x, torch.tensor(len(x))), lambda b: b),
    "height": (lambda x: {"x": x, "height": 224}, lambda b: (b["x"], len(b["x"]))),
    "constant": (lambda x: x, lambda b: (b, len(b) or 4)),
    "list": (list, lambda b: (stacked(b), len(b))),
    "tuple of lists": (lambda x: (tuple(x), (1,) * len(x)), lambda b: (stacked(b[0]), len(b[1]))),
    "dicts": (lambda x: [{"x": each, "y": 1} for each in x], lambda b: (stacked([each["x"] for each in b]), len(b))),
    "time first": (lambda x: x.T.contiguous(), lambda b: (b.T, b.shape[1])),
    "own class": (Graphs, lambda b: (b.x, b.num_graphs)),
    "own class, not registered": (Plain, lambda b: (b.x, b.num_graphs)),
    "own class as example": (Plain, lambda b: (b.x, b.num_graphs)),
    "batch as example": (lambda x: {"x": x, "n": len(x)}, lambda b: (b["x"], b["n"])),
    "empty example": (lambda x: {"x": x, "n": len(x)}, lambda b: (b["x"], b["n"])),
}
Program = tuple[str, str, str, tuple[int, int]]  # a kind, when it calls join.mean, mode, lengths


def net() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


def tensors(rank: int, length: int) -> list[torch.Tensor]:
    seed = torch.Generator().manual_seed(100 + rank)
    sizes = [4 if i % 2 == 0 else 5 for i in range(length)]
    return [torch.randn(size, 6, generator=seed, dtype=torch.float64) for size in sizes]


def vector(model: Any) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def groups(when: str, longest: int) -> list[list[int]]:
    """The steps whose batches each optimizer step is of."""
    if when == "each":
        return [[i] for i in range(longest)]
    return [[*range(i, min(i + 2, longest))] for i in range(0, longest, 2)]


def one_process(when: str, lengths: tuple[int, int]) -> torch.Tensor:
    model, loaders = net(), [tensors(rank, length) for rank, length in enumerate(lengths)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for steps in groups(when, max(lengths)):
        x = torch.cat([loader[i] for loader in loaders for i in steps if i < len(loader)])
        optimizer.zero_grad()
        (model(x).square().sum() / len(x)).backward()
        optimizer.step()
    return vector(model)


def train(rank: int, program: Program) -> torch.Tensor:
    """A window is of two batches: their losses and counts are added up, and given to ``join.mean`` at its end."""
    kind, when, mode, lengths = program
    make, read = KINDS[kind]
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = [make(x) for x in tensors(rank, lengths[rank])]
    zero, x = torch.zeros(0, 6, dtype=torch.float64), torch.ones(3, 6, dtype=torch.float64)
    options: dict[str, Any] = {"batch_dim": 1} if kind == "time first" else {}
    if "example" in kind:
        options["example"] = {"x": zero, "n": 0} if kind == "empty example" else make(x)
    wrapped = when == "window"
    ends = [steps[-1] for steps in groups(when, max(lengths))]
    with stagereg.Join([model, optimizer], mode=mode, timeout=15) as join:
        total, n = torch.zeros((), dtype=torch.float64), 0.0
        loader = [*enumerate(batches)] if wrapped and "example" not in kind else batches
        for step, item in enumerate(join.iterate(loader, **options)):
            i, b = item if loader is not batches else (step, item)
            x, count = read(b)
            loss = model(x.double()).square().sum()
            total, n = total + loss, n + float(count)
            if i in ends:
                optimizer.zero_grad()
                join.mean(total, n).backward()
                optimizer.step()
                total, n = torch.zeros((), dtype=torch.float64), 0.0
    return vector(model)


def outcomes(rank: int, world_size: int, programs: list[Program]) -> list[tuple[Any, list[str]]]:
    """What each program ends with on this rank, and what it is warned of; each has a process group of its own."""
    empty_batch.register(Graphs, lambda batch: Graphs(batch.x[:0]))
    base, found, ended = _get_default_store(), [], []
    for i, program in enumerate(programs):
        ended.append(dist.group.WORLD)  # a collector that meets it would wait
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=PrefixStore(f"program {i}", base), rank=rank, world_size=world_size)
        with mock.patch.object(counts._log, "warning") as warning:
            try:
                result: Any = train(rank, program)
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
        found.append((result, [call.args[0] % call.args[1:] for call in warning.call_args_list]))
    return found


def check(programs: list[Program]) -> dict[Program, tuple[Any, ...]]:
    """Run programs; each equals one process, or all its ranks have an error of the project that names the cause."""
    ranks = run_ranks(outcomes, 2, args=(programs,), timeout_s=60 + 8 * len(programs))
    found = dict(zip(programs, zip(*ranks, strict=True), strict=True))
    for program, results in found.items():
        errors = [result for result, _ in results if isinstance(result, str)]
        if errors:
            assert len(errors) == 2, (program, errors)
            causes = ("got n=", "got an example with samples", "Register a function for its class")
            assert any(e.startswith("JoinError") and any(map(e.__contains__, causes)) for e in errors), (
                program,
                errors,
            )
            continue
        assert all(len(warnings) < 2 for _, warnings in results), (program, results)
        expected = one_process(program[1], program[3])
        off = max((result - expected).abs().max().item() for result, _ in results)
        # A constant that a loop adds up is no number in the batch: only its sum is seen, and warned of.
        is_unclear = program[:2] == ("constant", "window") and any(warnings for _, warnings in results)
        assert off < 1e-12 or is_unclear, (program, off)
    return found


def test_every_kind_of_batch_gives_the_numbers_of_one_process() -> None:
    programs = [(kind, "each", "auto", (2, 5)) for kind in KINDS]
    programs += [(kind, "window", "planned", (3, 6)) for kind in KINDS]
    programs += [("constant", "each", "counted", (1, 2))]  # as many samples as this rank has had in all
    programs += [(kind, "each", "counted", (0, 3)) for kind in ("int", "list", "own class", "batch as example")]
    found = check(programs)
    refused = {program[:2] for program, ranks in found.items() if isinstance(ranks[0][0], str)}
    warned = {program[:2] for program, ranks in found.items() if any(warnings for _, warnings in ranks)}
    unknown = ("own class, not registered", "own class as example")
    assert refused == {*itertools.product(unknown, ("each", "window"))}
    stale = {"int", "float", "0-dim", "constant", "batch as example"}
    assert {kind for kind, when in warned if when == "each"} == stale
    assert {kind for kind, when in warned if when == "window"} == {*stale, "own class"}


PROGRAMS = st.tuples(
    st.sampled_from([*KINDS]),
    st.sampled_from(["each", "window"]),
    st.sampled_from(["planned", "counted", "auto"]),
    st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda lengths: max(lengths) > 0),
)


@pytest.mark.slow
@given(programs=st.lists(PROGRAMS, min_size=12, max_size=12, unique=True))
@settings(deadline=None, database=None, max_examples=examples(4))
def test_any_loop_gives_the_numbers_of_one_process_or_an_error(programs: list[Program]) -> None:
    check(programs)


def judged(counter: SampleCounter, n: float, total: float, over: str = "samples", trains: bool = True) -> Any:
    with mock.patch.object(counts._log, "warning") as warning:
        return counter.counted("here", n, lambda: total, over, trains), warning.call_count


def test_a_sum_over_several_batches_keeps_the_samples_of_this_rank() -> None:
    counter = SampleCounter()
    counter.add(torch.ones(4, 2))
    assert judged(counter, 4, 1.5) == (4, 0)
    counter.add(torch.ones(5, 2))
    counter.add_empty({"batch['n']": 4.0})
    assert judged(counter, 5, 1.5) == (5, 0)  # what an accumulation has
    assert counter.counted("elsewhere", 9, lambda: 1.5, "samples", True) == 9  # a line that has never run before
    assert judged(counter, 5, 1.5) == (5, 0)  # another call on the same batch
    counter.add_empty({"batch['n']": 4.0})
    assert judged(counter, 9, 1.5, trains=False) == (9, 0)  # a mean over everything so far
    assert judged(counter, 7, 1.5, "world") == (7, 1)
    assert judged(counter, 7, 1.5) == (0, 0)  # warned of once


def test_what_cannot_be_a_count_of_samples_is_dropped_or_refused() -> None:
    for total, n in ((0.0, 4), (float("nan"), 4), (1.5, 4)):
        counter = SampleCounter()
        counter.add_empty({})
        assert judged(counter, n, total) == (0, 1)
    counter = SampleCounter()
    counter.add(torch.ones(4, 2))
    counter.add_empty({"batch['n']": 4.0})
    assert judged(counter, 4, 0.0) == (0, 1)  # as of a mean in every second step, of that batch alone
    for kept, expected in (({"batch['n']": 3.0}, None), ({"batch['n']": 4.0}, (4, 1)), ({}, (8, 1))):
        counter = SampleCounter()
        counter.add(torch.ones(4, 2))
        counter.add_empty(kept)
        if expected is None:
            with pytest.raises(JoinError, match=r"n=8 on an empty batch. This rank got 4 samples.*batch\['n'\] = 3"):
                judged(counter, 8, 1.5)
        else:
            assert judged(counter, 8, 1.5) == expected


@given(start=st.integers(-3, 5), seen=st.integers(0, 5), place=st.sampled_from(["pair", "triple", "dict"]))
def test_an_index_is_continued_if_it_is_known_to_be_one(start: int, seen: int, place: str) -> None:
    x = torch.ones(2)
    make = {"pair": lambda i: (i, x), "triple": lambda i: (7, i, x), "dict": lambda i: {"i": i, "x": x, "n": 2}}[place]
    index = Index([])
    for i in range(seen):
        index.add(make(start + i))
    is_known = seen > 2 or (start in (0, 1) and (seen == 2 or place == "pair"))
    for i in range(3):
        expected: Any = make(start + seen + i if is_known else start)
        found = index.continued(make(start))
        assert str(found) == str(expected)
    of_enumerate = Index(enumerate([x], start))
    of_enumerate.add((start, x))
    assert of_enumerate.continued((start, x))[0] == start + 1


def stepped(rank: int, world_size: int) -> list[list[int]]:
    """The steps at which the optimizer steps, decided by the loader's index."""
    found = []
    for start, wrap in (
        (0, enumerate),
        (1, lambda each: list(enumerate(each, 1))),
        (0, lambda each: zip(range(99), each, strict=False)),
    ):
        model = DistributedDataParallel(net())
        steps = []
        with stagereg.Join([model], timeout=15) as join:
            for i, x in join.iterate(wrap(tensors(rank, (1, 5)[rank]))):
                join.mean(model(x).sum(), len(x)).backward()
                if (i + 1 - start) % 2 == 0:
                    steps.append(i)
        found.append(steps)
    return found


def test_a_loop_that_steps_by_the_index_steps_on_all_ranks() -> None:
    first, second = run_ranks(stepped, 2, timeout_s=60)
    assert first == second == [[1, 3], [2, 4], [1, 3]]
