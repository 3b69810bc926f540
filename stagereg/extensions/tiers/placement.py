"""Which machines get the copies of which others.

The machines are sorted by failure domain and dealt into groups of ``copies + 1``, and those of a group copy to each
other: with few sets of partners, few ways to lose several machines take a step (copysets: Cidon et al., USENIX ATC
2013). Neighbours in that order are in different groups, so a group has as many domains as can be. If the number of
machines cannot be divided so, the first groups have one machine more, or several if there are few groups. The largest
domain comes first, since a machine of a larger group has a choice of partners.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

_STAND_INS = 4


class Machine(NamedTuple):
    """One machine of a run: its name, and its failure domain; an empty one: a domain of its own."""

    name: str
    domain: str = ""


def partners(machines: Iterable[Machine], copies: int) -> dict[str, list[str]]:
    """Return which others get each machine's copies, by its name; the same in any order of ``machines``.

    The first ``copies`` are those wanted, or all others if there are not so many; then come up to 4 that stand in if
    one of these is lost, the best first. As long as no domain has more than ``len(machines) // (copies + 1)`` machines,
    a machine and its partners are in ``copies + 1`` domains, and none receives more than ``copies`` copies.
    """
    domains = {each.name: (each.domain, "" if each.domain else each.name) for each in machines}
    sizes = Counter(domains.values())
    order = sorted(domains, key=lambda name: (-sizes[domains[name]], domains[name], name))
    if not copies:
        return {name: [] for name in order}

    def apart(names: list[str], *others: Collection[tuple[str, str]]) -> list[str]:
        """Return machines, those in the domains ``others`` last."""
        return sorted(names, key=lambda each: [domains[each] in some for some in others])

    count = max(1, len(order) // (copies + 1))
    found = {}
    for at, name in enumerate(order):
        group, turn, own = order[at % count :: count], at // count, {domains[name]}
        chosen = apart(group[turn + 1 :] + group[:turn], own)[:copies]
        spare = [each for each in order[at + 1 :] + order[:at] if each not in chosen]
        found[name] = [*chosen, *apart(spare, own, {domains[each] for each in chosen})[:_STAND_INS]]
    return found
