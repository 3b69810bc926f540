"""A rank that is forked from the warm process is as one that was started: what it is, what it gets, how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stagereg.extensions.recovery.warm as warm
from stagereg.extensions.recovery.warm import PythonCommand, WarmProcess, WarmStart, split_command
from stagereg.launch.extension import Start

from ...support.programs import await_gone, comes_true

BOUND_S = 60.0
SCRIPT = """
import atexit, json, os, random, signal, sys, threading
import beside
import numpy

atexit.register(lambda: open("ended", "a").write(f"{sys.argv[1]}\\n"))
print(json.dumps({
    "argv": sys.argv, "orig": sys.orig_argv, "name": __name__, "path": sys.path[0], "cwd": os.getcwd(),
    "file": __file__, "is main": sys.modules["__main__"].__dict__ is globals(), "threads": threading.active_count(),
    "variable": os.environ["OWN"], "left": os.environ.get("OF_ALL"), "launcher": int(os.environ["STAGEREG_LAUNCHER"]),
    "parent": os.getppid(), "group": os.getpgid(0), "pid": os.getpid(), "beside": beside.RANK,
    "random": [random.random(), numpy.random.rand()], "torch": "torch" in WARM,
    "seed": sys.modules["torch"].initial_seed() if "torch" in WARM else None,
    "handlers": [signal.getsignal(number) is default for number, default in (
        (signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL))],
    "descriptors": len(os.listdir("/proc/self/fd")),
}), file=open(sys.argv[1], "w"))
match sys.argv[2]:
    case "raises":
        raise ValueError("no cheese")
    case "exits":
        sys.exit(75)
    case "waits":
        import time
        time.sleep(1000)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("warm")
    (place / "program").mkdir()
    (place / "program/script.py").write_text("import sys\nWARM = set(sys.modules)\n" + SCRIPT)
    (place / "program/beside.py").write_text("import os\nRANK = os.environ.get('OWN')\n")
    return place


def start_of(folder: Path, *more: str, number: int = 0) -> Start:
    variables = {**os.environ, "OWN": str(number), "OMP_NUM_THREADS": "1"}
    return Start(
        [sys.executable, "-B", "program/script.py", str(folder / f"said{number}"), *more], str(folder), variables
    )


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[WarmStart]:
    started = WarmStart(start_of(folder)._replace(variables={**os.environ, "OF_ALL": "x", "OMP_NUM_THREADS": "1"}))
    yield started
    started.close()


def started(server: WarmStart, start: Start) -> WarmProcess:
    """Start it once the server is ready."""
    found: list[WarmProcess] = []

    def starts() -> bool:
        if process := server.start(start):
            found.append(process)
        return bool(found)

    assert comes_true(starts, BOUND_S)
    return found[0]


@pytest.mark.slow
def test_a_program_finds_what_it_would_find_in_a_process_of_its_own(server: WarmStart, folder: Path) -> None:
    found = []
    for number in range(2):
        start = start_of(folder, "returns", number=number)
        fresh = subprocess.run(start.command, cwd=folder, env={**start.variables, "STAGEREG_LAUNCHER": "0"}, check=True)
        of_its_own = json.loads((folder / f"said{number}").read_text())
        process = started(server, start)
        assert (process.wait(BOUND_S), process.poll()) == (fresh.returncode, 0)
        said = json.loads((folder / f"said{number}").read_text())
        assert said["launcher"] == said["parent"]
        assert said["group"] == said["pid"] == process.pid
        assert said["torch"]
        assert said["variable"] == said["beside"] == str(number)
        for name in ("argv", "orig", "name", "path", "cwd", "file", "is main", "threads", "left", "handlers"):
            assert said[name] == of_its_own[name], name
        assert said["descriptors"] <= of_its_own["descriptors"] + 1
        found.append([*said["random"], said["seed"]])
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]
    assert found[0][2] != found[1][2] or found[0][2] == warm._SEED


@pytest.mark.slow
def test_its_end_is_told_whatever_it_was(server: WarmStart, folder: Path) -> None:
    for number, (how, code) in enumerate({"returns": 0, "raises": 1, "exits": 75}.items(), 10):
        assert started(server, start_of(folder, how, number=number)).wait(BOUND_S) == code
        assert str(folder / f"said{number}") in (folder / "ended").read_text(), "what runs at the end of a process"
    server._server.send_signal(signal.SIGTERM)  # of Slurm, to each process of a step
    process = started(server, start_of(folder, "waits", number=20))
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert comes_true(lambda: (folder / "said20").exists())
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(BOUND_S) == -signal.SIGTERM
    process.send_signal(signal.SIGTERM)  # which is for nobody by now


@pytest.mark.slow
def test_all_end_with_the_server(folder: Path) -> None:
    server = WarmStart(start_of(folder))
    process = started(server, start_of(folder, "waits", number=30))
    server.close()
    assert process.wait(BOUND_S) == -signal.SIGKILL
    assert await_gone(process.pid)
    assert server.start(start_of(folder, "returns")) is None
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["a thread", "an option"])
def test_what_cannot_be_forked_safely_is_not(folder: Path, fault: str) -> None:
    start = start_of(folder)
    if fault == "a thread":
        (folder / "sitecustomize.py").write_text(
            "import threading, time\nthreading.Thread(target=time.sleep, args=[99], daemon=True).start()\n"
        )
        start.variables["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    else:
        start.command[1:1] = ["-i"]
    server = WarmStart(start)
    assert server._server.wait(BOUND_S) == 0
    assert server.start(start_of(folder)) is None
    server.close()
    (folder / "sitecustomize.py").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train.py a=1", PythonCommand([], False, ["train.py", "a=1"])),
        ("-u -W ignore -Xdev train.py -m", PythonCommand(["-u", "-W", "ignore", "-Xdev"], False, ["train.py", "-m"])),
        ("-m train -m", PythonCommand([], True, ["train", "-m"])),
        ("-c print()", None),
        ("-Ic print()", None),
        ("-i train.py", None),
        ("--help", None),
        ("-u", None),
        ("-", None),
        ("", None),
    ],
)
def test_a_command_line_is_understood_or_not_taken(line: str, expected: PythonCommand | None) -> None:
    assert split_command(["python", *line.split()]) == expected
