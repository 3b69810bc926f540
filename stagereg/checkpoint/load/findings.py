"""Results of checking a checkpoint on all ranks before it is loaded: corrupt files, and parameters without a match."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stagereg.checkpoint.format.damage import Found, InaccessibleFile, differences, marks_of_shares
from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.errors import name_ranks


class ScanResult(NamedTuple):
    """The results that one rank sends to rank 0."""

    marks: dict[str, Found]  # digest or error of each file that this rank has checked
    can_load: bool = True
    left: Mapping[str, Sequence[str]] = {}  # saved parameters that this rank does not load, by entry
    missing: Sequence[str] = ()  # parameters without saved values that ``allow_missing`` permits
    unused: Sequence[str] = ()  # names in ``allow_missing`` that match no name on this rank
    corrupt: str = ""  # the error if no copy of the data that this rank can read is valid


class MergedScan(NamedTuple):
    """The merged results of all ranks. Rank 0 sends them to every rank."""

    unclear: list[str]  # error messages for files that a rank could not access
    missed: list[tuple[int, str]]  # ranks and the files that they did not find
    wrong: dict[str, str]  # corrupt files with the error
    failed: bool  # whether at least one rank cannot load
    rests: dict[str, set[str]]  # saved parameters that no rank loads, by entry
    missing: list[str]  # like ScanResult.missing, on any rank
    unused: list[str]  # like ScanResult.unused, on all ranks


def together(chosen: Checkpoint, machines: Sequence[Sequence[int]], looked: Sequence[ScanResult]) -> MergedScan:
    """Merge the results of all ranks. ``looked``: the results in rank order. Called on rank 0."""
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
