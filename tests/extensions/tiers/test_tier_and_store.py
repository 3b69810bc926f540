"""A tier and a store beside it: one copy serves both, and what is wrong with one of them does not concern the other."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import stagereg
import stagereg.checkpoint.save.committing as committing
from stagereg.checkpoint.format.wrappers import same_bits
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.errors import CheckpointError
from stagereg.stagers.pinned_cached import PinnedCachedStager
from stagereg.testing import run_ranks
from tests.support.subclasses import Nested, nested

from ...support.programs import comes_true

BOUND_S = 30.0


def tier(folder: Path, **options: Any) -> Any:
    return stagereg.build("tier", "disk", dir=str(folder), **{"every": 1, "copies": 0, **options})


class SlowStorage(DcpStorage):
    """Writes when it is let go on."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()
        self.wraps = stagereg.build("storage", "dcp")

    def write_files(self, *args: Any) -> Any:
        self.begun.set()
        assert self.go.wait(BOUND_S)
        return super().write_files(*args)


class CountingStager(PinnedCachedStager):
    """Counts the copies that it makes, and those that it is given back."""

    made = given_back = 0

    def stage(self, state_dict: Any) -> Any:
        self.made += 1
        return super().stage(state_dict)

    def release(self, copy: Any) -> None:
        self.given_back += 1
        super().release(copy)


def test_a_store_that_is_slow_holds_up_no_save_of_the_tier(tmp_path: Path) -> None:
    storage, state = SlowStorage(), {"value": torch.zeros(1000)}
    with stagereg.Checkpointer(
        str(tmp_path / "store"), every=100, storage=storage, tier=tier(tmp_path / "tier")
    ) as checkpointer:
        checkpointer.save(1, state)
        try:
            for step in range(2, 7):
                checkpointer.maybe_save(step, state)
                assert comes_true(lambda step=step: checkpointer.stats.tier_saves == step, BOUND_S)
            assert storage.begun.is_set()
            assert checkpointer.stats.saves == 0
        finally:
            storage.go.set()
        checkpointer.wait()
        assert checkpointer.stats.saves == 1


def test_one_copy_serves_tier_and_store_and_is_given_back_once(tmp_path: Path) -> None:
    storage, stager, state = SlowStorage(), CountingStager(pin=False), {"value": torch.arange(1000.0)}
    checkpointer = stagereg.Checkpointer(
        str(tmp_path / "store"), every=1, stager=stager, storage=storage, tier=tier(tmp_path / "tier")
    )
    checkpointer.maybe_save(1, state)
    state["value"].zero_()
    assert comes_true(lambda: checkpointer.stats.tier_saves == 1 and storage.begun.is_set(), BOUND_S)
    assert (stager.made, stager.given_back) == (1, 0)  # the store still reads it
    storage.go.set()
    checkpointer.wait()
    assert (stager.made, stager.given_back) == (1, 1)
    checkpointer.close()
    for folder in (tmp_path / "store", tmp_path / "tier"):
        resumed = stagereg.Checkpointer(
            str(tmp_path / "store"),
            tier=tier(tmp_path / ("other" if folder.name == "store" else "tier")),
            save_last=False,
        )
        got = {"value": torch.zeros(1000)}
        assert resumed.restore(got) == 1
        assert folder in Path(str(resumed.restored)).parents
        assert torch.equal(got["value"], torch.arange(1000.0))
        resumed.close()


def test_a_tier_without_room_leaves_the_store_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"value": torch.ones(1000)}
    with stagereg.Checkpointer(
        str(tmp_path / "store"), every=2, tier=tier(tmp_path / "tier", host_memory=10)
    ) as checkpointer:
        for step in (1, 2):
            checkpointer.maybe_save(step, state)
            checkpointer.wait()
        assert (checkpointer.stats.saves, checkpointer.stats.tier_saves) == (1, 0)
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert sum('of Tier(host_memory="10B") are used' in each for each in warnings) == 2


def lose_folder(rank: int, world_size: int, root: str) -> tuple[int, int]:
    """Lose the folder of the tier between two saves, as where a login ends and its memory is cleared."""
    folder, state = Path(root, "tier"), {"value": torch.ones(10) * rank}
    with stagereg.Checkpointer(None, tier=tier(folder), save_last=False) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.maybe_save(step, {"value": stagereg.per_rank(state["value"])})
            checkpointer.wait()
            dist.barrier()
            if step == 1 and rank == 0:
                shutil.rmtree(folder)
            dist.barrier()
        return checkpointer.stats.tier_saves, len([*folder.glob("*/step-*/part-*.json")])


def test_ranks_go_on_where_the_folder_of_their_tier_vanishes(tmp_path: Path) -> None:
    for saves, parts in run_ranks(lose_folder, 2, args=(str(tmp_path),), timeout_s=60):
        assert saves == 3
        assert parts == 4


def test_a_tier_gets_no_such_index_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tables = committing.tables

    def shifted(*args: Any) -> dict[str, Any]:
        found = tables(*args)
        found["tensors"]["x"][2][0][1] += 1 << 30
        return found

    monkeypatch.setattr(committing, "tables", shifted)

    def run() -> None:
        tier = stagereg.build("tier", "disk", dir=str(tmp_path / "tier"), every=1)
        with stagereg.Checkpointer(
            str(tmp_path / "store"), every=10, tier=tier, stager=stagereg.build("stager", "blocking")
        ) as each:
            each.maybe_save(1, {"x": torch.ones(3)})

    with pytest.raises(CheckpointError, match="are outside of their file"):  # the last step, which goes to the store
        run()
    assert "are outside of their file" in caplog.text
    assert not [*(tmp_path / "tier").rglob("index.json")]


def test_a_step_in_a_tier_has_what_subclasses_wrap(tmp_path: Path) -> None:
    tier = stagereg.build("tier", "disk", dir=str(tmp_path / "tier"), every=1)
    with stagereg.Checkpointer(
        str(tmp_path / "store"), every=10, tier=tier, stager=stagereg.build("stager", "blocking")
    ) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.maybe_save(step, {"x": {"w": nested(4), "n": step}})
        checkpointer.wait()
    assert isinstance(nested(1), Nested)
    tier = stagereg.build("tier", "disk", dir=str(tmp_path / "tier"), every=1)
    state: dict[str, Any] = {"x": {"w": None, "n": 0}}
    with stagereg.Checkpointer(str(tmp_path / "store"), every=10, tier=tier) as checkpointer:
        assert checkpointer.restore(state) == 3
    assert same_bits(state["x"]["w"], nested(4))


def test_a_tier_whose_disk_fails_costs_the_checkpoint_directory_no_save(tmp_path: Path, caplog: Any) -> None:
    kept = tmp_path / "kept"
    with stagereg.Checkpointer(str(kept), every=2, keep=9, tier=tier(tmp_path / "tier")) as checkpointer:
        for step in range(1, 7):
            if step == 3:
                checkpointer.wait()
                (tmp_path / "tier").rename(tmp_path / "away")
                (tmp_path / "tier").touch()  # no folder can be made there
            checkpointer.maybe_save(step, {"x": torch.full((4,), float(step)), "step": step})
    assert sorted(path.name for path in kept.glob("step-*")) == [f"step-{step:08}" for step in (2, 4, 6)]
    assert "in the tier" in caplog.text
