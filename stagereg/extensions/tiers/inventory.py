"""Which steps there are: what all machines report, put together, and which of it is of this run as it is today.

A step is complete when each rank's part lies somewhere, be it on one machine or on as many as wrote it. So neither the
number of machines nor who runs where matters, and a machine that comes back with old parts adds some and vetoes none.

*Branches.* Each start that restores, or begins anew, makes a new branch and notes from which step. What an earlier
branch saved beyond that step was given up: it is void, wherever it lies and whoever brings it back. Within what is
valid a later branch is newer, and in one branch a greater serial number. No clock is asked, and no step number alone.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.format.manifest import MOST, FileDigest, Manifest
from stagereg.extensions.tiers.part import Part, SaveId


@dataclass(frozen=True)
class Lineage:
    """The branches of a run: of each its number, the step that it began from, -1 for none, and the serial number of the
    newest checkpoint that the store had then.

    Branches that no longer make a difference are left out.
    """

    run: str
    branches: tuple[tuple[int, int, int], ...] = ()

    @property
    def branch(self) -> int:
        """The number of the newest branch; 0 before the first one."""
        return self.branches[-1][0] if self.branches else 0

    def branched(self, step: int, stored: int = 0) -> Lineage:
        """Return it with another branch, which begins from ``step``, where the store has come to ``stored``."""
        kept = tuple(each for each in self.branches if each[1] < step)
        return Lineage(self.run, (*kept, (self.branch + 1, step, stored)))

    def branch_of(self, serial: int) -> int:
        """Return the number of the branch in which the store's checkpoint with this serial number was committed."""
        return max((number for number, _, stored in self.branches if serial > stored), default=0)

    def is_valid(self, save: SaveId) -> bool:
        """Whether a save is of this run, and no later branch has given it up."""
        beyond = any(number > save.branch and save.step > step for number, step, _ in self.branches)
        return save.run == self.run and save.branch <= self.branch and not beyond

    def dumps(self) -> bytes:
        return (json.dumps({"run": self.run, "branches": self.branches}) + "\n").encode()

    @classmethod
    def loads(cls, data: bytes) -> Lineage:
        """Read that text. Raises: ``ValueError`` if it is none."""
        try:
            read = json.loads(data)
            branches = tuple((number, step, stored) for number, step, stored in read["branches"])
            SaveId.of([read["run"], 0, 0, 0, "0" * 8, 1])
        except (RecursionError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"it is no lineage: {error}") from None
        numbers = [each for branch in branches for each in branch]
        if any(type(each) is not int or not -1 <= each <= MOST for each in numbers) or [*branches] != sorted(branches):
            raise ValueError("its branches are none")
        return cls(read["run"], branches)


class ReportedPart(NamedTuple):
    """A part that a machine has, as it tells the others."""

    save: SaveId
    rank: int
    crc32: int  # of its manifest, which has the checksums of all blocks
    files: tuple[tuple[str, FileDigest], ...]


def report(parts: Iterable[Part]) -> list[ReportedPart]:
    found = []
    for part in parts:
        files = tuple((name, file.mark) for name, file in sorted(part.files.items()))
        found.append(ReportedPart(part.save, part.rank, crc32(part.dumps().encode()), files))
    return found


class TierStep(NamedTuple):
    """A complete step: of each rank's part, in rank order, what it is and the machines that have it."""

    save: SaveId
    parts: tuple[tuple[ReportedPart, tuple[str, ...]], ...]

    @property
    def files(self) -> dict[str, FileDigest]:
        return {name: mark for part, _ in self.parts for name, mark in part.files}

    @property
    def manifest(self) -> Manifest:
        """What the manifest of a checkpoint with these files would be."""
        return Manifest(self.save.step, self.save.world_size, self.save.serial, self.files, "dcp")

    def without(self, bad: Collection[tuple[str, int]]) -> TierStep:
        """Return it without the copies that proved bad, by machine and the rank whose part it is.

        Where all of a part are, they stay: each may have what another one has not.
        """
        parts = enumerate(self.parts)
        return TierStep(
            self.save, tuple((p, tuple(m for m in on if (m, rank) not in bad) or on) for rank, (p, on) in parts)
        )


def steps(reports: Mapping[str, Sequence[ReportedPart]], lineage: Lineage) -> tuple[list[TierStep], list[str]]:
    """Return the complete steps that are valid, the newest first, and a line on each other step.

    Args:
        reports: of each machine, by its name.
        lineage: of the run.
    """
    found: dict[SaveId, dict[int, dict[ReportedPart, list[str]]]] = defaultdict(lambda: defaultdict(dict))
    for machine, reported in reports.items():
        for part in reported:
            found[part.save][part.rank].setdefault(part, []).append(machine)
    complete, others = [], []
    for save, ranks in sorted(found.items(), key=lambda item: item[0].order, reverse=True):
        missing = [rank for rank in range(save.world_size) if rank not in ranks]
        if not lineage.is_valid(save):
            others.append(f"step {save.step} of branch {save.branch}: given up when the run went back")
        elif missing:
            some = ", ".join(map(str, missing[:4])) + (" and more" if len(missing) > 4 else "")
            others.append(f"step {save.step}: no machine has what rank {some} wrote")
        else:
            chosen = [max(ranks[rank].items(), key=lambda item: len(item[1])) for rank in range(save.world_size)]
            complete.append(TierStep(save, tuple((part, tuple(sorted(machines))) for part, machines in chosen)))
    return complete, others


def missing_copies(
    step: TierStep, partners: Mapping[str, Sequence[str]], copies: int
) -> dict[str, dict[int, list[str]]]:
    """Return which machine is to send which rank's part where, so that each part has as many copies as it should.

    By sender, then by the part's rank. A part stays where it is; new copies go to the partners of the first machine
    that has it.
    """
    found: dict[str, dict[int, list[str]]] = defaultdict(dict)
    for rank, (_, machines) in enumerate(step.parts):
        here = [each for each in machines if each in partners]
        for sender in here[:1]:
            if wanted := [each for each in partners[sender] if each not in here][: copies + 1 - len(here)]:
                found[sender][rank] = wanted
    return dict(found)


def lineage_of(texts: Iterable[bytes], run: str = "") -> Lineage | None:
    """Return the lineage that has come furthest, of what the store or machines have noted; ``None`` if there is none.

    What cannot be read, or is of another run than ``run``, is passed over.
    """
    found: list[Lineage] = []
    for text in texts:
        with contextlib.suppress(ValueError):
            found.append(Lineage.loads(text))
    return max((each for each in found if not run or each.run == run), key=lambda each: each.branch, default=None)
