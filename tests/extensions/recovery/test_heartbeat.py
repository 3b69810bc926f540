"""Strangers at the port of the hub: whatever they send, they end nothing, hold nothing up and are told nothing."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stagereg.extensions.recovery.heartbeat as heartbeat
from stagereg.extensions.recovery.heartbeat import Config, failures, greeting, printable, proof

from ...support.programs import comes_true

BOUND_S = 30.0
SECRET, WORLD = "sesame", 4


class Hub:
    """The heartbeat process of rank 0, whose rank this process is."""

    def __init__(self, most_files: int = 1024, timeout_s: float = 60.0) -> None:
        limited = ["sh", "-c", f'ulimit -n {most_files}; exec "$@"', "sh"]
        command = [*limited, sys.executable, "-I", "-S", heartbeat.__file__, str(os.getpid())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.send(Config(0, "process 1 on host", timeout_s, SECRET, None, WORLD)._asdict())
        self.port = self.said()["port"]

    def send(self, value: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value).encode() + b"\n")

    def said(self) -> dict[str, Any]:
        """Return what it says next to its rank."""
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def call(self) -> tuple[socket.socket, str]:
        """Return a connection, and the challenge that came on it."""
        line = socket.create_connection(("127.0.0.1", self.port), BOUND_S)
        return line, received(line)

    def join(self, rank: object, name: str = "process") -> tuple[socket.socket, bool]:
        """Return a connection as this rank, which knows the secret, and whether the hub let it in."""
        line, challenge = self.call()
        line.sendall(f"{rank} {proof(SECRET, challenge, str(rank))} {name}\n".encode())
        return line, received(line) == f".{proof(SECRET, challenge, 'hub')}"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.parametrize("hub", [None, ["127.0.0.1", 9, "process 1 on host"]])
def test_a_heartbeat_that_is_started_as_its_rank_ends_does_not_stay(hub: list[Any] | None) -> None:
    """Rank and heartbeat of rank 0 are killed one after the other: the second heartbeat has another parent at once."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    config = Config(0 if hub is None else 1, f"process {gone.pid} on host", 60.0, SECRET, hub, WORLD)
    command = [sys.executable, "-I", "-S", heartbeat.__file__, str(gone.pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(config._asdict()).encode() + b"\n")
        try:
            assert process.wait(BOUND_S) == 0
        finally:
            process.kill()


def received(line: socket.socket) -> str:
    """Return the next line, without a byte more; nothing if the connection has ended."""
    text = b""
    with contextlib.suppress(ConnectionError):
        while not text.endswith(b"\n") and (byte := line.recv(1)):
            text += byte
    return text.decode().rstrip("\n")


def is_closed(line: socket.socket) -> bool:
    """Whether the other side ends a connection in a while."""
    line.settimeout(BOUND_S)
    with contextlib.suppress(ConnectionError):
        while line.recv(4000):
            pass
    return True


@pytest.fixture
def hub() -> Iterator[Hub]:
    started = Hub()
    yield started
    started.end()


GARBAGE = {
    "5,000 digits": b"9" * 5000 + b" x\n",
    "4,301 zeros": b"0" * 4301 + b" x y\n",
    "1,000 digits": b"9" * 1000 + b" x y\n",
    "Arabic digits": "\u0663".encode() * 400 + b" x\n",
    "no text": b"\xff\xfe \xff\n",
    "no line": b"x" * (1 << 20),
    "a failure": json.dumps({"failed": {"1": ["me", "dead"]}}).encode() + b"\n",
    "an end": b"bye\n",
    "a wrong proof": f"1 {'0' * 64} me\n".encode(),
    "a proof that is not ASCII": "1 \u00e9 me\n".encode(),
    "nested lists": b"{" + b"[" * 900 + b"\n",
    "nothing": b"\n",
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_a_line_of_a_stranger_ends_its_connection_alone(hub: Hub, data: bytes) -> None:
    stranger, _ = hub.call()
    began = time.monotonic()
    with contextlib.suppress(OSError):
        stranger.sendall(data)
    assert is_closed(stranger)
    assert time.monotonic() - began < heartbeat._STRANGER_S - 1, "it is not read to its end"
    assert hub.join(1)[1]


PROVEN = {
    "5,000 digits": json.dumps({"failed": {"9" * 5000: ["me", "dead"]}}),
    "a rank that does not exist": json.dumps({"failed": {str(WORLD): ["me", "dead"]}}),
    "a rank below 0": json.dumps({"failed": {"-1": ["me", "dead"]}}),
    "no names": json.dumps({"failed": {"1": "x"}}),
    "no text": json.dumps({"failed": {"1": [{}, 3]}}),
    "no failures": "{}",
    "deep lists": "{" + '"failed":' + "[" * 60_000,
    "no JSON": "{]",
    "another word": "hello",
}


@pytest.mark.parametrize("text", PROVEN.values(), ids=PROVEN)
def test_a_line_of_a_rank_that_means_nothing_ends_its_connection_alone(hub: Hub, text: str) -> None:
    bad, _ = hub.join(1)
    good, _ = hub.join(2)
    bad.sendall(text.encode() + b"\n")
    assert is_closed(bad)
    assert hub.join(1)[1], "it may connect again"
    good.sendall(b"bye\n")
    assert is_closed(good)
    assert [hub.said() for _ in range(4)][2:] == [{"came": 1, "name": "process"}, {"left": 2}]


@pytest.mark.parametrize("rank", [-1, 0, WORLD, 10**400, "", "x", "1.0", "\u0661\u0661"])
def test_a_rank_that_does_not_exist_is_sent_away(hub: Hub, rank: object) -> None:
    line, welcome = hub.join(rank)
    assert (welcome, is_closed(line), hub.join(1)[1]) == (False, True, True)


def test_a_rank_is_let_in_once(hub: Hub) -> None:
    first, _ = hub.join(1)
    second, welcome = hub.join(1)
    assert (welcome, is_closed(second)) == (False, True)
    first.sendall(b"bye\n")
    assert is_closed(first)
    assert hub.join(1)[1], "once the first one has ended"


def test_strangers_are_told_nothing(hub: Hub) -> None:
    """They get the challenge, and dots, failures and shortened timeouts go to ranks alone."""
    early, _ = hub.call()
    teller, _ = hub.join(1)
    other, _ = hub.join(2)
    teller.sendall(json.dumps({"failed": {"3": ["process 4711 on secret-host", "dead"]}}).encode() + b"\n")
    hub.send("shorten")
    assert comes_true(lambda: "secret-host" in received(other), BOUND_S)
    late, challenge = hub.call()
    assert not select.select([early, late], [], [], 1.5)[0]
    assert len(challenge) == 32


def test_a_name_that_goes_to_terminals_is_short_and_printable(hub: Hub) -> None:
    hub.join(1, "\x1b[2J\u202e" + "x" * 800)
    assert hub.said()["name"] == "?[2J?" + "x" * 295
    assert printable("a\nb\x07") == "a?b?"
    assert failures(json.dumps({"failed": {"1": ["\x1b", "\x9b" * 1000]}}), 2) == [(1, "?", "?" * 300)]


def test_strangers_that_take_all_files_keep_no_rank_out_and_are_sent_away() -> None:
    hub = Hub(most_files=48)
    strangers = [socket.socket() for _ in range(70)]
    try:
        for each in strangers:
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", hub.port))
        assert hub.join(1)[1]
        assert processor_s(hub.process.pid) < 0.4
        strangers[0].setblocking(True)
        assert is_closed(strangers[0])
    finally:
        hub.end()
        for each in strangers:
            each.close()


def processor_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_of_4000_damaged_lines_none_is_taken_for_another_one() -> None:
    chance, challenge = random.Random(0), "c" * 32
    good = f"2 {proof(SECRET, challenge, '2')} process 7 on host"
    failure = json.dumps({"failed": {"2": ["process 7", "gone"]}})
    assert greeting(good, challenge, SECRET, WORLD) == (2, "process 7 on host")
    assert failures(failure, WORLD) == [(2, "process 7", "gone")]
    assert greeting("9" * 5000 + " x", challenge, SECRET, WORLD) is None, "no number is read before the proof"
    for _ in range(2000):
        text = damaged(good, chance)
        found = greeting(text, challenge, SECRET, WORLD)
        assert found is None or (text.startswith(good[:67]) and found == (2, printable(text[67:]))), text
        with contextlib.suppress(Exception):
            for rank, *texts in failures(damaged(failure, chance), WORLD):
                assert rank in range(WORLD), texts
                assert all(each.isprintable() and len(each) <= 300 for each in texts)


def damaged(text: str, chance: random.Random) -> str:
    letters = [*text]
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(letters))
        new = chance.choice(["", "9" * 900, " ", "\0", "\u0663", "f", "-", "\x1b", '"', "[", "{", ","])
        letters[at : at + chance.randint(0, 3)] = new
    return "".join(letters)
