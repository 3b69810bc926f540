"""A comparison as text: one order, one number format, left-out columns are named, and no markup in values acts."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import stagereg.sweep.render.page as page
import stagereg.sweep.render.tables as tables
from stagereg.sweep.answer import sentences
from stagereg.sweep.comparison import Cell, Comparison, ComparisonRow
from stagereg.sweep.metric import METRICS, metric

NUMBERS = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e12, max_value=1e12)
_HERE = Path("sweep")
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=40)


def printed(comparison: Comparison, capsys: pytest.CaptureFixture[str]) -> list[str]:
    tables.terminal(comparison)
    return capsys.readouterr().out.splitlines()


def wide(row_of: Callable[..., ComparisonRow], compared: Callable[..., Comparison]) -> Comparison:
    """Two parameters and all eight metrics, each with a spread."""
    values = {one.name: (1234.5 * i, 1300.1 * i, 1280.2 * i) for i, one in enumerate(METRICS, 1)}
    rows = [
        row_of({"stager": stager, "join.mode": mode}, values)
        for stager in ("pinned_cached", "overlapped")
        for mode in ("planned", "counted")
    ]
    return compared(rows)


def test_rows_are_in_the_order_of_the_metric_that_ranks_and_failed_ones_last(comparison: Comparison) -> None:
    last = ("pinned", "planned")
    slowest_last = [tuple(row.parameters.values()) for row in tables.ordered(comparison)]
    assert slowest_last[:2] == [("overlapped", "counted"), ("pinned", "counted")]
    assert slowest_last[-1] == last
    most_first = tables.ordered(replace(comparison, ranking=metric("samples_per_s")))
    assert [tuple(row.parameters.values()) for row in most_first][:2] == [
        ("pinned", "counted"),
        ("overlapped", "counted"),
    ]
    assert tuple(most_first[-1].parameters.values()) == last


def test_rows_of_two_versions_are_distinguished_in_every_table(
    row_of: Callable[..., ComparisonRow], compared: Callable[..., Comparison], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        replace(row_of({"a": "1"}, {"stall_ms": (stall,)}), versions=f"torch {version}")
        for stall, version in ((1.0, "2.12"), (2.0, "2.13"))
    ]
    _, head, _, *lines = printed(replace(compared(rows), constant=()), capsys)
    assert head.split() == ["verdict", "a", "versions", "stall", "ms"]
    assert [line.split()[:3] for line in lines[:2]] == [["1", "torch", "2.12"], ["1", "torch", "2.13"]]
    assert "| verdict | a | versions | runs | stall ms |" in tables.markdown_text(compared(rows))
    assert [line["versions"] for line in csv.DictReader(io.StringIO(tables.csv_text(compared(rows))))] == [
        "torch 2.12",
        "torch 2.13",
    ]
    page_text = page.compare_page(compared(rows))
    assert page_text.count("<code>torch 2.12</code></td>") == 1


def test_a_row_without_the_ranking_figure_comes_before_failed_ones(
    row_of: Callable[..., ComparisonRow], compared: Callable[..., Comparison]
) -> None:
    rows = [
        row_of({"a": "failed"}, {}, error="boom"),
        row_of({"a": "without"}, {"loss": (1.0,)}),
        row_of({"a": "nan"}, {"loss": (1.0,), "stall_ms": (math.nan,)}),
        row_of({"a": "with"}, {"stall_ms": (5.0,)}),
    ]
    assert [row.parameters["a"] for row in tables.ordered(compared(rows))] == ["with", "without", "nan", "failed"]


def test_the_terminal_shows_marks_spreads_the_first_line_of_errors_and_ends_in_the_answer(
    comparison: Comparison, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(comparison, capsys)
    best = next(line for line in lines if "overlapped" in line)
    assert best.split()[:2] == ["best", "overlapped"]
    assert "9.1 ±0.9" in re.sub(r"(\d\.\d)\d? ±(\d\.\d)\d?", r"\1 ±\2", best)
    assert "*" in best
    assert "~" in best
    assert any(line.split()[:1] == ["A/A"] for line in lines)
    assert any("stager=pinned join.mode=planned failed: CheckpointError: the disk is full" in line for line in lines)
    assert not any("and more of it" in line for line in lines)
    assert any("best of its column" in line for line in lines)
    assert "Beware: The machine was busy." in lines
    assert lines[0] == "All with train.steps=60"
    assert lines[-1] == sentences(comparison)


def test_two_parameters_and_eight_metrics_fit_a_line_of_120(
    row_of: Callable[..., ComparisonRow], compared: Callable[..., Comparison], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(wide(row_of, compared), capsys)
    head = next(i for i, line in enumerate(lines) if "verdict" in line)
    rule = next(i for i, line in enumerate(lines) if set(line.strip()) == {"-", " "})
    assert max(map(len, lines[head : rule + 9])) <= 120
    assert sum(name in " ".join(lines[head:rule]) for name in ("stall", "lost", "host", "loss", "shadowed")) == 5
    assert not any("Not shown" in line for line in lines)


def test_the_number_of_runs_is_a_column_where_rows_differ_in_it(
    row_of: Callable[..., ComparisonRow], compared: Callable[..., Comparison], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row_of({"a": str(count)}, {"loss": (1.0,) * count}) for count in (2, 2, 3)]
    again = replace(rows[2], again=True, jobs=rows[2].jobs[:1])
    alike = printed(replace(compared([*rows[:2], again], "loss"), repeats=2), capsys)
    assert "3 rows, ranked by loss, lower is better. 2 runs each." in alike
    assert not any("runs" in line.split() and "verdict" in line for line in alike)
    assert any({"runs", "verdict"} <= set(line.split()) for line in printed(compared(rows, "loss"), capsys))


def test_columns_that_do_not_fit_are_left_out_from_the_right_and_named_but_never_the_ranking_one(
    row_of: Callable[..., ComparisonRow],
    compared: Callable[..., Comparison],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stagereg.output.line_width", lambda: 70)
    comparison = replace(wide(row_of, compared), ranking=metric("loss"))
    lines = printed(comparison, capsys)
    note = next(line for line in lines if "Not shown" in line)
    assert "shadowed_steps" in note
    assert "loss" not in note
    assert "compare.csv" in note
    head = next(line for line in lines if "verdict" in line)
    assert "loss" in head
    assert len(head) <= 70


def test_a_long_parameter_is_folded_not_cut(
    row_of: Callable[..., ComparisonRow], compared: Callable[..., Comparison], capsys: pytest.CaptureFixture[str]
) -> None:
    long = "torch.optim." + ".".join(f"part{number}" for number in range(30))
    lines = printed(compared([row_of({"a": long}, {"stall_ms": (1.0, 2.0)}), row_of({"a": "b"}, {})]), capsys)
    start = next(i for i, line in enumerate(lines) if set(line.strip()) == {"-", " "})
    table = lines[start + 1 : lines.index(next(line for line in lines if "best of its" in line))]
    assert long in "".join(part for line in table for part in line.split() if part.startswith(("torch", "part")))
    assert max(map(len, table)) <= 120


def test_csv_has_raw_numbers_and_reads_back(
    comparison: Comparison, row_of: Callable[..., ComparisonRow], compared: Callable[..., Comparison]
) -> None:
    rows = list(csv.DictReader(io.StringIO(tables.csv_text(comparison))))
    assert [row["verdict"] for row in rows] == ["best", "tie", "", "A/A", "failed"]
    assert (rows[0]["stall_ms.median"], rows[0]["stall_ms.n"]) == ("9.1", "3")
    assert float(rows[0]["stall_ms.spread"]) == pytest.approx(0.95)
    assert rows[3]["again"] == "true"
    assert rows[3]["stall_ms.spread"] == ""
    assert (rows[4]["status"], rows[4]["stall_ms.median"], rows[4]["stall_ms.n"]) == ("failed", "", "0")
    assert rows[4]["error"] == "CheckpointError: the disk is full"
    assert rows[0]["overrides"] == "train.steps=60 stager=overlapped join.mode=counted"
    strange = 'a,b "c"\n;d'
    (read,) = csv.DictReader(io.StringIO(tables.csv_text(compared([row_of({"x": strange}, {"loss": (0.1,)})]))))
    assert (read["x"], read["loss.median"]) == (strange, "0.1")


@given(TEXTS, TEXTS)
@example("`a` | ``b``", "| @all #12 <img src=x onerror=alert(1)>")
def test_no_text_breaks_a_row_of_markdown(value: str, error: str) -> None:
    rows = (
        ComparisonRow({"x": value}, (), {"loss": Cell(1.0, None, (1.0,))}),
        ComparisonRow({"x": "b"}, (), error=error),
    )
    made = Comparison(_HERE, ("x",), (), (metric("loss"),), rows, 1, metric("loss"))
    lines = tables.markdown_text(made).splitlines()
    bars = [len(re.findall(r"(?<!\\)\|", line)) for line in lines if line.startswith("| ")]
    assert bars == [5] * 4
    assert not re.search(r"^[^`]*<img", "\n".join(line for line in lines if line.startswith("| ")))


def test_markdown_marks_the_best_and_begins_with_the_answer(comparison: Comparison) -> None:
    text = tables.markdown_text(comparison)
    assert text.startswith("**Best by stall\\_ms: stager=overlapped")
    assert "| best | `overlapped` | `counted` | 3 | **9.1" in text
    assert "`CheckpointError: the disk is full`" in text


@given(NUMBERS)
@example(0.0012345)
@example(999_999.5)
@example(1e-7)
def test_a_number_has_three_digits(value: float) -> None:
    text = tables.number(value)
    assert float(text.replace(",", "")) == pytest.approx(value, rel=6e-3, abs=1e-300)
    assert len(text) <= 14


@given(NUMBERS, st.floats(1e-9, 1e9))
def test_a_median_and_its_spread_have_as_many_digits_behind_the_point(median: float, spread: float) -> None:
    cell = Cell(median, spread, (median, median))
    shown, seen = tables.median_text(cell), tables.spread_text(cell)
    if "e" not in shown + seen and median:
        assert len(shown.partition(".")[2]) == len(seen.partition(".")[2])
    assert float(shown.replace(",", "")) == pytest.approx(median, rel=6e-3, abs=1e-300)


def test_a_small_spread_is_not_rounded_to_nothing() -> None:
    cell = Cell(2.3046, 0.0001, (2.3046, 2.3047))
    assert (tables.median_text(cell), tables.spread_text(cell)) == ("2.3046", "±0.0001")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_is_a_dash(value: float) -> None:
    assert tables.number(value) == "-"
