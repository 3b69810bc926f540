"""Older checkpoints lose their optimizer state and nothing else, and one of the two forms is whole at any moment."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import stagereg
import stagereg.extensions.retention.rewriting as rewriting
import stagereg.extensions.retention.weights_after as weights_after
from stagereg import cli
from stagereg.assembly import Checkpointer
from stagereg.base.providers import has
from stagereg.checkpoint.format.manifest import Manifest
from stagereg.checkpoint.options import Restore
from stagereg.checkpoint.store.keep import Keep
from stagereg.checkpoint.store.open_store import open_store
from stagereg.errors import CheckpointError, ConfigError, CorruptCheckpointError
from stagereg.testing.ranks import run_ranks
from tests.support.format_reader import FormatReader
from tests.support.keeping import steps
from tests.support.reading import opened
from tests.support.states import assert_same
from tests.support.watching import watching

if not has("interop"):
    pytest.skip("reading .metadata needs the extension interop", allow_module_level=True)

STORAGES = ("dcp", "torch_dcp")
NAME = "step-00000001"


class Killed(BaseException):
    """Stands for SIGKILL: what is on the disk stays as it is."""


class Tied(nn.Module):
    """Has shared weights, two dtypes, a tensor with strides, one without elements, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.low = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.turned = nn.Parameter(torch.randn(300, 5).t())
        self.register_buffer("none", torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.low(self.embed(x).bfloat16()).float()) + self.turned.sum()


def state_of(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    more = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "epoch": 7, "own": stagereg.per_rank([1.5])}
    return {"model": model, "optimizer": optimizer, **more, "odd": {"raw": b"x", "spare": torch.arange(3000)}}


def take_step(state: dict[str, Any]) -> None:
    state["model"](torch.tensor([1, 2])).sum().backward()
    state["optimizer"].step()
    state["scheduler"].step()


def run(root: Path, count: int = 3, first: int = 1, weights_after: int | None = 1, **options: Any) -> dict[str, Any]:
    """Save ``count`` steps, and wait for the copy after each of them. Return the state of the last step."""
    state = state_of()
    options = {"keep": Keep(newest=9, weights_after=weights_after), "save_last": False, **options}
    with Checkpointer(str(root), **options) as checkpointer:
        if first > 1:
            checkpointer.restore(state)
        for step in range(first, first + count):
            take_step(state)
            checkpointer.save(step, state)
            checkpointer.wait()
            for thread in threading.enumerate():
                if thread.name == "stagereg-weights":
                    thread.join(60)
    return state


def small(root: Path) -> dict[int, list[str]]:
    """The dropped entries by step, of all checkpoints; each is whole, and nothing else is left in the directory."""
    store = open_store(str(root))
    complete, damaged = store.checkpoints()
    assert damaged == [each for each in complete if store.look(each.path, content=True).damages] == []
    assert sorted(x for x in os.listdir(root) if x.startswith(("step", ".step"))) == sorted(
        each.name for each in complete
    )
    return {each.manifest.step: each.manifest.dropped for each in reversed(complete)}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A directory with two whole checkpoints, to be copied or rewritten by tests."""
    run(tmp_path / "run", 2, weights_after=None)
    return tmp_path / "run"


def rewrite(root: Path, name: str = NAME) -> None:
    """Rewrite one checkpoint on this thread, as a run does."""
    store = open_store(str(root))
    with store.lock():
        store.sweep()
        [chosen] = [each for each in store.checkpoints()[0] if each.name == name]
        written = store.temporary(chosen.manifest.step, "0123456789ab")
        made = rewriting.WeightsCopy(store, chosen, written, lambda: False).write()
        if left := weights_after._replace(store, chosen, written, made):
            store.backend.discard(left)
        store.retention.clear()


@pytest.mark.parametrize("storage", STORAGES)
def test_older_checkpoints_lose_the_optimizer_and_nothing_else(
    tmp_path: Path, storage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "a", weights_after=None, storage=storage)
    run(tmp_path / "b", storage=storage)
    assert small(tmp_path / "b") == {1: ["optimizer"], 2: ["optimizer"], 3: []}
    for step in (1, 2):
        one, other = (tmp_path / root / f"step-{step:08}" for root in "ab")
        with opened(one, verify=True) as before, opened(other, verify=True) as after:
            assert sorted({*after.entries, "optimizer"}) == before.entries
            expected = {name: before.entry(name) for name in after.entries}
            assert_same(after.state(), expected)
        loaded = {"model": {"turned": torch.zeros(5, 300)}}
        dcp.load(loaded, checkpoint_id=str(other))
        assert torch.equal(loaded["model"]["turned"], expected["model"]["turned"])
        manifests = [Manifest.loads((each / "manifest.json").read_bytes()) for each in (one, other)]
        assert manifests[1].nbytes < manifests[0].nbytes - 8 * 300 * 5
    capsys.readouterr()
    assert cli.main(["ls", str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.count("weights only, without optimizer") == 2
    assert cli.main(["verify", str(tmp_path / "b")]) == 0


def test_other_programs_read_what_is_left(whole: Path, tmp_path: Path) -> None:
    with opened(whole / NAME) as checkpoint:
        weight = checkpoint["model.turned"]
        low = checkpoint["model.low.weight"]
    rewrite(whole)
    path = whole / NAME
    found = {"model": {"turned": torch.zeros(5, 300), "low.weight": torch.zeros(4, 4, dtype=torch.bfloat16)}}
    dcp.load(found, checkpoint_id=str(path))
    assert torch.equal(found["model"]["turned"], weight)
    assert torch.equal(found["model"]["low.weight"], low)
    with pytest.raises(CheckpointException, match="Missing key"):
        dcp.load({"optimizer.state.turned.exp_avg": torch.zeros(5, 300)}, checkpoint_id=str(path))
    assert (FormatReader(path).tensor("model.turned") == weight.detach().numpy()).all()
    with stagereg.open_checkpoint(path, verify=True) as checkpoint:
        assert torch.equal(checkpoint["model.turned"], weight)
        assert "optimizer" not in checkpoint.entries
        assert checkpoint.manifest.dropped == ["optimizer"]
    assert cli.main(["convert", str(path), str(tmp_path / "out.pt")]) == 0
    converted = torch.load(tmp_path / "out.pt", weights_only=True)
    assert sorted(converted) == ["epoch", "model", "odd", "own.rank0", "scheduler"]
    assert torch.equal(converted["model"]["low.weight"], low)


def two_ranks(rank: int, world_size: int, root: str) -> None:
    state = state_of(1)
    state["own"] = stagereg.per_rank([float(rank)])
    with Checkpointer(root, keep=Keep(newest=9, weights_after=1), save_last=False) as checkpointer:
        for step in (1, 2, 3):
            take_step(state)
            checkpointer.save(step, state)
            checkpointer.wait()


def test_files_of_all_ranks_are_rewritten(tmp_path: Path) -> None:
    run_ranks(two_ranks, args=(str(tmp_path),))
    assert small(tmp_path) == {1: ["optimizer"], 2: ["optimizer"], 3: []}
    files = Manifest.loads((tmp_path / NAME / "manifest.json").read_bytes()).files
    assert {"__0_0.distcp", "__1_0.distcp"} < files.keys()  # each rank has written a shard
    state = state_of(1)
    take_step(state)
    with opened(tmp_path / NAME, verify=True) as checkpoint:
        found = checkpoint.entry("model")
        assert all(torch.equal(found[name], value) for name, value in state["model"].state_dict().items())
        assert [checkpoint.entry("own", rank) for rank in (0, 1)] == [[0.0], [1.0]]


def two_optimizers(rank: int, world_size: int, root: str) -> tuple[str, int | None]:
    """Only rank 1 restores an optimizer."""
    state = state_of(rank)
    chosen = state if rank == 1 else {"model": state["model"]}
    refusing = Checkpointer(root, resume=f"{root}/{NAME}", save_last=False)
    with refusing as checkpointer, pytest.raises(CheckpointError) as refused:
        checkpointer.restore(chosen)
    with Checkpointer(root, save_last=False) as checkpointer:
        return str(refused.value), checkpointer.restore(chosen)


def test_all_ranks_refuse_if_one_rank_restores_the_optimizer(whole: Path) -> None:
    rewrite(whole)
    first, second = run_ranks(two_optimizers, args=(str(whole),))
    assert first == second
    assert "has dropped this optimizer state" in first[0]
    assert first[1] == 2


# -- restoring


def restored(root: Path, state: dict[str, Any], resume: str, **options: Any) -> int | None:
    with Checkpointer(str(root), resume=resume, restore=Restore(**options), save_last=False) as checkpointer:
        return checkpointer.restore(state)


def test_a_restore_into_an_optimizer_says_who_dropped_its_state(whole: Path) -> None:
    rewrite(whole)
    state = state_of(9)
    before = state["model"].turned.detach().clone()
    line = r"step-00000001 has no optimizer: .*weights_after.* has dropped this optimizer state.*allow_missing.* newer"
    with pytest.raises(CheckpointError, match=line):
        restored(whole, state, str(whole / NAME))
    assert torch.equal(state["model"].turned, before)
    renamed = {("adam" if name == "optimizer" else name): value for name, value in state_of(9).items()}
    with pytest.raises(CheckpointError, match="has dropped this optimizer state"):
        restored(whole, renamed, str(whole / NAME), rename={"optimizer": "adam"})


def test_the_weights_are_restored_without_the_optimizer(whole: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(whole / NAME) as checkpoint:
        weight = checkpoint["model.turned"]
    rewrite(whole)
    for chosen, options in ((["model"], {}), ([*state_of()], {"allow_missing": ["optimizer"]})):
        state = {name: value for name, value in state_of(9).items() if name in chosen}
        assert restored(whole, state, str(whole / NAME), **options) == 1
        assert torch.equal(state["model"].turned, weight)
    assert "does not contain optimizer: started from scratch" in caplog.text
    assert state["optimizer"].state == {}


def test_auto_resumes_from_the_newest_whole_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    last = run(tmp_path, 3)
    caplog.clear()
    state = state_of(9)
    assert restored(tmp_path, state, "auto") == 3
    assert_same({**state["model"].state_dict()}, {**last["model"].state_dict()})
    assert "skipped" not in caplog.text


def test_auto_refuses_if_only_weights_are_left(tmp_path: Path) -> None:
    run(tmp_path, 3)
    shutil.rmtree(tmp_path / "step-00000003")
    (tmp_path / "latest").unlink()
    line = r"(?s)none of them is whole:.*optimizer: .*weights_after.* has dropped this.*allow_missing.*resume.*never"
    with pytest.raises(CheckpointError, match=line) as refused:
        restored(tmp_path, state_of(), "auto")
    assert not isinstance(refused.value, CorruptCheckpointError)
    assert restored(tmp_path, {"model": Tied()}, "auto") == 2


# -- at every moment


def moments(root: Path) -> list[str]:
    seen: list[str] = []
    with watching(seen.append):
        rewrite(root)
    return seen


def test_killed_at_any_moment_the_whole_or_the_small_one_is_left(whole: Path, tmp_path: Path) -> None:
    with opened(whole / NAME) as checkpoint:
        before = checkpoint.state()
    shutil.copytree(whole, tmp_path / "dry", symlinks=True)
    seen = moments(tmp_path / "dry")
    assert {"writing", "flushed", "described", "renamed", "hidden"} <= {*seen}
    found = set()
    for nth in range(len(seen)):
        root = tmp_path / str(nth)
        shutil.copytree(whole, root, symlinks=True)
        left = [nth]

        def kill(at: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Killed

        with watching(kill), suppress(Killed):
            rewrite(root)
        complete, damaged = open_store(str(root)).checkpoints()
        assert ([each.manifest.step for each in complete], damaged) == ([2, 1], [])
        with opened(complete[1].path, verify=True) as checkpoint:
            own = {name: value for name, value in before.items() if name not in complete[1].manifest.dropped}
            assert_same(checkpoint.state(), own)
        found.add(tuple(complete[1].manifest.dropped))
        state = run(root, 1, first=3)
        assert small(root) == {1: ["optimizer"], 2: ["optimizer"], 3: []}
        assert restored(root, state, "auto") == 3
    assert found == {(), ("optimizer",)}


def test_a_checkpoint_that_is_being_read_stays_whole_until_then(whole: Path) -> None:
    store = open_store(str(whole))
    with store.readers.read_lease(str(whole / NAME)):
        run(whole, 2, first=3)
        assert small(whole) == {1: [], 2: ["optimizer"], 3: ["optimizer"], 4: []}
    run(whole, 1, first=5)
    assert small(whole)[1] == ["optimizer"]


@pytest.mark.parametrize("point", ["flushed", "renamed", "hidden"])
def test_a_reader_that_comes_meanwhile_keeps_it_whole(whole: Path, point: str) -> None:
    store, held = open_store(str(whole)), []

    def read(at: str) -> None:
        if at == point and not held:
            held.append(store.readers.read_lease(str(whole / NAME)))
            held[0].__enter__()

    with watching(read):
        rewrite(whole)
    assert small(whole) == {1: [], 2: []}
    held[0].__exit__(None, None, None)
    rewrite(whole)
    assert small(whole) == {1: ["optimizer"], 2: []}


# -- what is not rewritten


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "index.json"])
def test_a_corrupt_checkpoint_stays_as_it_is(whole: Path, file: str, caplog: pytest.LogCaptureFixture) -> None:
    """And it does not count as one of the newest."""
    folder = whole / "step-00000002"
    data = bytearray((folder / file).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / file).write_bytes(data)
    before = {each.name: each.read_bytes() for each in folder.iterdir()}
    run(whole, 3, first=3, keep=Keep(newest=3, weights_after=1), resume=str(whole / NAME))
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == before
    [warned] = [each.getMessage() for each in caplog.records if "keeps its optimizer state" in each.getMessage()]
    assert "step-00000002" in warned
    assert " corrupt: " in warned
    found = {each.manifest.step: each.manifest.dropped for each in open_store(str(whole)).checkpoints()[0]}
    assert found == {2: [], 3: ["optimizer"], 4: ["optimizer"], 5: []}


def test_a_failure_is_logged_once_and_no_save_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write(copy: rewriting.WeightsCopy) -> Manifest:
        os.mkdir(copy._written)
        (Path(copy._written) / "part").write_bytes(b"x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(rewriting.WeightsCopy, "write", write)
    run(tmp_path, 4)
    assert small(tmp_path) == {1: [], 2: [], 3: [], 4: []}
    [warned] = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert "step-00000001 keeps its optimizer state, although" in warned
    assert "No space left on device" in warned


def test_a_state_without_an_optimizer_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(str(tmp_path), keep=Keep(newest=9, weights_after=1), save_last=False) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"x": step})
            checkpointer.wait()
    assert small(tmp_path) == {1: [], 2: [], 3: []}
    [warned] = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert "none of its entries is the state of an optimizer" in warned


def test_inexact_checkpoints_do_not_count_as_whole(whole: Path) -> None:
    """Otherwise emergency saves would make the last exact checkpoint useless."""
    run(whole, 1, first=3, weights_after=None)
    path = whole / "step-00000003" / "manifest.json"
    path.write_text(dataclasses.replace(Manifest.loads(path.read_bytes()), lost={"0": ["optimizer"]}).dumps())
    run(whole, 1, first=4, weights_after=2)
    assert small(whole) == {1: ["optimizer"], 2: [], 3: [], 4: []}


def test_checkpoints_of_an_earlier_run_stay_as_they_are(whole: Path) -> None:
    with Checkpointer(str(whole), keep=Keep(newest=9, weights_after=1), save_last=False) as checkpointer:
        checkpointer.save(0, state_of())
    assert small(whole) == {0: [], 1: [], 2: []}


def test_an_error_ends_the_run_without_waiting_for_a_copy(tmp_path: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def hold(copy: rewriting.WeightsCopy) -> Manifest:
        os.mkdir(copy._written)
        reached.set()
        while not copy._is_stopped():
            assert not go_on.wait(0.01)
        raise rewriting.StoppedError

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rewriting.WeightsCopy, "write", hold)
        with pytest.raises(ZeroDivisionError):
            stopped(tmp_path, reached)
    assert small(tmp_path) == {1: [], 2: []}


def stopped(root: Path, reached: threading.Event) -> None:
    with Checkpointer(str(root), keep=Keep(newest=9, weights_after=1), save_last=False) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of())
            checkpointer.wait()
        assert reached.wait(60)
        raise ZeroDivisionError


def test_a_copy_stops_between_two_reads(whole: Path) -> None:
    store = open_store(str(whole))
    copy = rewriting.WeightsCopy(store, store.checkpoints()[0][1], str(whole / ".step-00000001.ab.tmp"), lambda: True)
    with pytest.raises(rewriting.StoppedError):
        copy.write()


def test_a_program_that_only_reads_changes_nothing(whole: Path) -> None:
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    with Checkpointer(str(whole), keep=Keep(weights_after=1), save_last=False) as checkpointer:
        checkpointer.restore({"model": Tied()})
    assert small(whole) == {1: [], 2: []}
    assert before.items() <= {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}.items()


# -- what is refused


def refused(tmp_path: Path, **options: Any) -> Iterator[str]:
    with pytest.raises(ConfigError) as error:
        Checkpointer(**{"dir": str(tmp_path / "run"), "keep": Keep(weights_after=1), **options})
    yield str(error.value)


def test_what_cannot_be_rewritten_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [line] = refused(tmp_path, storage="safetensors")
    assert "weights_after=1) does not support" in line
    assert "safetensors" in line
    assert "dcp" in line
    if has("buckets"):
        [line] = refused(tmp_path, dir="memory://weights/run")
        assert "needs a checkpoint directory in a file system, not memory://weights/run" in line
    if has("tiers"):
        [line] = refused(tmp_path, dir=None, tier=stagereg.build("tier", "disk", dir=str(tmp_path / "tier")))
        assert "not a tier alone" in line
    monkeypatch.setattr(weights_after, "has", lambda name: name != "interop")
    [line] = refused(tmp_path)
    assert "needs stagereg/extensions/interop" in line
    with pytest.raises(ConfigError, match=r"weights_after.* must be a whole number of at least 1"):
        Keep(weights_after=0)
    assert steps(tmp_path / "run") == []


@pytest.mark.skipif(not has("callbacks"), reason="needs the extension callbacks")
def test_copies_stay_whole(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="copy_to does not support"):
        stagereg.build("on_commit", "copy_to", dir=str(tmp_path / "copies"), keep=Keep(weights_after=1))
    copies = stagereg.build("on_commit", "copy_to", dir=str(tmp_path / "copies"), keep=9)
    run(tmp_path / "run", 3, on_commit=copies)
    shutil.rmtree(tmp_path / "copies" / "step-00000003")  # so that older ones are compared as well
    run(tmp_path / "run", 1, first=4, on_commit=copies)
    assert small(tmp_path / "run") == {1: ["optimizer"], 2: ["optimizer"], 3: ["optimizer"], 4: []}
    assert small(tmp_path / "copies")[1] == small(tmp_path / "copies")[2] == []
