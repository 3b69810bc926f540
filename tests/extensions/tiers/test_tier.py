"""The options of a tier say what is of no use, and what a candidate of tier or store comes before which other."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import stagereg
from stagereg import Checkpointer
from stagereg.checkpoint.extension import Candidate
from stagereg.checkpoint.format.damage import VerificationResult
from stagereg.checkpoint.format.manifest import FileDigest, Manifest
from stagereg.errors import CheckpointError, ConfigError
from stagereg.extensions.tiers.inventory import Lineage, ReportedPart, TierStep
from stagereg.extensions.tiers.near import LocalTier
from stagereg.extensions.tiers.part import SaveId
from stagereg.extensions.tiers.source import with_steps_of_tier
from stagereg.extensions.tiers.tier import Tier


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dir": ""}, "dir.* must be a folder"),
        ({"dir": "s3://bucket/x"}, "dir.* must be a folder"),
        ({"every": 0}, "every.* must be a whole number of at least 1, not 0"),
        ({"every": "atuo"}, "Did you mean 'auto'"),
        ({"copies": -1}, "copies.* must be a whole number of at least 0"),
        ({"keep": 0}, "keep.* must be a whole number of at least 1"),
    ],
)
def test_values_of_no_use_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        stagereg.build("tier", "disk", **{"dir": "/local/t", **options})


def test_memory_wants_a_folder_in_memory(tmp_path: Path) -> None:
    if os.statvfs(tmp_path).f_fsid == os.statvfs("/dev/shm").f_fsid:
        pytest.skip("the folder of tests is in memory")
    with pytest.raises(ConfigError, match=r"not in memory\. Use tier=.*disk"):
        stagereg.build("tier", "memory", dir=str(tmp_path)).prepare()


def test_without_directory_and_tier_nothing_is_kept_and_that_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r'^Checkpointer\(dir=\.\.\.\) .*: tier=stagereg\.build\("tier", "disk", dir="PATH"\)'
    ):
        Checkpointer(None)


def candidates(lineage: Lineage, store: dict[int, int], tier: list[tuple[int, int]]) -> list[str]:
    """Names of what is tried: of ``store`` steps by serial, of ``tier`` branches and steps; each the newest first."""
    listed = [
        Candidate(VerificationResult(f"store {step}", Manifest(step, 1, serial, {}, "dcp")), "store")
        for serial, step in store.items()
    ]
    steps = {}
    for branch, step in tier:
        save = SaveId("0" * 8, branch, step, step, "1" * 8, 1)
        part = ReportedPart(save, 0, 0, (("__0_0.distcp", FileDigest(1, 0)),))
        steps[f"tier {step}"] = TierStep(save, ((part, ("a",)),))
    return [each.path for each in with_steps_of_tier(listed, steps, lineage.branch_of)]


def test_steps_of_tier_and_store_are_tried_by_branch_then_step_and_the_tier_before_equals() -> None:
    first = Lineage("0" * 8).branched(-1)
    assert candidates(first, {2: 8, 1: 4}, [(1, 10), (1, 8), (1, 6)]) == [
        *("tier 10", "tier 8", "store 8", "tier 6", "store 4")
    ]
    back = first.branched(4, stored=2)
    assert candidates(back, {3: 6, 2: 8, 1: 4}, [(2, 5), (1, 4)]) == [
        "store 6",
        "tier 5",
        "store 8",
        "tier 4",
        "store 4",
    ]
    assert candidates(first, {}, [(1, 2)]) == ["tier 2"]
    assert candidates(first, {1: 3}, []) == ["store 3"]


def tier_in(folder: Path, **options: Any) -> Tier:
    tier: Tier = stagereg.build("tier", "disk", dir=str(folder / "near"), copies=0, **{"every": 1, **options})
    return tier


def crash(folder: Path, more: int = 0) -> tuple[int | None, str]:
    """Restore, take steps, and end without an end in good order; what was restored, and from where."""
    state = {"x": 0}
    with contextlib.closing(Checkpointer(str(folder / "store"), every=100, tier=tier_in(folder))) as checkpointer:
        step = checkpointer.restore(state)
        found = str(checkpointer.restored)
        for each in range((step or 0) + 1, (step or 0) + 1 + more):
            state["x"] = each
            checkpointer.maybe_save(each, state)
        checkpointer.wait()
        assert state["x"] == (step or 0) + more
        checkpointer._quarantine.crashed = True
    return step, found


def test_a_step_that_no_machine_has_whole_any_more_is_skipped_with_what_reading_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert crash(tmp_path, more=2)[0] is None
    newest = max((tmp_path / "near").rglob("*.distcp"), key=lambda each: each.stat().st_mtime_ns)
    newest.write_bytes(bytes(byte ^ 1 for byte in newest.read_bytes()))
    assert crash(tmp_path)[0] == 1
    assert "is corrupt and was skipped:\n  rank 0: no valid copy of block 0" in caplog.text


def test_a_step_of_the_tier_that_runs_crash_after_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert crash(tmp_path, 3)[0] is None
    restored = [crash(tmp_path) for _ in range(6)]
    assert [step for step, _ in restored] == [3, 3, 3, 2, 2, 2]
    assert all(str(tmp_path / "near") in path for _, path in restored)
    with pytest.raises(CheckpointError, match="none of them is valid"):
        crash(tmp_path)


def test_a_step_of_the_tier_may_be_named_by_its_path_until_it_is_gone(tmp_path: Path) -> None:
    crash(tmp_path, 3)
    _, path = crash(tmp_path)
    for named, why in ((path, ""), (f"{path}0", "no longer complete on the machines")):
        with Checkpointer(str(tmp_path / "store"), resume=named, tier=tier_in(tmp_path)) as checkpointer:
            state = {"x": 0}
            if why:
                with pytest.raises(CheckpointError, match=why):
                    checkpointer.restore(state)
            else:
                assert (checkpointer.restore(state), state["x"]) == (3, 3)
                checkpointer._saver.stored = 3


def test_a_save_that_is_called_for_at_a_step_of_the_tier_goes_to_the_store_too(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path / "store"), every=100, tier=tier_in(tmp_path)) as checkpointer:
        assert checkpointer.should_save(1)
        assert not checkpointer.goes_everywhere(1)
        checkpointer.save(1, {"x": 1})
        assert (checkpointer.goes_everywhere(1), checkpointer.saved) == (True, None)
        checkpointer.save(1, {"x": 1})  # as at the end of an epoch
        checkpointer.wait()
        assert checkpointer.saved == 1
        assert str(checkpointer.latest).endswith("step-00000001")


def test_a_save_that_cannot_begin_leaves_the_step_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = LocalTier.begin_save

    def begin_save(self: LocalTier, step: int) -> SaveId | None:
        if step == 2:
            raise CheckpointError("rank 1 ended")
        return begin(self, step)

    monkeypatch.setattr(LocalTier, "begin_save", begin_save)
    state = {"value": torch.tensor([1.0])}
    tier = tier_in(tmp_path)

    def run() -> None:
        with Checkpointer(None, tier=tier) as checkpointer:
            assert checkpointer.restore(state) is None
            for step in (1, 2):
                checkpointer.maybe_save(step, state)
                checkpointer.wait()

    with pytest.raises(CheckpointError, match="rank 1 ended"):
        run()
    state["value"].zero_()
    with Checkpointer(None, tier=tier) as checkpointer:
        assert checkpointer.restore(state) == 1
    assert state["value"].item() == 1.0
