"""A comparison as text: one order, one number format, and left-out columns are named."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import stagereg.sweep.render.page as page
import stagereg.sweep.render.tables as tables
from stagereg.sweep.answer import answer
from stagereg.sweep.comparison import Comparison, compare
from stagereg.sweep.metric import METRICS, metric

from ...support.samples import compared, failed, jobs, row_of

TO = "\N{EN DASH}"
LOSSES = (2.0, 2.74, 55.8)
NUMBERS = st.floats(min_value=-1e12, max_value=1e12)


def printed(comparison: Comparison, capsys: pytest.CaptureFixture[str]) -> list[str]:
    tables.terminal(comparison)
    return capsys.readouterr().out.splitlines()


def ordered(comparison: Comparison) -> list[tuple[tables.Value, ...]]:
    heads = len(comparison.parameters)
    return [row[1 : 1 + heads] for row in tables.compare_table(comparison).rows]


def wide() -> Comparison:
    """Two parameters and all eight metrics, each with a spread."""
    values = {one.name: (1234.5 * i, 1300.1 * i, 1280.2 * i) for i, one in enumerate(METRICS, 1)}
    stagers, modes = ("pinned_cached", "overlapped"), ("planned", "counted")
    return compared([row_of({"stager": stager, "join.mode": mode}, values) for stager in stagers for mode in modes])


def test_rows_are_ranked_and_failed_ones_last(comparison: Comparison) -> None:
    least_first = ordered(comparison)
    assert least_first[:2] == [("overlapped", "counted"), ("pinned", "counted")]
    most_first = ordered(replace(comparison, ranking=metric("samples_per_s")))
    assert most_first[:2] == [("pinned", "counted"), ("overlapped", "counted")]
    assert least_first[-1] == most_first[-1] == ("pinned", "planned")
    rows = [
        row_of({"a": "failed"}, {}, error="boom"),
        row_of({"a": "without"}, {"loss": (1.0,)}),
        row_of({"a": "with"}, {"stall_ms": (5.0,)}),
    ]
    assert ordered(compared(rows)) == [("with",), ("without",), ("failed",)]


def test_rows_of_two_versions_are_distinguished_in_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    of_versions = ((1.0, "torch 2.12"), (2.0, "torch 2.13"))
    made = compared([replace(row_of({"a": "1"}, {"stall_ms": (stall,)}), versions=v) for stall, v in of_versions])
    lines = [" ".join(line.split()) for line in printed(replace(made, constant=()), capsys)]
    assert "verdict a versions stall" in lines
    assert {"1 torch 2.12 1", "1 torch 2.13 2"} <= {line.removeprefix("best ").rstrip("*") for line in lines}
    read = csv.DictReader(io.StringIO(tables.csv_text(made)))
    assert [line["versions"] for line in read] == ["torch 2.12", "torch 2.13"]
    assert page.compare_page(made).count(">torch 2.12</td>") == 1


def test_the_terminal_shows_marks_ranges_errors_and_the_answer(
    comparison: Comparison, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(replace(comparison, equal={"loss": 3.47, "shadowed_steps": 0.0}), capsys)
    at = next(at for at, line in enumerate(lines) if "overlapped" in line)
    assert lines[at].split()[:6] == ["best", "overlapped", "counted", "9.10*", f"(8.20{TO}10.10)", "3"]
    assert re.search(r"3 +17,950~", lines[at])
    assert lines[at + 3].split()[:5] == ["A/A", "the", "same", "again", "49.5"], "below its twin"
    text = " ".join("\n".join(lines).split())
    assert "stager=pinned join.mode=planned failed: CheckpointError: the disk is full" in text
    assert "and more of it" not in text
    assert f"* best of its column; ~ ties with the best; a{TO}b minimum to maximum." in text
    assert "The same in all rows: loss 3.47, shadowed steps 0." in text
    assert "Warning: The machine was busy." in lines
    assert lines[0] == "All with train.steps=60"
    found = answer(comparison)
    assert found.headline in lines
    assert text.endswith(" ".join(found.evidence))


def test_the_ranking_metric_follows_the_parameters_with_the_ratio_to_the_best() -> None:
    made = compare(
        jobs({f"a={at}": [{"loss": loss, "stall_ms": 3.0 + at}] * 4 for at, loss in enumerate(LOSSES)}), "loss"
    )
    table = tables.compare_table(made)
    heads = [head if isinstance(head, str) else head.head for head in table.columns]
    assert heads == ["verdict", "a", "loss", "vs best", "runs", "stall ms"]
    assert [row[3] for row in table.rows] == ["1.00×", "1.37×", "27.9×"]  # noqa: RUF001


def test_no_mark_is_in_a_column_that_tells_no_rows_apart(capsys: pytest.CaptureFixture[str]) -> None:
    equal = jobs({f"a={at}": [{"stall_ms": 3.0 + run, "loss": float(at)} for run in range(4)] for at in range(2)})
    made = compare(equal)
    assert made.best is not None
    assert [row[0] for row in tables.compare_table(made).rows] == ["", ""]
    lines = printed(made, capsys)
    head = next(at for at, line in enumerate(lines) if "verdict" in line)
    assert tables.ALL_TIE in lines[head + 2]
    assert not any(mark in " ".join(lines[head : head + 6]) for mark in ("3*", "4.5*", "4.5~"))
    assert ">all tie<" in page.compare_page(made)
    one = compare(equal[::2])
    assert [row[0] for row in tables.compare_table(one).rows] == [""]
    assert not any("*" in line for line in printed(one, capsys))
    assert '<span class="chip best"' not in page.compare_page(one)


def test_a_table_fits_its_line_or_names_what_it_leaves_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = wide()
    lines = printed(made, capsys)
    assert not any("Not shown" in line for line in lines)
    assert max(map(len, lines)) <= 120
    monkeypatch.setattr("stagereg.base.output.line_width", lambda: 70)
    lines = printed(replace(made, ranking=metric("loss"), warnings=("A word " * 30,)), capsys)
    assert max(map(len, lines)) <= 70
    text = " ".join("\n".join(lines).split())
    note = re.search(r"Not shown for lack of space: (.*?); see compare.csv", text)
    assert note is not None
    assert note[1].endswith("shadowed_steps")
    assert "loss" not in note[1]
    assert "loss" in next(line for line in lines if "verdict" in line)
    path = "/a/very/long/path" * 6
    rows = (*made.rows[1:], replace(made.rows[0], error=path))
    assert any(path in line for line in printed(replace(made, rows=rows), capsys)), "a path can be copied"
    assert f"a{TO}b minimum to maximum." in text, "words are whole"


def test_of_many_rows_the_terminal_shows_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row_of({"a": f"x{at}"}, {"loss": (at + 1.0,)}, error="boom" if at == 60 else "") for at in range(61)]
    lines = printed(compared(rows, "loss"), capsys)
    assert [at for at in range(61) if any(f"x{at} " in line for line in lines)] == list(range(15))
    assert "  46 more rows: see compare.csv and report.html." in lines
    assert not any("boom" in line for line in lines)
    assert tables.csv_text(compared(rows, "loss")).count("\n") == 62


def test_the_number_of_runs_is_a_column_where_rows_differ_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row_of({"a": str(count)}, {"loss": (1.0,) * count}) for count in (2, 2, 3)]
    alike = printed(compared(rows[:2], "loss"), capsys)
    assert "2 rows, ranked by loss, lower is better. 2 runs each." in alike
    assert not any("runs" in line.split() and "verdict" in line for line in alike)
    assert any({"runs", "verdict"} <= set(line.split()) for line in printed(compared(rows, "loss"), capsys))
    jobs = (rows[0].jobs[0], replace(rows[0].jobs[1], status="failed"))
    assert "1 of 2 failed" in tables.csv_text(compared([replace(rows[0], jobs=jobs)], "loss"))


def test_a_parameter_may_be_named_as_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row_of({"runs": value, "vs best": "y", "verdict": "z"}, {"loss": (1.0,)}) for value in ("u", "v")]
    made = compared(rows, "loss")
    assert [row[1:4] for row in tables.compare_table(made).rows] == [("u", "y", "z"), ("v", "y", "z")]
    assert ["u", "y", "z", "1"] in [line.split() for line in printed(made, capsys)]
    assert ">y</td>" in page.compare_page(made)


def test_runs_that_are_far_off_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    stalls = [5.0, 5.01, 5.02, 9.0, 5.03, 5.0]
    made = compare(jobs({"a=1": [{"stall_ms": stall} for stall in stalls], "a=2": [{"stall_ms": 7.0}] * 6}))
    text = " ".join("\n".join(printed(made, capsys)).split())
    assert "a=1: 1 outlier in stall ms among 6 runs: job 6." in text


@pytest.mark.parametrize(
    ("runs", "legend"),
    [
        ((3, 4), "minimum to maximum"),
        ((6, 7), "middle half of the runs"),
        ((3, 6), "minimum to maximum (with more than 5 runs the middle half)"),
    ],
)
def test_the_legend_says_what_a_range_is(runs: tuple[int, int], legend: str) -> None:
    made = compared([row_of({"a": str(count)}, {"loss": range(1, count + 1)}) for count in runs], "loss")
    assert f"a{TO}b {legend}." in tables.remarks(made, made.rows)


def test_nan_and_infinity_are_no_gaps(capsys: pytest.CaptureFixture[str]) -> None:
    losses = {"a=1": float("nan"), "a=2": float("inf"), "a=3": 1.0}
    figures = {name: [{"loss": loss, "stall_ms": 1.0 + at}] for at, (name, loss) in enumerate(losses.items())}
    made = compare(jobs(figures | {"a=4": [{"stall_ms": 9.0}]}))
    shown = [line.split()[-1] for line in printed(made, capsys) if re.match(r" +\d +\d", line)]
    assert shown == ["nan", "inf", "1", "-"]
    (first, second, *_) = csv.DictReader(io.StringIO(tables.csv_text(made)))
    assert (first["loss.median"], second["loss.median"]) == ("nan", "inf")


def test_csv_has_raw_numbers_and_reads_back(comparison: Comparison) -> None:
    rows = list(csv.DictReader(io.StringIO(tables.csv_text(comparison))))
    assert [row["verdict"] for row in rows] == ["best", "tie", "", "A/A", "failed"]
    assert (rows[0]["stall_ms.median"], rows[0]["stall_ms.n"]) == ("9.1", "3")
    assert (rows[0]["stall_ms.low"], rows[0]["stall_ms.high"]) == ("8.2", "10.1")
    assert (rows[3]["runs"], rows[3]["stager"]) == ("1", "blocking"), "the same again has its parameters here"
    assert (rows[4]["status"], rows[4]["stall_ms.median"], rows[4]["stall_ms.n"]) == ("failed", "", "0")
    assert rows[4]["error"] == "CheckpointError: the disk is full"
    assert rows[0]["overrides"] == "train.steps=60 stager=overlapped join.mode=counted"
    strange = 'a,b "c"\n;d'
    row = row_of({"x": strange, "lr": "0.30000000000000004"}, {"loss": (0.1,)}, directory=Path("my sweep/a b"))
    (read,) = csv.DictReader(io.StringIO(tables.csv_text(replace(compared([row]), metrics=(), equal={"loss": 0.1}))))
    assert (read["x"], read["loss.median"], read["lr"]) == (strange, "0.1", "0.30000000000000004")
    assert json.loads(read["directories"]) == ["my sweep/a b"]


@given(st.lists(NUMBERS, max_size=12))
@example([0.9999, 0.5])
@example([100_000_000.0, 0.0, -0.0])
@example([2.3046, 2.30461, 2.4, 9.999])
def test_the_numbers_of_a_column_can_be_told_apart(values: list[float]) -> None:
    texts = tables.column_texts(values)
    for (one, text), (other, other_text) in itertools.combinations(zip(values, texts, strict=True), 2):
        if text == other_text and not math.isnan(one):
            assert one == pytest.approx(other, rel=1e-6)
    for value, text in zip(values, texts, strict=True):
        read = float(text.replace(",", ""))
        assert read == pytest.approx(value, rel=6e-3, nan_ok=True)
        assert math.isnan(value) or abs(read) < 1 or abs(value) > 0.9999999
        assert len(text) <= 19


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1.62, 13.2, 802.4), ["1.62", "13.2", "802"]),
        ((0.9999, 0.5), ["0.9999", "0.5000"]),
        ((18000.0, 18050.0, 3.0), ["18,000", "18,050", "3"]),
        ((0.31983, 0.31984, 0.31988, 0.32013), ["0.31983", "0.31984", "0.3199", "0.3201"]),
        ((2.3046, 2.3046000001), ["2.30", "2.30"]),
        ((1e12, 1e-7, 0.0, -2.5), ["1e+12", "1e-07", "0", "-2.50"]),
        ((math.nan, math.inf, -math.inf, 2.0), ["nan", "inf", "-inf", "2"]),
    ],
)
def test_numbers_have_as_few_digits_as_that_takes(values: tuple[float, ...], expected: list[str]) -> None:
    assert tables.column_texts(values) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1.62, 1.61, 1.63), f"1.62 (1.61{TO}1.63)"),
        ((1.62,), "1.62"),
        ((1.62, 1.62), "1.62"),
        ((-1.5, -2.5, 0.5), "-1.50 (-2.50 to 0.50)"),
        ((math.inf, 1.0, 2.0), f"2 (1{TO}inf)"),
        ((math.nan, 1.0), "nan"),
        ((1.0, 2.0, 3.0, 4.0, 5.0, 106.0), "3.50 (2.25–4.75)"),  # noqa: RUF001
    ],
)
def test_a_range_is_from_where_to_where_the_runs_lie(values: tuple[float, ...], expected: str) -> None:
    (cell,) = tables.shown_cells(compared([row_of({}, {"stall_ms": values})]), metric("stall_ms"))
    assert cell is not None
    assert cell.one_line == expected


def grid(stalls: dict[str, list[float]]) -> Comparison:
    return compare(jobs({name: [{"stall_ms": stall} for stall in each] for name, each in stalls.items()}))


class TestByOption:
    def test_each_combination_counts_once_by_its_median(self) -> None:
        made = grid({"a=1 b=x": [1.0] * 5, "a=2 b=x": [3.0], "a=1 b=y": [11.0], "a=2 b=y": [9.0] * 5})
        table = tables.option_table(made)
        assert table is not None
        assert table.rows == (
            ("a", "1", "6", "best", 6),
            ("", "2", "6", "best", 6),
            ("b", "x", "2", "best", 6),
            ("", "y", "10", "+400 %", 6),
        )
        assert "not balanced" not in table.caption

    def test_a_value_that_ran_with_the_slow_ones_alone_is_not_blamed(self) -> None:
        made = grid({"a=1 b=x": [1.0], "a=2 b=x": [1.0], "a=2 b=y": [99.0], "a=3 b=y": [99.0], "a=3 b=x": [1.0]})
        table = tables.option_table(made)
        assert table is not None
        assert [row[:4] for row in table.rows][:3] == [
            ("a", "1", "1", "best"),
            ("", "2", "1", "best"),
            ("", "3", "1", "best"),
        ]
        assert (
            "a is not balanced: of 2 combinations of the other options, only 1 ran with every value of a and count."
            in table.caption
        )
        assert tables.option_table(grid({"a=1 b=x": [1.0], "a=2 b=y": [2.0]})) is None

    def test_only_completed_finite_runs_that_are_ranked_count(self) -> None:
        many = jobs(
            {f"a={a} b={b}": [{"stall_ms": a * b}, {"stall_ms": math.nan}] for a in (1.0, 2.0) for b in (3.0, 5.0)},
            again=[{"stall_ms": 1e9}],
        )
        many += [failed(Path("sweep/98"), 98, many[0].overrides, figures={"stall_ms": 1e9})]
        many += [failed(Path("sweep/99"), 99, ("a=7.0", "b=3.0"))]
        table = tables.option_table(compare(many))
        assert table is not None
        assert [row[:5] for row in table.rows if row[1] in ("3.0", "5.0")] == [
            ("b", "3.0", "4.50", "best", 2),
            ("", "5.0", "7.50", "+67 %", 2),
        ]

    def test_one_option_has_no_table(self) -> None:
        assert tables.option_table(grid({"a=1": [1.0], "a=2": [2.0]})) is None

    def test_the_terminal_has_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        lines = printed(grid({f"a={a} b={b}": [a * b] for a in (1.0, 2.0) for b in (3.0, 5.0)}), capsys)
        assert "By option" in lines
        assert any(line.split() == ["a", "1.0", "4.00", "best", "2"] for line in lines)
