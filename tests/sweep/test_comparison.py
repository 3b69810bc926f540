"""A comparison names which combination is best only where the runs show it, and names what they do not show."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from stagereg.errors import ConfigError
from stagereg.sweep.answer import answer
from stagereg.sweep.cell import Cell
from stagereg.sweep.comparison import Comparison, ComparisonRow, compare
from stagereg.sweep.number_text import parameter_text
from stagereg.sweep.rank_sum import p_value
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
        assert [len(row.jobs) for row in shown.rows] == [4] * 8 + [1]
        assert shown.rows[-2].error.startswith("rank 1: RuntimeError: the loss is not finite\n")
        assert ("killed or still running" in shown.rows[-1].error, shown.rows[-1].cells) == (True, {})
        assert (shown.directory, shown.repeats, shown.ranking.name) == (tmp_path, 4, "stall_ms")
        assert shown.best is not None
        assert shown.best.label == "stager=pinned_cached join.mode=planned"
        assert [row.label for row in shown.ties] == ["stager=pinned_cached join.mode=counted"]

    def test_repeats_become_their_median_and_range(self) -> None:
        (row,) = compare(stalls(a=[4.0, 1.0, 2.0, 3.0])).rows
        assert row.cells["stall_ms"] == Cell(2.5, (4.0, 1.0, 2.0, 3.0), 1.0, 4.0, verdict="best")
        many = Cell.of([1.0, 2.0, 3.0, 4.0, 5.0, 60.0])
        assert (many.median, many.low, many.high) == (3.5, 2.25, 4.75)

    def test_a_run_that_is_far_off_is_named(self) -> None:
        (row,) = compare(stalls(a=[2.0, 2.1, 9.0, 1.9, 2.0])).rows
        assert row.cells["stall_ms"].outliers == (row.jobs[2].directory.name,)
        for usual in ([2.0, 2.1, 2.4, 1.9, 2.0], [2.0, 9.0, 2.0], [2.0, 2.0, 2.0, 2.01]):
            assert Cell.of(usual, "abcde").outliers == ()

    def test_each_row_has_its_ratio_to_the_best(self) -> None:
        rows = compare(stalls(a=[4.0], b=[2.0], again=[3.0])).rows
        assert [row.vs_best for row in rows] == [2.0, 1.5, 1.0]
        assert [row.vs_best for row in compare(stalls(a=[-1.0], b=[-2.0])).rows] == [None, None]

    def test_the_a_a_row_is_below_its_twin_wherever_that_is_ranked(self) -> None:
        ranked = compare(stalls(a=[4.0], b=[2.0], c=[3.0], again=[1.0])).ranked
        assert [(row.label, row.again) for row in ranked] == [
            ("stager=b", False), ("stager=c", False), ("stager=a", False), ("stager=a", True)
        ]  # fmt: skip

    def test_figures_that_are_equal_everywhere_are_no_column(self) -> None:
        rows = {f"a={at}": [{"stall_ms": at, "loss": 2.5, "steps": 9, "host": 1}] * 2 for at in (1, 2)}
        assert compare(jobs(rows)).equal == {"loss": 2.5}
        assert "loss" not in {one.name for one in compare(jobs(rows)).metrics}
        assert compare(jobs(rows), "loss").equal == {}, "what ranks stays"
        assert compare(jobs({"a=1": rows["a=1"]})).equal == {}, "there is one row"
        rows["a=3"] = [{"stall_ms": 3}]
        assert compare(jobs(rows)).equal == {}, "one row has none"

    def test_a_swept_number_is_shown_without_its_rounding(self) -> None:
        shown = ["0.30000000000000004", "1e-05", "0.1", "overlapped", "1" * 20, "true", "[0.30000000000000004]"]
        assert [parameter_text(each) for each in shown] == ["0.3", *shown[1:]]

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
            ({"returned.acc": [0.5, 0.75], "loss": [1, 2]}, ("returned.acc", "minimize"), "returned.acc", "best tie"),
            ({"returned.acc": [0.5, 0.75]}, ("returned.acc", "maximize"), "returned.acc", "tie best"),
            ({"stall_ms": [1, 2], "samples_per_s": [10, 20]}, (), "stall_ms", "best tie"),
            ({"stall_ms": [1, 2], "samples_per_s": [10, 20]}, (), "samples_per_s", "tie best"),
            ({"stall_ms": [1, 2], "shadowed_steps": [3, 1]}, (), "shadowed_steps", " "),
            (
                {"stall_ms": [1, 2], "shadowed_steps": [3, 1]},
                ("shadowed_steps", "minimize"),
                "shadowed_steps",
                "tie best",
            ),
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
            given = jobs({"a=1": [{"loss": 2 + difference}] * 5, "a=2": [{"loss": 2.0}] * 5})
            assert verdicts(compare(given, "loss"), "loss") == expected

    @pytest.mark.parametrize("runs", [1, 2, 3, 4])
    def test_fewer_than_four_runs_show_no_difference(self, runs: int) -> None:
        shown = stalls(a=[1.0 + at / 100 for at in range(runs)], b=[9.0 + at for at in range(6)])
        assert verdicts(compare(shown)) == ["best", "" if runs == 4 else "tie"]

    def test_a_difference_below_what_matters_is_a_tie(self) -> None:
        shown = stalls(a=[1.0, 1.001, 1.002, 1.003] * 3, b=[1.04, 1.041, 1.042, 1.043] * 3)
        for matters, verdict in ((None, "tie"), ("1%", ""), ("20%", "tie"), (0, "")):
            assert verdicts(compare(shown, matters=matters)) == ["best", verdict]

    def test_runs_that_overlap_are_judged_by_the_test(self) -> None:
        ten = [float(at) for at in range(10, 20)]
        for shift, verdict in ((2.0, "tie"), (5.0, "")):
            assert verdicts(compare(stalls(a=ten, b=[each + shift for each in ten]))) == ["best", verdict]

    def test_of_several_rivals_each_needs_more_unless_all_are_told_apart(self) -> None:
        ten = [float(at) for at in range(10, 20)]
        near = [each + 3.5 for each in ten]  # chance 2.9 %
        assert verdicts(compare(stalls(a=ten, b=near, c=near))) == ["best", "", ""]
        assert verdicts(compare(stalls(a=ten, b=near, c=[each + 1 for each in ten]))) == ["best", "tie", "tie"]
        same = [each + 0.1 for each in ten]
        assert verdicts(compare(stalls(a=ten, b=near, c=near, d=same))) == ["best", "tie", "tie", "tie"]
        far = [each + 40 for each in ten[:4]]
        assert verdicts(compare(stalls(a=ten[:4], b=far, c=ten[1:5]))) == ["best", "", "tie"], "complete separation"

    def test_a_combination_that_differs_from_itself_hides_smaller_differences(self) -> None:
        shown = {"a": [10.0, 10.1, 10.2, 10.3], "b": [14.0, 14.1, 14.2, 14.3], "c": [30.0, 30.1, 30.2, 30.3]}
        unsteady = compare(stalls(again=[16.0, 16.1, 16.2, 16.3], **shown))
        assert [row.cells["stall_ms"].verdict for row in unsteady.rows] == ["best", "", "tie", ""]
        assert unsteady.warnings[0].startswith("stager=a and its repetition (A/A) differ significantly, by 37 %")
        steady = compare(stalls(again=[8.0, 10.1, 10.2, 16.3], **shown))
        assert [row.cells["stall_ms"].verdict for row in steady.rows] == ["best", "", "", ""]
        assert not steady.warnings

    def test_columns_in_which_all_tie_are_undecided(self) -> None:
        rows = {f"a={at}": [{"stall_ms": at, "loss": at + run} for run in range(4)] for at in (1, 2)}
        assert compare(jobs(rows)).undecided == {"loss"}


class TestNumbersThatAreNotFinite:
    def test_a_combination_with_one_is_never_best_and_shows_it(self) -> None:
        for bad in (math.nan, math.inf, -math.inf):
            given = jobs({"a=1": [{"loss": 1.0}, {"loss": bad}], "a=2": [{"loss": 2.0}] * 2})
            for direction in ("minimize", "maximize"):
                shown = compare(given, "loss", direction)
                assert verdicts(shown, "loss") == ["", "best"]
                assert shown.ranked[0] is shown.best or math.isfinite(shown.ranked[0].cells["loss"].median)
                assert [str(each) for each in shown.rows[0].cells["loss"].values] == ["1.0", str(bad)]
                assert "is not ranked: ." not in answer(shown).text

    def test_if_all_have_one_there_is_no_answer(self) -> None:
        found = answer(compare(jobs({"a=1": [{"loss": math.nan}], "a=2": [{"loss": math.nan}]}), "loss"))
        assert found.headline == "No answer: no combination completed all its runs."
        assert "no finite loss" in found.text


class TestJobsThatDidNotComplete:
    def test_a_combination_that_failed_once_is_not_best(self) -> None:
        shown = jobs({f"a={at}": [{"samples_per_s": value}] for at, value in enumerate([10.0, 30.0, 20.0])})
        for at, out in ((0, False), (1, True)):  # it is named only where it looks better
            lost = failed(Path("sweep/9"), 9, shown[at].overrides, figures={"samples_per_s": 99.0})
            comparison = compare([*shown, lost], "samples_per_s")
            assert comparison.rows[at].status == "1 of 2 failed"
            assert comparison.rows[at].cells["samples_per_s"].values == (shown[at].figures["samples_per_s"],)
            assert verdicts(comparison, "samples_per_s") == (["tie", "", "best"] if out else ["", "best", "tie"])
            assert ("a=1 (30 samples/s) is not ranked: 1 of 2 failed." in answer(comparison).text) == out

    def test_an_unfinished_repeat_leaves_its_combination_in(self) -> None:
        shown = stalls(a=[1.0, 1.0], b=[5.0, 5.0])
        last = {"status": "unfinished", "error": "killed", "figures": {"stall_ms": 9.0}, "versions": {}}
        shown.append(replace(shown[0], directory=Path("sweep/9"), started=BEGAN + 900, **last))
        comparison = compare(shown)
        assert verdicts(comparison) == ["best", "tie"]
        assert (comparison.rows[0].status, comparison.rows[0].error) == ("1 of 3 unfinished", "killed")
        assert comparison.warnings == ("Not included in the metrics: 1 job (killed or still running).",)
        shown.append(failed(Path("sweep/8"), 99, shown[0].overrides))
        assert compare(shown).rows[0].error.startswith("rank 1: RuntimeError"), "that of a failed job first"

    def test_a_combination_that_lacks_figures_is_not_best(self) -> None:
        shown = jobs({"a=1": [{"loss": 1.0, "stall_ms": 1.0}, {"stall_ms": 1.0}], "a=2": [{"loss": 2.0}] * 2})
        comparison = compare(shown, "loss")
        assert verdicts(comparison, "loss") == ["", "best"]
        assert comparison.rows[0].note == "no loss in 1 of 2 runs"


FOUR = [1.2, 1.1, 1.3, 1.2]
ANOTHER = failed(Path("sweep/9"), 9, ("train.steps=40", "nproc=2", "stager=z"))
SAME = replace(ANOTHER, overrides=("train.steps=40", "nproc=2", "stager=a"))
FROM_4 = "At least sweep.repeats=4 is needed to decide whether the difference is significant."
ALONE = "Nothing to compare: 1 ms."
ANSWERS = [
    (
        stalls(a=FOUR, b=[3.4, 3.5, 3.6, 3.5]),
        "a stalls training least: 1.2 ms per checkpoint. 66 % less than b (3.5 ms); 4 runs each, all lower (chance "
        "1 in 35).",
    ),
    (
        stalls(a=[*FOUR, 3.55], b=[3.4, 3.5, 3.6, 3.5, 3.6, 9.1], again=[1.3]),
        "a stalls training least: 1.2 ms per checkpoint. 66 % less than b (3.55 ms); 5 and 6 runs (chance 1 in 42). a "
        "differs from itself by 7.7 %.",
    ),
    (stalls(a=[1, 1.1], b=[3, 3.1]), f"a leads with 1.05 ms. 66 % less than b (3.05 ms); 2 runs each. {FROM_4}"),
    (
        stalls(a=[1.2], b=[3.4], c=[2.0]),
        f"Not decided: a leads with 1.2 ms. 40 % less than c (2 ms); 1 run each. {FROM_4}",
    ),
    (
        stalls(a=[1, 1, 3, 3], b=[2.5] * 4),
        "Not decided: a or b. a (2 ms) and b (2.5 ms) differ by 20 %, runs of one combination by 100 %; 4 runs each. "
        "More runs may decide: sweep.repeats=10.",
    ),
    (
        stalls(a=FOUR * 5, b=[each * 1.01 for each in FOUR * 5]),
        "Not decided: a or b. a (1.2 ms) and b (1.21 ms) differ by 0.99 %, runs of one combination by 4.2 %; 20 runs "
        "each. No difference exceeds 5 % (sweep.matters).",
    ),
    (stalls(**{name: [1] for name in "abcdef"}), "Not decided: a or 5 others. They are equal: 1 ms."),
    ([*stalls(a=[1.0]), ANOTHER], f"{ALONE} No other combination completed all runs with a number."),
    (stalls(a=[1, 1]), f"{ALONE} There is no other combination."),
    (jobs({"a=1": [{"loss": 1.0}]}), "No answer: no job has stall_ms. Available metrics: loss."),
    (
        [failed(Path("0"), 0, ()), result(Path("1"), 1, status="unfinished")],
        "No answer: 1 of 2 jobs failed. 1 job did not finish.",
    ),
    (
        [*stalls(a=[1]), SAME],
        "No answer: no combination completed all its runs. Every combination has at least one "
        "run that failed or has no finite stall_ms.",
    ),
]


@pytest.mark.parametrize(("shown", "end"), ANSWERS)
def test_the_answer_claims_no_more_than_the_runs_show(shown: list[JobResult], end: str) -> None:
    assert answer(compare(shown)).text.endswith(end)


@pytest.mark.parametrize(
    ("sweep_of", "ranking", "headline"),
    [
        ({"lr=0.1": [1.0], "lr=0.30000000000000004": [2.0]}, ("maximize",), "lr=0.3 has the highest m: 2."),
        ({"on=true": [1.0], "on=false": [2.0]}, ("minimize",), "on=true has the lowest m: 1."),
        ({"a=1 b=2 c=3 d=4": [1.0], "a=2 b=3 c=4 d=5": [2.0]}, ("minimize",), "a=1 b=2 … has the lowest m: 1."),
        ({"a=1 b=2 c=x": [0.9999], "a=1 b=2 c=y": [0.5]}, ("maximize",), "x has the highest m: 0.9999."),
    ],
)
def test_the_headline_names_what_differs_in_few_words(
    sweep_of: dict[str, list[float]], ranking: tuple[str], headline: str
) -> None:
    runs = {name: [{"returned.m": value} for value in values * 4] for name, values in sweep_of.items()}
    assert answer(compare(jobs(runs), "returned.m", *ranking)).headline == headline


def test_a_metric_that_is_turned_round_is_not_praised() -> None:
    shown = stalls(a=FOUR, b=[3.4, 3.5, 3.6, 3.5])
    assert answer(compare(shown, direction="maximize")).headline == "b has the highest stall ms: 3.5 ms."


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
        assert warning.startswith("The results are of different versions (torch 2.12.0; torch 2.13.0).")
        assert "torch 2.13.0 or 3 others. Equal to torch 2.12.0 (1.05 ms)" in answer(comparison).text

    def test_other_machines_are_reported(self) -> None:
        shown = stalls(a=[1.0], b=[2.0])
        moved = replace(shown[1], environment=ENVIRONMENT | {"cores": 8, "host": "there"})
        assert compare([shown[0], moved]).warnings == (
            "The jobs ran on different machines (a processor, 2 cores; a processor, 8 cores): differences "
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
        assert compare(shown).rows[0].note == "2 failed saves"


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
@example(shown={"a": [1.0, 2.0, 3.0, 4.0], "b": [2.0]}, again=[])
@example(shown={"a": [1.0, 1.0, 1.0, 1.0, 3.0], "b": [2.5] * 5}, again=[])
@example(shown={"a": [1.0, 1.0, 1.0, 3.0], "b": [2.5] * 4}, again=[])
def test_the_best_has_the_best_median_and_no_row_is_told_apart_by_chance(
    shown: dict[str, list[float]], again: list[float]
) -> None:
    comparison = compare(stalls(again, **shown))
    best = comparison.best
    assert best is not None
    assert len(answer(comparison).headline.split()) <= 10
    top = best.cells["stall_ms"]
    for row in comparison.rows:
        cell = row.cells["stall_ms"]
        if row.again or row is best:
            continue
        assert cell.median >= top.median
        told_apart = cell.verdict == ""
        assert not told_apart or p_value(top.values, cell.values) <= 0.05
        apart = max(top.values) < 0.95 * min(cell.values) and min(len(top.values), len(cell.values)) >= 4
        assert told_apart or not apart or again, "complete separation"
