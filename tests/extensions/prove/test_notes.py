"""Verdicts are shown, and files that no run of stagereg wrote cost a verdict, and nothing else."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stagereg.extensions.prove.notes as notes
from stagereg.assembly import Checkpointer, Prove
from stagereg.checkpoint.store.open_store import open_store
from stagereg.cli import main
from stagereg.extensions.retention.proven import KeepProven

from ...commands.checkpoint_directories import save
from ...support.noted import note

PLACES: dict[str, Callable[[Path], object]] = {
    "directory": Path.mkdir,
    "pipe": lambda path: os.mkfifo(path),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "unreadable": lambda path: path.touch(0),
}
TEXTS = [
    "",
    "{",
    "[]",
    "[[1, 2]]",
    "null",
    "7",
    '"key"',
    "{}",
    "[" * 100_000,
    "9" * 5000,
    "\udcff",
    "NaN",
    '{"key": 1}',
]
FIELDS: list[dict[str, Any]] = [
    {"verdict": "refuted", "why": 7},
    {"verdict": {"refuted": 1}},
    {"verdict": "splendid"},
    {"ranks": 10**12},
    {"ranks": 0},
    {"ranks": "2"},
    {"steps": None},
    {"hydra": []},
    {"run": {}},
    {"device": 1.5},
    {"number": "x"},
    {"more": "x" * (1 << 20)},
]


def listed(root: Path, capsys: pytest.CaptureFixture[str]) -> dict[int, str]:
    capsys.readouterr()
    assert main(["ls", str(root), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    return {each["step"]: each["why"] for each in found if "leftover" not in each["state"]}


def test_ls_shows_the_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1, 2, 3, 4)
    note(tmp_path, 1, "proven")
    note(tmp_path, 2, "refuted", "data: batches\n\x1b[31m")
    note(tmp_path, 3)
    shown = {4: "", 3: "not tried", 2: "refuted by data: batches\\n\\x1b[31m", 1: "proven"}
    assert listed(tmp_path, capsys) == shown
    main(["ls", str(tmp_path)])
    ends = [line.partition("not verified")[2].strip() for line in capsys.readouterr().out.splitlines()[3:]]
    assert ends == ["latest", *[*shown.values()][1:]]


def test_ls_does_not_show_the_verdict_about_an_earlier_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1)
    path = note(tmp_path, 1, "refuted", "data: batches")
    before = path.read_text()
    save(tmp_path, 2, 1, salt="again")
    path.write_text(before)
    assert listed(tmp_path, capsys) == {2: "", 1: ""}
    note(tmp_path, 1, "proven")
    assert listed(tmp_path, capsys) == {2: "", 1: "proven"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory with four checkpoints, three of which have recorded steps; the first one is proven."""
    train(tmp_path / "run", 4)
    note(tmp_path / "run", 1, "proven")
    return tmp_path / "run"


def train(root: Path, until: int) -> None:
    model = torch.nn.Linear(2, 2)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with Checkpointer(str(root), every=1, keep=9, prove=Prove(steps=1)) as checkpointer:
        first = checkpointer.restore(state) or 0
        for step in range(first + 1, until + 1):
            model(torch.ones(2)).sum().backward()
            state["optimizer"].step()
            checkpointer.maybe_save(step, state)


def replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def expect_no_harm(root: Path, capsys: pytest.CaptureFixture[str], caplog: Any) -> None:
    """Expect that ls, prove, the retention rule and a run ignore the file of step 3."""
    assert listed(root, capsys) == {4: "", 3: "", 2: "not tried", 1: "proven"}
    assert main(["prove", str(root), "--all", "--json", "--timeout", "60", "--", sys.executable, "-c", "0"]) == 2
    printed = capsys.readouterr()
    assert [each["step"] for each in json.loads(printed.out)["checkpoints"]] == [2, 1]
    assert "Traceback" not in printed.err
    assert len(KeepProven(newest=1).select(open_store(root).checkpoints()[0], {})) == 2
    train(root, 6)
    assert caplog.messages == []


@pytest.mark.parametrize("place", PLACES)
def test_a_file_that_cannot_be_read_costs_its_verdict(
    run: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if place == "unreadable" and os.geteuid() == 0:
        pytest.skip("root can read all files")
    replace(run / "proofs" / "step-00000003.json", PLACES[place])
    assert listed(run, capsys) == {4: "", 3: "", 2: "not tried", 1: "proven"}


@pytest.mark.parametrize("text", ["{", '{"key": 1}'])
def test_a_malformed_file_costs_its_verdict(
    run: Path, text: str, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    (run / "proofs" / "step-00000003.json").write_text(text)
    expect_no_harm(run, capsys, caplog)


def test_each_other_malformed_file_is_ignored(run: Path) -> None:
    store = open_store(run)
    newest = store.checkpoints()[0][1]
    path = note(run, 3)
    assert notes.read(store, newest)
    for text in TEXTS:
        path.write_bytes(text.encode(errors="surrogateescape"))
        assert notes.read(store, newest) == {}, text[:99]
    for more in FIELDS:
        path.unlink()  # otherwise the next note would repeat its run
        note(run, 3, **more)
        assert notes.read(store, newest) == {}, more
    record = path.with_name("step-00000003.rank0.json")
    for text in (*TEXTS, '{"rows": 7}', '{"rows": [7]}', '{"rows": {"a": 1}}'):
        record.write_bytes(text.encode(errors="surrogateescape"))
        assert notes.read(store, newest, 0) == {}, text[:99]


def test_a_record_that_was_replaced_costs_its_proof(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "proofs" / "step-00000002.rank0.json").write_text('{"rows": [7, 7, 7]}')
    assert main(["prove", str(run), "--all", "--json", "--timeout", "60", "--", sys.executable, "-c", "0"]) == 2
    assert [each["step"] for each in json.loads(capsys.readouterr().out)["checkpoints"]] == [3, 1]


def test_a_folder_that_cannot_be_written_costs_the_records(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "proofs").write_text("of the user")
    train(tmp_path / "run", 3)
    assert any("cannot record the steps after step 1" in text for text in caplog.messages)
    assert (tmp_path / "run" / "proofs").read_text() == "of the user"
    assert sorted(each.name for each in (tmp_path / "run").glob("step-*")) == [f"step-0000000{n}" for n in (1, 2, 3)]
