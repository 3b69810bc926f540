"""Every rank ends a join with the numbers of a single process that has all the data of each step."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from stagereg.testing import run_ranks

from ..support.reference import EXACT, JOINABLES, Case, difference, expected, train

PLAIN = Case()
UNUSED = Case(net="branches", optimizer="sgd", wrap={"find_unused_parameters": True})

CASES = {
    "adam": PLAIN,
    "sgd with momentum": Case(optimizer="sgd"),
    "fused adamw": Case(optimizer="fused"),
    "adagrad": Case(optimizer="adagrad"),
    "zero": Case(column="zero"),
    "a rank without batches": Case(lengths=(3, 0, 2)),
    "even": Case(lengths=(3, 3, 3)),
    "no rank has data": Case(lengths=(0, 0, 0)),
    "gradients never zeroed": Case(zero="never"),
    "gradients never zeroed, zero": Case(zero="never", column="zero"),
    "zeroed between forward and backward": Case(when="between"),
    "zeroed in place at the end": Case(zero="zeros", when="end", epochs=2),
    "divided by the active ranks": Case(divide=False),
    "a join for every epoch": Case(epochs=3, one_join=False, column="zero", divide=False),
    "a schedule": Case(last="scheduler", epochs=2),
    "a function": Case(last="function", epochs=2),
    "a function that zeroes": Case(last="function", when="end"),
    "buffers": Case(net="norm", optimizer="sgd", epochs=2),
    "buffers, accumulation": Case(net="norm", optimizer="sgd", accumulate=2, lengths=(1, 3, 6), epochs=2),
    "gradients are bucket views": Case(wrap={"gradient_as_bucket_view": True}, epochs=2),
    "many buckets": Case(wrap={"bucket_cap_mb": 1e-5}, epochs=2),
    "buckets rebuilt without a rank": Case(wrap={"bucket_cap_mb": 1e-5}, lengths=(1, 0, 4)),
    "parameters unused everywhere": UNUSED,
    "parameters unused everywhere, bucket views": replace(
        UNUSED, wrap={**UNUSED.wrap, "gradient_as_bucket_view": True}
    ),
    "out of data inside an accumulation": Case(accumulate=2, lengths=(1, 3, 6)),
    "out of data inside an accumulation, zeroed at the end": Case(
        accumulate=3, lengths=(2, 4, 9), when="end", epochs=2
    ),
    "a rank that never sees a second step": Case(lengths=(0, 5, 1), zero="never"),
    "out of data inside an accumulation, active ranks": Case(accumulate=2, lengths=(1, 3, 6), divide=False),
    "two forwards for one backward, evaluation between": Case(forwards=2),
    "keywords, nested outputs, two forwards": Case(net="nested", forwards=2, optimizer="sgd"),
    "a model that returns a dataclass": Case(net="dataclass", zero="never", optimizer="sgd"),
    "a model that hides its tensors": Case(net="hiding", zero="never", optimizer="sgd"),
    "a static graph": Case(wrap={"static_graph": True}, epochs=2),
    "allreduce hook": Case(comm_hook="allreduce", epochs=2),
    "builtin allreduce hook, active ranks": Case(comm_hook="builtin allreduce", divide=False, epochs=2),
}
if not JOINABLES:
    CASES = {name: case for name, case in CASES.items() if case.column != "zero"}


def all_of_them(rank: int, world_size: int, runs: dict[str, tuple[Case, str]]) -> dict[str, Any]:
    """Cases of one world size, in the same processes, so that a trace of one shows in the next."""
    outcomes = {}
    for name, (case, library) in runs.items():
        try:
            outcomes[name] = train(rank, world_size, case, library)
        except Exception as error:
            error.add_note(f"in the case {name!r}, {library}")
            raise
    return outcomes


def wrong(runs: dict[str, tuple[Case, str]], timeout_s: float = 100) -> dict[tuple[int, str], float]:
    """How far ranks are from the single process, where they are, in cases that are each run with a library."""
    apart = {}
    for size in sorted({len(case.lengths) for case, _ in runs.values()}):
        alike = {name: run for name, run in runs.items() if len(run[0].lengths) == size}
        for rank, outcome in enumerate(run_ranks(all_of_them, size, args=(alike,), timeout_s=timeout_s)):
            apart.update({(rank, name): difference(found, expected(*runs[name])) for name, found in outcome.items()})
    assert len(apart) == sum(len(case.lengths) for case, _ in runs.values())
    return {where: value for where, value in apart.items() if not value < EXACT}


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
    "library",
    ["ours", *(pytest.param(each, marks=pytest.mark.slow) for each in ("counted", "planned"))],
)
def test_every_rank_has_the_numbers_of_a_single_process(library: str) -> None:
    assert wrong({name: (CASES[name], library) for name in covering()}) == {}


def test_compressed_gradients_are_near_and_replicas_equal() -> None:
    compressed = {
        f"{hook}, {zero}": Case(comm_hook=hook, zero=zero, optimizer="sgd", lengths=(3, 4), divide=False)
        for hook in ("fp16", "builtin fp16")
        for zero in ("none", "never")
    }
    apart = wrong({name: (case, "ours") for name, case in compressed.items()})
    for name in compressed:
        assert apart[0, name] == apart[1, name] < 2e-3, name
