"""Which machines get the copies of which others.

Machines are put into groups of ``copies + 1``, each over as many failure domains as can be, and those of a group copy
to each other: with few sets of partners, few ways to lose several machines take a step (copysets: Cidon et al., USENIX
ATC 2013). Where the number of machines cannot be divided so, the ``N mod (copies + 1)`` last groups have one machine
more each, or several more if there are fewer groups than that.

The groups follow from the names and domains alone: the first machine by hash takes those that fit its hash best, then
the first of those left does, and so on. A machine that comes back finds its old partners. One that is gone or has
another name moves a chain of others: of 1,024, some 2 % have other partners then with one copy, 8 % with three.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

from stagereg.errors import ConfigError, at_least

_STAND_INS = 4
_PRIME = (1 << 61) - 1


class Machine(NamedTuple):
    """One machine of a run: its name, and its failure domain; an empty one: a domain of its own."""

    name: str
    domain: str = ""


def partners(machines: Sequence[Machine], copies: int) -> dict[str, list[str]]:
    """Return which others get each machine's copies, by its name; the same in any order of ``machines``.

    The first ``copies`` are those wanted, or all others if there are not so many; then come up to 4 that stand in where
    one of these is lost, the best first. As long as no domain has more than ``len(machines) // (copies + 1)`` machines,
    a machine and its partners are in ``copies + 1`` domains, and none receives more than ``copies`` copies. Otherwise
    they share domains as rarely as can be, and a machine of a larger group may receive one copy more, or, with fewer
    than ``(copies + 1) ** 2`` machines, twice as many.

    Raises:
        ConfigError: two machines have one name; ``copies`` is no number from 0 on.
    """
    hashes, domains = _hashes(machines), _domains(machines)
    ring = list(hashes)
    found: dict[str, list[str]] = {}
    for group in _groups(hashes, domains, copies):
        for name, chosen in group.items():
            at = ring.index(name)
            spare = [each for each in ring[at + 1 :] + ring[:at] if each not in chosen] if chosen else []
            own, near = domains[name], {domains[each] for each in chosen} - {domains[name]}
            elsewhere = (each for each in spare if domains[each] not in near and domains[each] != own)
            beside = (each for each in spare if domains[each] in near)
            here = (each for each in spare if domains[each] == own)
            found[name] = [*chosen, *islice(chain(elsewhere, beside, here), _STAND_INS)]
    return found


def _hashes(machines: Sequence[Machine]) -> dict[str, int]:
    """Return a hash of each name, the smallest first."""
    if twice := [name for name, count in Counter(each.name for each in machines).items() if count > 1]:
        raise ConfigError(f"Two machines are named {twice[0]!r}; each needs a name of its own.")
    digests = {each.name: hashlib.blake2b(each.name.encode(), digest_size=7).digest() for each in machines}
    return {name: 1 + int.from_bytes(digests[name], "big") for name in sorted(digests, key=lambda n: (digests[n], n))}


def _domains(machines: Sequence[Machine]) -> dict[str, tuple[str, str]]:
    return {each.name: (each.domain, "" if each.domain else each.name) for each in machines}


def _groups(
    hashes: Mapping[str, int], domains: Mapping[str, tuple[str, str]], copies: int
) -> Iterator[dict[str, list[str]]]:
    """Yield who copies to whom, group by group, the larger groups last.

    A domain of ``n`` machines has ``n / count`` of them in each of ``count`` groups, rounded down or up: as evenly as
    can be. What is too much for that goes into the larger groups, where a machine has a choice of partners.
    """
    copies = max(0, min(at_least(0, "copies", copies), len(hashes) - 1))
    left = list(hashes)
    for count in range(len(left) // (copies + 1), 0, -1):
        over = len(left) - count * (copies + 1)  # machines that are left to the larger groups
        size = copies + 1 if over < count else -(-len(left) // count)
        sizes = Counter(domains[each] for each in left)
        owed = Counter({domain: n // count for domain, n in sizes.items() if n >= count})
        most = {domain: max(1, n // count, -(-(n - over) // count)) for domain, n in sizes.items()}
        group: list[str] = []
        while len(group) < size:
            open_to = owed if owed.total() == size - len(group) else most
            fitting = [each for each in left if open_to[domains[each]] > 0] or left
            first = hashes[group[0]] if group else 1
            group.append(min(fitting, key=lambda each: first * hashes[each] % _PRIME))
            left.remove(group[-1])
            most[domains[group[-1]]] -= 1
            owed[domains[group[-1]]] -= owed[domains[group[-1]]] > 0
        yield {name: _spread(name, group[at + 1 :] + group[:at], domains, copies) for at, name in enumerate(group)}


def _spread(name: str, others: list[str], domains: Mapping[str, tuple[str, str]], copies: int) -> list[str]:
    """Return the next ones of a group, over as many domains as it has, its own last."""
    chosen: list[str] = []
    taken = Counter({domains[name]: len(others)})
    while len(chosen) < copies:
        chosen.append(min((e for e in others if e not in chosen), key=lambda each: taken[domains[each]]))
        taken[domains[chosen[-1]]] += 1
    return chosen
