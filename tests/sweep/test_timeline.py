"""The timeline of a run: bars lie where the ranks recorded them, and of a long run a part is shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagereg.errors import ConfigError
from stagereg.sweep.figures import saved
from stagereg.sweep.run import RankRecord, Run, Span
from stagereg.sweep.timeline import timeline_figure, usual_window

from ..support.samples import BEGAN, Sample, write_run

matplotlib = pytest.importorskip("matplotlib")

from stagereg.sweep.render.plots import COLOURS  # noqa: E402 - only where there is matplotlib

STALL, STAGE, WRITE, STEP = (COLOURS[name] for name in ("failed", "best", "good", "plain"))
Read = Callable[..., Run]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    return lambda **facts: Run.read(write_run(tmp_path / f"run {facts}", Sample(**facts)))


def bars(figure: Any, colour: str) -> list[tuple[float, float, float]]:
    """(start, end, middle of the lane) of each bar of that colour."""
    drawn = [each for each in figure.axes[0].collections if len(each.get_facecolor())]
    wanted = [each for each in drawn if matplotlib.colors.to_hex(each.get_facecolor()[0]) == colour]
    boxes = [path.get_extents() for each in wanted for path in each.get_paths()]
    return sorted(((box.x0, box.x1, (box.y0 + box.y1) / 2) for box in boxes), key=lambda bar: (bar[2], bar[0]))


def texts(figure: Any) -> list[str]:
    axes = figure.axes[0]
    titles = (figure.get_suptitle(), axes.get_title("left"))
    return [*titles, *(text.get_text() for text in (*axes.get_yticklabels(), *axes.texts))]


def test_spans_lie_where_the_ranks_recorded_them(read: Read) -> None:
    run = read(ranks=2)
    figure = timeline_figure(run)
    for colour, name in ((STALL, "stalls"), (STAGE, "stages"), (WRITE, "writes")):
        drawn = bars(figure, colour)
        seen = [(span.start - run.began, span.end - run.began) for rank in run.ranks for span in getattr(rank, name)]
        assert [bar[:2] for bar in drawn] == [pytest.approx(each, abs=1e-6) for each in seen]
        assert len({bar[2] for bar in drawn}) == 2, "each rank has a lane of its own"
    assert len(bars(figure, STEP)) == 2 * 39, "the begin of the first step is unknown"


def test_checkpoints_show_their_step_and_state(read: Read) -> None:
    complete, killed = texts(timeline_figure(read())), texts(timeline_figure(read(killed=True)))
    assert [step for step in ("10", "20", "30", "40") if step in complete] == ["10", "20", "30", "40"]
    assert "40 not complete" in killed
    assert "40" not in killed
    assert any("ended half-way" in text for text in killed)
    assert not any("ended half-way" in text for text in complete)


def test_a_long_run_shows_its_first_saves_or_what_is_asked_for(read: Read) -> None:
    run = read(ranks=1, steps=1000, every=50)
    figure = timeline_figure(run)
    start, end = figure.axes[0].get_xlim()
    assert "a stretch around the first checkpoints" in " ".join(texts(figure))
    assert start < saved(run)[0].start < saved(run)[0].end < end
    assert len(bars(figure, STEP)) <= 130
    assert "stretch" not in " ".join(texts(timeline_figure(read(ranks=1))))
    assert timeline_figure(run, (2.0, 3.0)).axes[0].get_xlim() == (2.0, 3.0)
    assert timeline_figure(run, (2.0, float("inf"))).axes[0].get_xlim()[1] < 20


def test_of_many_ranks_those_that_stalled_longest_are_drawn(read: Read) -> None:
    figure = timeline_figure(read(ranks=40, steps=10))
    seen = texts(figure)
    assert [text for text in seen if text.startswith("rank ")] == [f"rank {rank}" for rank in (0, *range(29, 40))]
    assert any("12 of 40 ranks" in text for text in seen)


def test_a_run_without_steps_is_reported_not_drawn() -> None:
    with pytest.raises(ConfigError, match="no steps and no checkpoints"):
        timeline_figure(Run(Path("run"), (RankRecord(0, {"t": BEGAN}),)))


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Runs of a rank or two, of steps and stalls of any length, resumed at any step."""
    ranks = []
    first = draw(st.integers(1, 1000))
    for rank in range(draw(st.integers(1, 2))):
        t = BEGAN + draw(st.floats(0, 5))
        start, steps, spans = t, [], []
        every = draw(st.integers(1, 60))
        seconds = draw(st.floats(1e-4, 10))
        stall, write = draw(st.floats(0, 5)), draw(st.floats(0, 500))
        for step in range(first, first + draw(st.sampled_from((0, 1, 5, 119, 121, 200)))):
            t += seconds
            steps.append((step, t))
            if step % every == 0:
                spans.append((step, t, stall, write))
                t += stall
        stalls = tuple(Span(step, at, stall) for step, at, stall, _ in spans)
        writes = tuple(Span(step, at, write) for step, at, _, write in spans)
        ranks.append(RankRecord(rank, {"t": start}, tuple(steps), stalls, writes=writes, first=start, last=t))
    return Run(Path("run"), tuple(ranks))


@settings(max_examples=50)
@given(runs())
def test_the_usual_window_has_the_first_save_and_few_steps(run: Run) -> None:
    if not any(rank.steps for rank in run.ranks):
        with pytest.raises(ConfigError):
            usual_window(run)
        return
    start, end = usual_window(run)
    assert 0 <= start < end
    if saved(run):
        assert start <= saved(run)[0].start + 1e-9
        assert saved(run)[0].end <= end + 1e-9
    elif max(len(rank.steps) for rank in run.ranks) > 120:
        assert sum(start <= t - run.began <= end for _, t in run.ranks[0].steps) <= 122
