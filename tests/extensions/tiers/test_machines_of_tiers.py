"""Machines are lost, replaced, cut off and filled up under a run with a tier: what it goes on from, bit for bit.

The program (:mod:`.train`) notes a checksum of its state at each step, and compares what it restores with that; what
lies on machines is read from their files (:mod:`tests.support.tier_runs`). The first tests start jobs as users do, with
torchrun; the others fork the ranks, since they start many.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.crash_points import TIER_POINTS
from tests.support.lab import CHECKOUT, LOCAL, Lab
from tests.support.programs import comes_true
from tests.support.tier_runs import START_S, Runs, now

PROGRAM = str(CHECKOUT / "tests/extensions/tiers/train.py")


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(machines=3) as machines:
        yield machines


@pytest.fixture
def make_runs(lab: Lab, tmp_path: Path) -> Callable[..., Runs]:
    return lambda **options: Runs(lab, tmp_path, **options)


# -- machines come and go


@pytest.mark.slow
def test_a_job_of_torchrun_goes_on_without_a_lost_machine(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "truth").mkdir()
    options = {"truth": tmp_path / "truth", "tier": "disk", "dir": f"{LOCAL}/t", "width": 300}
    program = [PROGRAM, *(f"{name}={value}" for name, value in options.items())]
    job = lab.torchrun([*program, "hold=7"], machines=[0, 1])
    for process in job.processes.values():
        process.await_output("HOLDS at 7", 3 * START_S)
    lab.machines[1].kill()
    for machine in lab.machines:
        machine.end_processes()
    job = lab.torchrun([*program, "steps=9"], machines=[2, 0])
    first, _ = job.wait(3 * START_S)
    assert job.returncodes == [0, 0], first
    assert "RESTORED 6 from" in first
    assert "from the local tier" in first


def test_copies_that_a_loss_has_cost_are_made_again_at_once(make_runs: Callable[..., Runs], lab: Lab) -> None:
    runs = make_runs()
    runs.hold(at=2)
    lab.machines[1].kill()
    runs.end()
    assert runs.hold(at=3, machines=[0, 2], every=1000).step == 2
    [left] = runs.left()
    assert {rank: sorted(machines) for rank, machines in left.on.items()} == {0: [0, 2], 1: [0, 2], 2: [0, 2]}
    lab.machines[0].kill()
    runs.end()
    lab.machines[1].reboot()
    assert runs.finish(machines=[1, 2], more=1).step == 2


# -- kills at each moment of a copy


@pytest.mark.slow
@pytest.mark.parametrize("loses", ["a process", "a machine"])
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_nothing_copied_is_lost_by_a_kill_at_any_moment(
    make_runs: Callable[..., Runs], lab: Lab, tier: str, loses: str
) -> None:
    runs, newest = make_runs(tier=tier, width=700, every=1, max_crashes=0), None
    for point, count in [(each, count) for each in TIER_POINTS for count in (1, 3, 4)]:
        began = now()
        job = runs.start(failpoint=f"{point}:1:{count}")
        first, second, _ = job.processes.values()
        second.await_output("ENDS at", START_S)
        if "RESTORED" in first.output:  # else it was a copy that is made again, right after restoring
            assert runs.restored(job).step == newest, point
        copied = runs.copied(copies=1, since=began) or 0
        if loses == "a machine":
            lab.machines[1].kill()
        runs.end()
        newest = runs.newest()
        assert (newest or 0) >= copied, point
        if loses == "a machine":
            lab.machines[1].replace()
    assert newest is not None
    assert runs.finish(more=1).step == newest


# -- damaged copies


def flip(part: Path) -> None:
    """Flip a bit of what a rank wrote."""
    file = part.with_name(f"__{part.stem.removeprefix('part-')}_0.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(part: Path) -> None:
    """Take the last byte of what a rank wrote."""
    file = part.with_name(f"__{part.stem.removeprefix('part-')}_0.distcp")
    file.write_bytes(file.read_bytes()[:-1])


class Damaged:
    """Two machines that have steps 4 and 6 each, and a store with 3 and 6; they can be put back as they were."""

    def __init__(self, runs: Runs, lab: Lab, folder: Path) -> None:
        self.runs, self._lab, self._folder = runs, lab, folder
        runs.hold(at=7, machines=[0, 1])
        runs.end()
        self._copy(folder / "kept", back=False)

    def put_back(self) -> None:
        self._copy(self._folder / "kept", back=True)

    def part(self, machine: int, step: int) -> Path:
        """Return the part of rank 1, which wrote on machine 1."""
        [path] = self.parts(machine, step)
        return path

    def parts(self, machine: int, step: int) -> list[Path]:
        return [*self.runs.tier_of(self._lab.machines[machine]).glob(f"*/step-{step:08d}.*/part-1.json")]

    def _copy(self, kept: Path, back: bool) -> None:
        places = [self.runs.tier_of(machine) for machine in self._lab.machines[:2]] + [self._folder / "store"]
        for number, place in enumerate(places):
            source, target = (kept / str(number), place) if back else (place, kept / str(number))
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, symlinks=True)


def check_damage(state: Damaged, folder: Path, damage: Callable[[Path], None], where: str) -> None:
    """Damage copies of the newest step, and see that the run goes on from the next best, and says why."""
    state.put_back()
    runs, expected = state.runs, 6
    for machine in {"own": [1], "peer": [0]}.get(where, [0, 1]):
        damage(state.part(machine, 6))
    if where == "both and store":
        data = folder / "store/step-00000006/__1_0.distcp"
        data.write_bytes(data.read_bytes()[:-1])
        expected = 4
    restored = runs.hold(at=expected + 1, machines=[0, 1], every=1000, store_every=1000)
    assert restored.step == expected
    assert ("/store/" in restored.path) == (where == "both")
    if where in ("own", "both"):
        assert any(text in runs.output for text in ("reading another copy", "Skipped ")), runs.output
    if where == "own":  # the copy of the other machine takes its place
        assert comes_true(lambda: state.parts(1, 6))
        files = [state.part(machine, 6).parent / "__1_0.distcp" for machine in (0, 1)]
        assert files[0].read_bytes() == files[1].read_bytes()
    runs.end()


def test_a_damaged_copy_gives_way_to_the_next_best(make_runs: Callable[..., Runs], lab: Lab, tmp_path: Path) -> None:
    state = Damaged(make_runs(store=tmp_path / "store", store_every=3), lab, tmp_path)
    check_damage(state, tmp_path, flip, "own")
    check_damage(state, tmp_path, cut, "both and store")


@pytest.mark.slow
def test_a_machine_with_notes_of_another_run_does_not_decide_which_run_it_is(
    make_runs: Callable[..., Runs], lab: Lab, tmp_path: Path
) -> None:
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    older = Runs(lab, stranger)
    for at in (3, 5, 7):  # three branches
        older.hold(at=at, machines=[2])
        older.end()
    runs = make_runs()
    runs.hold(at=3, machines=[0, 1])
    runs.end()
    job = runs.start(machines=[0, 1, 2], more=1)
    outputs = job.wait(2 * START_S)
    assert 0 not in job.returncodes, outputs
    assert "another run" in outputs[0]
