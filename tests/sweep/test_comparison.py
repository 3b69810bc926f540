"""A comparison names which combination is best only where the runs show it, and names what they do not show."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from stagereg.errors import ConfigError
from stagereg.sweep.answer import answer
from stagereg.sweep.comparison import Cell, Comparison, ComparisonRow, compare
from stagereg.sweep.result import JobResult, results

from ..support.samples import BEGAN, ENVIRONMENT, FAILING, STALLS, UNFINISHED, VERSIONS, failed, jobs, result, sweep


def stalls(again: list[float] | None = None, **values: list[float]) -> list[JobResult]:
    """Jobs with these stalls, by the name of the stager."""
    figures = {f"stager={name}": [{"stall_ms": each} for each in several] for name, several in values.items()}
    return jobs(figures, again=[{"stall_ms": each} for each in again or []])


def verdicts(comparison: Comparison, name: str = "stall_ms") -> list[str]:
    return [row.cells[name].verdict if name in row.cells else "-" for row in comparison.rows]


class TestRows:
    def test_a_sweep_has_a_row_for_each_combination(self, tmp_path: Path) -> None:
        shown = compare(results(sweep(tmp_path)))
        assert (shown.parameters, shown.constant) == (("stager", "join.mode"), ("train.steps=40", "nproc=2"))
        assert [row.label for row in shown.rows] == [next(iter(STALLS)), *STALLS, FAILING, UNFINISHED]
        assert [row.again for row in shown.rows] == [False, True] + [False] * 7
        assert [row.status for row in shown.rows] == ["completed"] * 7 + ["failed", "unfinished"]
        assert [len(row.jobs) for row in shown.rows] == [3, 1, 3, 3, 3, 3, 3, 3, 1]
        assert shown.rows[-2].error.startswith("rank 1: RuntimeError: the loss is not finite\n")
        assert ("killed half-way" in shown.rows[-1].error, shown.rows[-1].cells) == (True, {})
        assert (shown.directory, shown.repeats, shown.ranking.name) == (tmp_path, 3, "stall_ms")
        assert shown.best is not None
        assert shown.best.label == "stager=pinned_cached join.mode=planned"
        assert [row.label for row in shown.ties] == ["stager=pinned_cached join.mode=counted"]

    def test_repeats_become_median_and_quartiles(self) -> None:
        (row,) = compare(stalls(a=[4.0, 1.0, 2.0, 3.0])).rows
        assert row.cells["stall_ms"] == Cell(2.5, 1.5, (4.0, 1.0, 2.0, 3.0), "best")
        assert Cell.of([2.0]) == Cell(2.0, None, (2.0,))

    @pytest.mark.parametrize(
        ("given", "labels", "constant"),
        [
            (["a=1 +b=2", "++b=2 a=1", "a=9 b=2 a=1"], ["as configured"], "a=1 +b=2"),
            (["a=1", "a=1 b=2", "a=1 ~c"], ["as configured", "b=2", "~c="], "a=1"),
            (["a=1 sweep.repeats=2 ++sweep.metric=loss n=1", "a=2 sweep.repeats=3 n=1"], ["a=1", "a=2"], "n=1"),
        ],
    )
    def test_overrides_that_differ_are_what_was_swept(self, given: list[str], labels: list[str], constant: str) -> None:
        found = [result(Path(str(at)), at, overrides=tuple(each.split())) for at, each in enumerate(given)]
        shown = compare(found)
        assert [row.label for row in shown.rows] == labels
        assert shown.constant == tuple(constant.split())

    def test_nothing_cannot_be_compared(self) -> None:
        with pytest.raises(ConfigError, match="no jobs"):
            compare([])

    def test_a_job_whose_overrides_are_lost_sweeps_nothing(self) -> None:
        shown = compare([*stalls(a=[1.0], b=[2.0]), result(Path("sweep/9"), 9, status="unfinished", overrides=())])
        assert shown.parameters == ("stager",)
        assert shown.constant == ("train.steps=40", "nproc=2")

    def test_columns_are_the_figures_that_any_completed_job_has(self) -> None:
        shown = [
            result(Path("0"), 0, overrides=("a=0",), figures={"loss": 1.0, "train_s": 3.0, "returned.b": 1.0}),
            result(Path("1"), 1, overrides=("a=1",), figures={"stall_ms": 1.0, "returned.a": 2.0}),
            failed(Path("2"), 2, ("a=2",), figures={"samples_per_s": 9.0}),
        ]
        assert [one.name for one in compare(shown).metrics] == ["stall_ms", "loss", "returned.a", "returned.b"]

    @pytest.mark.parametrize(
        ("figures", "ranking", "column", "expected"),
        [
            ({"returned.acc": [0.5, 0.75], "loss": [1, 2]}, ("loss",), "returned.acc", " "),
            ({"returned.acc": [0.5, 0.75], "loss": [1, 2]}, ("returned.acc",), "returned.acc", "best "),
            ({"returned.acc": [0.5, 0.75]}, ("returned.acc", "maximize"), "returned.acc", " best"),
            ({"stall_ms": [1, 2], "samples_per_s": [10, 20]}, (), "stall_ms", "best "),
            ({"stall_ms": [1, 2], "samples_per_s": [10, 20]}, (), "samples_per_s", " best"),
            ({"stall_ms": [1, 2], "shadowed_steps": [3, 1]}, (), "shadowed_steps", " "),
            ({"stall_ms": [1, 2], "shadowed_steps": [3, 1]}, ("shadowed_steps", "minimize"), "shadowed_steps", " best"),
            ({"stall_ms": [1, 2, 3], "loss": [2.5, 2.5, 2.5]}, (), "loss", "  "),
            ({"stall_ms": [1, 2, 3], "loss": [2.5, 2.5, 2.5]}, ("loss",), "loss", "best tie tie"),
        ],
    )
    def test_each_column_has_its_own_best_unless_all_are_equal(
        self, figures: dict[str, list[float]], ranking: tuple[str, ...], column: str, expected: str
    ) -> None:
        rows = [dict(zip(figures, values, strict=True)) for values in zip(*figures.values(), strict=True)]
        shown = jobs({f"a={at}": [row] for at, row in enumerate(rows)})
        assert verdicts(compare(shown, *ranking), column) == expected.split(" ")


class TestTies:
    def test_a_difference_that_rounding_may_make_is_a_tie(self) -> None:
        for difference, expected in ((1e-9, ["tie", "best"]), (1e-4, ["", "best"])):
            assert verdicts(compare(stalls(a=[2 + difference] * 5, b=[2] * 5))) == expected


class TestJobsThatDidNotComplete:
    def test_a_combination_that_failed_once_is_not_best(self) -> None:
        shown = jobs({f"a={at}": [{"samples_per_s": value}] for at, value in enumerate([10.0, 30.0, 20.0])})
        for at, out in ((0, False), (1, True)):  # it is named only where it looks better
            lost = failed(Path("sweep/9"), 9, shown[at].overrides, figures={"samples_per_s": 99.0})
            comparison = compare([*shown, lost], "samples_per_s")
            assert comparison.rows[at].status == "1 of 2 failed"
            assert comparison.rows[at].cells["samples_per_s"].values == (shown[at].figures["samples_per_s"],)
            assert verdicts(comparison, "samples_per_s") == (["", "", "best"] if out else ["", "best", ""])
            assert ("a=1, 30 samples/s, is out: 1 of 2 failed." in answer(comparison)) == out

    def test_an_unfinished_repeat_leaves_its_combination_in(self) -> None:
        shown = stalls(a=[1.0, 1.0], b=[5.0, 5.0])
        last = {"status": "unfinished", "error": "killed", "figures": {"stall_ms": 9.0}, "versions": {}}
        shown.append(replace(shown[0], directory=Path("sweep/9"), started=BEGAN + 900, **last))
        comparison = compare(shown)
        assert verdicts(comparison) == ["best", ""]
        assert (comparison.rows[0].status, comparison.rows[0].error) == ("1 of 3 unfinished", "killed")
        assert comparison.warnings == ("Killed half-way or still running: 1 job, whose figures do not count.",)
        shown.append(failed(Path("sweep/8"), 99, shown[0].overrides))
        assert compare(shown).rows[0].error.startswith("rank 1: RuntimeError"), "that of a failed job first"

    def test_a_combination_that_lacks_figures_is_not_best(self) -> None:
        shown = jobs({"a=1": [{"loss": 1.0, "stall_ms": 1.0}, {"stall_ms": 1.0}], "a=2": [{"loss": 2.0}] * 2})
        comparison = compare(shown, "loss")
        assert verdicts(comparison, "loss") == ["", "best"]
        assert comparison.rows[0].note == "no loss in 1 of 2 runs"


UNKNOWN = "so it is unknown whether the difference is real; sweep.repeats=3 would show."
SPREAD = "the difference is larger than the spread of"
TWINS = "the difference is smaller than that between two sets of runs of one combination."
ANOTHER = failed(Path("sweep/9"), 9, ("train.steps=40", "nproc=2", "stager=z"))
SAME = replace(ANOTHER, overrides=("train.steps=40", "nproc=2", "stager=a"))
UNANSWERED = "No answer by stall_ms: every combination that has it failed, or lacks it, in some of its runs."
NONE = [failed(Path("0"), 0, ()), result(Path("1"), 1, status="unfinished")]
ANSWERS = [
    (
        stalls(a=[1.2, 1.1, 1.3], b=[3.4, 3.5, 3.6]),
        f"Best by stall_ms: stager=a, 1.2 ms, before stager=b, 3.5 ms: {SPREAD} 3 runs each, "
        "so it is most likely real.",
    ),
    (stalls(a=[1, 1.1], b=[3, 3.1]), f"{SPREAD} 2 runs each, but so few prove little; sweep.repeats=5 would help."),
    (stalls(a=[1.2], b=[3.4], c=[2.0]), f": stager=a, 1.2 ms, before stager=c, 2 ms: one run each, {UNKNOWN}"),
    (stalls(a=[1.2, 1.2], b=[3.4]), f"before stager=b, 3.4 ms: one of the two has a single run, {UNKNOWN}"),
    (stalls(a=[1] * 3, b=[2] * 3, again=[4.0]), f"Best by stall_ms: stager=a, 1 ms; it ties with stager=b: {TWINS}"),
    (stalls(a=[1, 1, 3], b=[2.5] * 3, c=[1] * 3), "b and stager=c: their runs overlap, or the figures are equal."),
    (stalls(**{name: [1] for name in "abcdef"}), "stager=b, stager=c, stager=d and 2 more: the figures are equal."),
    ([*stalls(a=[1.0]), ANOTHER], "1 ms; no other combination completed all its runs with that figure."),
    (stalls(a=[1, 2]), "Best by stall_ms: as configured, 1.5 ms; there is no other combination to compare it with."),
    (
        jobs({"a=1": [{"loss": 1.0}]}),
        "No answer by stall_ms: no completed job has that figure. Figures there are: loss.",
    ),
    (NONE, "No answer: of 2 jobs, 1 failed, 1 unfinished."),
    ([*stalls(a=[1]), SAME], UNANSWERED),
]


@pytest.mark.parametrize(("shown", "end"), ANSWERS)
def test_the_answer_claims_no_more_than_the_runs_show(shown: list[JobResult], end: str) -> None:
    assert answer(compare(shown)).endswith(end)


class TestWarnings:
    def test_results_of_two_versions_have_rows_of_their_own(self) -> None:
        new = stalls(a=[1.0, 1.1], b=[2.0, 2.1], again=[1.2])
        later = {"versions": VERSIONS | {"torch": "2.12.0"}, "started": BEGAN + 3600}
        old = [replace(job, directory=Path("sweep", f"{99 + at}"), **later) for at, job in enumerate(new)]
        comparison = compare([*new, *old])
        expected = [("13", "a"), ("13", "a"), ("12", "a"), ("12", "a"), ("13", "b"), ("12", "b")]
        assert [(row.versions, row.parameters["stager"]) for row in comparison.rows] == [
            (f"torch 2.{minor}.0", stager) for minor, stager in expected
        ]
        assert [row.again for row in comparison.rows] == [False, True, False, True, False, False]
        warning = comparison.warnings[0]
        assert warning.startswith("Results of different versions are mixed (torch 2.12.0; torch 2.13.0).")
        assert "stager=a (torch 2.13.0)" in answer(comparison)

    def test_the_noise_is_the_largest_of_all_a_a_pairs(self) -> None:
        quiet = stalls(a=[10.0] * 5, b=[12.0] * 5, again=[10.0])
        busy = [
            replace(job, directory=Path("then", str(at)), versions={"stagereg": "0"}) for at, job in enumerate(quiet)
        ]
        busy[-1] = replace(busy[-1], figures={"stall_ms": 13.0})
        assert len(compare([*quiet, *busy]).ties) == 3
        alone = replace(quiet[-1], versions=VERSIONS | {"torch": "2.12.0"}, figures={"stall_ms": 90.0})
        assert verdicts(compare([*quiet[:-1], alone])) == ["best", "", ""], "of one version"

    def test_other_machines_are_reported(self) -> None:
        shown = stalls(a=[1.0], b=[2.0])
        moved = replace(shown[1], environment=ENVIRONMENT | {"cores": 8, "host": "there"})
        assert compare([shown[0], moved]).warnings == (
            "The jobs ran on different machines (a processor, 2 cores; a processor, 8 cores): what differs "
            "may come from the machine.",
        )

    def test_jobs_that_ran_beside_each_other_are_reported(self) -> None:
        shown = [replace(job, started=BEGAN) for job in stalls(a=[1.0], b=[2.0], c=[3.0])]
        elsewhere = replace(shown[2], environment=ENVIRONMENT | {"host": "there"})
        assert compare(shown).warnings[0].startswith("Up to 3 jobs ran at the same time on one machine")
        assert compare([*shown[:2], elsewhere]).warnings[0].startswith("Up to 2 jobs")
        assert compare([shown[0], elsewhere]).warnings == ()
        in_turn = [replace(job, started=BEGAN + 49.5 * at) for at, job in enumerate(shown)]
        assert compare(in_turn).warnings == ()

    def test_checkpoints_that_could_not_be_saved_are_reported(self) -> None:
        shown = jobs({"a=1": [{"stall_ms": 1.0, "lost_checkpoints": 2.0}]})
        assert compare(shown).rows[0].note == "2 checkpoints could not be saved"


FIGURE = st.integers(1, 40).map(float)
VALUES = st.lists(FIGURE, min_size=1, max_size=6)
SWEEPS = st.dictionaries(st.sampled_from("abcdef"), VALUES, min_size=1, max_size=5)
AGAIN = st.lists(FIGURE, max_size=2)


def seen(rows: tuple[ComparisonRow, ...]) -> list[tuple[object, ...]]:
    return [(row.label, row.again, row.cells, row.status, row.note) for row in rows]


@settings(deadline=None, max_examples=40)
@given(shown=SWEEPS, fails=st.integers(1, 3), order=st.randoms(use_true_random=False))
def test_neither_their_order_nor_a_failed_job_changes_a_row(
    shown: dict[str, list[float]], fails: int, order: random.Random
) -> None:
    assume(len(shown) > 1)
    every = stalls(**shown)
    more = [failed(Path(f"sweep/{90 + at}"), 90 + at, ("train.steps=40", "nproc=2", "stager=z")) for at in range(fails)]
    before, after = compare(every), compare(order.sample([*every, *more], len(every) + fails))
    assert seen(after.rows[:-1]) == seen(before.rows)
    assert answer(after) == answer(before)
    assert after.rows[-1].status == "failed"


@settings(deadline=None, max_examples=60)
@given(shown=SWEEPS, again=AGAIN)
@example(shown={"a": [1.0, 2.0, 3.0], "b": [2.0]}, again=[])
@example(shown={"a": [1.0, 1.0, 1.0, 1.0, 3.0], "b": [2.5] * 5}, again=[])
@example(shown={"a": [1.0, 1.0, 1.0, 3.0], "b": [2.5] * 4}, again=[])
def test_the_best_has_the_best_median_and_rows_in_noise_tie(shown: dict[str, list[float]], again: list[float]) -> None:
    comparison = compare(stalls(again, **shown))
    best = comparison.best
    assert best is not None
    top = best.cells["stall_ms"]
    first = comparison.rows[0].cells["stall_ms"].median
    second = statistics.median(again) if again else first
    noise = abs(first - second) / (max(abs(first), abs(second)) or 1.0)
    for row in comparison.rows:
        cell = row.cells["stall_ms"]
        if row.again:
            assert cell.verdict == ""
            continue
        assert cell.median >= top.median
        in_proportion = noise * max(abs(cell.median), abs(top.median))
        within = cell.median - top.median <= max(cell.spread or 0.0, top.spread or 0.0, in_proportion)
        apart = max(top.values) < min(cell.values) or min(len(top.values), len(cell.values)) >= 5
        assert (row is best or cell.verdict == "tie") == (within or not apart)
