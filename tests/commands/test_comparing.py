"""Which differences between two runs refute a checkpoint, and which cause is named first."""

from __future__ import annotations

from typing import Any

import pytest

from stagereg.commands.comparing import Difference, compare, explain

Rows = list[dict[str, Any]]


def tensor(digest: str, norm: float = 1.0, copies: int = 0) -> list[Any]:
    return [["float32[2]", digest], norm, copies]


def rows(**changed: Any) -> Rows:
    """The rows of a rank: at the save, at the start, after two steps. ``step1={...}`` changes values of a row."""
    found: Rows = [{"random numbers: torch": "r0"}]
    for at in range(3):
        found.append(
            {
                "random numbers: torch": f"r{at}",
                "parameter: model.w": tensor(f"w{at}"),
                "buffer: model.b": tensor(f"b{at}"),
                "optimizer state: opt.w.m": tensor(f"m{at}"),
                "schedule: opt.lr": str(at),
                "variable: epoch": "1",
            }
        )
        if at:
            found[-1] |= {
                "step: step": 8 + at,
                "data: batches": tensor(f"d{at}"),
                "gradient: model.w": tensor(f"g{at}"),
            }
            found[-1] |= {"data: count": 4, "data: samples": [["0000000000000002"], 0.0, 0], "loss: loss": f"{at}"}
    for name, values in changed.items():
        found[int(name[-1]) + 1] |= values
    return found


def first(recorded: dict[int, Rows], tried: dict[int, Rows], same_size: bool = True) -> Difference | None:
    return next((each for each in compare(recorded, tried, same_size) if each.refutes), None)


def named(found: Difference | None) -> tuple[int, int, str, str]:
    assert found is not None
    return found.row, found.rank, found.kind, found.name


def test_equal_rows_differ_in_nothing() -> None:
    assert compare({0: rows(), 1: rows()}, {0: rows(), 1: rows()}, True) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"step1": {"parameter: model.w": tensor("x")}}, (1, 0, "parameter", "model.w")),
        ({"step1": {"parameter: model.w": tensor("x"), "data: batches": tensor("x")}}, (1, 0, "data", "batches")),
        ({"step1": {"parameter: model.w": tensor("x"), "schedule: opt.lr": "9"}}, (1, 0, "schedule", "opt.lr")),
        (
            {"step1": {"gradient: model.w": tensor("x"), "parameter: model.w": tensor("x")}},
            (1, 0, "gradient", "model.w"),
        ),
        ({"step2": {"step: step": 12}}, (2, 0, "step", "step")),
        (
            {"step1": {"random numbers: torch": "x"}, "step2": {"random numbers: torch": "y"}},
            (1, 0, "random numbers", "torch"),
        ),
        (
            {"step0": {"optimizer state: opt.w.m": tensor("x")}, "step2": {"optimizer state: opt.w.m": tensor("y")}},
            (0, 0, "optimizer state", "opt.w.m"),
        ),
    ],
)
def test_the_cause_comes_before_its_consequences(changes: dict[str, Any], expected: tuple[int, int, str, str]) -> None:
    assert named(first({0: rows()}, {0: rows(**changes)})) == expected


def test_another_step_explains_the_differences_before_it() -> None:
    found = first(
        {0: rows()}, {0: rows(step0={"schedule: opt.lr": "9"}, step1={"schedule: opt.lr": "9", "step: step": 8})}
    )
    assert named(found) == (1, 0, "step", "step")


@pytest.mark.parametrize(
    "changes",
    [
        {"step1": {"variable: epoch": "7"}},
        {"step1": {"loss: loss": "7"}},
        {"step0": {"buffer: model.b": tensor("of rank 0")}},  # DDP broadcasts it in the next forward
    ],
)
def test_a_difference_without_effect_does_not_refute(changes: dict[str, Any]) -> None:
    assert first({0: rows()}, {0: rows(**changes)}) is None
    assert compare({0: rows()}, {0: rows(**changes)}, True) != []


def test_a_generator_that_the_steps_did_not_use_does_not_refute() -> None:
    unused = {f"step{at}": {"random numbers: torch": "r0"} for at in range(3)}
    other = {f"step{at}": {"random numbers: torch": "other"} for at in range(3)}
    assert first({0: rows(**unused)}, {0: rows(**other)}) is None


def test_a_rank_that_takes_fewer_steps_refutes() -> None:
    assert named(first({0: rows(), 1: rows()}, {0: rows(), 1: rows()[:-1]})) == (2, 1, "step", "step")


def test_another_rank_that_differs_is_named() -> None:
    other = rows(step1={"parameter: model.w": tensor("x")})
    assert named(first({0: rows(), 1: rows()}, {0: rows(), 1: other})) == (1, 1, "parameter", "model.w")


def test_on_another_number_of_ranks_norms_may_differ_by_a_thousandth() -> None:
    near, far = (rows(step1={"parameter: model.w": tensor("x", 1 + by)}) for by in (0.0009, 0.0012))
    half = {f"step{at}": {"data: count": 2, "data: samples": [["0000000000000001"], 0.0, 0]} for at in (1, 2)}
    recorded = {0: rows(**half), 1: rows(**half)}
    assert first(recorded, {0: near}, same_size=False) is None
    assert named(first(recorded, {0: far}, same_size=False)) == (1, -1, "parameter", "model.w")


def test_on_another_number_of_ranks_shards_add_up_to_the_whole() -> None:
    shards = [
        {f"step{at}": {"parameter: model.w": tensor(f"s{rank}", norm, 1)} for at in range(3)}
        for rank, norm in enumerate((3.0, 4.0))
    ]
    whole = rows(**{f"step{at}": {"parameter: model.w": tensor("w", 5.0)} for at in range(3)})
    assert first({0: rows(**shards[0]), 1: rows(**shards[1])}, {0: whole}, same_size=False) is None
    wrong = rows(**{f"step{at}": {"parameter: model.w": tensor("w", 4.0)} for at in range(3)})
    assert named(first({0: rows(**shards[0]), 1: rows(**shards[1])}, {0: wrong}, same_size=False))[2] == "parameter"


def test_on_another_number_of_ranks_other_samples_refute() -> None:
    half = {f"step{at}": {"data: count": 2, "data: samples": [["0000000000000001"], 0.0, 0]} for at in (1, 2)}
    other = rows(step2={"data: samples": [["0000000000000003"], 0.0, 0]})
    found = first({0: rows(**half), 1: rows(**half)}, {0: other}, same_size=False)
    assert named(found) == (2, -1, "data", "first 8 samples")


def test_other_numbers_of_samples_per_step_are_compared_where_their_sums_agree() -> None:
    half = {f"step{at}": {"data: count": 2, "data: samples": [["0000000000000001"], 0.0, 0]} for at in (1, 2)}
    moved = rows(step1={**half["step1"], "parameter: model.w": tensor("x", 9.0)}, step2=half["step2"])
    assert first({0: rows(), 1: rows()}, {0: moved}, same_size=False) is None  # 8 samples per step against 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step1": {"data: batches": tensor("d2")}}, "1 batch too far ahead"),
        ({"step2": {"data: batches": tensor("d1")}}, "1 batch too far back"),
        ({"step1": {"optimizer state: opt.w.m": tensor("z", 0.0)}}, "opt.w.m is zero"),
        ({"step1": {"step: step": 8}}, "Begin at restore"),
    ],
)
def test_the_likely_cause_is_read_from_the_values(changes: dict[str, Any], words: str) -> None:
    recorded = {0: rows()}
    assert words in explain(compare(recorded, {0: rows(**changes)}, True), recorded, [{}, {}])


def test_a_value_of_another_rank_and_swapped_state_are_recognized() -> None:
    other = rows(step0={"buffer: model.b": tensor("of 1")}, step1={"buffer: model.b": tensor("of 1, later")})
    mine = rows(step0={"buffer: model.b": tensor("of 1")}, step1={"buffer: model.b": tensor("of 1, later")})
    recorded = {0: rows(), 1: other}
    cause = explain(compare(recorded, {0: mine, 1: other}, True), recorded, [{}, {}])
    assert cause == "model.b has the value that model.b of rank 1 had in the run."


def test_gradients_that_were_accumulated_before_the_save_are_named() -> None:
    kept = rows(step0={"value: accumulated gradients": 6}, step1={"step: optimizer steps": 0})
    changed = {"step: optimizer steps": 0, "gradient: model.w": tensor("x")}
    lost = rows(step0={"value: accumulated gradients": 0}, step1=changed)
    cause = explain(compare({0: kept}, {0: lost}, True), {0: kept}, [{}, {}])
    assert cause.startswith("6 gradients that were accumulated before the save are lost")
