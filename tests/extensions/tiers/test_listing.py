"""``stagereg ls`` and ``stagereg verify`` of a tier: what this machine has of each step, and where else it is."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import pytest

from stagereg.checkpoint.storage.aligned import BLOCK_BYTES
from stagereg.checkpoint.store.lock import StoreLock
from stagereg.extensions.tiers.folder import NOTE, MachineFolder, notes_of_part
from stagereg.extensions.tiers.inventory import Lineage
from stagereg.extensions.tiers.part import Part, PartFile, SaveId

from ...commands.checkpoint_directories import flip, instead, save
from ...commands.conftest import Command, command

__all__ = ["command"]  # a fixture
RUN, OTHER = "0123456789abcdef", "fedcba9876543210"


def write_step(
    tier: Path,
    step: int,
    copied: Mapping[int, Collection[str]],
    received: Collection[int] = (),
    serial: int = 0,
    branch: int = 1,
    run: str = RUN,
    nbytes: int = 1000,
) -> Path:
    """Write the parts of a step of four ranks: own ones, with the machines that have copies, and those received."""
    folder = MachineFolder(str(tier), run, durable=True)
    os.makedirs(folder.path, exist_ok=True)
    of = SaveId(run, branch, serial or step // 10, step, f"{step:012x}", 4)
    for rank in (*copied, *received):
        data = bytes([rank + 1]) * nbytes
        os.makedirs(folder.directory(of), exist_ok=True)
        Path(folder.directory(of), f"__{rank}_0.distcp").write_bytes(data)
        part = Part(of, rank, {f"__{rank}_0.distcp": PartFile.of_bytes(data)})
        folder.complete(part, received=rank in received)
        if copied.get(rank):
            folder.note_copied(part, [*copied[rank]])
    return Path(folder.directory(of))


def rows(out: str) -> dict[str, str]:
    """The lines of a table by their first word."""
    return {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line.strip()}


def test_each_step_is_shown_with_the_machines_that_have_it(tmp_path: Path, command: Command) -> None:
    write_step(tmp_path, 10, {0: ["node2"], 1: ["node2"]}, received=[2, 3])
    write_step(tmp_path, 20, {0: ["node2", "node3"], 1: []}, received=[3])
    seen = command("ls", tmp_path).out
    assert seen.splitlines()[0] == f"{tmp_path}/{RUN}: on this machine"
    found = rows(seen)
    assert re.sub(r"\d+ s ", "", found["10"]) == (
        "1 3.91 KiB 0-3 of 4 copied 0-1: copied to node2; 2-3: from another machine"
    )
    assert found["20"].endswith("0-1, 3 of 4 written 0: copied to node2, node3; 1: only here; 3: from another machine")
    assert "The newest step is 20. Step 10 is the newest that survives if this machine fails." in seen
    assert command("ls", tmp_path / RUN).out == seen


def test_a_program_gets_all_of_it(tmp_path: Path, command: Command) -> None:
    old = write_step(tmp_path, 10, {0: ["node2"]})
    new = write_step(tmp_path, 20, {0: []}, received=[1])
    seen = command("ls", tmp_path, "--json").json
    assert seen["tier"] == str(tmp_path)
    [run] = seen["runs"]
    newest, oldest = run.pop("steps")
    assert run == {
        "run": RUN,
        "path": f"{tmp_path}/{RUN}",
        "held_by": None,
        "newest": str(new),
        "newest_copied": str(old),
    }
    assert newest.pop("time") > oldest["time"] - 1
    assert newest == {
        "path": str(new),
        "step": 20,
        "branch": 1,
        "serial": 2,
        "files": 2,
        "bytes": 2000,
        "ranks": 4,
        "state": "written",
        "void": "",
        "parts": [
            {"rank": 0, "copied": [], "received": False},
            {"rank": 1, "copied": [], "received": True},
        ],
        "damages": [],
    }
    assert (oldest["state"], oldest["parts"]) == ("copied", [{"rank": 0, "copied": ["node2"], "received": False}])


@pytest.mark.parametrize(
    ("copied", "expected"),
    [
        ({10: True, 20: False}, "newest step is 20. Step 10 is the newest that survives if this machine fails."),
        ({10: False, 20: False}, "No step has peer copies: step 20 does not survive a failure of this machine."),
        ({10: False, 20: True}, "newest step is 20. Step 20 is the newest that survives if this machine fails."),
    ],
)
def test_the_newest_copied_step_is_named(
    tmp_path: Path, command: Command, copied: dict[int, bool], expected: str
) -> None:
    for step, there in copied.items():
        write_step(tmp_path, step, {0: ["node2"] if there else []})
    assert expected in command("ls", tmp_path).out


def test_what_the_run_gave_up_is_void(tmp_path: Path, command: Command) -> None:
    write_step(tmp_path, 20, {0: ["node2"]}, branch=1)
    write_step(tmp_path, 10, {0: ["node2"]}, branch=1)
    lineage = Lineage(RUN).branched(-1).branched(10)
    (tmp_path / RUN / NOTE).write_bytes(lineage.dumps())
    found = rows(command("ls", tmp_path).out)
    assert "void the run returned to an earlier step; copied to node2" in found["20"]
    assert " copied copied to node2" in found["10"]
    assert command("ls", tmp_path, "--json").json["runs"][0]["newest"].endswith("step-00000010.00000000000a")


def test_what_a_reboot_ended_is_void(tmp_path: Path, command: Command) -> None:
    write_step(tmp_path, 20, {0: ["node2"]})
    (tmp_path / RUN / ".boot").write_text("another")
    assert "void saved before a reboot" in rows(command("ls", tmp_path).out)["20"]


def test_several_runs_and_their_holders_are_told_apart(tmp_path: Path, command: Command) -> None:
    write_step(tmp_path, 10, {0: []})
    write_step(tmp_path, 20, {0: []}, run=OTHER)
    os.makedirs(tmp_path / RUN / "step-00000030.0123456789ab")
    with StoreLock(tmp_path / RUN):
        seen = command("ls", tmp_path).out
        first, second = command("ls", tmp_path, "--json").json["runs"]
    assert (first["run"], first["held_by"]["pid"], second["held_by"]) == (RUN, os.getpid(), None)
    assert rows(seen)["30"].endswith("being written")
    assert "Locked by process" in seen.partition(OTHER)[0]
    assert rows(command("ls", tmp_path).out)["30"].endswith("leftover of a killed run")


def test_a_store_and_other_folders_are_no_tier(tmp_path: Path, command: Command) -> None:
    save(tmp_path / "store", 100)
    (tmp_path / "store" / NOTE).write_bytes(Lineage(RUN).dumps())
    assert command("ls", tmp_path / "store", "--json").json["checkpoints"][0]["step"] == 100
    (tmp_path / "empty" / RUN).mkdir(parents=True)
    assert "There is no checkpoint in" in command("ls", tmp_path / "empty", code=2).err
    (tmp_path / "empty" / RUN / NOTE).write_bytes(Lineage(RUN).dumps())
    assert "no complete step that the run can resume from" in command("ls", tmp_path / "empty").out
    assert "has no complete data of any step" in command("verify", tmp_path / "empty", code=2).err


def change(manifest: Path) -> None:
    manifest.write_text(manifest.read_text().replace(" 20,", " 21,", 1))


@pytest.mark.parametrize(
    ("damage", "expected", "fast"),
    [
        (lambda at: flip(at / "__1_0.distcp"), "__1_0.distcp: CRC-32 mismatch in block 1: expected ", False),
        (
            lambda at: os.truncate(at / "__1_0.distcp", 9),
            f"__1_0.distcp: truncated: 9 of {BLOCK_BYTES + 5} bytes",
            True,
        ),
        (lambda at: (at / "__1_0.distcp").unlink(), "__1_0.distcp: missing", True),
        (lambda at: instead(at / "__1_0.distcp", os.mkfifo), "__1_0.distcp: not a regular file", True),
        (lambda at: change(at / "part-1.json"), "part-1.json: corrupt: invalid manifest: its text and", True),
        (lambda at: (at / "part-1.json").write_text("[" * 10000), "part-1.json: corrupt: ", True),
        (
            lambda at: (at / "part-0.json").replace(at / "part-1.json"),
            "part-1.json: corrupt: the manifest belongs to another",
            True,
        ),
    ],
)
def test_any_damage_is_found_and_named(
    tmp_path: Path, command: Command, damage: Callable[[Path], object], expected: str, fast: bool
) -> None:
    write_step(tmp_path, 10, {0: [], 1: []}, nbytes=BLOCK_BYTES + 5)
    step = write_step(tmp_path, 20, {0: [], 1: []}, nbytes=BLOCK_BYTES + 5)
    for target in (tmp_path, tmp_path / RUN, step):
        assert " valid." in command("verify", target).out
    damage(step)
    seen = command("verify", tmp_path, code=1).out
    assert expected in seen
    assert "2 steps, 1 not valid." in seen
    assert rows(seen)["10"].endswith(" valid")
    assert expected in command("verify", step, code=1).out
    [run] = command("verify", tmp_path, "--json", code=1).json["runs"]
    assert [(each["step"], each["state"]) for each in run["steps"]] == [(20, "corrupt"), (10, "written")]
    command("verify", tmp_path, "--fast", code=int(fast))
    assert ("corrupt" in command("ls", tmp_path).out) == fast
    assert expected in command("ls", tmp_path, "--verify").out


def test_a_step_deleted_meanwhile_is_skipped(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = write_step(tmp_path, 10, {0: []})
    write_step(tmp_path, 20, {0: []})
    folder = MachineFolder(str(tmp_path), RUN, durable=True)
    loads = Part.loads

    def delete(text: str | bytes) -> Part:
        folder.delete([gone.name])
        return loads(text)

    monkeypatch.setattr(Part, "loads", delete)
    [run] = command("verify", tmp_path, "--json").json["runs"]
    assert [each["step"] for each in run["steps"]] == [20]


def test_looking_changes_nothing(tmp_path: Path, command: Command) -> None:
    step = write_step(tmp_path, 10, {0: ["node2"]}, received=[1])
    (step / "__7_0.distcp").write_bytes(b"half")

    def there() -> dict[str, int]:
        return {str(each): each.stat().st_mtime_ns for each in tmp_path.rglob("*")}

    before = there()
    command("ls", tmp_path)
    command("verify", tmp_path)
    assert there() == before


def test_a_part_that_came_is_known_as_a_copy_to_the_run_too(tmp_path: Path) -> None:
    step = write_step(tmp_path, 10, {0: ["node2"]}, received=[1])
    MachineFolder(str(tmp_path), RUN, durable=True).sweep()
    assert [notes_of_part(str(step), f"part-{rank}.json") for rank in (0, 1)] == [(("node2",), False), ((), True)]
    assert json.loads((step / "part-1.json").read_text())["rank"] == 1
