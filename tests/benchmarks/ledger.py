"""What the ranks of :mod:`.ledger_run` have written down, and whether it is as it should be.

What counts is what no restore has undone: of each attempt the steps up to that which the next one went on from.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .ledger_run import LENGTH, SEED, SIZE


@dataclass
class Attempt:
    """One start of all ranks, which has restored."""

    size: int
    start: int
    source: str
    t: float
    samples: dict[int, dict[int, list[int]]] = field(default_factory=lambda: defaultdict(dict))  # by step and rank
    checksums: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    at: dict[int, float] = field(default_factory=dict)  # when a rank had first taken a step
    ended: dict[int, int] = field(default_factory=dict)  # checksums at the end, by rank


class Ledger:
    """The ledger of a run, read as it grows."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._read = folder / "ledger", Counter[str]()
        self._folder.mkdir()
        self._attempts: dict[int, Attempt] = {}
        self.ranks: dict[int, tuple[str, int]] = {}  # where each rank is that wrote last: host and process
        self.reached: list[tuple[str, int]] = []  # who has come to a point that was asked for

    @property
    def attempts(self) -> list[Attempt]:
        """All of them, in order."""
        for path in self._folder.iterdir():
            with path.open("rb") as file:
                file.seek(self._read[path.name])
                for line in file:
                    if line.endswith(b"\n"):
                        self._read[path.name] += len(line)
                        self._take(json.loads(line))
        return [self._attempts[token] for token in sorted(self._attempts)]

    def _take(self, line: dict) -> None:
        rank = line["rank"]
        self.ranks[rank] = line["host"], line["pid"]
        if "reached" in line:
            self.reached.append(self.ranks[rank])
            return
        if "start" in line:
            found = Attempt(line["size"], line["start"], line["source"], line["t"])
            found = self._attempts.setdefault(line["attempt"], found)
            assert (found.size, found.start) == (line["size"], line["start"]), "ranks have restored different steps"
            return
        attempt = self._attempts[line["attempt"]]
        if "samples" in line:
            attempt.samples[line["step"]][rank] = line["samples"]
        elif "ended" in line:
            attempt.ended[rank] = line["checksum"]
        else:
            attempt.checksums[line["step"]][rank] = line["checksum"]
            attempt.at.setdefault(line["step"], line["t"])

    def done(self) -> int:
        """Return the last step that a rank has taken, and that no restore has undone."""
        last = 0
        for each in self.attempts:
            last = max([each.start, *each.checksums]) if each.at else min(last, each.start)
        return last

    def counted(self) -> list[tuple[int, Attempt]]:
        """Return the attempt that took each step that counts, from step 1 on."""
        found: list[tuple[int, Attempt]] = []
        for each in self.attempts:
            assert each.start <= len(found), f"step {each.start} was restored, and {len(found)} were taken"
            del found[each.start :]
            steps = [step for step in sorted(each.samples) if each.checksums[step]]
            assert steps == [*range(each.start + 1, each.start + 1 + len(steps))]
            found += [(step, each) for step in steps]
        return found

    def check(self, references: Mapping[int, Sequence[int]]) -> tuple[int, bool]:
        """Raise ``AssertionError`` if anything is wrong, once the run has ended.

        Args:
            references: the checksums after each step of runs that nothing has interrupted, by the number of ranks.

        Returns:
            The number of steps, and whether all of it was compared bit for bit.
        """
        counted, size, compared = self.counted(), 0, True
        for (step, attempt), expected in zip(counted, dealt([each.size for _, each in counted]), strict=True):
            size = size or attempt.size
            compared = compared and attempt.size == size
            assert attempt.samples[step] == expected, f"step {step}: {attempt.samples[step]}, not {expected}"
            [found] = {*attempt.checksums[step].values()}
            if compared:
                assert found == references[size][step - 1], f"step {step} is another one than without failures"
        step, last = counted[-1]
        assert last.ended == dict.fromkeys(range(last.size), last.checksums[step][0]), "the end is of another step"
        return step, compared


def dealt(sizes: Sequence[int]) -> Iterator[dict[int, list[int]]]:
    """Yield what each rank is to be trained on at each step, for the number of ranks at each."""
    epoch, size, consumed, left = -1, 0, 0, list[int]()
    for each in sizes:
        if each != size:
            gone = {x for rank in range(size) for x in left[rank::size][:consumed]}
            left, size, consumed = [x for x in left if x not in gone], each, 0
        if consumed >= len(left) // size:
            epoch, consumed = epoch + 1, 0
            left = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
        share = len(left) // size
        yield {rank: left[rank::size][:share][consumed : consumed + SIZE] for rank in range(size)}
        consumed = min(consumed + SIZE, share)
