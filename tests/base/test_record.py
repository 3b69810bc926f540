"""The events of a run are read back as they were recorded, survive a kill and a full disk, and never harm the run."""

from __future__ import annotations

import decimal
import json
import logging
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stagereg
from stagereg.base import record
from stagereg.errors import ConfigError


def parsed(line: str) -> dict[str, Any]:
    """A line as a strict reader of JSON takes it, which knows no NaN."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(line, parse_constant=refuse)


def recorded(directory: Path, event: str = "", rank: int = 0) -> list[dict[str, Any]]:
    text = (directory / record.file_name(rank)).read_text()
    assert text.endswith("\n")
    lines = [parsed(line) for line in text.splitlines()]
    return [line for line in lines if event in ("", line["event"])]


def test_start_and_end_record_process_versions_and_how_it_went(tmp_path: Path) -> None:
    with record.recording(tmp_path, 3, 4, device="cpu"):
        record.emit("step", step=7, **{"event": "another", "t": "never"})
    start, step, end = recorded(tmp_path, rank=3)
    assert {path.name for path in tmp_path.glob(record.FILES)} == {"metrics.rank3.jsonl"}
    expected = {"event": "start", "format": 1, "rank": 3, "world_size": 4, "pid": os.getpid(), "device": "cpu"}
    versions = {"stagereg": stagereg.__version__, "torch": version("torch"), "python": sys.version.split()[0]}
    assert start.items() >= (expected | versions).items()
    assert start["host"]
    assert start["hydra-core"]
    assert step == {"event": "step", "step": 7, "t": pytest.approx(start["t"], abs=60), "run": start["run"]}
    with record.recording(tmp_path, 3, 4):
        pass
    assert recorded(tmp_path, rank=3)[-1]["run"] != start["run"], (
        "each recording is a run of its own unless it is named"
    )
    assert end["status"] == "completed"
    assert "error" not in end
    assert 2**23 < end["peak_rss"] < 2**40
    assert 0 < end["seconds"] == pytest.approx(end["t"] - start["t"], abs=0.1)


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ValueError("no cheese\nat line 3"), "failed", "ValueError: no cheese"),
        (KeyboardInterrupt(), "failed", "KeyboardInterrupt"),
        (SystemExit(3), "failed", "called sys.exit(3)"),
        (SystemExit("no cheese"), "failed", "called sys.exit('no cheese')"),
        (SystemExit(0), "completed", None),
        (SystemExit(), "completed", None),
    ],
)
def test_the_end_is_recorded_however_the_task_ends(
    tmp_path: Path, error: BaseException, status: str, text: str | None
) -> None:
    with pytest.raises(type(error)) as caught, record.recording(tmp_path, 0, 1):
        raise error
    assert caught.value is error
    (end,) = recorded(tmp_path, "end")
    assert (end["status"], end.get("error")) == (status, text)


class Odd:
    """Has no text."""

    def __str__(self) -> str:
        raise ValueError("no text")


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
ODD = st.sampled_from(
    [object(), Odd(), CIRCLE, {"in": CIRCLE}, b"bytes", {1, 2}, 1j, 10**5000, {(1, 2): 3}, [Odd(), math.inf]]
)


def as_json_has_it(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_json_has_it(each) for key, each in value.items()}
    if isinstance(value, list):
        return [as_json_has_it(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@given(st.text(), st.dictionaries(st.text(), VALUES, max_size=4), ODD)
@settings(max_examples=80, deadline=None)
def test_every_event_comes_back_as_one_line_of_json(event: str, fields: dict[str, Any], odd: Any) -> None:
    fields.pop("odd", None)
    with tempfile.TemporaryDirectory() as folder:
        with record.recording(Path(folder), 0, 1):
            record.emit(event, **fields)
            record.emit(event, **fields, odd=odd)
        _, line, with_odd, _ = recorded(Path(folder))
    expected = as_json_has_it(fields) | {"event": event}
    for found in (line, with_odd):
        assert isinstance(found.pop("t"), float)
        assert found.pop("run").endswith(".0")
        found.pop("odd", None)
    expected.pop("t", None)
    expected.pop("run", None)
    assert line == with_odd == expected


def test_lines_of_many_threads_stay_whole(tmp_path: Path) -> None:
    threads, each = 8, 100
    ready = threading.Barrier(threads)

    def work(number: int) -> None:
        ready.wait(20)
        for at in range(each):
            record.emit("step", thread=number, at=at, text=str(number) * 5000)

    with record.recording(tmp_path, 0, 1), ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    lines = recorded(tmp_path, "step")
    assert all(line["text"] == str(line["thread"]) * 5000 for line in lines)
    for number in range(threads):
        assert [line["at"] for line in lines if line["thread"] == number] == list(range(each))


def test_a_second_recording_follows_the_first_after_a_torn_line(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    stagereg.log(1, loss=0.5)
    with record.recording(tmp_path, 0, 1):
        pass
    stagereg.log(1, loss=0.5)  # dropped, as nothing records
    first = file.read_text()
    assert [line["event"] for line in recorded(tmp_path)] == ["start", "end"]
    file.write_text(first + '{"event":"st')
    with record.recording(tmp_path, 0, 1):
        record.emit("step", step=1)
    second = file.read_text().removeprefix(first + '{"event":"st\n')
    assert [parsed(line)["event"] for line in second.splitlines()] == ["start", "step", "end"]


def test_a_recording_inside_another_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with record.recording(tmp_path / "outer", 0, 1):
        with record.recording(tmp_path / "inner", 0, 1):
            record.emit("step", step=1)
        record.emit("step", step=2)
    assert [line["step"] for line in recorded(tmp_path / "outer", "step")] == [1, 2]
    assert not (tmp_path / "inner").exists()
    assert len(caplog.records) == 1


OBSTACLES: dict[str, Callable[[Path], object]] = {
    "a file instead of the directory": lambda directory: directory.touch(),
    "a directory instead of the file": lambda directory: (directory / "metrics.jsonl").mkdir(parents=True),
    "full": lambda directory: (directory.mkdir(), (directory / "metrics.jsonl").symlink_to("/dev/full")),
    "full within a line": lambda directory: None,
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_a_run_that_cannot_be_recorded_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    directory, write = tmp_path / "run", os.write
    OBSTACLES[obstacle](directory)
    with record.recording(directory, 0, 1):
        record.emit("step", step=1)
        if obstacle == "full within a line":
            with monkeypatch.context() as full:
                full.setattr(os, "write", lambda file, data: write(file, data[:9]))
                record.emit("step", step=2)
        stagereg.log(3, loss=0.5)
    own = [each for each in caplog.records if each.name == "stagereg.base.record" and each.levelno >= logging.WARNING]
    messages = [each.getMessage() for each in own]
    assert len(messages) == 1
    assert "Training continues" in messages[0]
    if obstacle == "full within a line":
        *whole, torn = (directory / "metrics.jsonl").read_text().split("\n")
        assert [parsed(line)["event"] for line in whole] == ["start", "step"]
        assert torn == '{"event":'


FORKED = """
import os, threading
from stagereg.base import record

class Listener:
    lock, values = threading.Lock(), {}
    def add(self, step, values):
        with self.lock:
            self.values[step] = values

listener = Listener()
record.listen(listener)
record.log(1, loss=0.5)
with listener.lock:  # as another thread may hold it at the fork
    if (child := os.fork()) == 0:
        record.log(2, loss=0.25)
        os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert listener.values == {1: {"loss": 0.5}}
"""


def test_listeners_hear_what_is_logged_and_a_fork_has_none() -> None:
    command = [sys.executable, "-c", FORKED]
    subprocess.run(command, check=True, timeout=60, cwd=Path(__file__).parents[2])


KILLED = """
import os, sys
from pathlib import Path
from stagereg.base import record

with record.recording(Path(sys.argv[1]), 0, 1):
    if os.fork() == 0:  # as a loader's worker, which leaves the block too
        record.emit("step", step=-1)
        sys.exit()
    os.wait()
    step = 0
    while True:
        record.emit("step", step=step, text="x" * 1000)
        step += 1
        if step == 500:
            print("now", flush=True)
"""


def test_a_killed_process_has_written_all_but_its_last_line(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], 60)
        process.send_signal(signal.SIGKILL)
    assert ready
    *whole, _ = (tmp_path / "metrics.jsonl").read_text().split("\n")
    start, *steps = map(parsed, whole)
    assert start["event"] == "start"
    assert [line["step"] for line in steps] == list(range(len(steps)))
    assert len(steps) >= 500
    assert all(line["text"] == "x" * 1000 for line in steps)


def test_numbers_are_written_as_numbers_and_nan_as_null(tmp_path: Path) -> None:
    with record.recording(tmp_path, 0, 1):
        record.emit("write", bytes=torch.tensor(7), price=decimal.Decimal("1.25"), dir=tmp_path)
        stagereg.log(3, loss=torch.tensor(0.5), rate=1, grown=math.inf)
        stagereg.log(4, loss=math.nan)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch's, of a number with a gradient
            stagereg.log(5, loss=torch.tensor(0.5, requires_grad=True))
    _, write, first, second, third, _ = recorded(tmp_path)
    assert third["values"] == {"loss": 0.5}
    assert (write["bytes"], write["price"], write["dir"]) == (7, 1.25, str(tmp_path))
    assert (first["step"], first["values"]) == (3, {"loss": 0.5, "rate": 1.0, "grown": None})
    assert (second["step"], second["values"]) == (4, {"loss": None})


class Broken:
    ndim = 0

    def __float__(self) -> float:
        raise KeyError("x")

    def __repr__(self) -> str:
        return "Broken()"


@pytest.mark.parametrize(
    ("step", "value", "named"),
    [
        (1, "0.5", "'0.5'"),
        (1, Broken(), "Broken()"),
        (1, None, "None"),
        (1, 1j, "1j"),
        (1, torch.zeros(1), "a Tensor of shape [1]"),
        (1, 10**400, "1000"),
        (1.5, 0.5, "step=1.5"),
        ("one", 0.5, "step='one'"),
    ],
)
def test_a_value_that_is_no_number_is_refused_by_name(step: Any, value: Any, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        stagereg.log(step, loss=value)
    assert named in str(caught.value)
    assert "step=" in named or "loss" in str(caught.value)


@pytest.mark.parametrize("kind", ["a link", "a pipe"])
def test_what_is_no_record_is_not_written_to(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rc").write_text("exec zsh\n")
    path = tmp_path / record.file_name(0)
    os.mkfifo(path) if kind == "a pipe" else path.symlink_to(tmp_path / "rc")
    with record.recording(tmp_path, 0, 1):
        record.emit("step", step=1)
    assert (tmp_path / "rc").read_text() == "exec zsh\n"
    assert "Stopped recording" in caplog.text
    assert "not a regular file" in caplog.text
