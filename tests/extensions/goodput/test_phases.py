"""The first step of an attempt is reported with how long its start took, by phase, and what came before it."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import stagereg.extensions.goodput.phases as phases
from stagereg.assembly import Checkpointer
from stagereg.base import record
from stagereg.checkpoint.format.manifest import Manifest
from stagereg.extensions.goodput.launching import GoodputRank
from stagereg.launch.rank import Rank
from stagereg.launch.run_store import RunStore

from ...support.programs import TORCHRUN

NOW = 1_000_000.0


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has marked nothing yet, at a time that is known."""
    monkeypatch.setattr(phases, "_marks", {"started": NOW - 10, "imported": NOW - 7, "grouped": NOW - 3})
    monkeypatch.setattr(phases, "_start", None)
    monkeypatch.setattr(time, "time", lambda: NOW)


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / record.file_name(0)).read_text().splitlines())
    return [line for line in lines if line["event"] in kinds]


def killed_at(folder: Path, step: int, seconds_ago: float) -> None:
    """Write what an attempt leaves that was killed after a step."""
    lines = [{"event": "start", "t": NOW - 1000}, {"event": "step", "step": step, "t": NOW - seconds_ago}]
    text = "".join(json.dumps(line | {"run": "r.0"}, separators=(",", ":")) + "\n" for line in lines)
    (folder / record.file_name(0)).write_text(text)


def start(
    folder: Path, step: int = 1, noted: dict[str, Any] | None = None, restored: tuple[int, str, str] | None = None
) -> dict[str, Any]:
    """Start an attempt and take two steps; return what is recorded of the start."""
    phases.begin(folder, "r.1", noted)
    with record.recording(folder, 0, 1):
        if restored:
            phases.restored(*restored)
        phases.take_step(step)
        phases.take_step(step + 1)
    [found] = events(folder, "begin", "restart")
    return found


def test_a_first_start_has_its_phases_and_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    found = start(tmp_path)
    assert (found["event"], found["step"], found["again"]) == ("begin", 1, 0)
    assert found["phases"] == {"started": 0, "imported": 3, "grouped": 4, "first step": 3}
    assert caplog.text == ""
    assert [line["step"] for line in events(tmp_path, "step")] == [1, 2]


def test_a_first_start_begins_with_the_launcher(tmp_path: Path) -> None:
    phases.mark("launched", NOW - 12)
    assert start(tmp_path)["phases"]["started"] == 2


def test_what_the_launcher_saw_counts_from_the_last_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    seen = {"why": "rank 1: killed by SIGKILL", "noticed": NOW - 14, "ended": NOW - 13, "restart": 4}
    killed_at(tmp_path, step=12, seconds_ago=15)
    found = start(tmp_path, 11, seen, (10, "/x/step-10", "tier"))
    assert (found["event"], found["number"], found["why"]) == ("restart", 4, "rank 1: killed by SIGKILL")
    assert [*found["phases"]] == [name for name in phases.PHASES if name not in ("connected", "composed")]
    assert [*found["phases"].values()] == [1, 1, 3, 3, 4, 3, 0]
    assert (found["source"], found["origin"], found["again"]) == ("/x/step-10", "tier", 2)
    assert found["since"] + sum(found["phases"].values()) == NOW
    text = "Restart 4 took 15.00 s from the last step before it to the first step after it. rank 1: killed by SIGKILL"
    assert text in caplog.text
    assert "\n  restored       3.00 s  from /x/step-10\n" in caplog.text
    assert "\n  first step     0.00 s  step 11; 2 repeated" in caplog.text
    assert len(caplog.text.splitlines()) <= 1 + len(phases.PHASES)


def test_a_restore_is_noted_with_its_step_and_where_the_checkpoint_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[tuple[int, str, str]] = []
    monkeypatch.setattr(phases, "restored", lambda *given: noted.append(given))
    for _ in range(2):
        with Checkpointer(str(tmp_path)) as checkpointer:
            checkpointer.restore({"n": 0})
            checkpointer.save(3, {"n": 3})
    path = tmp_path / "step-00000003/manifest.json"
    path.write_text(dataclasses.replace(Manifest.loads(path.read_bytes()), lost={"0": ["n"]}).dumps())
    with Checkpointer(str(tmp_path), save_last=False) as checkpointer:
        checkpointer.restore({"n": 0})
    assert noted == [(0, "", ""), *((3, str(path.parent), origin) for origin in ("store", "survivors"))]


@pytest.mark.parametrize(
    ("why", "shown"),
    [
        (
            "rank 1 failed (pid 7): killed. Error on this rank:\nTraceback (most recent call last):\n  x\nOSError: y",
            "rank 1 failed (pid 7): killed.",
        ),
        ("rank 1: Traceback (most recent call last):\n  File x\nKeyError: 'y'\n", "rank 1: KeyError: 'y'"),
        ("its process was killed", "its process was killed"),
    ],
)
def test_the_failure_is_one_sentence(tmp_path: Path, why: str, shown: str) -> None:
    assert start(tmp_path, noted={"why": why, "noticed": NOW})["why"] == shown


def test_without_a_launcher_the_note_of_the_ranks_counts_and_else_the_record(tmp_path: Path) -> None:
    killed_at(tmp_path, step=12, seconds_ago=15)
    found = start(tmp_path, step=13, noted={"why": "rank 1 failed", "noticed": NOW - 12})
    assert (found["why"], found["number"], found["again"]) == ("rank 1 failed", 1, 0)
    assert (found["phases"]["noticed"], found["phases"]["started"]) == (3, 2)
    killed_at(tmp_path, step=12, seconds_ago=15)
    found = start(tmp_path, step=1)
    assert (found["why"], found["again"]) == ("its process was killed", 12)
    assert ("noticed" in found["phases"], found["phases"]["started"]) == (False, 5)


def test_a_run_follows_the_one_that_saved_to_its_directory_and_no_other(tmp_path: Path) -> None:
    killed_at(tmp_path, step=12, seconds_ago=15)
    with (tmp_path / record.file_name(0)).open("a") as file:
        file.write('{"event":"begin","step":1,"dir":"/theirs","t":1,"run":"r.0"}\n')
    for own, why in (("/mine", ""), ("/theirs", "its process was killed"), ("/mine", "")):
        phases.begin(tmp_path, f"{own}.0", None)
        phases.mtbf_s(600, in_tier=True)
        phases.saves_to(own)
        with record.recording(tmp_path, 0, 1, f"{own}.0"):
            phases.take_step(1)
        last = events(tmp_path, "begin", "restart")[-1]
        assert (last.get("why", ""), last["dir"], last["restored"]) == (why, own, 0)


@given(times=st.lists(st.one_of(st.none(), st.floats(NOW - 100, NOW + 100)), min_size=5, max_size=5))
def test_no_clock_makes_a_phase_negative(tmp_path_factory: pytest.TempPathFactory, times: list[float | None]) -> None:
    tmp_path = tmp_path_factory.mktemp("run")
    killed_at(tmp_path, 3, 20)
    names = ("noticed", "ended", "started", "imported", "grouped")
    known = dict(zip(names, times, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases, "_marks", {name: at for name, at in known.items() if at is not None})
        found = start(tmp_path, 4, {"why": "x", "noticed": known["noticed"], "ended": known["ended"]})
    assert min(found["phases"].values()) >= 0
    assert sum(found["phases"].values()) >= 20 - 1e-6


def test_the_rate_of_failures_is_what_was_seen_and_what_is_expected(tmp_path: Path) -> None:
    assert phases.mtbf_s(600, in_tier=True) == 600
    phases.begin(tmp_path, "r.1", None)
    assert phases.mtbf_s(600, in_tier=True) == 600, "nothing came before"
    killed_at(tmp_path, 3, 20)
    with (tmp_path / record.file_name(0)).open("a") as file:
        file.write('{"event":"restart","origin":"tier","t":1,"run":"r.0"}\n' * 2)
    phases.begin(tmp_path, "r.1", None)
    assert phases.mtbf_s(600, in_tier=True) == (600 + 1000) / (1 + 2 + 1)
    assert phases.mtbf_s(600, in_tier=False) == (600 + 1000) / (1 + 0 + 1)


def test_the_first_to_fail_notes_why_and_one_attempt_takes_it() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]

    def ranks(attempt: str) -> list[Rank]:
        return [Rank(rank, 2, rank, 2, False, RunStore(store, rank, 2, attempt)) for rank in (0, 1)]

    def taken(rank: Rank) -> Any:
        extension = GoodputRank()
        extension.around(rank, None)
        return extension._previous

    first, second, third = ranks("1"), ranks("2"), ranks("3")
    assert taken(first[0]) is None
    GoodputRank().noted(first[1], "rank 0 failed.\nError on this rank: an error")
    GoodputRank().noted(first[0], "a consequence")
    assert taken(second[1]) is None
    assert taken(second[0]) == {"why": "rank 0 failed.\nError on this rank: an error", "noticed": NOW}
    assert taken(third[0]) is None
    GoodputRank().noted(second[1], "again")
    assert taken(third[0]) == {"why": "again", "noticed": NOW}


def test_the_start_of_a_process_is_known_to_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    before = time.time()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert before - 1 < phases.process_start(str(child.pid)) < time.time() + 1
        child.communicate(b"\n")
    assert phases.process_start("none") <= time.time()
    assert phases.process_start("self") <= before


PROGRAM = """
import os, signal
import stagereg, torch
import torch.distributed as dist

@stagereg.main(config_path="conf", config_name="train")
def train(cfg):
    x, died = torch.zeros(3), os.path.join(cfg.checkpoint.dir, "died")
    with stagereg.instantiate(cfg.checkpoint) as checkpointer:
        state = {"x": x}
        first = (checkpointer.restore(state) or 0) + 1
        for step in range(first, 9):
            if step == 7 and dist.get_rank() == 1 and not os.path.exists(died):
                open(died, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            x += 1
            dist.all_reduce(torch.ones(1))
            checkpointer.maybe_save(step, state)
            checkpointer.wait()

train()
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.undo()
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "train.yaml").write_text("defaults: [stagereg, _self_]\nnproc: 2\n")
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


RUN = ["hydra.run.dir=out", "checkpoint.dir=out/checkpoints", "checkpoint.every=2"]
COMMANDS = {
    "run again": [sys.executable, "train.py", *RUN],
    "restarts": [sys.executable, "train.py", *RUN, "++restarts=1"],
    "torchrun": [*TORCHRUN, "--max-restarts=1", "train.py", *RUN],
}


@pytest.mark.slow
@pytest.mark.parametrize("how", COMMANDS)
def test_a_rank_that_is_killed_is_named_in_the_next_start_with_all_phases(program: Path, how: str) -> None:
    for _ in range(2 if how == "run again" else 1):
        ended = subprocess.run(COMMANDS[how], cwd=program, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stderr
    begin, restart = events(program / "out", "begin", "restart")
    assert (begin["event"], restart["event"]) == ("begin", "restart")
    before = {"restarts": {"noticed", "ended"}, "torchrun": {"noticed"}}.get(
        how, restart["phases"].keys() & {"noticed"}
    )
    own = phases.PHASES.keys() - {"noticed", "ended"}
    assert (begin["phases"].keys(), restart["phases"].keys()) == (own, own | before)
    assert (restart["step"], restart["again"], restart["origin"]) == (7, 0, "store")
    assert restart["source"].endswith("step-00000006")
    if how != "run again":  # of which rank 0 has recorded what came of it
        assert "rank 1 (process " in restart["why"]
    assert "stagereg: restart 1, " in (program / "out" / "train.log").read_text()
