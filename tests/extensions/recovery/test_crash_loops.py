"""A run that is started again and again comes to an end, whatever it dies of and wherever its checkpoints are."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import stagereg
from stagereg import Checkpointer, Restore
from stagereg.errors import CorruptCheckpointError
from stagereg.testing.ranks import RankFailure, run_ranks

from ...support.faulty_storage import flip
from ...support.programs import comes_true

NOTE = ".restored.json"
LAST = 13  # the first run ends here


def die(how: str) -> None:
    if how == "nan":  # as a program finds it in its loss
        assert torch.isfinite(torch.tensor(float("nan"))), "the loss is not finite"
    raise MemoryError  # which counts, whoever has started the run


def train(
    root: str, where: str, how: str = "raise", at: int = 0, steps: int = 99, often: int = 3, folder: str = "near"
) -> int | None:
    """Take steps up to ``steps``; die before step ``at``, or at once where something was restored, if that is 0."""
    tier = stagereg.build("tier", "disk", dir=f"{root}/{folder}", copies=1, every=1) if "tier" in where else None
    options = {
        "every": 4,
        "keep": 9,
        "tier": tier,
        "restore": Restore(max_crashes=often),
        "save_last": False,
    }
    state = {"x": torch.zeros(4)}
    with Checkpointer(f"{root}/store" if "store" in where else None, **options) as checkpointer:
        start = checkpointer.restore(state)
        print("began", "scratch" if start is None else f"{start}{'t' if folder in str(checkpointer.restored) else 's'}")
        for step in range((start or 0) + 1, steps + 1):
            if step == (at or (start or -1) + 1):
                die(how)
            state["x"] += 1
            checkpointer.maybe_save(step, state)
            checkpointer.wait()
            await_copies(checkpointer)
    return start


def await_copies(checkpointer: Any) -> None:
    """Wait for them, since a step is passed over while copies of the one before are sent."""
    if checkpointer._tiering is not None and dist.is_initialized():
        assert comes_true(lambda: not checkpointer._tiering.near._threads.busy, 30)
        dist.barrier()


class Cycles:
    """A job that is started again each time that it has died, at most so often."""

    MOST = 30

    def __init__(self, capsys: pytest.CaptureFixture[str], *args: Any, **options: Any) -> None:
        self.capsys, self.refusal = capsys, ""
        self.began = [*self._until_refused(args, options)]

    def _until_refused(self, args: Any, options: Any) -> Iterator[str]:
        for _ in range(self.MOST):
            try:
                train(*args, **options)
            except CorruptCheckpointError as refused:
                self.refusal = str(refused)
                return
            except (MemoryError, AssertionError):
                yield self.capsys.readouterr().out.split()[-1]
        pytest.fail("it never ends")


def thrice(*names: str) -> list[str]:
    return [name for name in names for _ in range(3)]


AT_ONCE = {"tier": ["13t", "12t"], "store": ["12s", "8s", "4s"], "tier+store": ["13t", "12t", "12s", "8s", "4s"]}
LATER = {"tier": ["14t", "13t"], "store": ["12s", "8s", "4s"], "tier+store": ["14t", "13t", "12s", "8s", "4s"]}


@pytest.mark.parametrize(
    ("where", "how"), [("tier", "raise"), ("store", "nan"), pytest.param("tier+store", "raise", marks=pytest.mark.slow)]
)
def test_a_run_that_dies_at_once_tries_each_copy_of_each_step_so_often_and_is_then_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, where: str, how: str
) -> None:
    train(str(tmp_path), where, steps=LAST, at=99)
    if how == "nan":  # an exception, whose first time is noted and whose second one is counted
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    cycles = Cycles(capsys, str(tmp_path), where, how)
    assert cycles.began == [*AT_ONCE[where][: how == "nan"], *thrice(*AT_ONCE[where])]
    assert cycles.refusal.count(
        "restored: 3 times, and each time the run crashed before it saved a checkpoint beyond step 1"
    ) == (len(AT_ONCE[where]))
    place = tmp_path / ("store" if "store" in where else "near")
    assert cycles.refusal.startswith(f"There are checkpoints in {place}, but none of them is valid:\n")
    assert "check the errors of those runs" in cycles.refusal
    assert "Restore the missing files" not in cycles.refusal
    for path in re.findall(r"  (/.*): restored: ", cycles.refusal):
        with pytest.raises((MemoryError, AssertionError)):
            resume(tmp_path, where, path, how)
        assert capsys.readouterr().out.split()[-1] == f"{int(Path(path).name[5:13])}t"


def resume(root: Path, where: str, path: str, how: str) -> None:
    tier = stagereg.build("tier", "disk", dir=f"{root}/near", copies=1, every=1)
    with Checkpointer(f"{root}/store" if "store" in where else None, every=4, tier=tier, resume=path) as checkpointer:
        start = checkpointer.restore({"x": torch.zeros(4)})
        print("began", f"{start}{'t' if str(checkpointer.restored) == path else 's'}")
        die(how)


@pytest.mark.parametrize("where", ["store", pytest.param("tier+store", marks=pytest.mark.slow)])
def test_saving_again_what_was_there_before_the_crash_is_no_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    cycles = Cycles(capsys, str(tmp_path), where, at=15)
    assert cycles.began == ["scratch", *thrice(*LATER[where])]
    assert "crashed before it saved a checkpoint beyond step 1" in cycles.refusal


def test_what_others_saved_for_a_run_that_was_lost_is_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The surviving ranks save it, and the one that has counted is gone."""
    root = str(tmp_path)
    train(root, "store", steps=LAST, at=99)
    for step in range(LAST, LAST + 20):
        with pytest.raises(MemoryError):
            train(root, "store")
        assert capsys.readouterr().out.split()[-1] == f"{step - 1}s"
        note = (tmp_path / "store" / NOTE).read_text()
        with Checkpointer(f"{root}/store", every=1, keep=99, resume="never") as checkpointer:
            checkpointer.save(step, {"x": torch.zeros(4)})
        (tmp_path / "store" / NOTE).write_text(note)
    assert Cycles(capsys, root, "store").began[:6] == thrice("32s", "31s")


def test_a_newer_checkpoint_that_is_damaged_is_no_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(str(tmp_path), "store", steps=LAST, at=99)
    [file, *_] = (tmp_path / "store" / "step-00000012").glob("*.distcp")
    flip(file)
    assert Cycles(capsys, str(tmp_path), "store").began == thrice("8s", "4s")


def test_of_many_checkpoints_five_are_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(str(tmp_path), "store", steps=32, at=99)
    cycles = Cycles(capsys, str(tmp_path), "store", often=2)
    assert cycles.began == [f"{step}s" for step in (32, 28, 24, 20, 16) for _ in range(2)]
    untried = "restored: not tried: the run crashed 10 times in a row before it saved a checkpoint beyond step 32"
    assert [line.split(": ", 1)[0].strip() for line in cycles.refusal.splitlines() if untried in line] == [
        *("step-00000012", "step-00000008", "step-00000004")
    ]
    with pytest.raises(MemoryError):
        train(str(tmp_path), "store", often=3)
    assert capsys.readouterr().out.split()[-1] == "32s", "as soon as more is allowed"


def test_a_run_that_comes_beyond_the_crash_has_nothing_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(tmp_path)
    train(root, "tier+store", steps=14, at=99)
    for _ in range(5):
        with pytest.raises(MemoryError):
            train(root, "tier+store", at=15)
    train(root, "tier+store", at=99, steps=17)
    assert capsys.readouterr().out.split()[-1] == "13t"
    note = tmp_path / "store" / NOTE
    assert not note.exists() or "tier/step-00000014" not in note.read_text()
    cycles = Cycles(capsys, root, "tier+store", at=18)
    assert cycles.began[:6] == thrice("17t", "16t")


def machines(rank: int, world_size: int, root: str, at: int, steps: int) -> int | None:
    """Each rank is a machine: it has a folder of its own."""
    return train(root, "tier", at=at, steps=steps, folder=f"near{rank}")


def cycle(root: Path, capsys: pytest.CaptureFixture[str], at: int, steps: int = 99) -> str:
    capsys.readouterr()
    try:
        run_ranks(machines, 2, args=(str(root), at, steps))
    except RankFailure as failure:
        if "none of them is valid" in str(failure):
            return "refused"
    return capsys.readouterr().out.split("began")[1].split()[0]


def test_without_a_store_the_count_outlives_the_machine_of_rank_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cycle(tmp_path, capsys, 99, 5) == "scratch"
    assert [cycle(tmp_path, capsys, 0) for _ in range(2)] == ["5t", "5t"]
    shutil.rmtree(tmp_path / "near0")
    assert [cycle(tmp_path, capsys, 0) for _ in range(2)] == ["5t", "4t"]
    assert (tmp_path / "near0" / "notes" / NOTE).read_text() == (tmp_path / "near1" / "notes" / NOTE).read_text()
    assert [cycle(tmp_path, capsys, 0) for _ in range(3)] == ["4t", "4t", "refused"]


@pytest.mark.slow
def test_what_a_machine_notes_that_was_away_does_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cycle(tmp_path, capsys, 99, 5)
    assert [cycle(tmp_path, capsys, 0) for _ in range(3)] == ["5t", "5t", "5t"]
    noted = tmp_path / "near0" / "notes" / NOTE
    away = noted.read_bytes()
    assert cycle(tmp_path, capsys, 99, 6) == "4t"
    noted.write_bytes(away)
    assert cycle(tmp_path, capsys, 0) == "6t"
    noted.write_bytes(away)
    assert [cycle(tmp_path, capsys, 0) for _ in range(3)] == ["6t", "6t", "5t"]


def test_a_run_that_went_on_from_elsewhere_and_came_further_has_nothing_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a trainer's adapter does, which has checkpoints of its own beside the tier."""
    train(str(tmp_path), "tier", steps=LAST, at=99)
    assert Cycles(capsys, str(tmp_path), "tier").refusal
    state, tier = {"x": torch.zeros(4)}, stagereg.build("tier", "disk", dir=f"{tmp_path}/near", copies=1, every=1)
    with Checkpointer(None, tier=tier, save_last=False) as checkpointer:
        with pytest.raises(CorruptCheckpointError):
            checkpointer.restore(state)
        for step in range(5, LAST + 2):
            checkpointer.maybe_save(step, state)
            checkpointer.wait()
    assert Cycles(capsys, str(tmp_path), "tier").began == thrice("14t", "13t")


@pytest.mark.parametrize("anew", ["never", "deleted"])
def test_a_run_that_begins_from_scratch_has_nothing_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], anew: str
) -> None:
    train(str(tmp_path), "store", steps=LAST, at=99)
    assert Cycles(capsys, str(tmp_path), "store").began
    if anew == "deleted":
        for each in (tmp_path / "store").glob("step-*"):
            shutil.rmtree(each)
        train(str(tmp_path), "store", steps=LAST, at=99)
    else:
        with Checkpointer(str(tmp_path / "store"), every=4, keep=9, resume=anew) as checkpointer:
            checkpointer.restore({"x": torch.zeros(4)})
            for step in range(1, LAST):
                checkpointer.maybe_save(step, {"x": torch.zeros(4)})
    assert not (tmp_path / "store" / NOTE).exists()
    assert Cycles(capsys, str(tmp_path), "store").began == thrice("12s", "8s", "4s")
