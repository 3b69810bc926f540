"""The picture of a comparison: the same bytes each time, text as text, any numbers, and no global state changed."""

from __future__ import annotations

import math
import re
import sys
import warnings
from xml.etree import ElementTree

import pytest

import stagereg.sweep.render.plots as plots
from stagereg.sweep.comparison import Comparison

from ...support.samples import compared, row_of

matplotlib = pytest.importorskip("matplotlib", reason="pictures need hydra-stagereg[report]")


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
    labels = ["overlapped · counted", "pinned · counted", "blocking · planned", "blocking · planned (A/A)"]
    assert [text for text in seen if text in labels][:4] == labels
    assert "9.10 ±0.95" in seen
    assert any(text.endswith("failed: CheckpointError: the disk is full") for text in seen)
    assert {"stall ms", "samples/s", "loss"} <= set(seen)
    assert any("lower is better" in text for text in seen)
    assert {"best", "ties with the best", "A/A: the first combination once more", "median"} <= set(seen)


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


def test_forty_rows_of_any_size_have_their_own_labels() -> None:
    long = "torch.optim.some_module." + "x" * 100
    rows = [row_of({"a": f"{long}{i}", "b": "y" * 80}, {"stall_ms": (10 ** (-3 + i * 9 / 39),) * 2}) for i in range(40)]
    figure = plots.compare_figure(compared(rows))
    assert figure is not None
    (axes,) = figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert len(set(labels)) == 40, "their ends differ"
    assert max(map(len, labels)) <= 50
    assert axes.get_xscale() == "log"
    assert axes.get_window_extent().height / figure.dpi / 40 > 0.2


def test_without_the_ranking_figure_another_is_drawn_if_any() -> None:
    assert plots.compare_figure(compared([row_of({"a": "1"}, {}, error="boom")])) is None
    strange = r"$x^2$ \alpha <b>&"
    seen = texts(drawn(compared([row_of({"a": strange}, {"loss": (3.0,)})], "stall_ms")))
    assert {"loss", strange} <= set(seen), "dollars and markup are letters"
