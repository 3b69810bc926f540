"""Blocks come checked, from the nearest machine that has them whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import stagereg.extensions.tiers.inventory as inventory
from stagereg.checkpoint.storage.aligned import BLOCK_BYTES
from stagereg.errors import CheckpointError, CorruptCheckpointError
from stagereg.extensions.tiers.folder import MachineFolder
from stagereg.extensions.tiers.inventory import Lineage, TierStep
from stagereg.extensions.tiers.part import Part, PartFile, SaveId, manifest_name
from stagereg.extensions.tiers.step_reader import BlockFile, StepReader

SAVE = SaveId("0123abcd", 1, 1, 5, "5" * 8, 1)
NAME = "__0_0.distcp"
DATA = b"".join(bytes([number + 1]) * BLOCK_BYTES for number in range(2)) + b"the end"


class Machine:
    """One that has the part, in a folder; and what a connection to it answers."""

    def __init__(self, root: Path) -> None:
        self.folder = MachineFolder(str(root), SAVE.run, True)
        self.folder.prepare()
        self.file, self.asked = Path(self.folder.directory(SAVE), NAME), 0
        self.file.parent.mkdir()
        self.file.write_bytes(DATA)
        self.part_ = Part(SAVE, 0, {NAME: PartFile.of_bytes(DATA)})
        self.folder.complete(self.part_)

    def part(self, save: SaveId, rank: int) -> Part:
        return self.part_

    def get(self, save: SaveId, rank: int, name: str, numbers: Any, known: PartFile, take: Any) -> None:
        self.asked += len(numbers)
        data = self.file.read_bytes()
        found = [bytearray(data[known.block(n).start : known.block(n).stop]) for n in numbers]
        for number, each in zip(numbers, found, strict=True):
            if PartFile.of_bytes(bytes(each)).blocks != (known.blocks[number],):
                raise CorruptCheckpointError(f"block {number} is not what was staged")
            take(number, each)

    def flip(self, at: int) -> None:
        data = bytearray(self.file.read_bytes())
        data[at] ^= 1
        self.file.write_bytes(data)


@pytest.fixture
def machines(tmp_path: Path) -> dict[str, Machine]:
    return {name: Machine(tmp_path / name) for name in "abc"}


def step_of(machines: dict[str, Machine]) -> TierStep:
    reports = {name: inventory.report(each.folder.parts()) for name, each in machines.items()}
    [step], _ = inventory.steps(reports, Lineage(SAVE.run).branched(-1))
    return step


def reader(machines: dict[str, Machine], step: TierStep | None = None) -> StepReader:
    return StepReader(step or step_of(machines), machines["a"].folder, "a", machines.__getitem__)  # type: ignore[arg-type]


def test_the_own_copy_is_read_and_no_other_machine_asked(machines: dict[str, Machine]) -> None:
    with reader(machines) as opened:
        assert opened.content(NAME) == DATA
        assert dict(opened.found.sources) == {"a": len(DATA)}
    assert [each.asked for each in machines.values()] == [0, 0, 0]


def test_only_the_blocks_that_are_wanted_are_read(machines: dict[str, Machine]) -> None:
    with reader(machines) as opened:
        opened.fetch(NAME, [range(BLOCK_BYTES - 1, BLOCK_BYTES + 1), range(0)])
        assert opened.found.sources.total() == 2 * BLOCK_BYTES
        assert BlockFile(opened, NAME).read(BLOCK_BYTES - 1, 2) == b"\1\2"


@pytest.mark.parametrize("how", ["flipped", "cut", "missing"])
def test_the_next_machine_is_asked_for_what_the_own_copy_lacks(machines: dict[str, Machine], how: str) -> None:
    step = step_of(machines)
    if how == "flipped":
        machines["a"].flip(BLOCK_BYTES + 5)
    elif how == "cut":
        machines["a"].file.write_bytes(DATA[:-1])
    else:
        machines["a"].file.unlink()
    with reader(machines, step) as opened:
        assert opened.content(NAME) == DATA
        assert opened.found.bad == ({("a", 0)} if how != "missing" else set())
        assert opened.found.sources["b"] == (BLOCK_BYTES if how == "flipped" else len(DATA))


def test_a_copy_that_is_bad_on_the_way_too_is_replaced_by_the_third(machines: dict[str, Machine]) -> None:
    step = step_of(machines)
    machines["a"].flip(0)
    machines["b"].flip(0)
    with reader(machines, step) as opened:
        assert opened.content(NAME) == DATA
        assert opened.found.sources["c"] == BLOCK_BYTES
        assert opened.found.bad == {("a", 0), ("b", 0)}
    assert step.without(opened.found.bad).parts[0][1] == ("c",)
    assert step.without({("a", 0), ("b", 0), ("c", 0)}) == step  # each may have what another one has not


def test_what_no_machine_has_whole_is_damage_with_each_reason(machines: dict[str, Machine]) -> None:
    step = step_of(machines)
    for each in machines.values():
        each.flip(3)
    with (
        reader(machines, step) as opened,
        pytest.raises(CorruptCheckpointError, match=r"block 0 of .*: a: CRC-32 mismatch.*b: .*c: "),
    ):
        opened.content(NAME)


def test_a_file_that_the_step_does_not_have_is_an_error(machines: dict[str, Machine]) -> None:
    with reader(machines) as opened, pytest.raises(CheckpointError, match="has no file 'other'"):
        opened.content("other")


def test_a_manifest_that_is_another_one_than_was_reported_is_not_believed(machines: dict[str, Machine]) -> None:
    step = step_of(machines)
    for each in machines.values():
        each.part_ = Part(SAVE, 0, {NAME: PartFile.of_bytes(b"other")})
    Path(machines["a"].folder.directory(SAVE), manifest_name(0)).unlink()
    with (
        reader(machines, step) as opened,
        pytest.raises(CorruptCheckpointError, match="no machine has the part of rank 0"),
    ):
        opened.content(NAME)
