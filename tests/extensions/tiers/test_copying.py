"""Copies are made beside training: as many as wanted, by whoever works, and no failure is raised."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagereg.base import record
from stagereg.errors import CheckpointError
from stagereg.extensions.tiers.copying import CopyLag, CopyThread
from stagereg.extensions.tiers.folder import MachineFolder, notes_of_part
from stagereg.extensions.tiers.part import Part, manifest_name
from stagereg.extensions.tiers.peer import Peer
from tests.support.programs import comes_true
from tests.support.tier_parts import SECRET, connected, files_below, new_folder, serving, tier_threads, write_part
from tests.support.watching import watching

BOUND_S = 30


class Machines:
    """Machines that a part can be sent to; some fail, some wait."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []
        self.tried: list[int] = []
        self.failing: dict[str, BaseException] = {}
        self.closed: list[str] = []
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.gate.set()

    def __call__(self, machine: str) -> Any:
        if machine == "unknown":
            raise KeyError(machine)
        machines = self

        class Sent:
            closed = False

            def put(self, part: Part, directory: str) -> None:
                machines.tried.append(part.save.step)
                machines.begun.set()
                assert machines.gate.wait(BOUND_S)
                if self.closed:
                    raise ConnectionAbortedError("closed")
                if machine in machines.failing:
                    raise machines.failing[machine]
                machines.sent.append((machine, part.save.step))

            def close(self) -> None:
                self.closed = True
                machines.closed.append(machine)
                machines.gate.set()

        return Sent()


@pytest.fixture
def machines() -> Machines:
    return Machines()


@pytest.fixture
def folder(tmp_path: Path) -> MachineFolder:
    return new_folder(tmp_path / "here")


def submit(threads: CopyThread, folder: MachineFolder, machines: list[str], step: int = 1, **how: Any) -> Part:
    part = write_part(folder, {"x": 3}, step=step)
    threads.submit(part, folder.directory(part.save), machines, **how)
    return part


def wait_for(condition: Callable[[], bool]) -> None:
    assert comes_true(condition, BOUND_S)


def copied_of(folder: MachineFolder, part: Part) -> tuple[str, ...]:
    return notes_of_part(folder.directory(part.save), manifest_name(part.rank))[0]


def test_a_part_goes_to_as_many_as_wanted_and_is_noted(machines: Machines, folder: MachineFolder) -> None:
    threads = CopyThread(machines, folder, 2)
    assert (threads.busy, threads.copied) == (False, True)
    part = submit(threads, folder, ["a", "b", "c"])
    wait_for(lambda: not threads.busy)
    assert threads.copied
    assert machines.sent == [("a", 1), ("b", 1)]
    assert copied_of(folder, part) == ("a", "b")
    assert sorted(machines.closed) == ["a", "b"]  # nothing is kept


def test_a_stand_in_takes_what_another_refuses(
    machines: Machines, folder: MachineFolder, caplog: pytest.LogCaptureFixture
) -> None:
    machines.failing["a"] = CheckpointError("no room: it is full")
    threads = CopyThread(machines, folder, 1)
    for step in (1, 2):
        part = submit(threads, folder, ["a", "unknown", "c"], step)
        wait_for(lambda: not threads.busy)
        assert threads.copied
        assert copied_of(folder, part) == ("c",)
    assert [each.getMessage() for each in caplog.records] == [
        "stagereg: cannot copy step 1 to a: no room: it is full",
        "stagereg: cannot copy step 1 to unknown: KeyError: 'unknown'",
    ]
    del machines.failing["a"]
    submit(threads, folder, ["a"], 3)
    wait_for(lambda: not threads.busy)
    machines.failing["a"] = TimeoutError("again")
    submit(threads, folder, ["a"], 4)
    wait_for(lambda: not threads.busy)
    assert caplog.records[-1].getMessage() == "stagereg: cannot copy step 4 to a: TimeoutError: again"
    assert not threads.copied


@pytest.mark.parametrize(("copies", "candidates"), [(0, ["a"]), (1, [])])
def test_what_needs_no_copy_starts_no_thread(
    machines: Machines, folder: MachineFolder, copies: int, candidates: list[str]
) -> None:
    threads = CopyThread(machines, folder, copies)
    submit(threads, folder, candidates)
    assert (threads.busy, threads.copied, machines.sent) == (False, True, [])


def test_one_machine_is_enough_where_there_is_no_other(machines: Machines, folder: MachineFolder) -> None:
    threads = CopyThread(machines, folder, 3)
    submit(threads, folder, ["a"])
    wait_for(lambda: not threads.busy)
    assert threads.copied


def test_lost_copies_are_no_own_ones(machines: Machines, folder: MachineFolder) -> None:
    machines.gate.clear()
    threads = CopyThread(machines, folder, 1)
    submit(threads, folder, ["a"], 1)
    assert machines.begun.wait(BOUND_S)
    submit(threads, folder, ["a"], 2)
    lost = submit(threads, folder, ["b"], 3, have=["z"])
    submit(threads, folder, ["b"], 4, have=[])
    assert threads.busy
    assert not threads.copied
    machines.failing["b"] = OSError("gone")
    machines.gate.set()
    wait_for(lambda: not threads.busy)
    assert machines.sent == [("a", 1), ("a", 2)]
    assert machines.tried == [1, 2, 3, 4]
    assert threads.copied
    assert copied_of(folder, lost) == ()
    machines.failing.clear()
    lost = submit(threads, folder, ["b"], 5, have=["z"])
    submit(threads, folder, ["b"], 6)
    wait_for(lambda: not threads.busy)
    assert copied_of(folder, lost) == ("z", "b")
    assert machines.sent[2:] == [("b", 5), ("b", 6)]


def test_the_end_does_not_wait_for_long(
    machines: Machines, folder: MachineFolder, caplog: pytest.LogCaptureFixture
) -> None:
    before = tier_threads()
    machines.gate.clear()
    threads = CopyThread(machines, folder, 1)
    submit(threads, folder, ["a", "b"], 1)
    submit(threads, folder, ["a"], 2)
    assert machines.begun.wait(BOUND_S)
    threads.close(0.01)
    threads.close(0.01)
    assert not threads.busy
    submit(threads, folder, ["a"], 3)
    assert not threads.busy
    assert machines.sent == []
    assert caplog.records == []
    assert tier_threads() <= before


def test_the_end_has_copied_what_there_was_time_for(machines: Machines, folder: MachineFolder) -> None:
    threads = CopyThread(machines, folder, 1)
    for step in range(1, 5):
        submit(threads, folder, ["a"], step)
    threads.close(BOUND_S)
    assert [step for _, step in machines.sent] == [1, 2, 3, 4]


def test_each_transfer_is_an_event(machines: Machines, folder: MachineFolder, tmp_path: Path) -> None:
    machines.failing["a"] = OSError("gone")
    threads = CopyThread(machines, folder, 1)
    with record.recording(tmp_path, 0, 1):
        submit(threads, folder, ["a", "b"], 7)
        wait_for(lambda: not threads.busy)
    lines = [json.loads(line) for line in (tmp_path / record.file_name(0)).read_text().splitlines()]
    failed, worked = [each for each in lines if each["event"] == "copy"]
    assert (failed["to"], failed["error"]) == ("a", "OSError: gone")
    assert {name: worked[name] for name in ("to", "step", "rank", "bytes")} == {
        "to": "b",
        "step": 7,
        "rank": 0,
        "bytes": 3,
    }
    assert "error" not in worked
    assert worked["seconds"] >= 0
    assert worked["t"] >= worked["start"]


def test_a_real_machine_has_the_copy_before_it_is_noted(folder: MachineFolder, tmp_path: Path) -> None:
    there, seen = new_folder(tmp_path / "there"), []

    def connect(_: str) -> Peer:
        return Peer(server.address, SECRET)

    with serving(there) as server:
        threads = CopyThread(connect, folder, 1)
        part = write_part(folder, {"x": 3})

        def observe(name: str) -> None:
            seen.append((name, there.find(part.save, 0) is not None, copied_of(folder, part)))

        with watching(observe):
            threads.submit(part, folder.directory(part.save), ["there"])
            wait_for(lambda: not threads.busy)
        threads.close()
        with connected(server.address) as peer:
            assert peer.part(part.save, 0) == part
    assert seen[-2:] == [("acknowledged", True, ()), ("copied", True, ("there",))]
    assert files_below(there) == ["part-0.json", "x"]


def test_each_lag_is_one_warning_and_one_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lag = CopyLag()
    lag.note_copied(None)
    for _ in range(20):
        lag.note_late("copies have failed")
    lag.note_copied(40)
    for _ in range(20):
        lag.note_late("rank 1 still sending copies")
    lag.note_copied(90)
    lag.note_copied(100)
    texts = [each.getMessage() for each in caplog.records]
    assert [each.levelname for each in caplog.records] == ["WARNING", "INFO", "WARNING", "INFO"]
    late = "all peer copies{}, and 5 saves have begun since"
    assert f"no step of the local tier has {late.format(' yet')}: copies have failed." in texts[0]
    assert f"step 40 is the newest step of the local tier with {late.format('')}: rank 1 still" in texts[2]
    assert [each.rpartition(": ")[2] for each in texts[1::2]] == ["step 40 is copied.", "step 90 is copied."]


def test_a_few_slow_copies_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lag = CopyLag()
    for step in range(20):
        for _ in range(4):
            lag.note_late("rank 1 still sending copies")
        lag.note_copied(step)
    assert not caplog.records
