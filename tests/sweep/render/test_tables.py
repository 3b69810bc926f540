"""A comparison as text: one order, one number format, and left-out columns are named."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import stagereg.sweep.render.page as page
import stagereg.sweep.render.tables as tables
from stagereg.sweep.answer import answer
from stagereg.sweep.comparison import Cell, Comparison
from stagereg.sweep.metric import METRICS, metric, shown

from ...support.samples import compared, row_of

NUMBERS = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e12, max_value=1e12)


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
    assert {"1 torch 2.12 1", "1 torch 2.13 2"} <= set(lines)
    read = csv.DictReader(io.StringIO(tables.csv_text(made)))
    assert [line["versions"] for line in read] == ["torch 2.12", "torch 2.13"]
    assert page.compare_page(made).count(">torch 2.12</td>") == 1


def test_the_terminal_shows_marks_spreads_errors_and_the_answer(
    comparison: Comparison, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(comparison, capsys)
    best = next(at for at, line in enumerate(lines) if "overlapped" in line)
    assert lines[best].split()[:4] == ["best", "overlapped", "counted", "3"]
    assert re.search(r"9\.10\* +17,950~", lines[best])
    assert re.search(r"±0\.95 +±75", lines[best + 1])
    assert any(line.split()[:1] == ["A/A"] for line in lines)
    assert any("stager=pinned join.mode=planned failed: CheckpointError: the disk is full" in line for line in lines)
    assert not any("and more of it" in line for line in lines)
    assert any("best of its column" in line for line in lines)
    assert "Beware: The machine was busy." in lines
    assert lines[0] == "All with train.steps=60"
    assert lines[-1] == answer(comparison)


def test_a_table_fits_its_line_or_names_what_it_leaves_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = wide()
    lines = printed(made, capsys)
    assert not any("Not shown" in line for line in lines)
    assert max(map(len, lines[2:12])) <= 120
    monkeypatch.setattr("stagereg.output.line_width", lambda: 70)
    lines = printed(replace(made, ranking=metric("loss")), capsys)
    note = next(line for line in lines if "Not shown" in line)
    assert "shadowed_steps; compare.csv has all" in note
    assert "loss" not in note
    head = next(line for line in lines if "verdict" in line)
    assert "loss" in head
    assert len(head) <= 70


def test_the_number_of_runs_is_a_column_where_rows_differ_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row_of({"a": str(count)}, {"loss": (1.0,) * count}) for count in (2, 2, 3)]
    again = replace(rows[2], again=True, jobs=rows[2].jobs[:1])
    alike = printed(replace(compared([*rows[:2], again], "loss"), repeats=2), capsys)
    assert "3 rows, ranked by loss, lower is better. 2 runs each." in alike
    assert not any("runs" in line.split() and "verdict" in line for line in alike)
    assert any({"runs", "verdict"} <= set(line.split()) for line in printed(compared(rows, "loss"), capsys))
    jobs = (rows[0].jobs[0], replace(rows[0].jobs[1], status="failed"))
    assert "1 of 2 failed" in tables.csv_text(compared([replace(rows[0], jobs=jobs)], "loss"))


def test_csv_has_raw_numbers_and_reads_back(comparison: Comparison) -> None:
    rows = list(csv.DictReader(io.StringIO(tables.csv_text(comparison))))
    assert [row["verdict"] for row in rows] == ["best", "tie", "", "A/A", "failed"]
    assert (rows[0]["stall_ms.median"], rows[0]["stall_ms.n"]) == ("9.1", "3")
    assert float(rows[0]["stall_ms.spread"]) == pytest.approx(0.95)
    assert (rows[3]["runs"], rows[3]["stall_ms.spread"]) == ("1", "")
    assert (rows[4]["status"], rows[4]["stall_ms.median"], rows[4]["stall_ms.n"]) == ("failed", "", "0")
    assert rows[4]["error"] == "CheckpointError: the disk is full"
    assert rows[0]["overrides"] == "train.steps=60 stager=overlapped join.mode=counted"
    strange = 'a,b "c"\n;d'
    (read,) = csv.DictReader(io.StringIO(tables.csv_text(compared([row_of({"x": strange}, {"loss": (0.1,)})]))))
    assert (read["x"], read["loss.median"]) == (strange, "0.1")


@given(NUMBERS, st.floats(1e-9, 1e9))
@example(0.0012345, 1.0)
@example(999_999.5, 1.0)
@example(1e-7, 1e-9)
def test_a_spread_has_as_many_digits_as_its_median(median: float, spread: float) -> None:
    text = shown(median)
    assert float(text.replace(",", "")) == pytest.approx(median, rel=6e-3, abs=1e-300)
    assert len(text) <= 14
    text, spread_text = tables.cell_texts(Cell(median, spread, (median, median)))
    if "e" not in text + spread_text and median:
        assert len(text.partition(".")[2]) == len(spread_text.partition(".")[2])
    assert float(text.replace(",", "")) == pytest.approx(median, rel=6e-3, abs=1e-300)


def test_a_small_spread_adds_four_digits_at_most() -> None:
    assert tables.cell_texts(Cell(2.3046, 0.0001, (2.3, 2.3))) == ("2.3046", "±0.0001")
    assert tables.cell_texts(Cell(2.5, 1e-12, (2.5, 2.5))) == ("2.500000", "±0.000000")
