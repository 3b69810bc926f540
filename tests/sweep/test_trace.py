"""The Chrome trace of a run: every event has what its phase needs, and lies where the rank recorded it."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagereg.sweep.run import RankRecord, Run, Span
from stagereg.sweep.trace import trace_text

from ..support.samples import BEGAN, Sample, write_run

FIELDS: dict[str, dict[str, Any]] = {
    "M": {"args": dict},
    "X": {"ts": (int, float), "dur": (int, float), "cat": str, "args": dict},
    "b": {"ts": (int, float), "cat": str, "id": str, "args": dict},
    "e": {"ts": (int, float), "cat": str, "id": str},
    "C": {"ts": (int, float), "args": dict},
}
"""What Google's Trace Event Format asks of each phase, beside a name, a process and a thread."""


def events(run: Run) -> list[dict[str, Any]]:
    document = json.loads(trace_text(run), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert document["displayTimeUnit"] in ("ms", "ns")
    found: list[dict[str, Any]] = document["traceEvents"]
    return found


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
def test_every_event_has_the_fields_of_its_phase(run: Run) -> None:
    found = events(run)
    opened: Counter[tuple[str, str]] = Counter()
    for event in found:
        needed = {"name": str, "pid": int, "tid": int, **FIELDS[event["ph"]]}
        assert event.keys() == {"ph", *needed}
        assert all(isinstance(event[name], kind) for name, kind in needed.items())
        assert event.get("ts", 0) >= -1
        assert event.get("dur", 0) >= 0
        if event["ph"] in "be":
            opened[event["cat"], event["id"]] += 1 if event["ph"] == "b" else -1
    assert not any(opened.values()), "each asynchronous event that begins ends"
    lanes = sorted((e["pid"], e["ts"], e["ts"] + e["dur"]) for e in found if e["ph"] == "X")
    for (rank, _, end), (following, start, _) in itertools.pairwise(lanes):
        assert rank != following or start >= end - 1, "slices of one thread lie one after the other"


def test_steps_stalls_staging_writing_and_logs_are_in_the_trace(tmp_path: Path) -> None:
    run = Run.read(write_run(tmp_path, Sample(ranks=2)))
    found = events(run)
    count = Counter((event["ph"], event.get("cat", "")) for event in found)
    per_rank = {("X", "step"): 40, ("X", "stall"): 4, ("C", ""): 80}
    per_rank |= {(phase, cat): 4 for phase in "be" for cat in ("staging", "writing")}
    assert {key: count[key] for key in per_rank} == {key: 2 * number for key, number in per_rank.items()}
    stall = next(event for event in found if event.get("cat") == "stall" and event["pid"] == 1)
    (span, *_) = run.ranks[1].stalls
    assert (stall["ts"], stall["dur"]) == pytest.approx((1e6 * (span.start - run.began), 2100), abs=1)
    assert stall["args"] == {"step": 10}
    assert [e["args"]["name"] for e in found if e["name"] == "process_name"] == ["rank 0 here", "rank 1 here"]
    begin, end = (next(e for e in found if e["ph"] == phase and e["cat"] == "writing") for phase in "be")
    assert end["ts"] - begin["ts"] == pytest.approx(20_000, abs=1)
    assert begin["args"] == {"step": 10, "bytes": 64 * 2**20}


def test_what_is_no_number_is_no_point_of_a_counter() -> None:
    rank = RankRecord(0, logs=((1, BEGAN, {"loss": None}), (2, BEGAN + 1, {"loss": 0.5})), first=BEGAN)
    assert [e["args"] for e in events(Run(Path("run"), (rank,))) if e["ph"] == "C"] == [{"loss": 0.5}]
