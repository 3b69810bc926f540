"""The results of the check of a checkpoint on all ranks before loading: corrupt files, and unmatched entries."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stagereg.checkpoint.format.damage import Found, InaccessibleFile, differences, marks_of_shares
from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.errors import name_ranks


class ScanResult(NamedTuple):
    """The message of one rank: results for its portion of the files, whether it can load, and unmatched entries."""

    marks: dict[str, Found]
    can_load: bool = True
    left: Mapping[str, Sequence[str]] = {}
    missing: Sequence[str] = ()  # parameters without saved values that ``allow_missing`` permits
    unused: Sequence[str] = ()  # names in ``allow_missing`` that match no name on this rank
    corrupt: str = ""  # the error if no copy of the data that this rank can read is valid


class MergedScan(NamedTuple):
    """The results of all ranks: errors of the files, whether a rank cannot load, and entries that no rank loads."""

    unclear: list[str]
    missed: list[tuple[int, str]]
    wrong: dict[str, str]
    failed: bool
    rests: dict[str, set[str]]
    missing: list[str]
    unused: list[str]


def together(chosen: Checkpoint, machines: Sequence[Sequence[int]], looked: Sequence[ScanResult]) -> MergedScan:
    """Merge the messages of the ranks. On rank 0."""
    marks = [(rank, name, mark) for rank, each in enumerate(looked) for name, mark in each.marks.items()]
    unclear = [f"{name_ranks([of])}: {name}: {mark}" for of, name, mark in marks if isinstance(mark, InaccessibleFile)]
    missed = [(rank, name) for rank, name, mark in marks if mark == "missing"]
    wrong: dict[str, str] = {}
    for machine in machines if marks else ():
        wrong |= differences(chosen.manifest, marks_of_shares([looked[rank].marks for rank in machine]))
    wrong |= {name_ranks([rank]): each.corrupt for rank, each in enumerate(looked) if each.corrupt}
    left = [each.left for each in looked]
    rests = {name: set.intersection(*(set(each[name]) for each in left if name in each)) for name in set().union(*left)}
    missing = [*dict.fromkeys(itertools.chain(*(each.missing for each in looked)))]
    unused = [name for name in looked[0].unused if all(name in each.unused for each in looked)]
    return MergedScan(unclear, missed, wrong, not all(each.can_load for each in looked), rests, missing, unused)
