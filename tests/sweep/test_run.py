"""A run is read back as it was recorded, however it ended and also from damaged files."""

from __future__ import annotations

import itertools
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stagereg.base import record
from stagereg.base.recorded import last_event
from stagereg.errors import ConfigError
from stagereg.extensions.goodput.earlier import Earlier
from stagereg.sweep.run import Run, Span, Started

from ..support.samples import BEGAN, Sample, rank_file, write_events, write_run

START = {"event": "start", "t": 5.0, "format": 1, "rank": 0, "world_size": 1, "host": "here", "stagereg": "0.1.0"}
END = {"event": "end", "t": 9.0, "seconds": 4.0, "status": "completed", "error": None, "peak_rss": 7}
SHORT = b"".join(json.dumps(event).encode() + b"\n" for event in [*Sample(steps=3, every=2).events(0)])


def lines(directory: Path, *events: object, rank: int = 0) -> Run:
    """Read a run of these events, and lines of raw text."""
    directory.mkdir(exist_ok=True)
    text = (event if isinstance(event, str) else json.dumps(event) for event in events)
    rank_file(directory, rank).write_text("".join(f"{line}\n" for line in text))
    return Run.read(directory)


def test_recorded_events_are_read_back(tmp_path: Path) -> None:
    with record.recording(tmp_path, 0, 1):
        before = record.now()
        record.emit("step", step=3)
        record.emit("stall", step=3, start=before, seconds=0.5)
        record.emit("stage", step=3, start=before, seconds=0.25, bytes=1024)
        record.emit("write", step=3, start=before + 1, seconds=2, bytes=2048)
        record.emit("lost", step=2, error="the disk is full")
        record.emit("stall", step=4, start=before, seconds=0.5, tier=True)
        record.emit("tier", step=4, start=before + 1, seconds=2, bytes=2048, dir="the tier /t")
        record.emit("copy", step=4, rank=1, to="node2", bytes=1024, start=before + 3, seconds=1)
        record.emit("copy", step=4, rank=1, to="node3", bytes=1024, start=before + 4, seconds=1, error="cut")
        record.emit("lost", step=5, dir="the tier /t", error="memory is full")
        record.emit("fallback", step=1, damaged=3, lost=2, why="x: missing")
        record.emit("straggler", step=4, rank=3, machine="m7", slow=True, wait=0.041, of=0.12)
        record.emit("join", steps=5, shadowed=2, samples=40)
        record.log(3, loss=2.5, gap=math.nan)
    run = Run.read(tmp_path)
    (mine,) = run.ranks
    assert [step for step, _ in mine.steps] == [3]
    assert mine.stalls == (Span(3, before, 0.5), Span(4, before, 0.5, near=True))
    assert mine.stages == (Span(3, before, 0.25, 1024),)
    assert mine.writes == (Span(3, before + 1, 2, 2048),)
    assert mine.writes[0].end == before + 3
    assert mine.lost == ((2, "the disk is full"),)
    assert mine.tier_writes == (Span(4, before + 1, 2, 2048),)
    assert mine.transfers == (Span(4, before + 3, 1, 1024), Span(4, before + 4, 1, 1024))
    assert mine.fallbacks == ((1, 2, "x: missing"),)
    assert mine.stragglers == ((3, "m7", 4, True, 0.041, 0.12),)
    assert mine.join == {"samples": 40, "shadowed": 2, "steps": 5}
    assert [(step, values) for step, _, values in mine.logs] == [(3, {"loss": 2.5, "gap": None})]
    assert mine.end is not None
    assert mine.end["peak_rss"] > 0
    assert (run.world_size, run.status, run.error, run.damaged) == (1, "completed", "", 0)
    assert set(run.versions) == {"stagereg", "torch", "hydra-core", "python"}
    assert run.began <= before <= run.began + run.seconds


def test_attempts_are_kept_since_one_completed(tmp_path: Path) -> None:
    begin = {"event": "begin", "t": 6.0, "step": 1, "since": 4.0, "phases": {"started": 1.5}}
    restart = {"event": "restart", "number": 1, "why": "killed", "source": "/x", "origin": "tier", "again": 2}
    restart["restored"] = 9
    steps = [{"event": "step", "t": 6.0 + step, "step": step} for step in range(1, 4)]
    run = lines(tmp_path, START, *steps[:1], END, START, begin, *steps[1:], START, begin | restart, *steps)
    (first,), (second,) = (each.ranks for each in run.attempts)
    assert (first.steps, second.steps) == (((2, 8.0), (3, 9.0)), run.ranks[0].steps)
    assert first.started == Started(1, 4.0, {"started": 1.5})
    assert second.started == Started(1, 4.0, {"started": 1.5}, 1, "killed", "/x", "tier", 2, 9)
    assert first.started.seconds == 1.5
    assert len(lines(tmp_path, START, END, START, END).attempts) == 1
    assert len(lines(tmp_path / "other", START, rank=1).attempts) == 1
    odd = [begin | {"phases": {"started": "x"}}, begin | {"phases": None}, begin | {"number": "x"}]
    assert (lines(tmp_path, START, *odd).damaged, run.damaged) == (3, 0)


@settings(deadline=None)
@given(at=st.integers(0, len(SHORT)))
@example(at=len(SHORT) - 1)
def test_a_file_that_ends_anywhere_is_read_up_to_there(at: int) -> None:
    complete = SHORT[:at].count(b"\n") + SHORT[:at].endswith(b"}")
    with TemporaryDirectory() as folder:
        rank_file(Path(folder), 0).write_bytes(SHORT[:at])
        if not complete:
            with pytest.raises(ConfigError, match="contains no run"):
                Run.read(folder)
            return
        run = Run.read(folder)
    (seen,) = run.ranks
    expected = [json.loads(line)["event"] for line in SHORT.splitlines()[:complete]]
    assert run.damaged == 0
    assert len(seen.steps) == expected.count("step")
    assert len(seen.stalls) == expected.count("stall")
    assert (seen.end is None) == ("end" not in expected)


NO_EVENTS = ("null", "7", '"step"', "[]", "{}", '{"event": "step"}', '{"event": "step", "t": null}')
NO_FIELDS = ("stall", "log", "end", "join", "step", "start")
GARBAGE = st.one_of(
    st.binary(min_size=1).map(lambda raw: raw.replace(b"\n", b"") or b"x").filter(bytes.strip),
    st.sampled_from(NO_EVENTS).map(str.encode),
    st.sampled_from(NO_FIELDS).map(
        lambda name: f'{{"event": "{name}", "t": 1, "world_size": 0, "steps": "x"}}'.encode()
    ),
)


@settings(deadline=None, max_examples=50)
@given(garbage=st.lists(GARBAGE, max_size=5), at=st.integers(1, SHORT.count(b"\n") - 1))
@example(garbage=[b'{"event": "step", "t": 1' + b"0" * 400 + b', "step": 1}'], at=2)
@example(garbage=[b'{"event": "stall", "t": 1, "step": 1, "start": null, "seconds": 1}'], at=2)
@example(garbage=[b"[" * 20000], at=2)
@example(garbage=[b'{"event": "step", "t": 6, "step": true}', b'{"event": "step", "t": 6, "step": "\xff"}'], at=2)
def test_damaged_lines_are_left_out_and_counted(garbage: list[bytes], at: int) -> None:
    whole = SHORT.splitlines()
    with TemporaryDirectory() as folder:
        rank_file(Path(folder), 0).write_bytes(b"\n".join([*whole[:at], *garbage, *whole[at:]]) + b"\n")
        run = Run.read(folder)
        rank_file(Path(folder), 0).write_bytes(SHORT)
        clean = Run.read(folder)
    assert run.damaged == len(garbage)
    assert [replace(rank, damaged=0, first=0, last=0) for rank in run.ranks] == [
        replace(rank, first=0, last=0) for rank in clean.ranks
    ]


def test_only_events_after_the_last_start_count(tmp_path: Path) -> None:
    before = (START, {"event": "step", "t": 6, "step": 1}, END, "torn")
    later = {"event": "thermals", "t": 22, "celsius": 90}  # of a later version, is passed over
    run = lines(tmp_path, *before, {**START, "t": 20, "more": [1]}, {"event": "step", "t": 21, "step": 7}, later)
    (seen,) = run.ranks
    assert (seen.steps, seen.end) == (((7, 21.0),), None)
    assert (run.began, run.damaged) == (20, 0)


def test_the_run_that_began_last_is_read_and_the_others_are_counted(tmp_path: Path) -> None:
    def of(run: str, *events: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**event, "run": run} for event in events]

    def step(number: int) -> dict[str, Any]:
        return {"event": "step", "t": 6.0 + number, "step": number}

    def begin(directory: str) -> dict[str, Any]:
        return {"event": "begin", "t": 6.0, "step": 1, "since": 4.0, "phases": {}, "dir": directory}

    failed = {**END, "status": "failed", "error": "theirs"}
    training = of("a.0", START, begin("/mine"), step(1), {**END, "status": "failed", "error": "mine"})
    other = of("b.0", START, begin("/theirs"), step(700), failed)
    again, reader = of("c.0", {**START, "world_size": 2}, begin("/mine"), step(2)), of("d.0", START, failed)
    mixed = [line for pair in itertools.zip_longest(again, reader) for line in pair if line]  # at the same time
    mixed.sort(key=lambda line: (line["run"] != "d.0", line["event"] != "start"))  # the reader has begun first
    rank_file(tmp_path, 1).write_text("".join(f"{json.dumps(line)}\n" for line in [*of("b.0", START), *again]))
    run = lines(tmp_path, *training, *other, *mixed, "garbage", *of("c.0", step(3)))
    assert [[number for number, _ in record.steps] for record in run.ranks] == [[2, 3], [2]]
    assert [[number for number, _ in each.ranks[0].steps] for each in run.attempts] == [[1], [2, 3]]
    assert (run.others, run.damaged, run.error, run.world_size) == (2, 1, "", 2)
    run = lines(tmp_path, *training, *again, *of("e.0", START))
    assert (run.ranks[0].steps, len(run.attempts), run.others) == ((), 1, 3)
    run = lines(tmp_path, *training, *of("a.1", {**START, "world_size": 2}, step(2)))
    assert (len(run.attempts), [rank.rank for rank in run.ranks]) == (2, [0])


def test_an_attempt_has_the_records_of_all_its_ranks(tmp_path: Path) -> None:
    for number, (ranks, steps) in enumerate([(2, 3), (3, 4), (1, 5)]):
        sample = Sample(ranks=ranks, steps=steps, began=BEGAN + 10 * number, killed=True)
        for rank in range(ranks):
            write_events(rank_file(tmp_path, rank), [{**event, "run": f"a.{number}"} for event in sample.events(rank)])
    run = Run.read(tmp_path)
    steps_of = [[len(record.steps) for record in each.ranks] for each in run.attempts]
    assert steps_of == [[3, 3], [4, 4, 4], [5]]
    assert [each.world_size for each in run.attempts] == [2, 3, 1]
    for _ in range(2):  # a program that gives its attempts one name
        write_run(tmp_path / "one", Sample(steps=3 + _, killed=True))
        for rank in range(2):
            with rank_file(tmp_path / "one", rank).open("a") as file:
                file.write("\n")
    one = Run.read(tmp_path / "one")
    assert [[len(record.steps) for record in each.ranks] for each in one.attempts] == [[3, 3], [4, 4]]


def test_files_of_ranks_beyond_the_last_run_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, Sample(ranks=3, steps=2))
    write_run(tmp_path, Sample(ranks=2, steps=2, began=BEGAN + 100))
    assert [record.rank for record in Run.read(tmp_path).ranks] == [0, 1]


def test_steps_come_from_logs_without_a_checkpointer(tmp_path: Path) -> None:
    logs = [{"event": "log", "t": 6 + t, "step": step, "values": {"loss": 1}} for t, step in enumerate([1, 1, 2, 4])]
    assert lines(tmp_path, START, *logs).ranks[0].steps == ((1, 6.0), (2, 8.0), (4, 9.0))
    seen = lines(tmp_path, START, *logs, {"event": "step", "t": 30, "step": 1})
    assert seen.ranks[0].steps == ((1, 30.0),)


def test_joins_that_were_left_one_after_the_other_are_summed(tmp_path: Path) -> None:
    first, second = {"steps": 5, "shadowed": 1, "samples": 10}, {"steps": 3, "shadowed": 0}
    joins = [{"event": "join", "t": 6, **first}, {"event": "join", "t": 7, **second}]
    assert lines(tmp_path, START, *joins).ranks[0].join == {"steps": 8, "shadowed": 1, "samples": 10}
    assert lines(tmp_path, START).ranks[0].join is None


def test_a_run_has_ended_as_its_ranks_have(tmp_path: Path) -> None:
    assert lines(tmp_path, {**START, "world_size": 2}, END).status == "unfinished"
    assert lines(tmp_path, START, rank=1).status == "unfinished"
    run = lines(tmp_path, START, END, rank=1)
    assert run.status == "completed"
    for ending, status in (("preempted", "unfinished"), ("lost", "failed")):
        assert lines(tmp_path, START, {**END, "status": ending}, rank=1).status == status
    lines(tmp_path, {**START, "world_size": 2}, {**END, "status": "preempted"})
    assert lines(tmp_path, START, {**END, "status": "failed"}, rank=1).status == "failed"
    lines(tmp_path, {**START, "world_size": 3})
    lines(tmp_path, START, {**END, "status": "failed", "error": "RuntimeError: rank 2 is gone"}, rank=1)
    run = lines(tmp_path, START, {**END, "t": 8.9, "status": "failed", "error": "ValueError: no"}, rank=2)
    assert (run.status, run.error) == ("failed", "rank 2: ValueError: no")


def test_a_newer_format_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.jsonl was written by a newer stagereg \(0\.9\): format 2.*Update"):
        lines(tmp_path, {**START, "format": 2, "stagereg": "0.9"})


def test_a_directory_without_a_run_is_an_error(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match=r"metrics\.jsonl is missing"):
            Run.read(directory)
    (tmp_path / "metrics_of_mine.jsonl").write_text('{"event": "step", "t": 1, "step": 1}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is missing"):
        Run.read(tmp_path)
    (tmp_path / "taken" / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"cannot read .*taken"):
        Run.read(tmp_path / "taken")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl has no records of stagereg"):
        lines(tmp_path, {"loss": 1.0}, {"event": "mine", "t": 3})


def planted(kind: str, path: Path) -> None:
    """Put something under a name that a reader opens and must neither wait for nor read to its end."""
    path.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 36)


@pytest.mark.parametrize("kind", ["a pipe", "a device", "64 GiB of zeros"])
def test_what_is_no_record_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    write_run(tmp_path)
    planted(kind, rank_file(tmp_path, 0))
    with pytest.raises(ConfigError, match=r"cannot read .* (is not a regular file|has a line of more than)"):
        Run.read(tmp_path)
    attempt = json.loads(SHORT.splitlines()[0]).get("run", "")
    assert last_event(rank_file(tmp_path, 0), b"step", attempt) is None
    assert Earlier.read(rank_file(tmp_path, 0), 1 << 36, "", "") is None
