"""What a program does that is surely not meant, and that no error follows from, is logged once, with the way out."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import stagereg.extensions.diagnostics.first_save as first_save
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.options import Restore
from stagereg.stagers.blocking import BlockingStager
from stagereg.testing import run_ranks
from tests.checkpoint.promises.test_cast import HalfStager, IntStager, made, stepped

from ...support.forks import run_forked


def said(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class Averaged:
    """Keeps copies of parameters, as an EMA of somebody's own does."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.copies = {name: x.clone() for name, x in model.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        return self.copies

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.copies = state


def test_an_optimizer_of_parameters_that_are_not_saved_is_named_once(tmp_path: Path, caplog: Any) -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    both = torch.optim.SGD([*model.parameters(), other.weight])
    foreign = torch.optim.SGD(other.parameters())
    for number, (optimizer, count) in enumerate(((foreign, "2 of the 2"), (both, "1 of the 3"))):
        with Checkpointer(str(tmp_path / str(number))) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, {"model": model, "adam": optimizer})
        [text] = said(caplog)
        assert f"{count} parameters that 'adam' trains are not in the state" in text
        caplog.clear()


def test_an_optimizer_of_what_is_saved_is_not(tmp_path: Path, caplog: Any) -> None:
    model, masters = torch.nn.Linear(2, 2), [torch.nn.Parameter(torch.ones(2))]
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    of_model, of_masters = torch.optim.SGD([*model.parameters(), frozen]), torch.optim.SGD(masters)
    states: list[dict[str, Any]] = [
        {"model": torch.compile(model), "optimizer": of_model},
        {"model": [model], "optimizer": of_model, "ema": Averaged(model)},
        {"model": model.state_dict(), "optimizer": of_model},
        {"model": model, "masters": masters, "optimizer": [of_model, of_masters]},
        {"optimizer": of_masters},
        {"model": model, "average": Averaged(model), "optimizer": of_masters},  # whose copies may be these
    ]
    for number, state in enumerate(states):
        with Checkpointer(str(tmp_path / str(number))) as checkpointer:
            checkpointer.save(1, state)
    assert [text for text in said(caplog) if "are not in the state: they" in text] == []


def sharded(rank: int, world_size: int, root: str) -> list[int]:
    """How often an optimizer is named: of DDP, of FSDP2, and of FSDP2 that was made before the model was sharded."""
    counts = []
    for number, early in enumerate((None, False, True)):
        heard: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, heard=heard: heard.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("stagereg").addHandler(handler)
        model: Any = torch.nn.Linear(3, 5)
        optimizer = torch.optim.SGD(model.parameters())
        if early is None:
            model = DistributedDataParallel(model)
        else:
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = optimizer if early is not False else torch.optim.SGD(model.parameters())
        with Checkpointer(f"{root}/{number}") as checkpointer:
            checkpointer.save(1, {"model": model, "optimizer": optimizer})
        counts.append(sum("are not in the state: they" in each for each in heard))
    return counts


def test_an_optimizer_that_is_older_than_the_shards_of_its_model_is_named_by_rank_0(tmp_path: Path) -> None:
    assert run_ranks(sharded, 2, args=(str(tmp_path),), timeout_s=60) == [[0, 0, 1], [0, 0, 0]]


def test_a_step_that_goes_backwards_is_said_once_and_not_after_a_restore(tmp_path: Path, caplog: Any) -> None:
    with Checkpointer(str(tmp_path), keep=9) as checkpointer:
        for step in (1, 5, 5):
            checkpointer.save(step, {"n": step})
        checkpointer.restore({"n": 0}, tmp_path / "step-00000001")
        checkpointer.save(3, {"n": 3})
        assert said(caplog) == []
        for step in (2, 1):
            checkpointer.save(step, {"n": step})
    [text] = said(caplog)
    assert "Step 2 is saved after step 3" in text


def test_a_number_that_does_not_follow_its_variable_is_named_once(tmp_path: Path, caplog: Any) -> None:
    samples, seed, epoch, best, constant = 0, 0, 0, 9.0, 1
    state = {"samples": samples, "seed": seed, "epoch": epoch, "best": best, "other": 0}
    with Checkpointer(str(tmp_path), every=2) as checkpointer:
        for step in range(1, 30):
            samples += 8
            epoch = state["epoch"] = step // 4
            if step == 9:
                best = state["best"] = 3.0
            constant += 1
            checkpointer.maybe_save(step, state)
    [text] = said(caplog)
    assert "'samples' in the state is 0 in each checkpoint so far, but the" in text
    assert "the variable samples of the program is now 32" in text


def test_a_number_in_a_new_dict_each_time_is_not(tmp_path: Path, caplog: Any) -> None:
    count = 0
    with Checkpointer(str(tmp_path)) as checkpointer:
        for step in range(1, 9):
            count += 1
            checkpointer.save(step, {"count": 0})
    assert (said(caplog), count) == ([], 8)


def test_to_look_at_variables_keeps_none_of_them(tmp_path: Path) -> None:
    state = {"x": 0}
    kept = None

    def loop(checkpointer: Checkpointer, all_of_it: bool) -> tuple[bool, Any]:
        held = locals() if all_of_it else None
        big = torch.ones(3)
        gone = weakref.ref(big)
        checkpointer.save(1, state)
        del big
        return gone() is None, held

    with Checkpointer(str(tmp_path)) as checkpointer:
        assert loop(checkpointer, False)[0]
        _, kept = loop(checkpointer, True)
    assert kept["checkpointer"] is checkpointer  # the dict of a program that has it stays as it is


PROGRAM = """
import sys
import stagereg

state = {{"n": 0}}
def train():
    {body}
train()
print("trained", flush=True)
"""
OPEN = "checkpointer = stagereg.Checkpointer('c'); checkpointer.save(1, state)"


@pytest.mark.parametrize(
    ("body", "code", "times"),
    [
        (OPEN, 0, 1),  # dropped
        (f"global checkpointer; {OPEN}", 0, 1),  # held to the end
        pytest.param(f"{OPEN}; checkpointer.close()", 0, 0, marks=pytest.mark.slow),
        ("\n    with stagereg.Checkpointer('c') as checkpointer: checkpointer.save(1, state)", 0, 0),
        pytest.param(f"global checkpointer; {OPEN}; raise ValueError('of the program')", 1, 0, marks=pytest.mark.slow),
    ],
)
def test_a_program_that_does_not_close_its_checkpointer_is_told_at_its_end(
    body: str, code: int, times: int, tmp_path: Path
) -> None:
    done = run_forked(PROGRAM.format(body=body), cwd=tmp_path)
    assert (done.returncode, done.stderr.count("was not closed")) == (code, times), done.stderr


@pytest.mark.parametrize(
    ("stager", "cast", "said"),
    [
        (
            HalfStager,
            False,
            r"HalfStager returns 8 .* model.0.weight \(expected float32 \[8, 4\], got bfloat16 .* 5 more",
        ),
        (HalfStager, True, ""),
        (IntStager, True, r"returns 2 .* model.0.weight \(expected .*, got int32 \[8, 4\]\).*\. Use another stager"),
        (BlockingStager, False, ""),
    ],
)
def test_the_first_save_names_what_restore_would_not_take(
    stager: Any, cast: bool, said: str, tmp_path: Path, caplog: Any
) -> None:
    with Checkpointer(str(tmp_path), stager=stager(), restore=Restore(cast=cast)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, stepped(made()))
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(found) == bool(said)
    assert all("restore() does not accept" in each for each in found)
    assert not said or re.search(said, found[0])


@pytest.mark.parametrize(
    ("module", "name"),
    [(first_save, "leaves"), (first_save, "memory_of"), (first_save, "listed"), (first_save, "search_program")],
)
def test_a_check_that_fails_is_skipped_and_the_save_is_the_same(
    module: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("a check that fails")

    monkeypatch.setattr(module, name, fails)
    monkeypatch.setattr(first_save.TensorKind, "fits", fails if name == "listed" else first_save.TensorKind.fits)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with caplog.at_level(logging.DEBUG, logger="stagereg"), Checkpointer(tmp_path, every=1) as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": optimizer, "n": 1})
    assert [each for each in caplog.records if "skipped the check" in each.getMessage()]
    monkeypatch.undo()
    other = torch.nn.Linear(2, 2)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore({"model": other, "optimizer": torch.optim.SGD(other.parameters()), "n": 0}) == 1
    assert torch.equal(other.weight, model.weight)


def train(root: object, steps: Iterable[int], resume: str = "auto", source: str | None = None, keep: int = 9) -> None:
    state = {"x": torch.zeros(3)}
    with Checkpointer(str(root), keep=keep, resume=resume, save_last=False) as checkpointer:
        checkpointer.restore(state, source)
        for step in steps:
            checkpointer.save(step, state)


def test_newer_checkpoints_than_the_one_that_the_option_names_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warned() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        caplog.clear()
        return [text for text in found if "which the resume option names" in text]

    before, run = tmp_path / "before", tmp_path / "run"
    train(before, [20])
    first = str(before / "step-00000020")
    train(run, [], first)
    train(run, [], "auto", first)
    train(run, [20, 31], first)
    assert warned() == []  # as the run had no checkpoint yet
    train(run, [], first)
    assert warned() == [
        f"stagereg: resumed from step 20 in {first}, which the resume option names, but this run already has "
        f"{run}/step-00000031, 11 steps ahead. The new checkpoints of this run replace step-00000031, and retention "
        'deletes it. To continue from it instead, stop this run now, and start it with resume="auto".'
    ]
    assert (run / "step-00000031").exists()
    train(run, [], "step-00000020")
    assert len(warned()) == 1
    for resume in ("auto", "latest", "step-00000031", "never"):
        train(run, [], resume)
    train(run, [], "auto", first)
    assert warned() == []
    files = [each for each in (run / "step-00000031").iterdir() if each.suffix == ".distcp"]
    content = files[0].read_bytes()
    files[0].write_bytes(bytes(len(content)))  # which "auto" skips
    train(run, [])
    files[0].write_bytes(content)
    assert warned() == []
    # What the warning says is lost, and what it proposes.
    train(run, [25, 30], first, keep=2)
    assert sorted(each.name for each in run.glob("step-*")) == ["step-00000025", "step-00000030"]
    assert len(warned()) == 1

    counts_anew = tmp_path / "anew"
    train(counts_anew, [1, 2], first)
    train(counts_anew, [], first)
    [text] = warned()
    assert "step-00000002. The new checkpoints" in text
    monkeypatch.setattr("sys.argv", ["another", "program"])
    train(counts_anew, [], first)
    assert warned() == []
