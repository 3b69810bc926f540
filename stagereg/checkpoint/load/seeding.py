"""Seeds the random number generators (RNGs) of a rank that had failed, or of all ranks if the world size has changed.

Without a new seed, such an RNG would repeat the random numbers of step 0. The new seed is computed from the RNG state
that another rank has saved, the step and the rank. Some programs seed several ranks identically on purpose, for example
so that dropout is the same on these ranks. Such ranks are called *twins*, and stay identical: a failed rank takes the
RNG state of a surviving twin. If the world size has changed, ranks that are twins get the same new seed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

import stagereg.checkpoint.state.entries as entries
import stagereg.checkpoint.state.rng as rng
from stagereg.checkpoint.format.manifest import Manifest

_OF_RANK = entries.rng_name(0)[:-1]  # prefix of the entries with RNG states; the rank follows


def seeds_of(state: Mapping[str, Any]) -> dict[str, str]:
    """Map each RNG to its seed. The names of generators in ``state`` begin with a dot, those of global RNGs do not."""
    return rng.seeds() | {f".{name}": each.seed for name, each in _generators(state)}


def lowest_twins(seeds: Sequence[Mapping[str, str]]) -> dict[str, list[int]]:
    """List, for each RNG, the lowest rank with the same seed as each rank. ``seeds``: :func:`seeds_of`, by rank."""
    found: dict[str, list[int]] = {}
    for name in set().union(*seeds):
        first: dict[str, int] = {}
        found[name] = [first.setdefault(each.get(name, f"none {rank}"), rank) for rank, each in enumerate(seeds)]
    return found


class Seeded(NamedTuple):
    """The RNGs of this rank that do not continue from their own saved state."""

    anew: list[str]  # names of the RNGs with a new seed
    taken: dict[int, list[str]]  # names of the RNGs that took the saved state of a twin, by the twin's rank

    def __str__(self) -> str:
        texts = [f"seeded from the checkpoint, its step and the rank: {', '.join(self.anew)}"] if self.anew else []
        for rank, names in self.taken.items():
            texts.append(f"continued from rank {rank}, which the program seeds identically: {', '.join(names)}")
        return "; ".join(texts)


class Seeding:
    """Seeds the RNGs of a rank if the rank's RNG states were not saved. ``twins``: from :func:`lowest_twins`."""

    def __init__(self, manifest: Manifest, twins: Mapping[str, list[int]], rank: int, size: int) -> None:
        self._lowest_twins, self._rank, self._size, self._step = twins, rank, size, manifest.step
        self._saved_size, self._same_size = manifest.world_size, manifest.world_size == size
        self._saved: list[int] = []  # the ranks whose RNG states are in the checkpoint

    def sources(self, there: Collection[str]) -> list[int]:
        """Return the ranks whose saved RNG states this rank needs. ``there``: the entry names in the checkpoint."""
        ranks = sorted(int(name[len(_OF_RANK) :]) for name in there if re.fullmatch(f"{_OF_RANK}[0-9]{{1,18}}", name))
        self._saved = [rank for rank in ranks if rank < self._saved_size and entries.rng_name(rank) in there]
        return sorted({*self._saved[:1], *(twin for name in rng.seeds() for twin in self._twins(name))})

    def _twins(self, name: str) -> list[int]:
        """Return up to two twins of this rank with a saved state of the RNG ``name``."""
        lowest = self._lowest(name)
        return [rank for rank in self._saved if self._same_size and lowest[rank] == lowest[self._rank]][:2]

    def _lowest(self, name: str) -> Sequence[int]:
        return self._lowest_twins.get(name, range(self._size))

    def apply(
        self, state: Mapping[str, Any], restored: Collection[str], saved: Mapping[int, Mapping[str, torch.Tensor]]
    ) -> Seeded:
        """Set the RNGs of the process, and the generators in ``state``. Return which were seeded or copied.

        ``saved``: the RNG states of the ranks from :meth:`sources`. ``restored``: the restored entries of ``state``.
        """
        seeded, numbers = Seeded([], {}), dict[str, int]()
        found: dict[str, torch.Tensor] = {}
        first = saved[self._saved[0]] if self._saved else {}
        for name, seed in rng.seeds().items():
            twins = [rank for rank in self._twins(name) if name in saved[rank]]
            states = [saved[rank][name] for rank in twins]
            if states and torch.equal(states[0], states[-1]):
                found[name] = states[0]
                seeded.taken.setdefault(twins[0], []).append(name)
                continue
            own = self._rank if states else self._lowest(name)[self._rank]  # twins that diverged differ
            numbers[name] = rng.seed_from(name, _bytes(first, name) or seed, self._step, own)
            seeded.anew.append(name)
        rng.restore(found | rng.seeded(numbers))
        for name, generator in _generators(state):
            lowest, source = self._lowest(f".{name}"), self._saved[0] if self._same_size and self._saved else 0
            as_saved = name in restored and lowest[source] == lowest[self._rank]
            if not as_saved and (name in restored or isinstance(state[name], entries.PerRank)):
                base = _bytes(first, "torch") or generator.seed
                generator.reseed(rng.seed_from(f".{name}", base, self._step, lowest[self._rank]))
                seeded.anew.append(name)
        return seeded


def _bytes(state: Mapping[str, torch.Tensor], name: str) -> bytes:
    return bytes(state[name].tolist()) if name in state else b""


def _generators(state: Mapping[str, Any]) -> Iterator[tuple[str, rng.GeneratorState]]:
    for name, value in state.items():
        if found := rng.generator_state(value.value if isinstance(value, entries.PerRank) else value):
            yield name, found
