"""``make fuzz``: the readers stand up to a few inputs of each kind, and whatever a reader does wrong is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stagereg
from stagereg.extensions.interop.opened import OpenCheckpoint

from . import fuzz, fuzz_inputs, fuzz_watch
from .fuzz import KINDS, PRIVATE
from .fuzz_inputs import Action, Kind, Wrong, expect_printable
from .fuzz_watch import Watch, bounded_memory, examine, make_kind
from .mutations import Random


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Watch:
    scratch = tmp_path_factory.mktemp("fuzz")
    (scratch / "home").mkdir()
    (scratch / "home" / ".bashrc").write_text("mine\n")
    return Watch(scratch)


@pytest.fixture
def here(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(watch.scratch)
    monkeypatch.setenv("HOME", f"{watch.scratch}/home")
    monkeypatch.setenv("FUZZ_PRIVATE", PRIVATE)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # which a kind may set
    return Path(watch.scratch)


@pytest.mark.parametrize("name", KINDS)
def test_twenty_inputs_of_each_kind_are_read_right_or_refused(name: str, watch: Watch, here: Path) -> None:
    kind, ends = make_kind(name, here), Counter[str]()
    examine(kind, name, -1, 0, watch)  # which imports what is imported once
    with bounded_memory():
        for number in range(20):
            found, ended = examine(kind, name, 1, number, watch)
            assert found == []
            ends += ended
    assert ends.keys() <= {"read", "refused"}
    assert ends["read"] >= 15


class Stub(Kind):
    """An input that is read by one function."""

    def __init__(self, scratch: Path, reads: Callable[[Path], Any]) -> None:
        super().__init__(scratch)
        self.reads = reads

    def make(self, rng: Random) -> str:
        return "as it is"

    def actions(self, rng: Random) -> Iterator[Action]:
        yield "read", lambda: self.reads(self.folder)


def _examined(reads: Callable[[Path], Any], watch: Watch, here: Path) -> list[str]:
    found, _ = examine(Stub(here, reads), "stub", 1, 0, watch)
    return [each.what for each in found]


def _raises(error: BaseException) -> Callable[[Path], Any]:
    def read(_: Path) -> None:
        raise error

    return read


def _refused_for_memory(_: Path) -> None:
    try:
        bytearray(1 << 60)
    except MemoryError as error:
        raise stagereg.StageregError("it was not read") from error


def test_a_right_value_and_a_refusal_are_no_findings(watch: Watch, here: Path) -> None:
    assert _examined(lambda folder: (folder / "x").write_text("inside"), watch, here) == []
    assert _examined(_raises(stagereg.StageregError("no")), watch, here) == []


@pytest.mark.parametrize(
    ("reads", "what"),
    [
        (_raises(KeyError("x")), "KeyError"),
        (_raises(RecursionError()), "RecursionError"),
        (_raises(SystemExit(0)), "SystemExit"),
        (_raises(Wrong("a tensor is not what was saved", "w")), "a tensor is not what was saved"),
        (_refused_for_memory, "takes too much memory"),
        (lambda folder: bytearray(400 << 20).count(1), "takes too much memory"),
        (lambda folder: (folder.parent / "y").write_text("outside"), "does open"),
        (lambda folder: os.close(os.open(folder.parent / "y", os.O_RDWR | os.O_CREAT)), "does open"),
        (lambda folder: os.rename(folder, f"{folder}2"), "does os.rename"),
        (
            lambda folder: (folder.parent / "made").mkdir(exist_ok=True) or (folder.parent / "made").rmdir(),
            "does os.mkdir",
        ),
        (lambda folder: subprocess.run(["true"], check=True), "does subprocess.Popen"),
        (lambda folder: os.system("true"), "does os.system"),
        (lambda folder: torch.serialization.add_safe_globals([Stub]), "leaves changed: torch's safe globals"),
        (lambda folder: torch.set_default_dtype(torch.float64), "leaves changed: torch's default dtype"),
        (lambda folder: setattr(fuzz_metadata(), "evil", 1), "leaves changed: torch's metadata classes"),
        (lambda folder: os.environ.update(EVIL="1"), "leaves changed: the environment"),
        (lambda folder: sys.path.append("/evil"), "leaves changed: sys.path"),
    ],
)
def test_what_a_reader_does_wrong_is_a_finding(
    reads: Callable[[Path], Any], what: str, watch: Watch, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    allowed, dtype = torch.serialization.get_safe_globals(), torch.get_default_dtype()
    try:
        assert what in _examined(reads, watch, here)
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(allowed)
        torch.set_default_dtype(dtype)
        os.environ.pop("EVIL", None)
        if hasattr(fuzz_metadata(), "evil"):
            del fuzz_metadata().evil


def fuzz_metadata() -> Any:
    return torch.distributed.checkpoint.metadata.MetadataIndex


def test_a_file_of_the_user_that_changes_is_a_finding(watch: Watch, here: Path) -> None:
    mine = here / "home" / ".bashrc"
    try:
        assert "changes files of the user" in _examined(lambda _: mine.write_text("evil\n"), watch, here)
    finally:
        mine.write_text("mine\n")


def test_a_reading_that_hangs_is_a_finding(watch: Watch, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_watch, "LIMIT_S", 0.2)

    def read(folder: Path) -> None:
        os.mkfifo(folder / "pipe")
        (folder / "pipe").read_bytes()

    assert _examined(read, watch, here) == ["hangs for 0.2 s"]


def test_a_thread_or_a_file_that_stays_is_a_finding(watch: Watch, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_watch, "_LEAVES_S", 0.2)
    ends, files = threading.Event(), list[int]()
    try:
        assert _examined(lambda _: threading.Thread(target=ends.wait, daemon=True).start(), watch, here) == [
            "leaves threads"
        ]
        ends.set()
        found = _examined(lambda _: files.append(os.open(os.devnull, os.O_RDONLY)), watch, here)
        assert found == ["leaves files open"]
    finally:
        ends.set()
        for each in files:
            os.close(each)


@pytest.mark.parametrize(
    ("reads", "what"),
    [
        (lambda tensor: torch.full_like(tensor, 0.1234), "a tensor has bytes that are in no file"),
        (
            lambda tensor: torch.frombuffer(bytearray(b"\xa5" * 64), dtype=torch.uint8),
            "a tensor has uninitialised memory",
        ),
        (lambda tensor: torch.zeros(1 << 27, dtype=torch.uint8), "a tensor is larger than its file"),
    ],
)
def test_a_tensor_that_is_not_of_the_file_is_a_finding(
    reads: Callable[[Any], Any], what: str, watch: Watch, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = make_kind("structures", here)
    whole = OpenCheckpoint.__getitem__
    monkeypatch.setattr(OpenCheckpoint, "__getitem__", lambda self, name: reads(whole(self, name)))
    found = [each for number in range(6) for each in examine(kind, "structures", 1, number, watch)[0]]
    assert ("open_checkpoint", what) in {(each.action, each.what) for each in found}


def test_a_command_that_prints_too_much_is_a_finding() -> None:
    for text, what in (("\x1b[31m", "control characters"), (f"a {PRIVATE}", "private")):
        with pytest.raises(Wrong, match=what):
            expect_printable(text)
    expect_printable("é\n\t")


_WORKER = """
import json, os, sys
first, count = (int(sys.argv[sys.argv.index(name) + 1]) for name in ("--first", "--count"))
found = {"kind": "wire", "seed": 7, "number": 2, "action": "read", "what": "KeyError", "place": "x.py:f"}
for number in range(first, first + count):
    print(json.dumps({"begin": ["wire", number]}), flush=True)
    if number == 3:
        os.abort()
    print(json.dumps({"end": ["wire", number], "ends": {"read": 1}, "found": [found] * (number == 2)}), flush=True)
    if number == 5:
        os._exit(3)
"""


def test_findings_are_files_and_a_worker_that_dies_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "worker.py"
    program.write_text(_WORKER)
    monkeypatch.setattr(fuzz, "PROGRAM", [sys.executable, str(program)])
    asked = ["--kind", "wire", "--seed", "7", "--out", str(tmp_path / "out")]
    assert fuzz.main([*asked, "--count", "8"]) == 1
    seen = capsys.readouterr().out
    assert "2 findings" in seen
    assert "7 read" in seen, "the inputs behind the one that ended a worker are made"
    assert "wire: read KeyError in x.py:f: 1 times" in seen
    assert "ends the process: -6" in seen
    files = {path.name: json.loads(path.read_text()) for path in (tmp_path / "out").iterdir()}
    assert files.keys() == {"wire-7-2.json", "wire-7-3.json"}
    assert files["wire-7-2.json"]["again"].endswith("fuzz.py --kind wire --seed 7 --only 2")
    assert fuzz.main([*asked, "--only", "2"]) == 1
    assert fuzz.main([*asked, "--count", "2"]) == 0
    assert "no findings" in capsys.readouterr().out


def test_an_error_of_the_target_itself_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "worker.py"
    program.write_text("import sys; sys.exit(1)")
    monkeypatch.setattr(fuzz, "PROGRAM", [sys.executable, str(program)])
    with pytest.raises(RuntimeError, match="itself has failed"):
        fuzz.main(["--kind", "wire", "--count", "2", "--out", str(tmp_path / "out")])


def test_a_seed_makes_the_same_inputs_again(here: Path) -> None:
    kind = make_kind("zips", here)
    made = []
    for turn in range(2):
        for number in range(12):
            kind.folder = here / f"again-{turn}-{number}"
            how = kind.make(Random(f"1/zips/{number}"))
            made.append((how, fuzz_inputs.files_of(kind.folder)))
    assert made[:12] == made[12:]
    assert len({how for how, _ in made}) > 9
