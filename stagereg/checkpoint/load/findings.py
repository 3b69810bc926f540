"""What the ranks have found of a checkpoint before they load it: corrupt files, and entries that fit nothing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stagereg.checkpoint.format.damage import Found, InaccessibleFile, differences, marks_of_shares
from stagereg.checkpoint.format.manifest import Checkpoint


class ScanResult(NamedTuple):
    """What a rank sends: what it found of its share of the files, whether it can load, and what is left of entries."""

    marks: dict[str, Found]
    can_load: bool = True
    left: Mapping[str, Sequence[str]] = {}
    missing: Sequence[str] = ()  # parameters that were not saved, and may be missing
    unused: Sequence[str] = ()  # of ``allow_missing``, what is nothing of this rank
    corrupt: str = ""  # why no copy that this rank can reach is good, if reading has shown that


class MergedScan(NamedTuple):
    """What all ranks have found: what is wrong with the files, whether one cannot load, and what none of them takes."""

    unclear: list[str]
    missed: list[tuple[int, str]]
    wrong: dict[str, str]
    failed: bool
    rests: dict[str, set[str]]
    missing: list[str]
    unused: list[str]


def together(chosen: Checkpoint, machines: Sequence[Sequence[int]], looked: Sequence[ScanResult]) -> MergedScan:
    """Put together what the ranks have sent; on rank 0."""
    marks = [(rank, name, mark) for rank, each in enumerate(looked) for name, mark in each.marks.items()]
    unclear = [f"rank {rank}: {name}: {mark}" for rank, name, mark in marks if isinstance(mark, InaccessibleFile)]
    missed = [(rank, name) for rank, name, mark in marks if mark == "missing"]
    wrong: dict[str, str] = {}
    for machine in machines if marks else ():
        wrong |= differences(chosen.manifest, marks_of_shares([looked[rank].marks for rank in machine]))
    wrong |= {f"rank {rank}": each.corrupt for rank, each in enumerate(looked) if each.corrupt}
    left = [each.left for each in looked]
    rests = {name: set.intersection(*(set(each[name]) for each in left if name in each)) for name in set().union(*left)}
    missing = [*dict.fromkeys(itertools.chain(*(each.missing for each in looked)))]
    unused = [name for name in looked[0].unused if all(name in each.unused for each in looked)]
    return MergedScan(unclear, missed, wrong, not all(each.can_load for each in looked), rests, missing, unused)
