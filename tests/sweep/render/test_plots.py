"""The picture of a comparison: the same bytes each time, text as text, any numbers, and no global state changed."""

from __future__ import annotations

import itertools
import math
import re
import sys
import warnings
from dataclasses import replace
from xml.etree import ElementTree

import pytest

import stagereg.sweep.render.plots as plots
from stagereg.sweep.comparison import Comparison, compare

from ...support.samples import compared, jobs, row_of

matplotlib = pytest.importorskip("matplotlib", reason="plots need ./stagereg[report]")


def drawn(comparison: Comparison) -> str:
    figure = plots.compare_figure(comparison)
    assert figure is not None
    return plots.document(figure, "svg").decode()


def texts(document: str) -> list[str]:
    root = ElementTree.fromstring(document)
    return ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.fixture(scope="module")
def document(comparison: Comparison) -> str:
    return drawn(comparison)


def test_every_row_its_numbers_and_its_error_are_there_as_text(document: str) -> None:
    seen = texts(document)
    labels = ["overlapped · counted", "pinned · counted", "blocking · planned", "the same again"]
    assert [text for text in seen if text in labels][:4] == labels
    assert "9.10 (8.20\N{EN DASH}10.10)" in seen
    assert any(text.endswith("failed: CheckpointError: the disk is full") for text in seen)
    assert {"stall ms", "samples/s", "loss"} <= set(seen)
    assert any("lower is better" in text for text in seen)
    legend = {"best", "ties with the best", "the same again (A/A)", "median", "one run", "minimum to maximum"}
    assert legend <= set(seen)


def test_the_same_comparison_gives_the_same_bytes(comparison: Comparison, document: str) -> None:
    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"font.size": 30.0, "axes.linewidth": 7.0, "svg.fonttype": "path"}):
        assert drawn(comparison) == document
        assert matplotlib.rcParams["font.size"] == 30.0
    assert dict(matplotlib.rcParams) == before
    assert "<dc:date>" not in document
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


@pytest.mark.parametrize("values", [(5.0,), (0.0,), (0.0, 0.0), (-3.0, 4.0), (1e-9, 1e9), (7.0, 7.0), (1e12,)])
def test_any_values_can_be_drawn(values: tuple[float, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen = texts(drawn(compared([row_of({"a": str(value)}, {"stall_ms": (value,)}) for value in values])))
    assert all(
        math.isfinite(float(tick.replace(",", "").replace("\N{MINUS SIGN}", "-")))
        for tick in seen
        if re.fullmatch(r"-?[\d.,]+(e.\d+)?", tick)
    )


def test_ticks_of_close_values_can_be_distinguished() -> None:
    rows = [row_of({"a": f"x{i}"}, {"loss": (2.30455 + i / 1e5,)}) for i in range(4)]
    ticks = [text for text in texts(drawn(compared(rows, "loss"))) if re.fullmatch(r"2\.30\d+", text)]
    axis = [tick for tick in ticks if ticks.count(tick) == 1]
    assert len(axis) > 2


def test_of_many_rows_the_first_have_their_own_labels_and_a_line_counts_the_others() -> None:
    long = "torch.optim.some_module." + "x" * 100
    rows = [row_of({"a": f"{long}{i}", "b": "y" * 80}, {"stall_ms": (10 ** (-3 + i * 9 / 39),) * 2}) for i in range(40)]
    figure = plots.compare_figure(compared(rows))
    assert figure is not None
    (axes,) = figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert len(set(labels)) == 16, "their ends differ"
    assert labels[-1] == "25 more in the table"
    assert max(map(len, labels)) <= 50
    assert axes.get_xscale() == "log"
    assert axes.get_window_extent().height / figure.dpi / 16 > 0.2


def test_the_legend_has_every_mark_of_every_panel_and_no_other() -> None:
    alike = {"stall_ms": (5.0, 5.0), "loss": (2.0, 3.0, 4.0, 5.0, 6.0, 7.0), "samples_per_s": (1.0, math.inf)}
    rows = [
        row_of({"a": "1"}, alike, {"loss": "best"}),
        row_of(
            {"a": "2"},
            {**alike, "stall_ms": (6.0,), "samples_per_s": (1.0, 2.0)},
            {"loss": "tie", "samples_per_s": "best"},
        ),
    ]
    made = replace(compared(rows), undecided=frozenset({"samples_per_s"}))
    figure = plots.compare_figure(made)
    assert figure is not None
    (legend,) = figure.legends
    named = {text.get_text() for text in legend.get_texts()}
    assert named == {
        "best",
        "ties with the best",
        "median",
        "one run",
        "minimum to maximum",
        "middle half of the runs",
    }
    assert {line.get_label() for axes in figure.axes for line in axes.lines} == named
    (samples,) = [axes for axes in figure.axes if axes.get_title(loc="left") == "samples/s"]
    assert samples.get_xlabel() == "all tie"
    assert [text.get_text() for text in samples.texts] == ["inf"]
    assert samples.get_xscale() == "linear"
    assert {line.get_label() for line in samples.lines} == {"one run", "median", "minimum to maximum"}, (
        "no star where all tie"
    )


def test_titles_and_texts_stay_inside() -> None:
    names = [f"returned.my_very_long_metric_name_of_validation_{at}" for at in range(7)]
    many = jobs({f"a={at}": [{name: at + up + 1.0 for up, name in enumerate(names)}] * 2 for at in range(3)})
    figure = plots.compare_figure(compare(many, names[0], "minimize"))
    assert figure is not None
    plots.document(figure, "png")
    width = figure.bbox.width
    boxes = [axes.title.get_window_extent() for axes in figure.axes]
    boxes += [axes._left_title.get_window_extent() for axes in figure.axes]
    lines = {round(box.y0): [] for box in boxes}
    for box in sorted(boxes, key=lambda box: box.x0):
        assert 0 <= box.x0 <= box.x1 <= width
        lines[round(box.y0)].append(box)
    for row in lines.values():
        row = [box for box in row if box.width]
        assert all(one.x1 < other.x0 for one, other in itertools.pairwise(row)), "no title runs into the next"


def test_without_the_ranking_figure_another_is_drawn_if_any() -> None:
    assert plots.compare_figure(compared([row_of({"a": "1"}, {}, error="boom")])) is None
    strange = r"$x^2$ \alpha <b>&"
    seen = texts(drawn(compared([row_of({"a": strange}, {"loss": (3.0,)})], "stall_ms")))
    assert {"loss", strange} <= set(seen), "dollars and markup are letters"
