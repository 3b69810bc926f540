"""Merges the reports of all machines into the complete steps of the tier, and selects the steps valid for this run.

A step is complete if the part of each rank (the files that the rank saved) exists on some machine. Therefore machines
and the placement of ranks may change between starts. Old parts of a machine that rejoins count as additional copies.

*Branches.* Each start of a run begins a new branch and records the step that the branch starts from. Later steps of
earlier branches are void on every machine. Of two valid steps, the step of the later branch is newer. Within a branch,
the step with the greater serial number is newer. Neither clocks nor step numbers decide which step is newer.
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

ROLLED_BACK = "the run returned to an earlier step"


@dataclass(frozen=True)
class Lineage:
    """The branches of a run. A branch consists of its number, the step from which it began (-1: no step), and the
    serial number of the newest checkpoint in the checkpoint directory at that time. Void branches are omitted.
    """

    run: str
    branches: tuple[tuple[int, int, int], ...] = ()

    @property
    def branch(self) -> int:
        """The number of the newest branch; 0 before the first branch."""
        return self.branches[-1][0] if self.branches else 0

    def branched(self, step: int, stored: int = 0) -> Lineage:

        kept = tuple(each for each in self.branches if each[1] < step)
        return Lineage(self.run, (*kept, (self.branch + 1, step, stored)))

    def branch_of(self, serial: int) -> int:
        """Return the number of the branch that committed the checkpoint with this serial number."""
        return max((number for number, _, stored in self.branches if serial > stored), default=0)

    def is_valid(self, save: SaveId) -> bool:
        """Return whether a save belongs to this run and no later branch has voided it."""
        beyond = any(number > save.branch and save.step > step for number, step, _ in self.branches)
        return save.run == self.run and save.branch <= self.branch and not beyond

    def dumps(self) -> bytes:
        return (json.dumps({"run": self.run, "branches": self.branches}) + "\n").encode()

    @classmethod
    def loads(cls, data: bytes) -> Lineage:
        """Parse the bytes that :meth:`dumps` returned. Raises: ``ValueError`` if ``data`` is not a lineage."""
        try:
            read = json.loads(data)
            branches = tuple((number, step, stored) for number, step, stored in read["branches"])
            SaveId.of([read["run"], 0, 0, 0, "0" * 8, 1])
        except (RecursionError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"invalid lineage: {error}") from None
        numbers = [each for branch in branches for each in branch]
        if any(type(each) is not int or not -1 <= each <= MOST for each in numbers) or [*branches] != sorted(branches):
            raise ValueError(f"invalid lineage: branches must be a sorted list of integers in -1..{MOST}")
        return cls(read["run"], branches)


class ReportedPart(NamedTuple):
    """The summary of a part that a machine reports to the other machines."""

    save: SaveId
    rank: int
    crc32: int  # CRC-32 of the manifest, which contains the checksums of all blocks
    files: tuple[tuple[str, FileDigest], ...]


def report(parts: Iterable[Part]) -> list[ReportedPart]:
    found = []
    for part in parts:
        files = tuple((name, file.mark) for name, file in sorted(part.files.items()))
        found.append(ReportedPart(part.save, part.rank, crc32(part.dumps().encode()), files))
    return found


class TierStep(NamedTuple):
    """A complete step. ``parts`` has, in rank order, the part of each rank and the machines that store the part."""

    save: SaveId
    parts: tuple[tuple[ReportedPart, tuple[str, ...]], ...]

    @property
    def files(self) -> dict[str, FileDigest]:
        return {name: mark for part, _ in self.parts for name, mark in part.files}

    @property
    def manifest(self) -> Manifest:
        """The manifest of a checkpoint with the files of this step."""
        return Manifest(self.save.step, self.save.world_size, self.save.serial, self.files, "dcp")

    def without(self, bad: Collection[tuple[str, int]]) -> TierStep:
        """Return the step without the corrupt copies ``bad``, given as pairs (machine, rank of the part).

        If all copies of a part are corrupt, all are retained, because each may have valid blocks that others lack.
        """
        parts = enumerate(self.parts)
        kept = tuple((p, tuple(m for m in on if (m, rank) not in bad) or on) for rank, (p, on) in parts)
        return TierStep(self.save, kept)


def steps(reports: Mapping[str, Sequence[ReportedPart]], lineage: Lineage) -> tuple[list[TierStep], list[str]]:
    """Return the complete and valid steps, newest first, and for each other step a line why it is unusable.

    ``reports``: the parts that each machine reports, by the name of the machine. ``lineage``: the branches of the run.
    """
    found: dict[SaveId, dict[int, dict[ReportedPart, list[str]]]] = defaultdict(lambda: defaultdict(dict))
    for machine, reported in reports.items():
        for part in reported:
            found[part.save][part.rank].setdefault(part, []).append(machine)
    complete, others = [], []
    for save, ranks in sorted(found.items(), key=lambda item: item[0].order, reverse=True):
        missing = [rank for rank in range(save.world_size) if rank not in ranks]
        if not lineage.is_valid(save):
            others.append(f"step {save.step} of branch {save.branch} is void: {ROLLED_BACK}")
        elif missing:
            some = ", ".join(map(str, missing[:4])) + (" and more" if len(missing) > 4 else "")
            others.append(f"step {save.step} is incomplete: no machine has the part of rank {some}")
        else:
            chosen = [max(ranks[rank].items(), key=lambda item: len(item[1])) for rank in range(save.world_size)]
            complete.append(TierStep(save, tuple((part, tuple(sorted(machines))) for part, machines in chosen)))
    return complete, others


def missing_copies(step: TierStep, partners: dict[str, list[str]], copies: int) -> dict[str, dict[int, list[str]]]:
    """Return the transfers that give each part ``copies`` copies, as ``{sender: {rank of the part: receivers}}``.

    The first machine that has a part sends the part to its partners (:mod:`.placement`). Existing copies remain.
    """
    found: dict[str, dict[int, list[str]]] = defaultdict(dict)
    for rank, (_, machines) in enumerate(step.parts):
        here = [each for each in machines if each in partners]
        for sender in here[:1]:
            if wanted := [each for each in partners[sender] if each not in here][: copies + 1 - len(here)]:
                found[sender][rank] = wanted
    return dict(found)


def lineage_of(texts: Iterable[bytes], run: str = "") -> Lineage | None:
    """Parse ``texts``, and return the lineage that has the newest branch; ``None`` if no text is a valid lineage.

    If ``run`` is given, lineages of other runs are skipped.
    """
    found: list[Lineage] = []
    for text in texts:
        with contextlib.suppress(ValueError):
            found.append(Lineage.loads(text))
    return max((each for each in found if not run or each.run == run), key=lambda each: each.branch, default=None)
